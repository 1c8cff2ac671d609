"""Tasks over the embedded problem families: ``pocket:sums``, ``pocket:sums?terms=4``, ``pocket:mix``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from trimtab.core.config import DataConfig
from trimtab.core.errors import invalid, unknown
from trimtab.core.records import Prompt
from trimtab.pocket.families import FAMILIES, Problem, problem, verify
from trimtab.tasks.options import split_options
from trimtab.tasks.skips import Skips
from trimtab.tasks.task import RawPrompt
from trimtab.tasks.verifiers import Verifier

MIX = "mix"


class PocketVerifier(Verifier):
    """The family's own verification: linear in the text, safe on any."""

    trusted: ClassVar[bool] = True

    def __call__(self, prompt: Prompt, text: str) -> tuple[float, bool]:
        return verify(to_problem(prompt), text, graded=True)  # 1 only when right, so :func:`judge` can grade or not


@dataclass
class PocketTask:
    """Problems of one family, or of all in turn. Splits are by problem text, so that no seed can leak one."""

    name: str
    families: list[str]
    difficulty: dict[str, int]
    system: str = ""
    verifier: Any = field(default_factory=PocketVerifier)

    def train(self, num: int, seed: int, skips: Skips) -> list[RawPrompt]:
        return [self._raw("train", seed, index) for index in range(num)]

    def heldout(self, num: int, seed: int, skips: Skips) -> list[RawPrompt]:
        return [self._raw("heldout", seed, index) for index in range(num)]

    def _raw(self, split: str, seed: int, index: int) -> RawPrompt:
        family = self.families[index % len(self.families)]
        drawn = problem(family, split, seed, index // len(self.families), **self.difficulty)
        meta = {**drawn.meta, "family": family}
        return RawPrompt(drawn.text, drawn.answer, meta, where=f"{split} problem {index}", task=f"pocket:{family}")


def to_problem(prompt: Prompt) -> Problem:
    """The pocket problem behind a prompt of this task."""
    return Problem(prompt.meta["family"], prompt.text, prompt.answer, prompt.meta)


def load(rest: str, data: DataConfig) -> PocketTask:
    """The task ``pocket:<rest>``. ConfigError for an unknown family or difficulty knob."""
    name, difficulty = split_options(rest, "task")
    if name == MIX:
        if difficulty:
            raise invalid("task", f"pocket:{rest}", "pocket:mix without options", "Knobs belong to a single family.")
        return PocketTask(f"pocket:{MIX}", list(FAMILIES), {})
    if name not in FAMILIES:
        raise unknown("task", name, [*FAMILIES, MIX])
    return PocketTask(f"pocket:{rest}", [name], difficulty)
