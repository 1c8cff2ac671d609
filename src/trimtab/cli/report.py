"""``trimtab report``: the HTML report of a run."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

SUMMARY = "write the HTML report of a run"
EPILOG = """examples:
  trimtab report runs/grpo-20260101-120000                 writes report.html into the run directory
  trimtab report runs/grpo-20260101-120000 --out grpo.html
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="run directory")
    parser.add_argument("--out", metavar="FILE", type=Path, help="where to write it (default: RUN/report.html)")
    parser.add_argument("--json", action="store_true", help="print one JSON object with the path")


def run(args: argparse.Namespace) -> int:
    """Write the report and print its path."""
    from trimtab.report import write_report

    path = write_report(args.run_dir, args.out)
    sys.stdout.write((json.dumps({"report": str(path)}) if args.json else str(path)) + "\n")
    return 0
