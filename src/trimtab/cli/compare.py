"""``trimtab compare``: recipes side by side at equal budget."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.core.errors import ConfigError, invalid

SUMMARY = "compare recipes, or the values of a knob, at equal budget over several seeds"
EPILOG = """examples:
  trimtab compare grpo dapo rloo --tokens 2M --seeds 5
  trimtab compare opd esr prune-opd 'prune-opd[stop.form=streaming]' --seconds 600
  trimtab compare prune-opd --tokens 1M stop.threshold=0.5,0.7,0.9      a sweep is a comparison
  trimtab compare grpo dapo --steps 100 task=reasoning-gym:chain_sum model=smollm2-135m

The first recipe is the baseline. The same command again goes on where it was: finished runs are kept.
"""
BUDGETS = {"tokens": "tokens", "trained": "trained_tokens", "seconds": "seconds", "steps": "steps"}
_SIZES = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("items", nargs="*", metavar="recipe | key=value", help="recipes, and settings for all of them")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--tokens", metavar="N", help="budget of a run in generated tokens (200k, 2M)")
    budget.add_argument("--trained", metavar="N", help="budget of a run in trained tokens")
    budget.add_argument("--seconds", metavar="S", help="budget of a run in seconds, without evaluations")
    budget.add_argument("--steps", metavar="N", help="budget of a run in policy updates")
    parser.add_argument("--seeds", metavar="N", type=int, default=5, help="runs a recipe (default: 5)")
    parser.add_argument(
        "--target", metavar="A", type=float, help="accuracy to reach (default: the baseline's at the end)"
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="where to keep the runs (default: under runs/, by content)"
    )
    parser.add_argument(
        "--results", metavar="DIR", type=Path, default=Path("results"), help="folder of the result file"
    )
    parser.add_argument(
        "--jobs", metavar="N", type=int, default=0, help="runs at once (default: the cores; 1 on a GPU)"
    )
    parser.add_argument("--allow-dirty", action="store_true", help="write a result file that is marked unpublishable")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line, and nothing else")


def run(args: argparse.Namespace) -> int:
    """Run what is missing, show what was found, write page and result file. 1 when a run failed."""
    from trimtab.report.comparison import write_page
    from trimtab.run import compare, comparison

    if args.jobs < 0:
        raise invalid("--jobs", args.jobs, "a whole number >= 0")
    if args.target is not None and not 0 < args.target <= 1:
        raise invalid("--target", args.target, "an accuracy above 0 and up to 1")
    recipes, overrides = split_items(args.items)
    plan = compare.plan(recipes, overrides, budget(args), args.seeds, args.out)
    jobs = args.jobs or compare.default_jobs(plan)
    say = _silent if args.json else _say
    say(f"{len(plan.runs)} runs in {plan.folder}, {sum(r.finished for r in plan.runs)} finished, {jobs} at once")
    try:
        errors = compare.execute(plan, jobs, say=lambda run, error: say(f"{run.name}: {error or 'finished'}"))
    except KeyboardInterrupt:
        sys.stderr.write(f"trimtab: interrupted; the same command goes on from {plan.folder}\n")
        return 130
    found = comparison.compare(plan, errors, args.target)
    page = write_page(found, plan.folder / "compare.html")
    if not args.json:
        show(found)
        say(f"page: {page}")
    written, refusal = _write_result(args, plan, found)
    if args.json:
        sys.stdout.write(json.dumps({**_plain(found), "page": str(page), "result_file": written}) + "\n")
    elif written:
        say(f"result file: {written}")
    for name, error in errors.items():
        sys.stderr.write(f"trimtab: {name} failed: {error}\n")
    if refusal:
        raise refusal
    return 1 if errors else 0


def split_items(items: list[str]) -> tuple[list[str], list[str]]:
    """Recipes (with settings of their own in brackets) and overrides for all."""
    recipes = [item for item in items if "=" not in item or re.match(r"[^=]+\[.*\]$", item)]
    return recipes, [item for item in items if item not in recipes]


def budget(args: argparse.Namespace) -> Any:
    """The budget that was given, of exactly one kind."""
    from trimtab.run.compare import Budget

    (flag,) = [name for name in BUDGETS if getattr(args, name) is not None]
    return Budget(BUDGETS[flag], amount(getattr(args, flag), f"--{flag}"))  # type: ignore[arg-type]


def amount(text: str, flag: str) -> float:
    """``2M`` as 2000000."""
    found = re.fullmatch(r"([0-9][0-9_]*\.?[0-9]*(?:[eE]\+?[0-9]+)?)([kKmMgGbB]?)", text.strip())
    if not found or not (value := float(found[1]) * _SIZES[found[2].lower()]) > 0:
        raise invalid(flag, text, "a number above 0, such as 200000, 200k or 2M")
    return value


def show(found: Mapping[str, Any]) -> None:
    """The comparison on the terminal: one column a recipe, because there are more numbers than recipes."""
    from rich.table import Table
    from rich.text import Text

    from trimtab.report.comparison import facts, notes, table
    from trimtab.run.display import RunConsole

    head, *rows = table(found)
    shown = Table(show_lines=False)
    for cell in [head[0], *(row[0] for row in rows)]:
        shown.add_column(Text(cell), overflow="fold")
    for label, *cells in list(zip(head, *rows, strict=True))[1:]:
        shown.add_row(*(Text(cell) for cell in (label, *cells)))
    console = RunConsole()
    for label, value in facts(found):
        console.print(Text(f"{label}: {value}"))
    console.print(shown)
    for note in notes(found):
        console.print(Text(note, style="dim"))


def _write_result(
    args: argparse.Namespace, plan: Any, found: Mapping[str, Any]
) -> tuple[str | None, ConfigError | None]:
    """The path of the result file, or why it was refused; said last, after what was found is shown."""
    from trimtab.run.comparison import write_result

    try:
        return str(write_result(args.results, plan, found, allow_dirty=args.allow_dirty)), None
    except ConfigError as error:
        return None, error


def _plain(found: Mapping[str, Any]) -> Any:
    from trimtab.core.files import plain

    return plain(found)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _silent(text: str) -> None:
    pass
