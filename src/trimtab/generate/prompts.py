"""Contexts (prompt and prefix) of a generation call, each prefilled once and forked to its samples.

A few cache slots beside the running ones hold contexts whose samples are still waiting. A context's last token is not
prefilled: it is the first input of every sample's own decoding, so that prefill needs no sampling of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trimtab.core.records import IntArray
from trimtab.model.transformer import KVCache, Transformer


@dataclass(slots=True, eq=False)
class Context:
    """Tokens that some requests share.

    ``tokens`` is prompt and prefix, ``prompt_length`` >= 1 splits them; ``waiting`` holds request indices. The signals
    of the prefix tokens, (L, ...) each, are there once the context is loaded, if any are asked for.
    """

    tokens: IntArray
    prompt_length: int
    temperature: float
    waiting: deque[int] = field(default_factory=deque)
    slot: int = -1
    prefix_signals: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_cached(self) -> int:
        """Tokens that prefill computes."""
        return len(self.tokens) - 1


# (hidden (M, H), temperature) -> signals (M, ...)
SignalsOf = Callable[[Tensor, float], dict[str, Tensor]]


class PromptStore:
    """Prefills contexts into the cache slots ``slots`` and forks them.

    Args:
        budget: tokens, padding included, that one forward pass may take.
        signals_of: gives the signals of prefix tokens from the hidden states that predict them; None when not needed.
    """

    def __init__(
        self, model: Transformer, cache: KVCache, slots: Sequence[int], budget: int, signals_of: SignalsOf | None
    ) -> None:
        self.model, self.cache, self.budget, self.signals_of = model, cache, budget, signals_of
        self._free = list(slots)

    def load(self, queue: Iterable[Context]) -> list[Context]:
        """Prefill the first contexts of ``queue``: at least one, then as many as slots and one budget allow."""
        chosen: list[Context] = []
        total = 0
        for context in queue:
            total += len(context.tokens)
            if not self._free or (chosen and total > self.budget):
                break
            context.slot = self._free.pop()
            chosen.append(context)
        for batch in batches_by_length([c.num_cached for c in chosen], self.budget):
            self._prefill([chosen[i] for i in batch])
        return chosen

    def fork(self, context: Context, slots: Sequence[int]) -> None:
        """Copy a loaded context to running slots; frees its own slot when no sample waits any more."""
        if context.num_cached:
            self.cache.copy_slots([context.slot] * len(slots), slots, context.num_cached)
        if not context.waiting:
            self._free.append(context.slot)

    def _prefill(self, batch: list[Context]) -> None:
        device = self.model.device
        width = max(c.num_cached for c in batch)
        tokens = torch.zeros(len(batch), width, dtype=torch.int64)
        for row, context in enumerate(batch):
            tokens[row, : context.num_cached] = torch.from_numpy(context.tokens[:-1])
        tokens = tokens.to(device)
        count = torch.tensor([c.num_cached for c in batch], device=device)
        slots = torch.tensor([c.slot for c in batch], device=device)
        piece = max(1, self.budget // len(batch))
        for first in range(0, width, piece):
            chunk = tokens[:, first : first + piece]
            count_B = (count - first).clamp(0, chunk.shape[1])
            hidden = self.model.extend(chunk, count.clamp(max=first), count_B, self.cache, slots)
            self._read_prefixes(batch, hidden, first)

    def _read_prefixes(self, batch: list[Context], hidden: Tensor, first: int) -> None:
        """Signals of the prefix tokens predicted by the hidden states of the columns from ``first`` on."""
        if self.signals_of is None:
            return
        for row, context in enumerate(batch):
            start = max(context.prompt_length - 1 - first, 0)
            stop = min(context.num_cached - first, hidden.shape[1])
            if start < stop:
                for name, value in self.signals_of(hidden[row, start:stop], context.temperature).items():
                    known = context.prefix_signals.get(name)
                    context.prefix_signals[name] = value if known is None else torch.cat([known, value])


def batches_by_length(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of positive lengths in batches of similar length.

    In a batch the longest is at most twice the shortest and rows times longest is within ``budget``; a length beyond
    the budget stands alone.
    """
    batches: list[list[int]] = []
    for index in sorted((i for i, n in enumerate(lengths) if n > 0), key=lambda i: lengths[i]):
        batch = batches[-1] if batches else []
        fits = (len(batch) + 1) * lengths[index] <= budget
        if batch and fits and lengths[index] <= 2 * lengths[batch[0]]:
            batch.append(index)
        else:
            batches.append([index])
    return batches
