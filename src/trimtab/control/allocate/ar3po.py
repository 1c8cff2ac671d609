"""AR3PO: draw in stages until a prompt has a success, and borrow an old success for prompts that get none.

Source: "Improving Sampling Efficiency in RLVR through Adaptive Rollout and Response Reuse", arXiv 2509.25808 (option II
of the reuse, the better one there). k and S are chosen here.

1. Every prompt gets k rollouts. After each of S stages those with a fully correct one leave; the others get k more.
2. A prompt that stays without a success, and had one in an earlier step, borrows it: it takes the place of one of the
   failures, drawn at random. Option II cuts the gradient of the borrowed response, so that all it adds is its reward in
   the group's mean and deviation: n - 1 failures and one success of reward 1, where the failures get -1 / sqrt(n - 1)
   with the population deviation. No token of it is needed, and none is kept: the replaced failure's row carries the
   reward and is dropped from the loss. A group of one scored rollout does not borrow.
3. After the step every prompt with a fresh success is remembered. A borrowed one is not entered again.

The cost lies between k and S k rollouts a prompt, E[n] = sum_{j < S} k (1 - p)^(k j) at success rate p; ``group_size``
is used only where k = 0, as group_size / S. A missing verdict is no success and is never replaced.

Bias. Drawing ends at a success, so that the expected group mean lies above the success rate (for k = 1, S = 2 it is
p + p (1 - p) / 2), and the baseline is not unbiased. The borrowed reward is not the present policy's either: it turns a
group without signal into one that pushes away from its failures. The step's ``reward`` and the rewards in the history
contain it, accuracy and the history's correctness do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from trimtab.core.budget import even
from trimtab.core.errors import ConfigError
from trimtab.core.history import prompt_keys
from trimtab.core.outcomes import Outcomes
from trimtab.core.part import Needs, Part, knob
from trimtab.core.records import FloatArray, Group, IntArray
from trimtab.core.rng import key, scrambled
from trimtab.core.slots import Allocate, AllocationRequest, Filter, Keep, Reward, StepContext, StepRecord
from trimtab.core.table import PromptTable

if TYPE_CHECKING:
    from trimtab.core.config import RunConfig

SUCCESS = 1.0  # a graded outcome below it is a failure
LEAST_SCORED = 2


def expected_rollouts(p: float, k: int, stages: int) -> float:
    """E[n]: rollouts of a prompt that succeeds with probability ``p``."""
    return sum(k * (1 - p) ** (k * stage) for stage in range(stages))


def unsolved(groups: Sequence[Group]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """True where a prompt has no success so far (P,)."""
    return np.asarray(Outcomes.of(groups).best_P < SUCCESS)


@dataclass
class Successes:
    """Prompts that ever had a success, with the step of the last one; counts of the present step."""

    table: PromptTable = field(default_factory=lambda: PromptTable(step=np.int32(-1)))
    step: int = -1
    borrowed: int = 0
    last: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True)
class AR3PO(Allocate, Reward, Filter):
    """Stages of rollouts up to the first success; groups without one borrow an earlier success."""

    State: ClassVar[type] = Successes
    inert: ClassVar[dict[str, object] | None] = {"k": 0, "stages": 1, "reuse": False}

    k: int = knob(4, "rollouts of an unsolved prompt in each stage; 0 = group_size / stages", ge=0)
    stages: int = knob(2, "stages S", ge=1)
    reuse: bool = knob(True, "borrow an earlier success for groups without one (option II)")

    def needs(self) -> Needs:
        return Needs(verdicts=True)

    def required_slots(self) -> tuple[str, ...]:
        return ("allocate", "reward", "filter") if self.reuse else ("allocate",)

    def check(self, parts: Mapping[str, list[Part]], settings: RunConfig) -> None:
        if not self.reuse:
            return
        if any(part.slug == "zero-variance" for part in parts["filter"]):
            raise ConfigError(
                "allocate.ar3po: 'zero-variance' drops the all-wrong groups that a borrowed success is for. Remove it "
                "from the slot filter, or set allocate.reuse=false."
            )
        if parts["reward"][-1] is not self:
            raise ConfigError(
                f"reward.{parts['reward'][-1].slug}: stands behind ar3po and would shape the borrowed reward by the "
                "response it replaced. Put ar3po last in the slot reward."
            )

    # ------------------------------------------------------------ stages

    def each(self, ctx: StepContext) -> int:
        """k in force."""
        return self.k or max(1, ctx.group_size // self.stages)

    def budget(self, num_prompts: int, ctx: StepContext) -> int:
        return num_prompts * self.stages * self.each(ctx)

    def plan(self, request: AllocationRequest, ctx: StepContext) -> IntArray:
        size = len(request.prompts)
        counts_P = np.zeros(size, dtype=np.int64)
        if request.round >= self.stages:
            return counts_P
        open_P = np.ones(size, dtype=bool) if request.round == 0 else unsolved(request.groups)
        index = np.flatnonzero(open_P)
        total = min(len(index) * self.each(ctx), request.remaining)
        keys = prompt_keys([request.prompts[i].id for i in index.tolist()])
        counts_P[index] = even(total, scrambled(keys, *ctx.key(self.slug, request.round)))
        return counts_P

    # ------------------------------------------------------------ reuse

    def replaced(self, groups: Sequence[Group], ctx: StepContext) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Rows (N,) of ``flatten(groups)`` that a borrowed success takes the place of; at most one a group."""
        rows_P = [np.zeros(len(group.rollouts), dtype=bool) for group in groups]
        if self.reuse and groups:
            known_P = self.state.table.find(prompt_keys([group.prompt.id for group in groups])) >= 0
            enough_P = Outcomes.of(groups).scored_P >= LEAST_SCORED
            for index in np.flatnonzero(known_P & enough_P & unsolved(groups)).tolist():
                scored = [i for i, r in enumerate(groups[index].rollouts) if not r.verdict.status.failed]
                drawn = min(scored, key=lambda i: key(ctx.seed, self.slug, groups[index].rollouts[i].id))
                rows_P[index][drawn] = True
        return np.concatenate([*rows_P, np.zeros(0, dtype=bool)])

    def shape(self, groups: Sequence[Group], reward_N: FloatArray, ctx: StepContext) -> FloatArray:
        return np.where(self.replaced(groups, ctx), np.float32(SUCCESS), reward_N)

    def filter(self, groups: Sequence[Group], ctx: StepContext) -> Keep:
        replaced_N = self.replaced(groups, ctx)
        s = self.state
        if s.step != ctx.step:
            s.step, s.borrowed = ctx.step, 0
        s.borrowed += int(replaced_N.sum())
        return Keep(~replaced_N, reason="replaced")

    # ------------------------------------------------------------ after the step

    def observe(self, record: StepRecord, ctx: StepContext) -> None:
        s, groups = self.state, [group for group in record.groups if group.rollouts]
        open_P = unsolved(groups)
        solved = [group.prompt.id for group, is_open in zip(groups, open_P.tolist(), strict=True) if not is_open]
        rows = s.table.add(prompt_keys(solved))
        s.table["step"][rows] = ctx.step
        size_P, num = Outcomes.of(groups).size_P, max(len(groups), 1)
        s.last = {
            "rollouts_per_prompt": float(size_P.sum() / num),
            "unsolved": float(open_P.sum() / num),
            "borrowed": (s.borrowed if s.step == ctx.step else 0) / num,
            "known_successes": len(s.table),
            **{
                f"reached_stage_{stage}": float((size_P > (stage - 1) * self.each(ctx)).sum() / num)
                for stage in range(2, self.stages + 1)
            },
        }

    def metrics(self) -> dict[str, float]:
        return dict(self.state.last)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"table": self.state.table.state_dict()}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        table = Successes().table
        table.load_state_dict(values["table"])
        super().load_state_dict({**values, "table": table})
