"""Tasks over the package ``reasoning-gym``: ``reasoning-gym:chain_sum?min_terms=2&max_terms=3``."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from trimtab.core.config import DataConfig
from trimtab.core.errors import ConfigError, missing_extra, unknown
from trimtab.core.records import Prompt
from trimtab.core.rng import key
from trimtab.tasks.answers import last_line, last_number, tagged_answer
from trimtab.tasks.options import split_options
from trimtab.tasks.skips import Skips
from trimtab.tasks.task import RawPrompt
from trimtab.tasks.verifiers import Verifier, reason

SYSTEM = "Think step by step. Then give the final answer, and nothing else, between <answer> and </answer>."
HELDOUT_SHARE = 4  # one question in four is held out
_TRIES = 4 * HELDOUT_SHARE  # indices looked at per question wanted, before a small data set counts as used up
_LARGEST = 20_000  # what the strictest data set accepts as its size
_SPACING = 2**31 - 1  # data sets seed item i with seed + i: seeds of runs must lie far apart, and fit 32 bits


@dataclass(frozen=True)
class GymVerifier(Verifier):
    """The data set's own ``score_answer``, which may give partial credit."""

    dataset: str
    options: dict[str, Any]

    def prepare(self) -> None:
        _scorers[self.dataset] = _create(self.dataset, self.options)

    def __call__(self, prompt: Prompt, text: str) -> tuple[float, bool]:
        if self.dataset not in _scorers:
            self.prepare()
        score = _scorers[self.dataset].score_answer
        answer = extract(text, prompt.answer)
        entry = {"question": prompt.text, "answer": prompt.answer, "metadata": prompt.meta["metadata"]}
        try:
            return score(answer, entry), answer is not None
        except ValueError:  # some data sets convert the answer unchecked: int("twelve") ...
            score(prompt.answer, entry)  # ... which is the response's fault only if the reference itself can be scored
            return 0.0, False


_scorers: dict[str, Any] = {}  # per process


def extract(text: str, reference: Any) -> str | None:
    """The tagged answer, else the last number where the reference is a number, else the last line."""
    tagged = tagged_answer(text)
    if tagged is not None:
        return tagged or None
    if _is_number(reference):
        found = last_number(text)
        return None if found is None else format(found, "f")
    return last_line(text)


def _is_number(reference: Any) -> bool:
    try:
        float(reference)
    except (TypeError, ValueError):
        return False
    return True


@dataclass
class GymTask:
    """Questions generated on demand. A question belongs to one split by its hash, whatever seed made it."""

    name: str
    dataset: str
    options: dict[str, Any]
    verifier: Any = field(init=False)
    system: str = SYSTEM

    def __post_init__(self) -> None:
        self.verifier = GymVerifier(self.dataset, self.options)

    def train(self, num: int, seed: int, skips: Skips) -> list[RawPrompt]:
        found: list[RawPrompt] = []
        for raw in self._draw("train", seed, num, skips):
            found.append(raw)
            if len(found) == num:
                break
        return found

    def heldout(self, num: int, seed: int, skips: Skips) -> list[RawPrompt]:
        """Distinct questions; fewer than ``num`` when the data set has too few."""
        found: dict[str, RawPrompt] = {}
        for raw in self._draw("heldout", seed, num, skips):
            found.setdefault(raw.text, raw)
            if len(found) == num:
                break
        return list(found.values())

    def _draw(self, split: str, seed: int, num: int, skips: Skips) -> Iterator[RawPrompt]:
        tries = min(_TRIES * num, max(_LARGEST, 2 * num))
        base = key("reasoning-gym", self.dataset, split, seed) % _SPACING
        source = _create(self.dataset, {**self.options, "seed": base, "size": tries})
        for index in range(tries):
            where = f"{split} item {index}"
            try:
                entry = source[index]
            except Exception as error:  # generators of some hundred data sets, each with its own limits
                skips.add("the generator failed", f"{where}: {reason(error)}")
                continue
            if split_of(entry["question"]) == split:
                meta = {"metadata": entry["metadata"]}
                yield RawPrompt(entry["question"], entry["answer"], meta, where=where)


def split_of(question: str) -> str:
    """The one split a question belongs to."""
    return "heldout" if key("reasoning-gym-split", question) % HELDOUT_SHARE == 0 else "train"


def load(rest: str, data: DataConfig) -> GymTask:
    """The task ``reasoning-gym:<rest>``. ConfigError for an unknown data set or option."""
    name, options = split_options(rest, "task")
    known = _datasets()
    if name not in known:
        raise unknown("task", name, known)
    allowed = [f.name for f in fields(known[name][1]) if f.name not in ("seed", "size")]
    for option in options:
        if option not in allowed:
            raise unknown(f"task.{name}", option, allowed)
    _create(name, options)  # checks the values
    return GymTask(f"reasoning-gym:{rest}", name, options)


def _datasets() -> dict[str, Any]:
    try:
        found: dict[str, Any] = importlib.import_module("reasoning_gym.factory").DATASETS
    except ImportError as error:
        raise missing_extra("reasoning-gym", "tasks", "The task 'reasoning-gym:...'") from error
    return found


def _create(name: str, options: dict[str, Any]) -> Any:
    _datasets()
    try:
        return importlib.import_module("reasoning_gym").create_dataset(name, **options)
    except Exception as error:  # assertions of the data set's own checks, and type errors behind them
        raise ConfigError(f"task: reasoning-gym refused {name!r} with {options}: {reason(error)}") from error
