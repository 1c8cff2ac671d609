"""Soft overlong punishment: a length penalty that grows over the last tokens before the limit.

Source: DAPO, arXiv 2503.14476, section 3.4, equation 13.

With length L_i, limit L_max and buffer B: exceed = L_i - (L_max - B); r_i <- r_i - factor * clip(exceed / B, 0, 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from trimtab.core.errors import invalid
from trimtab.core.part import Part, knob
from trimtab.core.records import FloatArray, Group, IntArray, flatten
from trimtab.core.slots import Reward, StepContext

if TYPE_CHECKING:
    from trimtab.core.config import RunConfig


def penalty(length_N: IntArray, max_length: int, buffer: int, factor: float) -> FloatArray:
    """What is added to the reward (N,), between ``-factor`` and 0."""
    exceed_N = np.clip((length_N - (max_length - buffer)) / buffer, 0, 1)
    return (0 - factor * exceed_N).astype(np.float32)


@dataclass(kw_only=True)
class SoftOverlong(Reward):
    """Subtracts DAPO's length penalty."""

    inert: ClassVar[dict[str, object] | None] = {"factor": 0.0}

    max_length: int = knob(0, "length L_max with the full penalty, tokens; 0 = the response limit of the run", ge=0)
    buffer: int = knob(4096, "width B of the zone in which the penalty grows, tokens", ge=1)
    factor: float = knob(1.0, "largest penalty", ge=0)

    def check(self, parts: Mapping[str, list[Part]], settings: RunConfig) -> None:
        limit = self.max_length or settings.sampling.max_new_tokens
        if self.buffer > limit:
            raise invalid("reward.soft-overlong.buffer", self.buffer, f"at most the length limit, {limit} tokens")

    def shape(self, groups: Sequence[Group], reward_N: FloatArray, ctx: StepContext) -> FloatArray:
        length_N = np.array([rollout.length for rollout in flatten(groups)], dtype=np.int64)
        added_N = penalty(length_N, self.max_length or ctx.max_new_tokens, self.buffer, self.factor)
        return reward_N + added_N.astype(reward_N.dtype)
