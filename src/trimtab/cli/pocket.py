"""``trimtab pocket``: build the embedded models again from a seed, or look at the embedded problems."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

SUMMARY = "train the embedded models again, or show embedded problems"


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    build = actions.add_parser("build", help="train teacher, student and teacher-b from a seed")
    build.add_argument("--seed", type=int, default=0)
    build.add_argument("--out", type=Path, required=True, help="folder for the weights")
    build.add_argument("--models", nargs="+", default=["teacher", "student", "teacher-b"], metavar="MODEL")
    show = actions.add_parser("show", help="print problems with their written-out work")
    show.add_argument("family", nargs="?", default="sums")
    show.add_argument("--count", type=int, default=5)
    show.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    """Dispatch the action."""
    return _build(args) if args.action == "build" else _show(args)


def _build(args: argparse.Namespace) -> int:
    from trimtab.pocket.build import build

    build(seed=args.seed, out=args.out, models=tuple(args.models))
    return 0


def _show(args: argparse.Namespace) -> int:
    from trimtab import pocket
    from trimtab.core.errors import unknown

    if args.family not in pocket.FAMILIES:
        raise unknown("family", args.family, pocket.FAMILIES)
    for index in range(args.count):
        problem = pocket.problem(args.family, "train", args.seed, index)
        sys.stdout.write(f"{problem.text}{pocket.solution(problem)}\n")
    return 0
