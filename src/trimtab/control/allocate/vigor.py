"""VIGOR: draw a step's rollouts in rounds, the later ones where the rewards so far vary most.

Source: "Learning as Reasoning Unfolds: Progressive Rollout Allocation for Efficient Reinforcement Learning", arXiv
2607.22002. Ties, rounding and what is left over are ours.

1. Every prompt gets m0 rollouts. After round t the share alpha of the active prompts (rounded half up, at least one)
   with the largest population variance of all their outcomes so far stays active, and each of them gets gamma times as
   many in round t + 1, until T rounds are done. Equal variances are settled at random.
2. A prompt that left keeps its rollouts and is trained on. Every rollout of the step weighs the same.

A step costs P m0 sum_{i < T} (alpha gamma)^i rollouts, P m0 T where alpha gamma = 1. It is bounded by the run's budget
of ``group_size`` a prompt: what the rounds leave of it goes evenly to the prompts of the last round (``spend_rest``); a
round that it does not pay for in full is shared evenly.

The variance is that of correctness, right or graded: shaped rewards exist only when all rounds are done. A missing
outcome is in no variance; a prompt with fewer than two outcomes has variance 0.

Bias. How many rollouts a prompt gets depends on outcomes that are trained on, so that its group mean is not an unbiased
estimate of its success rate p: it lies further from 1/2 than p, because only a mixed first draw, whose mean is
nearer to 1/2, is diluted. Between prompts the step is weighted towards varying ones by intent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from trimtab.core.budget import even
from trimtab.core.errors import invalid
from trimtab.core.history import prompt_keys
from trimtab.core.outcomes import Outcomes
from trimtab.core.part import Needs, Part, knob
from trimtab.core.records import IntArray
from trimtab.core.rng import scrambled
from trimtab.core.slots import Allocate, AllocationRequest, StepContext, StepRecord

if TYPE_CHECKING:
    from trimtab.core.config import RunConfig

Array = np.ndarray[Any, Any]
_ROUNDING = 1e-9


def half_up(value: float) -> int:
    """The nearest whole number, halves upwards."""
    return math.floor(value + 0.5 + _ROUNDING)


def most_varying(var_A: Array, tie_A: Array, places: int) -> IntArray:
    """Positions of the ``places`` largest variances, ascending; the lower tie number is first among equals."""
    return np.sort(np.lexsort((tie_A, -var_A))[:places])


def total_advantage(p: float, size: int) -> float:
    """Theorem 1: sum of |A| over a group with a share p of successes, A = (reward - mean) / std: G sigma.

    sigma is the deviation of rewards +-1, twice that of rewards 0 and 1; the advantages are the same.
    """
    return size * 2 * math.sqrt(p * (1 - p))


def variance_gain(k: float, alpha: float, gamma: float, rounds: int) -> float:
    """Theorem 2, eta: rollout-weighted mean variance over plain GRPO's, prompt variances Pareto with index k > 1."""
    weight = [(gamma * alpha) ** i for i in range(rounds)]
    gain = [(gamma * alpha ** (1 - 1 / k)) ** i for i in range(rounds)]
    return sum(gain) / sum(weight)


def speed_up(eta: float) -> float:
    """Theorem 2: steps of plain GRPO over steps of VIGOR to the same gradient norm."""
    return eta ** (1 / 3)


@dataclass
class Active:
    """Prompts active in the present round, the places they stand for, and the last step's numbers."""

    index: list[int] = field(default_factory=list)
    places: int = 0
    round: int = -1
    num_prompts: int = 0
    dropped_varying: int = 0  # left although their outcomes varied, this step
    filled_constant: int = 0  # stayed although their outcomes did not vary, this step
    step: int = -1
    last: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True)
class Vigor(Allocate):
    """Successive rounds on the prompts whose outcomes vary most."""

    State: ClassVar[type] = Active
    inert: ClassVar[dict[str, object] | None] = {"m0": 0, "rounds": 1}

    m0: int = knob(2, "rollouts of every prompt in the first round; 0 = group_size / rounds", ge=0)
    rounds: int = knob(4, "rounds T", ge=1)
    keep: float = knob(0.5, "share alpha of the active prompts that stays active", gt=0, le=1)
    growth: float = knob(2.0, "factor gamma on the rollouts of an active prompt from round to round", ge=1)
    drop_zero: bool = knob(False, "give the places of prompts without variance to the others")
    spend_rest: bool = knob(True, "give what the rounds leave of the budget to the last active prompts")

    def needs(self) -> Needs:
        return Needs(verdicts=True)

    def check(self, parts: Mapping[str, list[Part]], settings: RunConfig) -> None:
        cost = self.first(settings.group_size) * sum((self.keep * self.growth) ** i for i in range(self.rounds))
        if cost > settings.group_size + _ROUNDING:
            raise invalid(
                "group_size",
                settings.group_size,
                f"at least {math.ceil(cost - _ROUNDING)}: what the rounds of vigor cost a prompt",
                "Or lower allocate.m0 or allocate.rounds.",
            )

    def first(self, group_size: int) -> int:
        """m0 in force."""
        return self.m0 or max(1, group_size // self.rounds)

    def plan(self, request: AllocationRequest, ctx: StepContext) -> IntArray:
        s, size = self.state, len(request.prompts)
        counts_P = np.zeros(size, dtype=np.int64)
        if request.round == 0:
            self.begin(size, ctx)
        elif s.round + 1 < self.rounds:
            self.cut(request, ctx)
        else:
            return counts_P
        s.round = request.round
        wanted = s.places * half_up(self.first(ctx.group_size) * self.growth**s.round)
        everything = self.spend_rest and s.round + 1 == self.rounds
        total = request.remaining if everything else min(wanted, request.remaining)
        keys = prompt_keys([request.prompts[i].id for i in s.index])
        counts_P[s.index] = even(total, scrambled(keys, *ctx.key(self.slug, "rest", s.round)))
        return counts_P

    def begin(self, size: int, ctx: StepContext) -> None:
        """All prompts are active."""
        s = self.state
        if s.step != ctx.step:
            s.step, s.dropped_varying, s.filled_constant = ctx.step, 0, 0
        s.index, s.places, s.num_prompts = list(range(size)), size, size

    def cut(self, request: AllocationRequest, ctx: StepContext) -> None:
        """Keep the most varying of the active prompts."""
        s = self.state
        s.places = max(1, half_up(self.keep * s.places))
        active = [request.groups[i] for i in s.index]
        var_A = Outcomes.of(active).var_P
        keys = prompt_keys([group.prompt.id for group in active])
        stay = most_varying(var_A, scrambled(keys, *ctx.key(self.slug, s.round)), s.places)
        varying = stay[var_A[stay] > 0]
        s.filled_constant += len(stay) - len(varying)
        s.dropped_varying += int((var_A > 0).sum()) - len(varying)
        if self.drop_zero and len(varying):
            stay = varying
        s.index = [s.index[i] for i in stay.tolist()]

    def observe(self, record: StepRecord, ctx: StepContext) -> None:
        found = Outcomes.of(record.groups)
        total = max(int(found.size_P.sum()), 1)
        uniform = float(found.var_P.mean()) if len(found.var_P) else 0.0
        s = self.state
        s.last = {
            "rollouts_most": int(found.size_P.max(initial=0)),
            "variance": float((found.var_P * found.size_P).sum() / total),  # a rollout counts once
            "variance_prompts": uniform,  # a prompt counts once
            "dropped_varying": s.dropped_varying,
            "filled_constant": s.filled_constant,
            "active_last": len(s.index),
        }

    def metrics(self) -> dict[str, float]:
        return dict(self.state.last)
