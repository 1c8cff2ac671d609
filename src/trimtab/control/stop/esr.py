"""Early Stopping Rollout: generate and distil only the first N tokens of every response.

Source: "Less is More: Early Stopping Rollout for On-Policy Distillation", arXiv 2605.27028.

The teacher corrects well only early in a response, because further on it reads a prefix it would not have written. So
every training response ends at its end of sequence or after N tokens, and the loss is

    L = 1 / (sum_i n_i) * sum_i sum_{t <= n_i} KL(p_{i,t} || q_{i,t}),   n_i = min(T_i, N),

no term behind N, no rescaling by N / T, no weight by position. Two forms with the same loss for the same samples:
``stop`` limits generation; ``mask`` generates in full and masks the tokens behind N, which costs more and shows the
untrained tail. N at or above the response limit is plain distillation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from trimtab.core.part import knob
from trimtab.core.records import DropReason, Group, IntArray, flatten
from trimtab.core.slots import Filter, Keep, StepContext, Stop


def head_mask(length_N: IntArray, cutoff: int) -> list[np.ndarray]:
    """Per row, True for the first ``cutoff`` tokens (T,)."""
    return [np.arange(length) < cutoff for length in length_N.tolist()]


@dataclass(kw_only=True)
class ESR(Stop, Filter):
    """A fixed window of N tokens, by stopping or by masking."""

    inert: ClassVar[dict[str, object] | None] = {"cutoff": 2**31}

    cutoff: int = knob(100, "response tokens N that are trained", ge=1)
    form: Literal["stop", "mask"] = knob("stop", "limit generation, or generate in full and mask the rest")

    def required_slots(self) -> tuple[str, ...]:
        return ("stop",) if self.form == "stop" else ("filter",)

    def limit(self, ctx: StepContext) -> int | None:
        return self.cutoff if self.form == "stop" and self.cutoff < ctx.max_new_tokens else None

    def filter(self, groups: Sequence[Group], ctx: StepContext) -> Keep:
        length_N = np.array([rollout.length for rollout in flatten(groups)], dtype=np.int64)
        mask = head_mask(length_N, self.cutoff) if (length_N > self.cutoff).any() else None
        return Keep(np.ones(len(length_N), dtype=bool), reason=DropReason.MASKED, token_mask=mask)
