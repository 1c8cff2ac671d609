"""``trimtab new``: the skeleton of a method: module, recipe and test, all under its slug."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from trimtab.core.errors import ConfigError, invalid, unknown
from trimtab.core.registry import FOLDERS, modules
from trimtab.core.slots import CHAINS, SLOTS

SUMMARY = "write the skeleton of a new method: module, recipe and test"

_FOLDER_OF = {
    "select": "control/select",
    "allocate": "control/allocate",
    "stop": "control/stop",
    "schedule": "control/schedule",
    "generate": "generate/parts",
    "reward": "filter/reward",
    "filter": "filter/keep",
    "replay": "replay",
    "advantage": "learn/advantage",
    "objective": "learn/objective",
    "correct": "learn/correct",
    "distill": "learn/distill",
}

_MODULE = '''"""{title} (authors, year, arXiv 0000.00000).

The rule, in the paper's symbols, with equation numbers. Deviations from the paper, if any.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.core.part import knob
from trimtab.core.slots import {base}


def rule(value: float, threshold: float) -> bool:
    """The arithmetic as a pure function: arguments in, decision out (equation, section)."""
    return value < threshold


@dataclass(kw_only=True)
class {cls}({base}):
    """What the part does, in one line (paper, section)."""

    threshold: float = knob(0.5, "τ: what it is, in the paper's words", ge=0, le=1)
'''

_RECIPE = """title: {title}
paper: ""
arxiv: ""
year: 2026
maturity: card
summary: One line on what it saves.
parts:
  {slot}: {spec}
  advantage: [{{part: baseline}}, {{part: scale}}]
  objective: clip
"""

_TEST = '''"""{title}: the paper's worked numbers, limits and invariants."""

from __future__ import annotations

import pytest

from {module} import rule


@pytest.mark.parametrize(("value", "threshold", "expected"), [(0.4, 0.5, True), (0.5, 0.5, False)])
def test_worked_numbers(value: float, threshold: float, expected: bool) -> None:
    assert rule(value, threshold) is expected
'''


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument(
        "slug", help="lower-case words joined by dashes; the file, recipe, test and page take this name"
    )
    parser.add_argument("--slot", required=True, metavar="SLOT", help=f"one of {', '.join(SLOTS)}")
    parser.add_argument("--root", type=Path, default=Path(), help="a checkout of trimtab (default: here)")


def run(args: argparse.Namespace) -> int:
    """Write the three files; nothing is overwritten."""
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", args.slug):
        raise invalid("slug", args.slug, "lower-case letters and digits, words joined by dashes")
    if args.slot not in SLOTS:
        raise unknown("--slot", args.slot, SLOTS)
    if args.slug in modules():
        raise ConfigError(f"slug: {args.slug!r} is already taken by {modules()[args.slug]}.")
    if not (args.root / "src/trimtab/core").is_dir():
        raise invalid("--root", str(args.root), "the root of a trimtab checkout (it holds src/trimtab)")
    files = {args.root / path: text for path, text in skeleton(args.slug, args.slot).items()}
    for path in files:  # all are looked at before the first is written: half a skeleton would be a broken part
        if path.exists():
            raise ConfigError(f"{path}: exists already; nothing was overwritten.")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"wrote {path}\n")
    return 0


def skeleton(slug: str, slot: str) -> dict[str, str]:
    """Relative path to content of the three files."""
    stem, title = slug.replace("-", "_"), slug.replace("-", " ").title()
    name = title.replace(" ", "")
    folder = _FOLDER_OF[slot]
    assert folder in FOLDERS
    names = {
        "title": title,
        "base": SLOTS[slot].__name__,
        "cls": name if not name[0].isdigit() else f"Method{name}",
        "slot": slot,
        "spec": f"[{{part: {slug}}}]" if slot in CHAINS else slug,
        "module": f"trimtab.{folder.replace('/', '.')}.{stem}",
    }
    return {
        f"src/trimtab/{folder}/{stem}.py": _MODULE.format(**names),
        f"src/trimtab/recipes/{slug}.yaml": _RECIPE.format(**names),
        f"tests/{folder}/test_{stem}.py": _TEST.format(**names),
    }
