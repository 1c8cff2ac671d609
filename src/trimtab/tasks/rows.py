"""Tasks over rows that already exist: which field is what, which rows are bad, which are held out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trimtab.core.config import DataConfig
from trimtab.core.errors import DataError, nearest
from trimtab.core.rng import key
from trimtab.tasks.skips import Skips
from trimtab.tasks.task import Message, RawPrompt
from trimtab.tasks.verifiers import Exact, alternatives, make_verifier


@dataclass(frozen=True, slots=True)
class Row:
    """One raw row; ``value`` is anything a file may hold, an exception when it could not be read."""

    where: str
    value: Any


class BadRow(ValueError):
    """Why a row cannot be used; the text is the reason it is counted under."""


@dataclass
class RowsTask:
    """Training and held-out problems, read and checked."""

    name: str
    rows: list[RawPrompt]
    held: list[RawPrompt]
    skips: Skips
    verifier: Any
    system: str = ""
    held_skips: Skips = field(default_factory=Skips)

    def train(self, num: int, seed: int, skips: Skips) -> list[RawPrompt]:
        """All training rows in their order: ``num`` is for sources without an end."""
        skips.merge(self.skips)
        return self.rows

    def heldout(self, num: int, seed: int, skips: Skips) -> list[RawPrompt]:
        """``num`` rows in an order fixed by ``seed`` and their text, so that fewer are a subset of more."""
        skips.merge(self.held_skips)
        return sorted(self.held, key=lambda raw: key("held-order", seed, raw.text))[:num]


def rows_task(name: str, train: Iterable[Row], test: Iterable[Row] | None, data: DataConfig) -> RowsTask:
    """The task over ``train`` and ``test``; without ``test`` a share ``data.holdout`` of the rows is held out.

    Which rows are held out depends on their text alone. Raises DataError when more than half of the rows are bad.
    """
    reader = _Reader(name, data)
    skips, held_skips = Skips(), Skips()
    rows = reader.read(train, skips)
    if test is None:
        rows, held = _split(rows, data.holdout)
    else:
        held = reader.read(test, held_skips)
        rows = _without(rows, {raw.text for raw in held}, skips)
    return RowsTask(name, rows, held, skips, reader.verifier, held_skips=held_skips)


def _split(rows: list[RawPrompt], share: float) -> tuple[list[RawPrompt], list[RawPrompt]]:
    hashes = {raw.text: (key("holdout", raw.text) & (2**32 - 1)) / 2**32 for raw in rows}
    if share == 0 or len(hashes) < 2:
        return rows, []
    threshold = max(share, min(hashes.values()) + 2**-32)  # at least one, however few there are
    held = [raw for raw in rows if hashes[raw.text] < threshold]
    return [raw for raw in rows if hashes[raw.text] >= threshold], held


def _without(rows: list[RawPrompt], held: set[str], skips: Skips) -> list[RawPrompt]:
    kept = []
    for raw in rows:
        if raw.text in held:
            skips.add("prompt is in the test split too", raw.where)
        else:
            kept.append(raw)
    return kept


class _Reader:
    """Turns rows into problems under the settings' field names."""

    def __init__(self, name: str, data: DataConfig) -> None:
        self.name = name
        self.data = data
        self.verifier = make_verifier(data.verifier) if data.verifier else Exact()

    def read(self, rows: Iterable[Row], skips: Skips) -> list[RawPrompt]:
        found, total, first_bad = [], 0, None
        for row in rows:
            total += 1
            try:
                found.append(self._raw(row))
            except BadRow as error:
                skips.add(str(error), row.where)
                first_bad = first_bad or row
        if first_bad and len(found) * 2 < total:
            raise self._too_many_bad(first_bad, total - len(found), total, skips)
        if not total:
            raise DataError(f"task {self.name!r}: the source has no rows")
        return found

    def _raw(self, row: Row) -> RawPrompt:
        if isinstance(row.value, Exception):
            raise BadRow(f"unreadable row ({type(row.value).__name__})")
        if not isinstance(row.value, Mapping):
            raise BadRow("row is no object with fields")
        prompt = _field(row.value, self.data.prompt_key)
        text, messages = _conversation(prompt) if isinstance(prompt, (list, tuple)) else (_text(prompt), ())
        _check_unicode(text)
        answer = self._answer(row.value)
        used = (self.data.prompt_key, self.data.answer_key)
        meta = {name: value for name, value in row.value.items() if name not in used}
        return RawPrompt(text, answer, meta, messages, row.where)

    def _answer(self, row: Mapping[str, Any]) -> Any:
        if not self.verifier.needs_answer:
            return _find(row, self.data.answer_key)
        answer = _field(row, self.data.answer_key)
        if answer is None or answer == "" or answer == []:
            raise BadRow(f"empty answer in field {self.data.answer_key!r}")
        for one in alternatives(answer):
            _check_unicode(one)
        complaint = self.verifier.check(answer)
        if complaint:
            raise BadRow(complaint)
        return answer

    def _too_many_bad(self, first: Row, bad: int, total: int, skips: Skips) -> DataError:
        message = f"task {self.name!r}: {bad} of {total} rows are bad. " + "; ".join(skips.lines()[:3]) + "."
        if isinstance(first.value, Mapping):
            keys = [str(name) for name in first.value]
            message += f" The fields there: {', '.join(keys)}."
            for setting in ("prompt_key", "answer_key"):
                wanted = getattr(self.data, setting)
                if _find(first.value, wanted, _MISSING) is _MISSING:
                    near = nearest(wanted, keys)
                    message += f" Set data.{setting}" + (f"={near}?" if near else f" to one of them, not {wanted!r}.")
        return DataError(message)


_MISSING = object()


def _find(row: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """``row[path]``, or, for a dotted path such as ``reward_model.ground_truth``, what stands inside."""
    if path in row:
        return row[path]
    value: Any = row
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return default
        value = value[name]
    return value


def _field(row: Mapping[str, Any], path: str) -> Any:
    value = _find(row, path, _MISSING)
    if value is _MISSING:
        raise BadRow(f"no field {path!r}")
    return value


def _text(prompt: Any) -> str:
    if not isinstance(prompt, str):
        raise BadRow(f"prompt is neither text nor chat messages ({type(prompt).__name__})")
    if not prompt.strip():
        raise BadRow("empty prompt")
    return prompt


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair; no tokenizer or file takes it
        raise BadRow("half a surrogate pair, which is no character") from error


def _conversation(prompt: Iterable[Any]) -> tuple[str, tuple[Message, ...]]:
    """The contents as one text, and the messages. The last one must leave the turn to the assistant."""
    messages = []
    for message in prompt:
        if not (isinstance(message, Mapping) and all(isinstance(message.get(k), str) for k in ("role", "content"))):
            raise BadRow("a chat message lacks a role or a content that is text")
        messages.append({"role": message["role"], "content": message["content"]})
    if not any(message["content"].strip() for message in messages):
        raise BadRow("empty prompt")
    if messages[-1]["role"] == "assistant":
        raise BadRow("the last chat message is the assistant's")
    return "\n\n".join(message["content"] for message in messages), tuple(messages)
