"""A chain of stop hooks over running slots, and the same chain over finished rollouts.

Each hook sees each response token of a rollout once, in order, after every token or in chunks. A rule names the
position at which its rollout ends; as rules only look back, the position does not depend on the chunking. The earliest
position over the chain wins, between equals the hook that comes first. A hook that names the last token of a response
which ended by itself cut nothing, so the response keeps its own stop reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.core.errors import ConfigError, EngineError, invalid
from trimtab.core.records import IntArray, StopReason, StopRecord
from trimtab.generate.protocol import ChunkView, Completion, StopHook

SIGNAL_ARRAYS: Mapping[str, tuple[str, ...]] = {
    "entropy": ("entropy",),
    "margin": ("margin",),
    "topk": ("topk_ids", "topk_logprobs"),
}
TEACHER = "teacher"

Slots = slice | IntArray
# (slots, pending tokens per slot, the hook) -> tokens (B, C) and signals (B, C, ...), C the largest count, valid first
Reader = Callable[[Slots, IntArray, StopHook], tuple[Tensor, dict[str, Tensor]]]


class HookChain:
    """The state of a chain of hooks over ``num_slots`` slots, and what each hook has seen of each slot."""

    def __init__(self, hooks: Sequence[StopHook], num_slots: int, device: torch.device) -> None:
        for hook in hooks:
            if hook.every < 1:
                raise invalid(f"stop.{hook.part}.every", hook.every, "an integer >= 1")
        self.hooks, self.device = list(hooks), device
        self._fresh = [hook.start(num_slots, device) for hook in self.hooks]
        self._state = [{name: value.clone() for name, value in fresh.items()} for fresh in self._fresh]
        self._row_S = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.seen_HS: IntArray = np.zeros((len(self.hooks), num_slots), dtype=np.int64)

    def reset(self, slots: IntArray, rows: IntArray) -> None:
        """Requests ``rows`` start in ``slots``."""
        index = self._tensor(slots)
        self.seen_HS[:, slots] = 0
        self._row_S[index] = self._tensor(rows)
        for state, fresh in zip(self._state, self._fresh, strict=True):
            for name in state:
                state[name][index] = fresh[name][index]

    def move(self, src: IntArray, dst: IntArray) -> None:
        """Slots ``dst`` continue what slots ``src`` held."""
        source, target = self._tensor(src), self._tensor(dst)
        self.seen_HS[:, dst] = self.seen_HS[:, src]
        for values in (self._row_S, *(values for state in self._state for values in state.values())):
            values[target] = values[source]

    def due(self, steps: int) -> list[int]:
        """Hooks to call after ``steps`` decode steps."""
        return [h for h, hook in enumerate(self.hooks) if steps % hook.every == 0]

    def feed(self, h: int, slots: Slots, length_B: IntArray, read: Reader) -> Tensor:
        """Show hook ``h`` what it has not seen of these slots, whose responses are ``length_B`` tokens long.

        Returns:
            (B,) int64 on the device: response index of the last token to keep, or -1.
        """
        hook, state = self.hooks[h], self._state[h]
        first_B = self.seen_HS[h, slots].copy()
        count_B = length_B - first_B
        self.seen_HS[h, slots] = length_B
        token_BC, signals = read(slots, count_B, hook)
        index = slots if isinstance(slots, slice) else self._tensor(slots)
        index_B = self._tensor(first_B)
        view = ChunkView(
            token_BC=token_BC,
            count_B=self._tensor(count_B),
            index_B=index_B,
            row_B=self._row_S[index],
            signals=signals,
        )
        new, column_B = hook.step({name: values[index] for name, values in state.items()}, view)
        if set(new) != set(state):
            raise EngineError(f"stop.{hook.part}: step returned the state {sorted(new)}, start gave {sorted(state)}")
        for name, values in new.items():
            state[name][index] = values
        return torch.where(column_B >= 0, index_B + column_B, -1)

    def flush(self, slots: IntArray, length_B: IntArray, read: Reader, cut_HB: IntArray) -> None:
        """Show every hook what it has not seen of rollouts that end, and enter the cuts it names into ``cut_HB``."""
        for h in range(len(self.hooks)):
            pending = np.flatnonzero(self.seen_HS[h, slots] < length_B)
            if len(pending):
                cut_B = self.feed(h, slots[pending], length_B[pending], read)
                cut_HB[h, pending] = _earlier(cut_HB[h, pending], cut_B.cpu().numpy())

    def _tensor(self, values: IntArray) -> Tensor:
        return torch.as_tensor(values, device=self.device)

    def resolve(self, cut_HB: IntArray, length_B: IntArray) -> tuple[IntArray, IntArray]:
        """Earliest cut of each row and the hook that named it, both (B,), -1 where no hook did."""
        if not len(cut_HB):
            none = np.full(len(length_B), -1, dtype=np.int64)
            return none, none
        beyond = np.argwhere(cut_HB >= length_B)
        if len(beyond):
            h, b = beyond[0]
            raise EngineError(
                f"stop.{self.hooks[h].part}: named response index {cut_HB[h, b]} of a response with {length_B[b]} "
                "tokens; a column must be below the row's count"
            )
        far = np.iinfo(np.int64).max
        filled = np.where(cut_HB < 0, far, cut_HB)
        hook_B = filled.argmin(0)
        position_B = filled[hook_B, np.arange(len(length_B))]
        none_B = position_B == far
        return np.where(none_B, -1, position_B), np.where(none_B, -1, hook_B)


def _earlier(a: IntArray, b: IntArray) -> IntArray:
    return np.where(a < 0, b, np.where(b < 0, a, np.minimum(a, b)))


def cut_applies(position: int, length: int, reason: StopReason) -> bool:
    """Whether a cut after ``position`` takes the place of a stop with ``reason`` after ``length`` tokens."""
    return position >= 0 and (position < length - 1 or reason is StopReason.ABORT)


def signal_names(hook: StopHook, available: Sequence[str]) -> list[str]:
    """The arrays a hook reads out of ``available``: log-probs always, its signals, and with "teacher" all the others.

    Raises:
        ConfigError: an array the hook asks for is not there.
    """
    own = [name for signal in sorted(hook.signals - {TEACHER}) for name in SIGNAL_ARRAYS.get(signal, (signal,))]
    missing = [name for name in own if name not in available]
    if missing:
        raise ConfigError(f"stop.{hook.part}: needs the signal array {missing[0]!r}; there are {sorted(available)}")
    names = ["logprobs", *own]
    if TEACHER in hook.signals:
        engine = {name for arrays in SIGNAL_ARRAYS.values() for name in arrays}
        names += [name for name in available if name not in engine and name not in ("tokens", "logprobs")]
    return names


class _Flat:
    """Finished rollouts end to end, read in chunks."""

    def __init__(self, completions: Sequence[Completion], device: torch.device) -> None:
        self.device = device
        length_N = np.array([len(c.tokens) for c in completions], dtype=np.int64)
        self._start_N = length_N.cumsum() - length_N
        self._last = max(0, int(length_N.sum()) - 1)
        common = set.intersection(*(set(c.signals) for c in completions))
        self._arrays = {name: self._join([c.signals[name] for c in completions]) for name in sorted(common)}
        self._arrays |= {"tokens": self._join([c.tokens for c in completions])}
        self._arrays |= {"logprobs": self._join([c.logprobs for c in completions])}

    def _join(self, arrays: list[np.ndarray[Any, Any]]) -> Tensor:
        return torch.as_tensor(np.concatenate(arrays), device=self.device)

    def reader(self, first: int) -> Reader:
        """Reads from response index ``first`` on."""

        def read(slots: Slots, count_B: IntArray, hook: StopHook) -> tuple[Tensor, dict[str, Tensor]]:
            column = np.minimum(np.arange(count_B.max()), count_B[:, None] - 1)
            index = torch.as_tensor((self._start_N[slots] + first)[:, None] + column, device=self.device)
            names = signal_names(hook, list(self._arrays))
            return self._arrays["tokens"][index], {name: self._arrays[name][index] for name in names}

        return read


def replay_hooks(
    hooks: Sequence[StopHook], completions: Sequence[Completion], chunk: int = 64, device: torch.device | str = "cpu"
) -> list[Completion]:
    """What the hooks would have made of rollouts generated without them: the completions, cut where a hook stops.

    For engines that cannot call back while they generate. Gives the same kept tokens as running the hooks inside the
    engine, for any ``chunk``. ``ChunkView.row_B`` indexes ``completions``; the signals the hooks need must be in
    ``Completion.signals``, the teacher's included.

    Raises:
        ConfigError: a signal is missing, or ``chunk`` < 1.
    """
    if chunk < 1:
        raise invalid("chunk", chunk, "an integer >= 1")
    length_N = np.array([len(c.tokens) for c in completions], dtype=np.int64)
    if not hooks or not len(length_N) or not length_N.max():
        return list(completions)
    flat = _Flat(completions, torch.device(device))
    chain = HookChain(hooks, len(completions), flat.device)
    rows = np.arange(len(completions))
    chain.reset(rows, rows)
    cut_HN = np.full((len(hooks), len(completions)), -1, dtype=np.int64)
    for h in range(len(hooks)):
        for first in range(0, int(length_N.max()), chunk):
            open_rows = np.flatnonzero((length_N > first) & (cut_HN[h] < 0))
            if not len(open_rows):
                break
            length_B = np.minimum(length_N[open_rows], first + chunk)
            cut_HN[h, open_rows] = chain.feed(h, open_rows, length_B, flat.reader(first)).cpu().numpy()
    position_N, hook_N = chain.resolve(cut_HN, length_N)
    parts = [hooks[h].part if h >= 0 else "" for h in hook_N]
    return [
        cut_completion(c, position, part) if cut_applies(position, len(c.tokens), c.stop.reason) else c
        for c, position, part in zip(completions, position_N.tolist(), parts, strict=True)
    ]


def cut_completion(completion: Completion, position: int, part: str) -> Completion:
    """The completion up to and with response index ``position``, ended by ``part``; the rest becomes overrun."""
    kept = position + 1
    return replace(
        completion,
        tokens=completion.tokens[:kept],
        logprobs=completion.logprobs[:kept],
        stop=StopRecord(StopReason.PART, position, part, completion.stop.limit),
        signals={name: values[:kept] for name, values in completion.signals.items()},
        overrun=completion.overrun + len(completion.tokens) - kept,
    )
