"""Statistics over groups of ragged size: flat rows plus group ids, no loop over groups.

Every function takes ``x_N`` (N,), ``group_N`` (N,) int64 in ``0..num_groups-1``, the number of groups P, and optionally
``mask_N`` (N,) bool. A False row is missing: its value, NaN included, is never read, and no gradient reaches it.
Results of dtype and device of ``x_N`` (integers and booleans become float32; sums run in float32 or better).

What an empty segment gives is part of each function's contract: 0 everywhere. NaN comes out only where a NaN went in
unmasked. A constant segment has exactly its value as mean, median and leave-one-out mean, and exactly 0 as deviation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.core.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy("torch")


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``x`` where ``mask`` is True, a scalar; exactly 0.0 and attached to the graph when nothing is."""
    total = torch.where(mask, x, torch.zeros_like(x)).sum()
    return total / mask.sum().clamp(min=1)


def segment_count(group_N: Tensor, num_groups: int, mask_N: Tensor | None = None) -> Tensor:
    """Present rows per group (P,) int64."""
    present = torch.ones_like(group_N) if mask_N is None else mask_N.to(group_N.dtype)
    return torch.zeros(num_groups, dtype=group_N.dtype, device=group_N.device).index_add(0, group_N, present)


def segment_sum(x_N: Tensor, group_N: Tensor, num_groups: int, mask_N: Tensor | None = None) -> Tensor:
    """Sum per group (P,)."""
    return _sum(_wide(x_N, mask_N), group_N, num_groups).to(_dtype(x_N))


def segment_mean(x_N: Tensor, group_N: Tensor, num_groups: int, mask_N: Tensor | None = None) -> Tensor:
    """Mean per group (P,)."""
    base_P, excess_P, _ = _excess(x_N, group_N, num_groups, mask_N)
    count_P = segment_count(group_N, num_groups, mask_N)
    return (base_P + excess_P / count_P.clamp(min=1)).to(_dtype(x_N))


def segment_loo_mean(x_N: Tensor, group_N: Tensor, num_groups: int, mask_N: Tensor | None = None) -> Tensor:
    """Mean of the other present rows of each row's group (N,); 0 where there is no other (a group of one)."""
    base_P, excess_P, excess_N = _excess(x_N, group_N, num_groups, mask_N)
    own_N = torch.ones_like(group_N) if mask_N is None else mask_N.to(group_N.dtype)
    others_N = segment_count(group_N, num_groups, mask_N)[group_N] - own_N
    mean_N = base_P[group_N] + (excess_P[group_N] - excess_N) / others_N.clamp(min=1)
    return torch.where(others_N > 0, mean_N, torch.zeros_like(mean_N)).to(_dtype(x_N))


def segment_var(x_N: Tensor, group_N: Tensor, num_groups: int, mask_N: Tensor | None = None, ddof: int = 1) -> Tensor:
    """Variance per group (P,) with divisor ``count - ddof``; 0 where that is not positive."""
    wide_N = _wide(x_N, mask_N)
    mean_P = segment_mean(wide_N, group_N, num_groups, mask_N)
    deviation_N = _zero_missing(wide_N - mean_P[group_N], mask_N)
    divisor_P = segment_count(group_N, num_groups, mask_N) - ddof
    var_P = _sum(deviation_N.square(), group_N, num_groups) / divisor_P.clamp(min=1)
    return torch.where(divisor_P > 0, var_P, torch.zeros_like(var_P)).to(_dtype(x_N))


def segment_std(x_N: Tensor, group_N: Tensor, num_groups: int, mask_N: Tensor | None = None, ddof: int = 1) -> Tensor:
    """Standard deviation per group (P,); 0 where the variance is 0 or undefined, with gradient 0 there."""
    var_P = segment_var(x_N, group_N, num_groups, mask_N, ddof)
    positive = var_P > 0
    return torch.where(positive, torch.where(positive, var_P, torch.ones_like(var_P)).sqrt(), torch.zeros_like(var_P))


def segment_min(x_N: Tensor, group_N: Tensor, num_groups: int, mask_N: Tensor | None = None) -> Tensor:
    """Smallest present value per group (P,)."""
    return _extreme(x_N, group_N, num_groups, mask_N, "amin").to(_dtype(x_N))


def segment_max(x_N: Tensor, group_N: Tensor, num_groups: int, mask_N: Tensor | None = None) -> Tensor:
    """Largest present value per group (P,)."""
    return _extreme(x_N, group_N, num_groups, mask_N, "amax").to(_dtype(x_N))


def segment_median(
    x_N: Tensor, group_N: Tensor, num_groups: int, mask_N: Tensor | None = None, lower: bool = False
) -> Tensor:
    """Median per group (P,); of an even count the mean of the two middle values, or with ``lower`` the lower one."""
    if not len(x_N):
        return torch.zeros(num_groups, dtype=_dtype(x_N), device=x_N.device)
    wide_N = _wide(x_N, mask_N)
    sorted_N = wide_N[_order(wide_N, group_N, num_groups, mask_N)]
    count_P = segment_count(group_N, num_groups, mask_N)
    start_P = count_P.cumsum(0) - count_P
    last = len(x_N) - 1
    lower_P = sorted_N[(start_P + (count_P - 1).clamp(min=0) // 2).clamp(max=last)]
    upper_P = lower_P if lower else sorted_N[(start_P + count_P // 2).clamp(max=last)]
    median_P = lower_P + (upper_P - lower_P) / 2
    return torch.where(count_P > 0, median_P, torch.zeros_like(median_P)).to(_dtype(x_N))


def segment_mad(
    x_N: Tensor, group_N: Tensor, num_groups: int, mask_N: Tensor | None = None, lower: bool = False
) -> Tensor:
    """Median absolute deviation from the median per group (P,), without a consistency factor; both medians alike."""
    wide_N = _wide(x_N, mask_N)
    median_P = segment_median(wide_N, group_N, num_groups, mask_N, lower)
    deviation_N = (wide_N - median_P[group_N]).abs()
    return segment_median(deviation_N, group_N, num_groups, mask_N, lower).to(_dtype(x_N))


def segment_rank(x_N: Tensor, group_N: Tensor, num_groups: int, mask_N: Tensor | None = None) -> Tensor:
    """Ascending rank of each row in its group (N,), from 1; ties share the mean of their ranks; 0 at missing rows."""
    wide_N = _wide(x_N, mask_N).detach()
    if not len(x_N):
        return wide_N.to(_dtype(x_N))
    order_N = _order(wide_N, group_N, num_groups, mask_N)
    value_N, home_N = wide_N[order_N], _home(group_N, num_groups, mask_N)[order_N]
    count_P = segment_count(home_N, num_groups + 1)
    start_P = count_P.cumsum(0) - count_P
    place_N = torch.arange(1, len(x_N) + 1, device=x_N.device) - start_P[home_N]
    new_run = torch.ones_like(order_N, dtype=torch.bool)
    new_run[1:] = (value_N[1:] != value_N[:-1]) | (home_N[1:] != home_N[:-1])
    run_N = new_run.long().cumsum(0) - 1
    shared_N = segment_mean(place_N.to(wide_N.dtype), run_N, len(x_N))[run_N]
    rank_N = torch.zeros_like(wide_N)
    rank_N[order_N] = shared_N
    return _zero_missing(rank_N, mask_N).to(_dtype(x_N))


def _dtype(x: Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else torch.float32


def _zero_missing(x_N: Tensor, mask_N: Tensor | None) -> Tensor:
    return x_N if mask_N is None else torch.where(mask_N, x_N, torch.zeros_like(x_N))


def _wide(x_N: Tensor, mask_N: Tensor | None) -> Tensor:
    """Values in float32 or float64, missing ones as 0."""
    return _zero_missing(x_N.to(torch.promote_types(_dtype(x_N), torch.float32)), mask_N)


def _home(group_N: Tensor, num_groups: int, mask_N: Tensor | None) -> Tensor:
    """Group ids with missing rows in one more group: a filler value could not be told from a true one."""
    return group_N if mask_N is None else torch.where(mask_N, group_N, torch.full_like(group_N, num_groups))


def _sum(wide_N: Tensor, group_N: Tensor, num_groups: int) -> Tensor:
    return torch.zeros(num_groups, dtype=wide_N.dtype, device=wide_N.device).index_add(0, group_N, wide_N)


def _extreme(x_N: Tensor, group_N: Tensor, num_groups: int, mask_N: Tensor | None, how: str) -> Tensor:
    wide_N = _wide(x_N, mask_N)
    start = torch.zeros(num_groups + 1, dtype=wide_N.dtype, device=wide_N.device)
    home_N = _home(group_N, num_groups, mask_N)
    return start.scatter_reduce(0, home_N, wide_N, how, include_self=False)[:num_groups]


def _excess(x_N: Tensor, group_N: Tensor, num_groups: int, mask_N: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Group minimum (P,), summed excess over it (P,) and each row's excess (N,), 0 at missing rows.

    Means taken from the minimum on are exact for constant groups, where a plain sum would leave a rounding error that
    a division by the (then tiny) deviation blows up.
    """
    wide_N = _wide(x_N, mask_N)
    base_P = _extreme(wide_N.detach(), group_N, num_groups, mask_N, "amin")
    excess_N = _zero_missing(wide_N - base_P[group_N], mask_N)
    return base_P, _sum(excess_N, group_N, num_groups), excess_N


def _order(wide_N: Tensor, group_N: Tensor, num_groups: int, mask_N: Tensor | None) -> Tensor:
    """Row order by group, then value, missing rows last."""
    home_N = _home(group_N, num_groups, mask_N)
    by_value = torch.argsort(wide_N, stable=True)
    return by_value[torch.argsort(home_N[by_value], stable=True)]
