"""Greatest common divisors by repeated subtraction: the number of steps is long-tailed, and so is the work."""

from __future__ import annotations

from math import gcd
from typing import Any

from trimtab.pocket.families.base import MARKER, Draw, Family, Problem, parse_integer

MIN_TOKENS, MAX_TOKENS = 10, 200  # of the work, its end of sequence included


def _work(a: int, b: int) -> str:
    steps, answer = [], gcd(a, b)
    while a != b:
        a, b = (a - b, b) if a > b else (a, b - a)
        steps.append(f"{a},{b}")
    return f"{' '.join(steps)} {MARKER}{answer}"


def _draw(draw: Draw, largest: int | None) -> tuple[str, str, dict[str, Any]] | None:
    factor = draw.choice((1, 1, 1, 2, 2, 3, 4, 5, 6, 8, 9, 12))
    limit = (99 if largest is None else largest) // factor
    a, b = (factor * draw.between(1, limit) for _ in range(2))
    if not MIN_TOKENS <= len(_work(a, b)) + 1 <= MAX_TOKENS:
        return None
    return f"gcd({a},{b})=", str(gcd(a, b)), {"values": (a, b)}


def _subtract(problem: Problem) -> str:
    """``gcd(84,36)=`` becomes ``48,36 12,36 12,24 12,12 #12``: the larger less the smaller until both are equal."""
    return _work(*problem.meta["values"])


def _score(answer: str, reply: str) -> tuple[float, bool]:
    """A divisor of the right answer divides both numbers too: it earns half its share of the answer."""
    found, wanted = parse_integer(reply), int(answer)
    if found is None:
        return 0.0, False
    if found == wanted:
        return 1.0, True
    return (found / wanted / 2 if found > 0 and wanted % found == 0 else 0.0), True


EUCLID = Family(
    name="euclid",
    summary="greatest common divisor by repeated subtraction, work of 10 to 200 tokens with a long tail",
    draw=_draw,
    styles={"A": _subtract},
    score=_score,
    knobs={"largest": (24, 99)},
)
