"""Reach a target from three or four small numbers, each used once: a written search, verified by its expression."""

from __future__ import annotations

import operator
import re
from typing import Any

from trimtab.pocket.families.base import MARKER, Draw, Family, Problem, closeness

MAX_EXPRESSION = 64  # characters; the longest honest expression has 13

_APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_TOKEN = re.compile(r"[0-9]{1,3}|[-+*()]")

# The order in which combinations are tried: positions in the (descending) numbers, and the operators between them,
# applied strictly from left to right.
_ORDERS: dict[int, list[tuple[tuple[int, ...], str]]] = {
    3: [
        *[((0, 1, 2), ops) for ops in ("++", "+-")],
        *[((0, 2, 1), ops) for ops in ("+-",)],
        *[((0, 1, 2), ops) for ops in ("--", "*+", "*-")],
        *[((0, 2, 1), ops) for ops in ("*+", "*-")],
        *[((0, 1, 2), ops) for ops in ("+*", "-*")],
        *[((0, 2, 1), ops) for ops in ("+*", "-*")],
    ],
    4: [((0, 1, 2, 3), ops) for ops in ("+++", "++-", "+-+", "*++", "*+-", "*-+", "+*+", "+*-")],
}


def _try(numbers: tuple[int, ...], order: tuple[int, ...], ops: str) -> tuple[str, str, int]:
    """One combination: (work as ``8*7=56-3=53``, expression, value)."""
    value = numbers[order[0]]
    work = expression = str(value)
    for op, position in zip(ops, order[1:], strict=True):
        number = numbers[position]
        if op == "*" and ("+" in expression or "-" in expression):
            expression = f"({expression})"
        value = _APPLY[op](value, number)
        work, expression = f"{work}{op}{number}={value}", f"{expression}{op}{number}"
    return work, expression, value


def _draw(draw: Draw, numbers: int | None) -> tuple[str, str, dict[str, Any]] | None:
    count = draw.choice((3, 3, 3, 4)) if numbers is None else numbers
    values = tuple(sorted((draw.between(1, 9) for _ in range(count)), reverse=True))
    target = _try(values, *draw.choice(_ORDERS[count]))[2]
    if not 1 <= target <= 99:
        return None
    listed = ",".join(map(str, values))
    return f"{target} from {listed}:", f"{target} from {listed}", {"values": values, "target": target}


def _search(problem: Problem) -> str:
    """``41 from 8,5,1:`` becomes ``8+5=13+1=14?41<8+5=13-1=12?41< ... 8*5=40+1=41?41 #8*5+1``.

    Combinations are tried until one hits; each result is held against the target, ``<`` and ``>`` mark the misses.
    """
    written, target = "", problem.meta["target"]
    for order, ops in _ORDERS[len(problem.meta["values"])]:
        work, expression, value = _try(problem.meta["values"], order, ops)
        written += f"{work}?{target}"
        if value == target:
            return f"{written} {MARKER}{expression}"
        written += "<" if value < target else ">"
    raise AssertionError(f"no combination reaches the target: {problem.text}")


class _Parser:
    """Recursive descent over at most ``MAX_EXPRESSION`` characters: sums of products of numbers and parentheses."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = [*tokens, ""]
        self.at = 0
        self.numbers: list[int] = []

    def take(self, *wanted: str) -> str | None:
        token = self.tokens[self.at]
        if token not in wanted:
            return None
        self.at += 1
        return token

    def sum(self) -> int:
        value = self.product()
        while op := self.take("+", "-"):
            value = _APPLY[op](value, self.product())
        return value

    def product(self) -> int:
        value = self.atom()
        while self.take("*"):
            value *= self.atom()
        return value

    def atom(self) -> int:
        if self.take("("):
            value = self.sum()
            if not self.take(")"):
                raise ValueError("unclosed parenthesis")
            return value
        token = self.tokens[self.at]
        if not token.isdigit():
            raise ValueError(f"a number is missing before {token!r}")
        self.at += 1
        self.numbers.append(int(token))
        return self.numbers[-1]


def evaluate(expression: str) -> tuple[int, list[int]] | None:
    """(value, numbers used) of an expression of whole numbers, ``+ - *`` and parentheses; None if it is not one."""
    tokens = _TOKEN.findall(expression) if len(expression) <= MAX_EXPRESSION else []
    if not tokens or "".join(tokens) != expression.replace(" ", ""):
        return None
    parser = _Parser(tokens)
    try:
        value = parser.sum()
    except ValueError:
        return None
    return (value, parser.numbers) if parser.take("") is not None else None


def _score(answer: str, reply: str) -> tuple[float, bool]:
    """Graded by the distance from the target; an expression must use each number exactly once to earn anything."""
    target, _, listed = answer.partition(" from ")
    found = evaluate(reply)
    if found is None:
        return 0.0, False
    value, used = found
    if sorted(used) != sorted(map(int, listed.split(","))):
        return 0.0, True
    return closeness(value, int(target)), True


COUNTDOWN = Family(
    name="countdown",
    summary="reach a target from 3 or 4 small numbers; the work is the combinations tried until one hits",
    draw=_draw,
    styles={"A": _search},
    score=_score,
    knobs={"numbers": (3, 4)},
)
