"""Solve a*x+b=c by guessing: rambling work with wrong paths and corrections before the marked answer."""

from __future__ import annotations

from typing import Any

from trimtab.pocket.families.base import MARKER, Draw, Family, Problem, score_integer

LOW, HIGH = 2, 9


def _draw(draw: Draw, largest: int | None) -> tuple[str, str, dict[str, Any]]:
    factor, offset = draw.between(2, 9), draw.between(1, 20)
    x = draw.between(LOW, HIGH if largest is None else largest)
    meta = {"factor": factor, "offset": offset, "x": x}
    return f"{factor}*x+{offset}={factor * x + offset}, x?", str(x), meta


def _guesses(problem: Problem) -> str:
    """``7*x+5=54, x?`` becomes ``2-9 9:63+5=68?54> no 2-8 3:21+5=26?54< no 4-8 7:49+5=54?54 #7``.

    Each guess comes from the range written before it, which the misses narrow.
    """
    factor, offset, x = (problem.meta[name] for name in ("factor", "offset", "x"))
    draw = Draw("pocket-guess", problem.text, problem.meta["key"])
    low, high, written, wanted = LOW, HIGH, "", factor * x + offset
    while True:
        guess = draw.between(low, high)
        product = factor * guess
        written += f"{low}-{high} {guess}:{product}+{offset}={product + offset}?{wanted}"
        if guess == x:
            return f"{written} {MARKER}{x}"
        written += "< no " if guess < x else "> no "
        low, high = (guess + 1, high) if guess < x else (low, guess - 1)


EQUATION = Family(
    name="equation",
    summary="solve a*x+b=c by guessing, with wrong guesses and corrections before the marked answer",
    draw=_draw,
    styles={"A": _guesses},
    score=score_integer,
    knobs={"largest": (4, HIGH)},
)
