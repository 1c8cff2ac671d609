"""``trimtab train``: run a recipe."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from trimtab.core.errors import ConfigError
from trimtab.core.files import to_json

SUMMARY = "train a policy with a recipe of rollout control"
DEFAULT_RECIPE = "prune-opd"
EPILOG = """examples:
  trimtab train                                     the shipped student, distilled with Prune-OPD
  trimtab train grpo steps=50 learner.lr=1e-4       another recipe, two settings changed
  trimtab train prune-opd stop.threshold=0.6        a knob of a part
  trimtab train grpo model=smollm2-135m task=reasoning-gym:chain_sum
  trimtab train --resume runs/prune-opd-20260101-120000
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("items", nargs="*", metavar="[recipe] key=value", help="recipe and settings to change")
    parser.add_argument("--resume", metavar="RUN", type=Path, help="continue a run from its last checkpoint")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line, and nothing else")
    parser.add_argument("--quiet", action="store_true", help="no progress display")


def split_items(items: list[str]) -> tuple[str, list[str]]:
    """The recipe (positional, or ``recipe=slug``) and the overrides."""
    names = [item for item in items if "=" not in item]
    names += [item.partition("=")[2] for item in items if item.startswith("recipe=")]
    overrides = [item for item in items if "=" in item and not item.startswith("recipe=")]
    if len(set(names)) > 1:
        raise ConfigError(f"recipe: {', '.join(names)} given. Name one recipe; settings are written key=value.")
    return (names[0] if names else DEFAULT_RECIPE), overrides


def run(args: argparse.Namespace) -> int:
    """Train, print the summary, write the report."""
    from trimtab.core.recipe import parse_overrides, resolve

    if args.resume and args.items:
        raise ConfigError(f"--resume: takes no settings ({' '.join(args.items)}); a run continues as it was started.")
    resolved = None
    if not args.resume:
        name, overrides = split_items(args.items)
        resolved = resolve(name, parse_overrides(overrides))
    summary = train(resolved, args.resume, quiet=args.json or args.quiet)
    if args.json:
        sys.stdout.write(to_json(summary) + "\n")
    return 0


def train(resolved: Any, resume_from: Path | None, *, quiet: bool) -> dict[str, Any]:
    """Run a resolved recipe, or continue a run; returns the summary."""
    from trimtab.run import setup
    from trimtab.run.display import Display

    with Display(quiet=quiet) as display:
        trainer = setup.resume(resume_from, display) if resume_from else setup.start(resolved, display)
        try:
            summary = trainer.run()
        finally:
            trainer.task.close()
        if trainer.settings.output.report:
            from trimtab.report import write_report

            summary["report"] = str(write_report(trainer.run_dir.path))
        display.summary(summary)
    return summary
