"""DARS: a second round of rollouts for prompts that the first one solves less than half of the time.

Source: "Depth-Breadth Synergy in RLVR: Unlocking LLM Reasoning Gains with Adaptive Exploration", arXiv 2508.13755, and
the authors' release (yangzhch6/DARS). The bounded budget (``extra``) is ours.

The total |advantage| of n binary outcomes with success rate p is n S(p), S(p) = 2 p (1 - p), or 2 sqrt(p (1 - p)) where
advantages are divided by their deviation (``std``). It is largest at p = 1/2: C* = N / 2, or N.

1. Every prompt gets N = group_size rollouts; p is the mean correctness of those with a verdict, 1 / (2N) if it is 0.
2. Where p < 1/2 the second round brings dN = ceil((target - n S(p)) / S(p)) more, n the rollouts with a verdict, up to
   ``n_max`` in all. The target is C* (``et``, equal treatment) or 2 (1 - p) C* (``hw``, hardness weighted). A prompt
   without any verdict gets none: nothing is known about it.
3. Both rounds are one group. Groups all wrong or all right after both are for the filter ``zero-variance``.

The cost is not that of plain GRPO: up to ``n_max`` rollouts a prompt, or with ``extra`` at most that many more a prompt
on average over the batch, all dN then scaled by one factor and rounded by largest remainders.

Breadth (DARS-B) is a matter of settings: a very large batch, and a few passes over it as a whole (schedule
``minibatches`` with one minibatch).

Bias. Only groups that did badly in the first round are drawn further, so that the expected group mean lies above the
success rate and the baseline is not unbiased: a lucky first round is kept, an unlucky one is diluted. A leave-one-out
baseline does not remove it, because the size of the group depends on the outcomes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from trimtab.core.budget import largest_remainder
from trimtab.core.outcomes import Outcomes
from trimtab.core.part import Needs, knob
from trimtab.core.records import Group, IntArray
from trimtab.core.rng import generator
from trimtab.core.slots import Allocate, AllocationRequest, StepContext, StepRecord

Array = np.ndarray[Any, Any]
Goal = Literal["et", "hw"]
UNSOLVED = 1e-6
_ROUNDING = 1e-9


def spread(p_P: Array, std: bool) -> Array:
    """S(p): mean |advantage| of a rollout."""
    return 2 * np.sqrt(p_P * (1 - p_P)) if std else 2 * p_P * (1 - p_P)


def further_rollouts(p_P: Array, scored_P: IntArray, base: int, goal: Goal, std: bool) -> IntArray:
    """dN (P,) before any cap, for success rates of ``scored_P`` rollouts each; 0 from one half on."""
    p_P = np.where(p_P <= UNSOLVED, 1 / (2 * base), p_P)
    peak = base if std else base / 2
    target_P = np.where(p_P < 0.5, peak * (2 * (1 - p_P) if goal == "hw" else 1.0), 0.0)
    s_P = spread(np.minimum(p_P, 0.5), std)
    return np.maximum(np.ceil((target_P - scored_P * s_P) / s_P - _ROUNDING), 0).astype(np.int64)


@dataclass
class Second:
    """The step's second rounds, and the last step's numbers."""

    step: int = -1
    prompts: int = 0  # that were given more
    rollouts: int = 0  # that they were given
    asked: int = 0  # that they would have been given without ``extra``
    last: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True)
class Dars(Allocate):
    """Raises the total advantage of hard prompts to that of half-solved ones, or beyond."""

    State: ClassVar[type] = Second
    inert: ClassVar[dict[str, object] | None] = {"extra": 0.0}

    goal: Goal = knob("et", "level to lift hard prompts to: that of p = 1/2, or the higher the harder")
    n_max: int = knob(32, "most rollouts a prompt (32 with et, 64 with hw)", ge=1)
    std: bool = knob(False, "the advantage is divided by the group deviation")
    extra: float | None = knob(None, "most further rollouts a prompt, on average; null = no bound (paper)", ge=0)

    def needs(self) -> Needs:
        return Needs(verdicts=True)

    def budget(self, num_prompts: int, ctx: StepContext) -> int:
        return num_prompts * ctx.group_size + self.bound(num_prompts, ctx)

    def bound(self, num_prompts: int, ctx: StepContext) -> int:
        """Most rollouts of the second round."""
        most = num_prompts * max(self.n_max - ctx.group_size, 0)
        return most if self.extra is None else min(most, int(self.extra * num_prompts + _ROUNDING))

    def plan(self, request: AllocationRequest, ctx: StepContext) -> IntArray:
        size = len(request.prompts)
        if request.round == 0:
            return np.full(size, min(ctx.group_size, request.remaining // max(size, 1)), dtype=np.int64)
        if request.round > 1:
            return np.zeros(size, dtype=np.int64)
        wanted_P = self.wanted(request.groups, ctx.group_size)
        total = min(int(wanted_P.sum()), self.bound(size, ctx), request.remaining)
        rng = generator(*ctx.key(self.slug, size))
        counts_P = largest_remainder(wanted_P, total, cap=wanted_P, rng=rng).counts
        self.note(counts_P, wanted_P, ctx)
        return counts_P

    def wanted(self, groups: list[Group], base: int) -> IntArray:
        """dN (P,) within ``n_max``."""
        found = Outcomes.of(groups)
        more_P = further_rollouts(found.mean_P, found.scored_P, base, self.goal, self.std)
        room_P = np.maximum(self.n_max - found.size_P, 0)
        return np.where(found.scored_P > 0, np.minimum(more_P, room_P), 0)

    def note(self, counts_P: IntArray, wanted_P: IntArray, ctx: StepContext) -> None:
        """Count over all draws of a step."""
        s = self.state
        if s.step != ctx.step:
            self.state = s = Second(step=ctx.step, last=s.last)
        s.prompts += int((counts_P > 0).sum())
        s.rollouts += int(counts_P.sum())
        s.asked += int(wanted_P.sum())

    def observe(self, record: StepRecord, ctx: StepContext) -> None:
        s, base = self.state, ctx.group_size
        acted = s if s.step == ctx.step else Second()
        first_P = Outcomes.of([Group(g.prompt, g.rollouts[:base]) for g in record.groups])
        both_P = Outcomes.of(record.groups)
        unsolved_P = (first_P.scored_P > 0) & (first_P.best_P <= UNSOLVED)
        saved = unsolved_P & (both_P.best_P > UNSOLVED)
        s.last = {
            "second_round_prompts": acted.prompts,
            "second_round_rollouts": acted.rollouts,
            "second_round_denied": acted.asked - acted.rollouts,
            "unsolved": float(unsolved_P.mean()) if len(unsolved_P) else 0.0,
            "saved": float(saved.mean()) if len(saved) else 0.0,
        }

    def metrics(self) -> dict[str, float]:
        return dict(self.state.last)
