"""Procedurally generated, verifiable problems with written-out work. Nothing here loads torch."""

from __future__ import annotations

from trimtab.core.errors import unknown
from trimtab.pocket.families.base import MARKER, SPLITS, Family, Problem, marked_answer, split_of
from trimtab.pocket.families.countdown import COUNTDOWN
from trimtab.pocket.families.equation import EQUATION
from trimtab.pocket.families.euclid import EUCLID
from trimtab.pocket.families.sums import SUMS

FAMILIES: dict[str, Family] = {family.name: family for family in (SUMS, EUCLID, COUNTDOWN, EQUATION)}
DEFAULT_FAMILY = SUMS.name


def family(name: str) -> Family:
    """The family called ``name``; a ConfigError names the known ones."""
    if name not in FAMILIES:
        raise unknown("pocket.family", name, FAMILIES)
    return FAMILIES[name]


def problem(name: str, split: str, seed: int, index: int, **difficulty: int | None) -> Problem:
    """The problem at (family, split, seed, index), a pure function of its arguments."""
    return family(name).problem(split, seed, index, **difficulty)


def solution(problem: Problem, style: str = "A") -> str:
    """The full written work for ``problem`` in one of its family's styles."""
    return family(problem.family).solution(problem, style)


def verify(problem: Problem, completion: str, graded: bool = False) -> tuple[float, bool]:
    """(score in [0, 1], well-formed?) of ``completion``; see :meth:`Family.verify`."""
    return family(problem.family).verify(problem.answer, completion, graded)


__all__ = [
    "DEFAULT_FAMILY",
    "FAMILIES",
    "MARKER",
    "SPLITS",
    "Family",
    "Problem",
    "family",
    "marked_answer",
    "problem",
    "solution",
    "split_of",
    "verify",
]
