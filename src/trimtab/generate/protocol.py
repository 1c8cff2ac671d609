"""The generation protocol: parts cannot tell which engine runs behind it.

``Request`` in, ``Completion`` out, in request order whatever finished first. A ``StopHook`` is a rule over positions;
the engine runs it after every token or over chunks, and cuts a rollout back to the exact position the rule names, so
that the kept tokens do not depend on the chunking. Tokens generated past the cut are counted in ``Completion.overrun``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from trimtab.core.records import Cost, FloatArray, IntArray, Prompt, StopRecord

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution tokens are drawn from. Temperature 0 is greedy (behaviour log-probs at temperature 1)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off


@dataclass(frozen=True, slots=True)
class Request:
    """One rollout to generate. Requests with the same ``prompt.id`` and prompt tokens share one prefill."""

    id: str
    prompt: Prompt
    sample: int
    key: int  # random-number key of this rollout (signed 64-bit)
    max_new_tokens: int
    sampling: Sampling = Sampling()
    prefix: tuple[int, ...] = ()  # response tokens to resume after; they count towards max_new_tokens
    prefix_logprobs: tuple[float, ...] = ()  # behaviour log-probs of the prefix, empty = unknown (NaN)


@dataclass(slots=True)
class Completion:
    """The result of one request; per-token arrays have T entries, the prefix included."""

    id: str
    tokens: IntArray
    logprobs: FloatArray
    stop: StopRecord
    version: int
    signals: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)
    overrun: int = 0  # tokens sampled past the cut of a stopper, not part of ``tokens``


@dataclass(slots=True)
class ChunkView:
    """What a hook sees: the newest ``C`` response tokens of ``B`` running rollouts.

    ``token_BC`` (B, C); ``count_B`` valid columns per row; ``index_B`` response index of column 0; ``row_B`` index of
    each row's request, for hooks with per-request knowledge. ``signals`` maps a name to (B, C) or (B, C, K):
    "logprobs" always, "entropy", "margin", "topk_ids" and "topk_logprobs" when the hook asks for them, and what the
    scorer returned when it asks for "teacher". A resumed rollout's prefix comes first, like any other tokens.
    """

    token_BC: torch.Tensor
    count_B: torch.Tensor
    index_B: torch.Tensor
    row_B: torch.Tensor
    signals: dict[str, torch.Tensor]


class StopHook(Protocol):
    """A stopper while it runs. ``state`` tensors have a leading slot axis; the engine gathers and resets their rows."""

    part: str  # slug, for the stop record
    every: int  # 1 = after each token, s = about every s tokens
    signals: frozenset[str]  # engine signals and "teacher" when chunk scores of the teacher are needed

    def start(self, num_slots: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Fresh state for ``num_slots`` rows (the value a row has before its first token)."""
        ...

    def step(self, state: dict[str, torch.Tensor], view: ChunkView) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """New state of these rows, and the column (B,) of the last token to keep, or -1 to go on.

        The engine passes only the running rows' state. Padding columns (>= count) must not change it.
        """
        ...


class StreamScorer(Protocol):
    """A teacher that reads along, chunk by chunk, with its own cache per slot."""

    def admit(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """New rollouts start in these slots with these prompts; a resumed one's prefix follows through ``extend``."""
        ...

    def extend(
        self, slot_B: torch.Tensor, token_BC: torch.Tensor, count_B: torch.Tensor, signals: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Teacher scores of the new tokens: names as in :mod:`trimtab.learn.teacher`, each (B, C) or (B, C, K)."""
        ...

    def move(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Slots were compacted: the cache rows ``src`` are now ``dst``."""
        ...


class Engine(Protocol):
    """A rollout engine."""

    name: str
    version: int

    def generate(
        self,
        requests: Sequence[Request],
        *,
        hooks: Sequence[StopHook] = (),
        signals: frozenset[str] = frozenset(),
        topk: int = 0,
        scorer: StreamScorer | None = None,
        should_abort: Callable[[], bool] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Completion]:
        """Run all requests to their end and return completions in request order.

        ``signals`` out of ``trimtab.core.part.SIGNALS``; with ``topk`` = K > 0 the completions carry ``topk_ids`` and
        ``topk_logprobs`` (T, K) of the sampling distribution. ``should_abort`` is polled between steps; when it
        answers True all running rollouts end with reason ``abort`` and their partial result. ``progress`` gets
        (finished requests, tokens so far).
        """
        ...

    def sync(self, model: Any, version: int) -> None:
        """Take over the weights of ``model``; everything cached from older weights is dropped."""
        ...
