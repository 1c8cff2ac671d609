"""What a problem family is, and what all families share: counter-based draws, splits, answer markers, closeness."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trimtab.core.errors import ConfigError, invalid, unknown
from trimtab.core.rng import key

MARKER = "#"
SPLITS = ("train", "heldout")
HELDOUT_SHARE = 8  # one problem text in eight is held out
MAX_TRIES = 10_000

T = TypeVar("T")
_INTEGER = re.compile(r"-?[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Problem:
    """One verifiable problem. ``answer`` holds all that verification needs; ``meta`` what writing the work needs."""

    family: str
    text: str
    answer: str
    meta: Mapping[str, Any] = field(default_factory=dict)


class Draw:
    """Integers keyed by what they are for: the n-th draw is a pure function of the key and n."""

    def __init__(self, *parts: object) -> None:
        self._parts = parts
        self._count = 0

    def between(self, low: int, high: int) -> int:
        """A whole number in [low, high], both included."""
        self._count += 1
        return low + (key(*self._parts, self._count) & (2**63 - 1)) % (high - low + 1)

    def choice(self, options: Sequence[T]) -> T:
        """One of ``options``, evenly."""
        return options[self.between(0, len(options) - 1)]


Solver = Callable[[Problem], str]


@dataclass(frozen=True)
class Family:
    """A source of problems with written-out work.

    ``draw(draw, **knobs)`` returns (text, answer, meta), or None to be asked again; ``score(answer, reply)`` gives
    (closeness in [0, 1] with 1 only for a right reply, well-formed?) and must never raise; ``knobs`` maps a difficulty
    knob to its allowed range, None standing for the family's own mix.
    """

    name: str
    summary: str
    draw: Callable[..., tuple[str, str, dict[str, Any]] | None]
    styles: Mapping[str, Solver]
    score: Callable[[str, str], tuple[float, bool]]
    knobs: Mapping[str, tuple[int, int]]

    def problem(self, split: str, seed: int, index: int, **difficulty: int | None) -> Problem:
        """The problem at (split, seed, index): a pure function of its arguments.

        A text belongs to exactly one split, by its hash, whatever seed, index or difficulty drew it.
        """
        if split not in SPLITS:
            raise unknown(f"pocket.{self.name}.split", split, SPLITS)
        self._check(difficulty)
        for attempt in range(MAX_TRIES):
            source = Draw("pocket", self.name, split, seed, index, attempt)
            drawn = self.draw(source, **{name: difficulty.get(name) for name in self.knobs})
            if drawn is not None and split_of(drawn[0]) == split:
                text, answer, meta = drawn
                return Problem(self.name, text, answer, {**meta, "key": f"{split}:{seed}:{index}"})
        raise ConfigError(f"pocket.{self.name}: no {split} problem exists for {difficulty}")

    def solution(self, problem: Problem, style: str = "A") -> str:
        """The full written work for ``problem``, ending with the marked answer; end of sequence goes right after."""
        if style not in self.styles:
            raise unknown(f"pocket.{self.name}.style", style, self.styles)
        return self.styles[style](problem)

    def verify(self, answer: str, completion: str, graded: bool = False) -> tuple[float, bool]:
        """(score in [0, 1], well-formed?) of ``completion``. Any text is safe; time is linear in its length.

        Only what follows the last marker counts, up to the end of the text; work before it is never read. Without
        ``graded`` the score is 1 for a right answer and 0 for every other.
        """
        reply = marked_answer(completion)
        if reply is None:
            return 0.0, False
        closeness, well_formed = self.score(answer, reply)
        return (closeness if graded else float(closeness == 1.0)), well_formed

    def _check(self, difficulty: Mapping[str, int | None]) -> None:
        for name, value in difficulty.items():
            if name not in self.knobs:
                raise unknown(f"pocket.{self.name}", name, self.knobs)
            low, high = self.knobs[name]
            if value is not None and not (isinstance(value, int) and low <= value <= high):
                raise invalid(f"pocket.{self.name}.{name}", value, f"a whole number from {low} to {high}")


def split_of(text: str) -> str:
    """The one split a problem text belongs to."""
    return SPLITS[1] if key("pocket-split", text) % HELDOUT_SHARE == 0 else SPLITS[0]


def marked_answer(completion: str) -> str | None:
    """What follows the last marker, stripped, or None without a marker or with nothing after it."""
    _, marker, reply = completion.rpartition(MARKER)
    return reply.strip() or None if marker else None


def parse_integer(reply: str) -> int | None:
    """``reply`` as a whole number of at most nine ASCII digits, or None."""
    return int(reply) if _INTEGER.fullmatch(reply) else None


def closeness(found: int, wanted: int) -> float:
    """1 for the right number, then falling with the distance d as 1 / (2 + d / 10): a near miss earns under a half."""
    distance = abs(found - wanted)
    return 1.0 if distance == 0 else 1.0 / (2.0 + distance / 10.0)


def score_integer(answer: str, reply: str) -> tuple[float, bool]:
    """The usual score: a whole number, graded by its distance from the answer."""
    found = parse_integer(reply)
    return (0.0, False) if found is None else (closeness(found, int(answer)), True)
