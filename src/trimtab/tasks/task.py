"""Tasks: where prompts come from, and how a spelling such as ``pocket:sums`` becomes prompts with token ids."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from trimtab.core.config import DataConfig, VerifyConfig
from trimtab.core.errors import DataError, unknown
from trimtab.core.records import Prompt, Verdict, prompt_id
from trimtab.tasks.service import Item, VerifierService
from trimtab.tasks.skips import Skips
from trimtab.tasks.verifiers import Verifier, make_verifier

if TYPE_CHECKING:
    from trimtab.model.tokenizer import Tokenizer

HELDOUT_SEED = 0  # the same held-out problems whatever the run's seed, so that runs can be compared
SOURCES = {  # scheme to module; each has `load(rest, data) -> Task`
    "pocket": "trimtab.tasks.pocket",
    "reasoning-gym": "trimtab.tasks.gym",
    "datasets": "trimtab.tasks.hub",
}

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """A problem before chat template and tokenizer."""

    text: str  # the problem alone; for a conversation its contents
    answer: Any = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()  # a conversation; empty = ``text`` is what the user says
    where: str = ""  # for reports: file and line, or index
    task: str = ""  # empty = the task's name


class Task(Protocol):
    """A source of problems with its verifier."""

    name: str
    system: str  # system message where the settings give none
    verifier: Callable[[Prompt, str], Any]

    def train(self, num: int, seed: int, skips: Skips) -> list[RawPrompt]:
        """``num`` training problems, a pure function of ``num`` and ``seed``; a finite source gives all it has.

        What could not be read is counted in ``skips``.
        """
        ...

    def heldout(self, num: int, seed: int, skips: Skips) -> list[RawPrompt]:
        """Up to ``num`` problems whose text is in no training set of this task, whatever its seed."""
        ...


class LoadedTask:
    """A task ready for a run.

    Attributes:
        name: the task's spelling.
        train: training prompts with distinct ids.
        skips: training rows left out, counted by reason, with the first place of each.
        heldout_skips: the same for the last :meth:`heldout`.
        service: the verifier behind :meth:`verify_all`.
    """

    def __init__(self, task: Task, data: DataConfig, verify: VerifyConfig, tokenizer: Tokenizer, seed: int = 0) -> None:
        """Raises DataError when no training prompt is left, and what :meth:`VerifierService.start` raises."""
        self.name = task.name
        self._task = task
        self._encoder = _Encoder(task, data, tokenizer)
        self.skips = Skips()
        self.train = self._encoder.prompts(task.train(data.num_prompts, seed, self.skips), self.skips)
        if not self.train:
            raise DataError(f"task {self.name!r}: no training prompt is left. " + _why(self.skips))
        self.heldout_skips = Skips()
        self.service = VerifierService(task.verifier, verify)
        self.service.start()

    @property
    def skipped(self) -> dict[str, int]:
        """Training rows left out, by reason."""
        return dict(self.skips.counts)

    def heldout(self, num: int) -> list[Prompt]:
        """Up to ``num`` held-out prompts, the same ones whatever the run's seed; fewer when the source has fewer."""
        self.heldout_skips = skips = Skips()
        return self._encoder.prompts(self._task.heldout(num, HELDOUT_SEED, skips), skips) if num else []

    def verify_all(self, items: Sequence[Item]) -> list[Verdict]:
        """One verdict per (prompt, response text), in order; never raises for what a reward function does."""
        return self.service.verify_all(items)

    def close(self) -> None:
        """End the verification processes."""
        self.service.close()

    def __enter__(self) -> LoadedTask:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Encoder:
    """Problems to prompts: chat template, token ids, stable ids, the length limit."""

    def __init__(self, task: Task, data: DataConfig, tokenizer: Tokenizer) -> None:
        self.task = task.name
        self.system = data.system or task.system
        self.verifier = task.verifier
        self.limit = data.max_prompt_tokens
        self.tokenizer = tokenizer
        self.chat = data.chat and has_chat_template(tokenizer)
        self._ints: dict[int, int] = {}  # one object per token id: a large data set would fill the memory with ints

    def prompts(self, raws: Sequence[RawPrompt], skips: Skips) -> list[Prompt]:
        """All that can be encoded within the limit. Equal problems get ids of their own by occurrence."""
        seen: Counter[str] = Counter()
        found = []
        for raw in raws:
            content = json.dumps([raw.text, raw.answer], default=str, sort_keys=True)
            occurrence, seen[content] = seen[content], seen[content] + 1
            prompt = self._prompt(raw, occurrence, skips)
            if prompt is not None:
                found.append(prompt)
        return found

    def _prompt(self, raw: RawPrompt, occurrence: int, skips: Skips) -> Prompt | None:
        messages = self._messages(raw)
        try:
            ids = self._encode(messages)
        except DataError as error:  # a character or a role the tokenizer does not know
            skips.add("cannot be encoded", f"{raw.where}: {error}")
            return None
        if not ids or len(ids) > self.limit:
            reason = f"prompt longer than data.max_prompt_tokens = {self.limit}" if ids else "empty prompt"
            skips.add(reason, f"{raw.where} ({len(ids)} tokens)")
            return None
        complaint = self.verifier.check(raw.answer) if isinstance(self.verifier, Verifier) else ""
        if complaint:
            skips.add(complaint, raw.where)
            return None
        return Prompt(
            id=prompt_id(raw.text, raw.answer, raw.task or self.task, occurrence),
            text=raw.text,
            tokens=tuple(self._ints.setdefault(i, i) for i in ids),
            answer=raw.answer,
            task=raw.task or self.task,
            meta=raw.meta,
            messages=messages if self.chat or raw.messages else (),
        )

    def _messages(self, raw: RawPrompt) -> tuple[Message, ...]:
        messages = raw.messages or ({"role": "user", "content": raw.text},)
        if self.system and messages[0]["role"] != "system":
            return ({"role": "system", "content": self.system}, *messages)
        return messages

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        if self.chat:
            return self.tokenizer.apply_chat(messages)
        return self.tokenizer.encode("\n\n".join(message["content"] for message in messages))


def has_chat_template(tokenizer: Tokenizer) -> bool:
    """True when the tokenizer says so, or holds a template."""
    declared = getattr(tokenizer, "has_chat_template", None)
    return bool(getattr(tokenizer, "chat_template", None) if declared is None else declared)


def _why(skips: Skips) -> str:
    return "Left out: " + "; ".join(skips.lines()) if skips.total else "The source is empty."


def load_task(spec: str, data: DataConfig, verify: VerifyConfig, tokenizer: Tokenizer, seed: int = 0) -> LoadedTask:
    """The task named by ``spec``, its prompts encoded and its verifier started.

    ``spec`` is ``pocket:<family>``, ``pocket:mix``, ``reasoning-gym:<dataset>``, ``datasets:<id or folder>`` or the
    path of a file or folder. Raises ConfigError for an unknown name, DataError for unreadable data and EngineError for
    a reward function that cannot be loaded.
    """
    return LoadedTask(make_task(spec, data), data, verify, tokenizer, seed)


def make_task(spec: str, data: DataConfig) -> Task:
    """The task named by ``spec``, with the verifier of ``data.verifier`` if one is set."""
    from trimtab.tasks.files import is_data_path, load_path

    scheme, colon, rest = spec.partition(":")
    is_path = is_data_path(spec)
    if scheme in SOURCES and (colon or not is_path):
        task: Task = importlib.import_module(SOURCES[scheme]).load(rest, data)
    elif is_path:
        task = load_path(spec, data)
    else:
        hint = f"Spelled {spec!r}; a source is <source>:<name>, a path ends in .jsonl, .json, .parquet or .csv."
        raise unknown("task", scheme, SOURCES, hint)
    if data.verifier:
        task.verifier = make_verifier(data.verifier)
    return task
