"""``trimtab doctor``: what is the matter with a run, read off its rollout logs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

SUMMARY = "diagnose a run from its rollout logs, Trimtab's or another framework's"
EPILOG = """examples:
  trimtab doctor runs/grpo-20260101-120000                       a run of Trimtab
  trimtab doctor out/completions                                 TRL with log_completions=True
  trimtab doctor dumps/ --format verl --map correct=acc          verl with trainer.rollout_data_dir
  trimtab doctor log.jsonl --map step=iter --map prompt=question --map reward=score
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("path", metavar="PATH", type=Path, help="run directory, folder of dumps, or one file")
    parser.add_argument(
        "--format",
        metavar="NAME",
        default="auto",
        help="auto, trimtab, trl, verl, slime, prime-rl or jsonl (default: auto)",
    )
    parser.add_argument(
        "--map",
        metavar="FIELD=NAME",
        action="append",
        default=[],
        help="what a field is called in the log; again for each field, dots go into nested objects",
    )
    parser.add_argument("--all", action="store_true", help="list every row, those that are fine or unknown too")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def run(args: argparse.Namespace) -> int:
    """Read, diagnose, print. Exit code 0 whatever the findings."""
    from rich.console import Console

    from trimtab.core.files import to_json
    from trimtab.doctor import diagnose, read_log
    from trimtab.doctor.render import render

    diagnosis = diagnose(read_log(args.path, args.format, _mapping(args.map)))
    if args.json:
        sys.stdout.write(to_json(diagnosis.to_dict()) + "\n")
    else:
        render(diagnosis, Console(), everything=args.all)
    return 0


def _mapping(items: list[str]) -> dict[str, str]:
    from trimtab.core.errors import invalid

    mapping: dict[str, str] = {}
    for item in items:
        field, sign, name = item.partition("=")
        if not sign or not field or not name:
            raise invalid("--map", item, "field=name, for example reward=score")
        mapping[field] = name
    return mapping
