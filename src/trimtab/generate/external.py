"""Rollouts that a program outside of this process generates piece by piece.

The engine around it fetches tokens; this module decides what becomes of them: limits, end of sequence, stop hooks, the
teacher that reads along, signals, results. Every engine that is not our own shares these decisions, so that parts see
no difference.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.core.errors import ConfigError, DataError, EngineError, invalid, unknown
from trimtab.core.part import SIGNALS
from trimtab.core.records import Cost, FloatArray, IntArray, StopReason, StopRecord
from trimtab.generate.hooks import TEACHER, HookChain, Slots, cut_applies, signal_names
from trimtab.generate.protocol import Completion, Request, StopHook, StreamScorer
from trimtab.generate.sampling import check_sampling

EXTERNAL_SIGNALS = ("margin", "topk")  # what the top log-probs of a server contain
Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class Asked:
    """The signals of a call: ``topk`` = K for ``topk_ids`` and ``topk_logprobs``, 0 without; ``margin``."""

    topk: int = 0
    margin: bool = False

    @property
    def width(self) -> int:
        """Most likely tokens to ask for at each position."""
        return max(self.topk, 2 if self.margin else 0)

    @property
    def any(self) -> bool:
        return self.width > 0


@dataclass(slots=True)
class Piece:
    """C new tokens of one rollout with their behaviour log-probs (NaN = not known).

    ``top_ids`` and ``top_logprobs`` are (C, width), most likely first, where signals were asked for.
    """

    tokens: IntArray
    logprobs: FloatArray
    top_ids: IntArray | None = None
    top_logprobs: FloatArray | None = None
    prefilled: int = 0  # context tokens that had to be computed for it

    def check(self, request: str, vocab_size: int, width: int) -> None:
        """Refuse what cannot be a piece of a rollout.

        Raises:
            EngineError: no tokens, ids outside the vocabulary, arrays that do not line up, impossible log-probs.
        """
        if not len(self.tokens):
            raise EngineError(f"request {request}: the engine answered without a token")
        if not 0 <= self.tokens.min() <= self.tokens.max() < vocab_size:
            wrong = self.tokens.min() if self.tokens.min() < 0 else self.tokens.max()
            raise EngineError(f"request {request}: the engine answered token id {wrong}; ids are 0..{vocab_size - 1}")
        if len(self.logprobs) != len(self.tokens):
            raise EngineError(f"request {request}: {len(self.logprobs)} log-probs for {len(self.tokens)} tokens")
        if (self.logprobs > 1e-3).any() or np.isinf(self.logprobs).any():
            bad = self.logprobs[(self.logprobs > 1e-3) | np.isinf(self.logprobs)][0]
            raise EngineError(f"request {request}: the engine answered the log-prob {bad} for a token it sampled")
        shape = None if self.top_ids is None else self.top_ids.shape
        if width and shape != (len(self.tokens), width):
            raise EngineError(f"request {request}: top {width} of {len(self.tokens)} tokens asked for, got {shape}")


def check_request(request: Request, vocab_size: int) -> None:
    """Refuse a request that no engine can run.

    Raises:
        ConfigError: a sampling value out of range.
        DataError: no prompt tokens, ids outside the vocabulary, prefix log-probs that do not line up.
    """
    check_sampling(request.sampling, f"request {request.id}: sampling")
    if not request.prompt.tokens:
        raise DataError(f"request {request.id}: prompt {request.prompt.id} has no tokens; at least one is needed")
    if request.prefix_logprobs and len(request.prefix_logprobs) != len(request.prefix):
        raise DataError(
            f"request {request.id}: {len(request.prefix_logprobs)} prefix_logprobs for {len(request.prefix)} tokens"
        )
    for name, tokens in (("prompt", request.prompt.tokens), ("prefix", request.prefix)):
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            wrong = min(tokens) if min(tokens) < 0 else max(tokens)
            raise DataError(f"request {request.id}: {name} holds token id {wrong}; ids are 0..{vocab_size - 1}")


def check_signals(
    engine: str, signals: frozenset[str], topk: int, hooks: Sequence[StopHook] = (), has_scorer: bool = False
) -> Asked:
    """What to ask for, after checking that an external engine can give it.

    Raises:
        ConfigError: a signal that needs the whole distribution, an unknown one, a hook without its teacher.
    """
    wanted = set(signals) | ({"topk"} if topk else set())
    for hook in hooks:
        if TEACHER in hook.signals and not has_scorer:
            raise ConfigError(f"stop.{hook.part}: needs a teacher while rollouts run, but there is no scorer")
        wanted |= hook.signals - {TEACHER}
    for name in sorted(wanted):
        if name not in SIGNALS:
            raise unknown("signals", name, SIGNALS)
        if name not in EXTERNAL_SIGNALS:
            raise ConfigError(
                f"engine.name: {engine!r} cannot give the signal {name!r}, which needs the log-probs of the whole "
                f"vocabulary; it gives {', '.join(EXTERNAL_SIGNALS)}. Use engine.name=torch, or a part without it."
            )
    if topk < 0 or ("topk" in wanted and not topk):
        raise invalid("topk", topk, "a whole number >= 1 where top-k signals are asked for, else 0")
    return Asked(topk, "margin" in wanted)


@dataclass(slots=True)
class _Row:
    """One request: the prefix it keeps, its limit and the reason at the limit; its buffers while it runs."""

    index: int
    request: Request
    prefix: IntArray
    limit: int
    limit_reason: StopReason
    slot: int = -1
    arrays: Arrays = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)
    surplus: int = 0  # tokens past the end that the engine sampled all the same

    @classmethod
    def of(cls, index: int, request: Request, max_context: int) -> _Row:
        room = max(0, max_context - len(request.prompt.tokens))
        limit = max(0, min(request.max_new_tokens, room))
        reason = StopReason.LIMIT if request.max_new_tokens <= room else StopReason.CONTEXT
        return cls(index, request, np.array(request.prefix[:limit], dtype=np.int64), limit, reason)


class ExternalRollouts:
    """The requests of one `generate` call, at most ``num_slots`` of them running.

    The engine calls :meth:`admit`, fetches tokens for the running rows after :meth:`context`, and hands them to
    :meth:`add`, which tells what ended. Rows of one prompt are admitted one after the other, so that a prefix cache
    serves them.

    Args:
        device: where hooks and the teacher compute.
        version: policy version of everything generated.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        hooks: Sequence[StopHook],
        asked: Asked,
        scorer: StreamScorer | None,
        eos_ids: frozenset[int],
        max_context: int,
        num_slots: int,
        version: int,
        device: torch.device,
    ) -> None:
        self.rows = [_Row.of(index, request, max_context) for index, request in enumerate(requests)]
        self.asked, self.eos_ids, self.version, self.device = asked, eos_ids, version, device
        self.scorer = scorer if any(TEACHER in hook.signals for hook in hooks) else None
        self._check_prefixes(hooks)
        num_slots = max(1, min(num_slots, len(requests)))
        self.chain = HookChain(hooks, num_slots, device)
        self.waiting = deque(_by_prompt(requests))
        self.done: list[Completion | None] = [None] * len(requests)
        self.num_done = self.num_tokens = 0
        self._free = list(range(num_slots))[::-1]
        self._row_S = np.zeros(num_slots, dtype=np.int64)
        self._length_S = np.zeros(num_slots, dtype=np.int64)
        self._scored_S = np.zeros(num_slots, dtype=np.int64)

    def _check_prefixes(self, hooks: Sequence[StopHook]) -> None:
        """A server does not say what it would have predicted along a prefix, so hooks cannot read it there."""
        row = next((row for row in self.rows if len(row.prefix)), None)
        for hook in hooks:
            if row is not None and (hook.signals - {TEACHER} or (TEACHER in hook.signals and self.asked.any)):
                raise ConfigError(
                    f"stop.{hook.part}: reads signals along reused prefixes (request {row.request.id}), which an "
                    "external engine does not give. Use engine.name=torch, or leave out the part that reuses tokens."
                )

    # ------------------------------------------------------------ what to fetch

    def admit(self) -> list[int]:
        """Start waiting rows while slots are free; returns those that need tokens."""
        started: list[int] = []
        while self._free and self.waiting:
            rows = [self.waiting.popleft() for _ in range(min(len(self._free), len(self.waiting)))]
            slots = np.array([self._free.pop() for _ in rows], dtype=np.int64)
            self._row_S[slots], self._scored_S[slots] = rows, 0
            for index, slot in zip(rows, slots.tolist(), strict=True):
                row = self.rows[index]
                row.slot, row.arrays = slot, self._buffers(row, row.limit)
                self._length_S[slot] = len(row.prefix)
            self.chain.reset(slots, np.array(rows, dtype=np.int64))
            if self.scorer is not None:
                self.scorer.admit(slots.tolist(), [self.rows[index].request.prompt.tokens for index in rows])
            ended = set(self._settle(slots))
            started += [index for index in rows if index not in ended]
        return started

    def context(self, index: int) -> list[int]:
        """Prompt and response tokens so far."""
        row = self.rows[index]
        return [*row.request.prompt.tokens, *row.arrays["tokens"][: self.length(index)].tolist()]

    def length(self, index: int) -> int:
        """Response tokens of a running row, its prefix included."""
        return int(self._length_S[self.rows[index].slot])

    def room(self, index: int) -> int:
        """Response tokens until the limit of a running row."""
        return self.rows[index].limit - self.length(index)

    # ------------------------------------------------------------ what came

    def add(self, pieces: Mapping[int, Piece]) -> list[int]:
        """Take in new tokens of running rows; returns the rows that ended."""
        for index, piece in pieces.items():
            self._write(index, piece)
        return self._settle(np.array([self.rows[index].slot for index in pieces], dtype=np.int64))

    def abort(self, reason: StopReason = StopReason.ABORT) -> None:
        """End everything that runs or waits with what it has."""
        running = [row.slot for row, done in zip(self.rows, self.done, strict=True) if row.slot >= 0 and done is None]
        if running:
            slots = np.array(running, dtype=np.int64)
            self._finish(slots, np.full((len(self.chain.hooks), len(slots)), -1, dtype=np.int64), reason)
        while self.waiting:
            row = self.rows[self.waiting.popleft()]
            row.arrays = self._buffers(row, len(row.prefix))
            self._complete(row, len(row.prefix), len(row.prefix), reason, "")

    def completions(self) -> list[Completion]:
        """The results in request order, every one with every signal; what is not known is NaN, or -1 for ids."""
        done = [completion for completion in self.done if completion is not None]
        assert len(done) == len(self.rows), (len(done), len(self.rows))
        shapes = {name: (value.shape[1:], value.dtype) for c in done for name, value in c.signals.items()}
        for completion in done:
            for name, (shape, dtype) in shapes.items():
                if name not in completion.signals:
                    completion.signals[name] = _unknown((len(completion.tokens), *shape), dtype)
        return done

    def salvage(self) -> list[Completion]:
        """All that is known when the engine failed: the rest ends with reason ``error`` and what it has."""
        self.abort(StopReason.ERROR)
        return self.completions()

    # ------------------------------------------------------------ inside

    def _buffers(self, row: _Row, size: int) -> Arrays:
        """Arrays of ``size`` response tokens that begin with the row's prefix."""
        arrays: Arrays = {"tokens": np.zeros(size, dtype=np.int64), "logprobs": _unknown((size,), np.float32)}
        if self.asked.topk:
            arrays["topk_ids"] = _unknown((size, self.asked.topk), np.int64)
            arrays["topk_logprobs"] = _unknown((size, self.asked.topk), np.float32)
        if self.asked.margin:
            arrays["margin"] = _unknown((size,), np.float32)
        arrays["tokens"][: len(row.prefix)] = row.prefix
        if row.request.prefix_logprobs:
            arrays["logprobs"][: len(row.prefix)] = row.request.prefix_logprobs[: len(row.prefix)]
        return arrays

    def _write(self, index: int, piece: Piece) -> None:
        """Append a piece up to the limit and through its first end-of-sequence token."""
        row, first, room = self.rows[index], self.length(index), self.room(index)
        ends = np.flatnonzero(np.isin(piece.tokens[:room], list(self.eos_ids)))
        count = int(ends[0]) + 1 if len(ends) else min(room, len(piece.tokens))
        place = slice(first, first + count)
        row.arrays["tokens"][place] = piece.tokens[:count]
        row.arrays["logprobs"][place] = piece.logprobs[:count]
        if self.asked.topk and piece.top_ids is not None and piece.top_logprobs is not None:
            row.arrays["topk_ids"][place] = piece.top_ids[:count, : self.asked.topk]
            row.arrays["topk_logprobs"][place] = piece.top_logprobs[:count, : self.asked.topk]
        if self.asked.margin and piece.top_logprobs is not None:
            row.arrays["margin"][place] = piece.top_logprobs[:count, 0] - piece.top_logprobs[:count, 1]
        self._length_S[row.slot] += count
        self.num_tokens += count
        row.surplus += len(piece.tokens) - count
        row.cost.sampled += len(piece.tokens)
        row.cost.prefilled += piece.prefilled

    def _settle(self, slots: IntArray) -> list[int]:
        """Let due hooks see the newest tokens of these slots and complete the rows that end."""
        length_B = self._length_S[slots]
        cut_HB = np.full((len(self.chain.hooks), len(slots)), -1, dtype=np.int64)
        for h, hook in enumerate(self.chain.hooks):
            pending_B = length_B - self.chain.seen_HS[h, slots]
            due = np.flatnonzero(pending_B >= hook.every)
            if len(due):
                cut_HB[h, due] = self.chain.feed(h, slots[due], length_B[due], self._read).cpu().numpy()
        own = np.array([self._own_reason(slot) is not None for slot in slots.tolist()], dtype=bool)
        ended = np.flatnonzero(own | (cut_HB >= 0).any(0))
        rows: list[int] = self._row_S[slots[ended]].tolist()
        if len(ended):
            self._finish(slots[ended], cut_HB[:, ended], None)
        return rows

    def _own_reason(self, slot: int) -> StopReason | None:
        """Why the row ends apart from hooks, if it does."""
        row, length = self.rows[self._row_S[slot]], int(self._length_S[slot])
        if length and int(row.arrays["tokens"][length - 1]) in self.eos_ids:
            return StopReason.EOS
        return row.limit_reason if length >= row.limit else None

    def _finish(self, slots: IntArray, cut_HB: IntArray, otherwise: StopReason | None) -> None:
        """Complete the rows in ``slots``: the hooks see the rest of them, then the earliest stop counts."""
        length_B = self._length_S[slots]
        if otherwise is not StopReason.ERROR:  # a failure must not be hidden by what a hook makes of half a rollout
            self.chain.flush(slots, length_B, self._read, cut_HB)
        position_B, hook_B = self.chain.resolve(cut_HB, length_B)
        for slot, position, h in zip(slots.tolist(), position_B.tolist(), hook_B.tolist(), strict=True):
            row, length = self.rows[self._row_S[slot]], int(self._length_S[slot])
            reason, part, kept = self._own_reason(slot) or otherwise, "", length
            if reason is None or cut_applies(position, length, reason):
                reason, part, kept = StopReason.PART, self.chain.hooks[h].part, position + 1
            row.cost.scored = int(self._scored_S[slot])
            self._complete(row, length, kept, reason, part)
            self._free.append(slot)

    def _complete(self, row: _Row, length: int, kept: int, reason: StopReason, part: str) -> None:
        arrays = {name: values[:kept].copy() for name, values in row.arrays.items()}
        row.arrays = {}
        self.done[row.index] = Completion(
            id=row.request.id,
            tokens=arrays.pop("tokens"),
            logprobs=arrays.pop("logprobs"),
            stop=StopRecord(reason, kept - 1, part, row.request.max_new_tokens),
            version=self.version,
            signals=arrays,
            cost=row.cost,
            overrun=length - max(kept, len(row.prefix)) + row.surplus,
        )
        self.num_done += 1

    # ------------------------------------------------------------ what hooks and the teacher read

    def _read(self, slots: Slots, count_B: IntArray, hook: StopHook) -> tuple[Tensor, dict[str, Tensor]]:
        """The newest tokens of running slots and the signals the hook asks for, padded with zeros."""
        index = np.arange(len(self._row_S))[slots]
        if TEACHER in hook.signals:
            self._score(index)
        arrays = [self.rows[row].arrays for row in self._row_S[index]]
        names = signal_names(hook, [name for name in arrays[0] if name != "tokens"])
        values = self._newest(index, count_B, ["tokens", *names])
        return values.pop("tokens"), values

    def _newest(self, slots: IntArray, count_B: IntArray, names: Sequence[str]) -> dict[str, Tensor]:
        """The last ``count_B`` values of each slot, (B, C, ...)."""
        arrays = [self.rows[row].arrays for row in self._row_S[slots]]
        found: dict[str, Tensor] = {}
        for name in names:
            sample = arrays[0][name]
            padded = np.zeros((len(slots), int(count_B.max()), *sample.shape[1:]), dtype=sample.dtype)
            for b, (slot, count) in enumerate(zip(slots.tolist(), count_B.tolist(), strict=True)):
                stop = int(self._length_S[slot])
                padded[b, :count] = arrays[b][name][stop - count : stop]
            found[name] = torch.from_numpy(padded).to(self.device)
        return found

    def _score(self, slots: IntArray) -> None:
        """Let the teacher read what it has not of these slots."""
        assert self.scorer is not None
        count_B = self._length_S[slots] - self._scored_S[slots]
        slots, count_B = slots[count_B > 0], count_B[count_B > 0]
        if not len(slots):
            return
        names = [name for name in ("logprobs", "topk_ids", "topk_logprobs", "margin") if name in self._arrays(slots[0])]
        values = self._newest(slots, count_B, ["tokens", *names])
        index, count = (torch.from_numpy(x).to(self.device) for x in (slots, count_B))
        scores = self.scorer.extend(index, values.pop("tokens"), count, values)
        self._scored_S[slots] += count_B
        for name, value_BC in scores.items():
            host = value_BC.cpu().numpy()
            for b, (slot, num) in enumerate(zip(slots.tolist(), count_B.tolist(), strict=True)):
                arrays, stop = self._arrays(slot), int(self._length_S[slot])
                if name not in arrays:
                    arrays[name] = _unknown((len(arrays["tokens"]), *host.shape[2:]), host.dtype)
                arrays[name][stop - num : stop] = host[b, :num]

    def _arrays(self, slot: int) -> Arrays:
        return self.rows[self._row_S[slot]].arrays


def _by_prompt(requests: Sequence[Request]) -> list[int]:
    """Request indices, those of one prompt together, prompts in order of first appearance."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(request.prompt.tokens, []).append(index)
    return [index for group in groups.values() for index in group]


def _unknown(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    return np.full(shape, np.nan if np.dtype(dtype).kind == "f" else -1, dtype=dtype)
