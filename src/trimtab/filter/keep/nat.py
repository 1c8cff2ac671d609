"""Trains on a random part of every response's tokens, without bias (NAT).

Source: Not all tokens are needed (NAT): token efficient reinforcement learning, arXiv 2603.06619 (Horvitz-Thompson
weights, both schemes). The uniform law of the cutoff, its least prefix and one draw per rollout are ours.

A response of T tokens; m_t = 1 where token t (from 1) is kept, p_t > 0 the probability of that. Every token's loss gets
the weight m_t / p_t, and the divisor stays that of the full response, so that the expected gradient over the draw is
the full one for every loss that is a sum of token terms. PPO's clip is; so are sequence ratios here, because a rule
that reads whole rows (its ``whole_rows``) is still shown all tokens, but then nothing is saved.

- ``urs``: tokens are kept independently with p = q. A response may keep none; drawing again would bias p.
- ``rpc``: the first L tokens, L uniform in {Lmin, ..., T}: p_t = 1 up to Lmin, then (T - t + 1) / (T - Lmin + 1). A
  response of at most Lmin tokens is kept whole. The learner computes nothing behind a response's last kept token, and
  a causal model gives the kept ones the same log-probs.

A draw depends on seed, step, prompt, sample and position alone, so that it is the same on every worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from trimtab.core import rng
from trimtab.core.lazy import lazy
from trimtab.core.part import knob
from trimtab.core.records import FloatArray, Group, Rollout, flatten
from trimtab.core.slots import Filter, Keep, StepContext, StepRecord

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")


def prefix_probability(position_T: torch.Tensor, length_T: torch.Tensor, least: int) -> torch.Tensor:
    """p (T,) float64 of ``rpc`` for tokens at ``position_T`` (from 1) of responses of ``length_T`` tokens."""
    tail_T = (length_T - position_T + 1).double() / (length_T - least + 1).clamp(min=1)
    return torch.where(position_T <= least, torch.ones_like(tail_T), tail_T)


def cutoff(uniform_N: torch.Tensor, length_N: torch.Tensor, least: int) -> torch.Tensor:
    """L (N,) int64, uniform in {least, ..., length}; the length where that is empty. ``uniform_N`` in (0, 1)."""
    choices_N = (length_N - least + 1).clamp(min=1)
    drawn_N = (uniform_N.double() * choices_N).long()
    return torch.minimum(length_N.clamp(max=least) + drawn_N, length_N)


@dataclass
class Tokens:
    """Shares of the last step's tokens: drawn, and expected of the draw."""

    kept_share: float | None = None
    expected_share: float | None = None


@dataclass(kw_only=True)
class NAT(Filter):
    """Keeps a random prefix, or random tokens, of every response, weighted by their inverse probability."""

    State: ClassVar[type] = Tokens
    inert: ClassVar[dict[str, object] | None] = {"scheme": "urs", "q": 1.0}

    scheme: Literal["rpc", "urs"] = knob("rpc", "random prefix cut, or independent tokens")
    q: float = knob(0.5, "'urs': probability of keeping a token", gt=0, le=1)
    min_prefix: int = knob(1, "'rpc': Lmin, tokens always kept; bounds the weights by T - Lmin + 1", ge=1)

    def draw(self, rollouts: Sequence[Rollout], ctx: StepContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Kept (T,) bool and its probability (T,) float64, on the rollouts' tokens one after the other."""
        length_N = torch.tensor([r.length for r in rollouts], dtype=torch.int64)
        row_T = torch.repeat_interleave(torch.arange(len(rollouts)), length_N)
        position_T = torch.arange(1, len(row_T) + 1) - (length_N.cumsum(0) - length_N)[row_T]
        key_N = rng.keys_tensor([rng.key(*ctx.key("nat", r.prompt.id, r.sample)) for r in rollouts])
        if self.scheme == "urs":
            probability_T = torch.full((len(row_T),), self.q, dtype=torch.float64)
            return rng.uniform(key_N[row_T], position_T).double() < probability_T, probability_T
        cutoff_N = cutoff(rng.uniform(key_N, torch.zeros_like(key_N)), length_N, self.min_prefix)
        return position_T <= cutoff_N[row_T], prefix_probability(position_T, length_N[row_T], self.min_prefix)

    def filter(self, groups: Sequence[Group], ctx: StepContext) -> Keep:
        rollouts = flatten(groups)
        kept_T, probability_T = self.draw(rollouts, ctx)
        weight_T = torch.where(kept_T, 1 / probability_T, torch.zeros_like(probability_T)).float().numpy()
        ends = np.cumsum([r.length for r in rollouts])[:-1]
        weight: list[FloatArray] = np.split(weight_T, ends) if rollouts else []
        return Keep(np.ones(len(rollouts), dtype=bool), token_weight=weight)

    def observe(self, record: StepRecord, ctx: StepContext) -> None:
        kept_T, probability_T = self.draw(flatten(record.groups), ctx)
        if len(kept_T):
            self.state = Tokens(kept_T.double().mean().item(), probability_T.mean().item())

    def metrics(self) -> dict[str, float]:
        found = {"kept_share": self.state.kept_share, "expected_share": self.state.expected_share}
        return {name: value for name, value in found.items() if value is not None}
