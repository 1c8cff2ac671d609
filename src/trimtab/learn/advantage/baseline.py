"""Group baseline: a rollout's value minus what the rollouts of its prompt give on average.

Sources: GRPO, arXiv 2402.03300, section 4.1.1; Dr.GRPO, arXiv 2503.20783, section 3.2; RLOO, arXiv 2402.14740,
section 3.2.

With mu the mean over the scored rollouts of the group and G their number:

- ``mean``: A_i = r_i - mu. A group of one has A = 0.
- ``leave-one-out``: A_i = r_i - mean_{j != i} r_j = G / (G - 1) (r_i - mu). A group of one has no baseline, A = r.

As a chain: GRPO = [baseline, scale], Dr.GRPO = [baseline], RLOO = [baseline leave-one-out], REINFORCE++-baseline =
[baseline, whiten].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trimtab.core.lazy import lazy
from trimtab.core.part import Needs, knob
from trimtab.core.segments import segment_loo_mean, segment_mean
from trimtab.core.slots import Advantage, AdvantageRows

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

Kind = Literal["mean", "leave-one-out"]


def centred(
    value_N: torch.Tensor, group_N: torch.Tensor, num_groups: int, scored_N: torch.Tensor, kind: Kind
) -> torch.Tensor:
    """``value_N`` minus its group's baseline (N,), statistics over scored rows; 0 at the others."""
    if kind == "mean":
        base_N = segment_mean(value_N, group_N, num_groups, scored_N)[group_N]
    else:
        base_N = segment_loo_mean(value_N, group_N, num_groups, scored_N)
    return torch.where(scored_N, value_N - base_N, torch.zeros_like(value_N))


@dataclass(kw_only=True)
class Baseline(Advantage):
    """Subtracts the group baseline (GRPO, Dr.GRPO, RLOO, REINFORCE++-baseline)."""

    kind: Kind = knob("mean", "mean of the group, or of its other rollouts (RLOO)")

    def needs(self) -> Needs:
        return Needs(verdicts=True)

    def advantage(self, rows: AdvantageRows, advantage: torch.Tensor) -> torch.Tensor:
        return centred(advantage, rows.group_N, rows.num_groups, rows.scored_N, self.kind)
