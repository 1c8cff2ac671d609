"""Sums of two to six two-digit numbers, with the work as running totals (A) or column by column (B)."""

from __future__ import annotations

from typing import Any

from trimtab.pocket.families.base import MARKER, Draw, Family, Problem, score_integer


def _draw(draw: Draw, terms: int | None) -> tuple[str, str, dict[str, Any]] | None:
    count = draw.between(2, 6) if terms is None else terms
    values = [draw.between(10, 99) for _ in range(count)]
    if len(set(values)) < count:  # a repeated number would make "the number after 47" ambiguous in the work
        return None
    return "+".join(map(str, values)) + "=", str(sum(values)), {"values": tuple(values)}


def _running_totals(problem: Problem) -> str:
    """``47+85+12=`` becomes ``47 +85=120+12=132 +12=140+4=144 #144``: the tens, the ones, the new total."""
    first, *rest = problem.meta["values"]
    total, steps = first, [str(first)]
    for value in rest:
        tens, ones = (total // 10 + value // 10) * 10, total % 10 + value % 10
        total += value
        steps.append(f"+{value}={tens}+{ones}={total}")
    return " ".join(steps) + f" {MARKER}{total}"


def _columns(problem: Problem) -> str:
    """``47+85+12=`` becomes ``u47:7,85:12,12:14/t47:4,85:12,12:13/130&14#144``: the units, the tens, then both."""
    units = tens = 0
    unit_steps, ten_steps = [], []
    for value in problem.meta["values"]:
        units, tens = units + value % 10, tens + value // 10
        unit_steps.append(f"{value}:{units}")
        ten_steps.append(f"{value}:{tens}")
    return f"u{','.join(unit_steps)}/t{','.join(ten_steps)}/{tens * 10}&{units}{MARKER}{tens * 10 + units}"


SUMS = Family(
    name="sums",
    summary="sums of 2 to 6 two-digit numbers with written running totals",
    draw=_draw,
    styles={"A": _running_totals, "B": _columns},
    score=score_integer,
    knobs={"terms": (2, 6)},
)
