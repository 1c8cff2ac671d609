"""Median-centred advantages for groups of few rollouts (MC-GRPO).

Source: MC-GRPO: Median-Centered Group Relative Policy Optimization for Small-Rollout Reinforcement Learning,
arXiv 2601.22582, and the authors' code. ``scale: std``, ``none`` and ``auto`` and the handling of even or broken
groups are ours.

With few rollouts the group mean is noisy and gives some of them the wrong sign. One more than the nominal G is
sampled, the median is the baseline and the median rollout itself leaves the update. Per prompt, over its N scored
rollouts with rewards r:

1. m = median(r), of an even N the lower of the two middle values; MAD = median |r - m|.
2. A_i = (r_i - m) / (MAD + eps_m). N below 3: A = 0.
3. Zero compensation (off; on in the authors' GSM8K runs): with Z = #{|A_i| > 1e-6}, A_i times N / Z.
4. The pivot, the rollout of lowest sample number with reward m, is dropped, also where all rewards are equal. The
   filter does this before the advantage is computed, which still counts the pivot's reward.

A two-valued reward always has MAD = 0, so that the minority gets +-gap / eps_m (1000 for 0 and 1) and the majority 0.
``auto`` therefore divides by the sample deviation (plus 1e-4) in a step whose scored rewards take at most two values,
and by the MAD otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trimtab.core.errors import ConfigError, invalid
from trimtab.core.lazy import lazy
from trimtab.core.part import Needs, Part, knob
from trimtab.core.records import Group, flatten, group_ids
from trimtab.core.segments import segment_count, segment_mad, segment_max, segment_median, segment_min, segment_std
from trimtab.core.slots import Advantage, AdvantageRows, Filter, Keep, StepContext

if TYPE_CHECKING:
    import torch

    from trimtab.core.config import RunConfig
else:
    torch = lazy("torch")

Scale = Literal["auto", "mad", "std", "none"]
LEAST_ROLLOUTS = 3
STD_EPS = 1e-4
NONZERO = 1e-6


def two_valued(reward_N: torch.Tensor, scored_N: torch.Tensor) -> torch.Tensor:
    """Scalar bool: the scored rewards of the whole step take at most two values."""
    one = torch.zeros(len(reward_N), dtype=torch.int64, device=reward_N.device)
    low, high = segment_min(reward_N, one, 1, scored_N), segment_max(reward_N, one, 1, scored_N)
    return ((reward_N == low) | (reward_N == high) | ~scored_N).all()


def divisor(
    reward_N: torch.Tensor, group_N: torch.Tensor, num_groups: int, scored_N: torch.Tensor, scale: Scale, eps_m: float
) -> torch.Tensor:
    """What each group's centred rewards are divided by (P,), positive."""
    if scale == "none":
        return torch.ones(num_groups, dtype=reward_N.dtype, device=reward_N.device)
    mad_P = segment_mad(reward_N, group_N, num_groups, scored_N, lower=True) + eps_m
    if scale == "mad":
        return mad_P
    std_P = segment_std(reward_N, group_N, num_groups, scored_N) + STD_EPS
    return std_P if scale == "std" else torch.where(two_valued(reward_N, scored_N), std_P, mad_P)


def median_centred(
    reward_N: torch.Tensor, group_N: torch.Tensor, num_groups: int, scored_N: torch.Tensor, scale: Scale, eps_m: float
) -> torch.Tensor:
    """Advantages (N,); exactly 0 at the median's value, in groups below three scored rollouts, at missing rewards."""
    median_P = segment_median(reward_N, group_N, num_groups, scored_N, lower=True)
    divisor_P = divisor(reward_N, group_N, num_groups, scored_N, scale, eps_m)
    enough_P = segment_count(group_N, num_groups, scored_N) >= LEAST_ROLLOUTS
    counts_N = scored_N & enough_P[group_N]  # chosen before the division: the gradient of a missing reward is NaN
    return torch.where(counts_N, reward_N - median_P[group_N], torch.zeros_like(reward_N)) / divisor_P[group_N]


def compensated(
    advantage_N: torch.Tensor, group_N: torch.Tensor, num_groups: int, scored_N: torch.Tensor
) -> torch.Tensor:
    """Advantages times N / Z (N,): a group's zeros do not shrink its share of the step."""
    nonzero_N = advantage_N.abs() > NONZERO
    count_P = segment_count(group_N, num_groups, scored_N)
    factor_P = count_P / segment_count(group_N, num_groups, nonzero_N).clamp(min=1)
    return torch.where(nonzero_N, advantage_N * factor_P[group_N].to(advantage_N.dtype), advantage_N)


def pivots(
    reward_N: torch.Tensor, sample_N: torch.Tensor, group_N: torch.Tensor, num_groups: int, scored_N: torch.Tensor
) -> torch.Tensor:
    """True (N,) at one rollout a group with a scored reward: of lowest sample number among those at the median."""
    median_P = segment_median(reward_N, group_N, num_groups, scored_N, lower=True)
    at_median_N = scored_N & (reward_N == median_P[group_N])
    far = torch.iinfo(torch.int64).max
    first_P = torch.full((num_groups,), far, dtype=torch.int64, device=reward_N.device).scatter_reduce(
        0, group_N, torch.where(at_median_N, sample_N, far), "amin"
    )
    return at_median_N & (sample_N == first_P[group_N])


@dataclass(kw_only=True)
class MCGRPO(Filter, Advantage):
    """Centres rewards on the group median, scales by the median deviation, and drops the median rollout."""

    scale: Scale = knob(
        "auto", "divisor: MAD (paper), sample deviation, none; auto = deviation if two-valued, else MAD"
    )
    eps_m: float = knob(1e-3, "added to the MAD", gt=0)
    zero_compensation: bool = knob(False, "raise non-zero advantages by N over their number")

    def needs(self) -> Needs:
        return Needs(verdicts=True, min_group=LEAST_ROLLOUTS)

    def required_slots(self) -> tuple[str, ...]:
        return ("filter", "advantage")

    def check(self, parts: Mapping[str, list[Part]], settings: RunConfig) -> None:
        if not parts["allocate"] and settings.group_size % 2 == 0:
            raise invalid(
                "group_size",
                settings.group_size,
                "an odd number: it counts the sampled rollouts, of which mc-grpo drops the median one",
            )
        chain = [part.slug for part in parts["advantage"]]
        if chain[0] != self.slug:
            raise ConfigError(
                f"advantage: {self.slug} starts from the rewards and stands behind {chain[0]!r}, whose result it would "
                f"discard. Put {self.slug} first."
            )

    def filter(self, groups: Sequence[Group], ctx: StepContext) -> Keep:
        rollouts = flatten(groups)
        reward_N = torch.tensor([float("nan") if r.reward is None else r.reward for r in rollouts])
        sample_N = torch.tensor([r.sample for r in rollouts], dtype=torch.int64)
        group_N = torch.from_numpy(group_ids(groups))
        return Keep(~pivots(reward_N, sample_N, group_N, len(groups), ~reward_N.isnan()).numpy(), reason="median")

    def advantage(self, rows: AdvantageRows, advantage: torch.Tensor) -> torch.Tensor:
        segments = rows.group_N, rows.num_groups, rows.scored_N
        found_N = median_centred(rows.reward_N, *segments, self.scale, self.eps_m)
        return compensated(found_N, *segments) if self.zero_compensation else found_N
