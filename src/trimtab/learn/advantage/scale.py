"""Division of the advantage by a standard deviation of the rewards.

Sources: GRPO, arXiv 2402.03300, section 4.1.1 (``group-std``); Lite PPO, arXiv 2508.08221 (``batch-std``).

A_i <- A_i / (s + eps), with s the standard deviation of the *rewards* over the group's scored rollouts, or over all
scored rollouts of the batch. Both common libraries use the sample deviation (ddof 1), with eps 1e-4 (TRL) or 1e-6
(verl); papers mostly write the population deviation (ddof 0). Where s is 0 the advantage is exactly 0: equal rewards
carry no preference, and dividing what rounding left by eps would invent one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trimtab.core.lazy import lazy
from trimtab.core.part import Needs, knob
from trimtab.core.segments import segment_std
from trimtab.core.slots import Advantage, AdvantageRows

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

By = Literal["group-std", "batch-std"]


def deviation(
    reward_N: torch.Tensor, group_N: torch.Tensor, num_groups: int, scored_N: torch.Tensor, by: By, ddof: int
) -> torch.Tensor:
    """Standard deviation of the scored rewards that holds for each row (N,); 0 where it is undefined."""
    if by == "batch-std":
        group_N, num_groups = torch.zeros_like(group_N), 1
    return segment_std(reward_N, group_N, num_groups, scored_N, ddof)[group_N]


def scaled(advantage_N: torch.Tensor, std_N: torch.Tensor, eps: float) -> torch.Tensor:
    """``advantage_N / (std_N + eps)``, exactly 0 where the deviation is 0."""
    return torch.where(std_N > 0, advantage_N / (std_N + eps), torch.zeros_like(advantage_N))


@dataclass(kw_only=True)
class Scale(Advantage):
    """Divides by the standard deviation of the rewards (GRPO)."""

    by: By = knob("group-std", "whose deviation: the rollout's group, or the whole batch (Lite PPO)")
    eps: float = knob(1e-6, "added to the deviation (verl 1e-6, TRL 1e-4)", gt=0)
    ddof: int = knob(1, "1 = sample deviation (both libraries), 0 = population deviation (papers)", ge=0, le=1)

    def needs(self) -> Needs:
        return Needs(verdicts=True)

    def advantage(self, rows: AdvantageRows, advantage: torch.Tensor) -> torch.Tensor:
        std_N = deviation(rows.reward_N, rows.group_N, rows.num_groups, rows.scored_N, self.by, self.ddof)
        return scaled(advantage, std_N.to(advantage.dtype), self.eps)
