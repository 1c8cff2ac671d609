from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trimtab.core import segments
from trimtab.core.segments import (
    masked_mean,
    segment_count,
    segment_loo_mean,
    segment_mad,
    segment_max,
    segment_mean,
    segment_median,
    segment_min,
    segment_rank,
    segment_std,
    segment_sum,
    segment_var,
)

PER_GROUP = {
    "sum": (segment_sum, sum),
    "mean": (segment_mean, statistics.fmean),
    "median": (segment_median, statistics.median),
    "mad": (segment_mad, lambda v: statistics.median(abs(x - statistics.median(v)) for x in v)),
    "lower median": (partial(segment_median, lower=True), statistics.median_low),
    "lower mad": (
        partial(segment_mad, lower=True),
        lambda v: statistics.median_low([abs(x - statistics.median_low(v)) for x in v]),
    ),
    "min": (segment_min, min),
    "max": (segment_max, max),
    "std": (segment_std, lambda v: statistics.stdev(v) if len(v) > 1 else 0.0),
}
Reference = Callable[[list[float]], float]


@st.composite
def rows(draw: st.DrawFn) -> tuple[Tensor, Tensor, int, Tensor]:
    num_groups = draw(st.integers(1, 5))
    size = draw(st.integers(0, 24))
    values = draw(st.lists(st.integers(-4, 4).map(lambda v: v / 4), min_size=size, max_size=size))
    group = draw(st.lists(st.integers(0, num_groups - 1), min_size=size, max_size=size))
    mask = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    x_N = torch.tensor(values, dtype=torch.float64)
    x_N[~torch.tensor(mask, dtype=torch.bool)] = math.nan  # whatever lies in a missing row must not be read
    return x_N, torch.tensor(group, dtype=torch.int64), num_groups, torch.tensor(mask, dtype=torch.bool)


def members(x_N: Tensor, group_N: Tensor, mask_N: Tensor, group: int) -> list[float]:
    return x_N[(group_N == group) & mask_N].tolist()


@pytest.mark.parametrize("name", PER_GROUP)
@settings(max_examples=60, deadline=None)
@given(data=rows())
def test_statistics_equal_a_plain_loop(name: str, data: tuple[Tensor, Tensor, int, Tensor]) -> None:
    function, reference = PER_GROUP[name]
    x_N, group_N, num_groups, mask_N = data
    result = function(x_N, group_N, num_groups, mask_N).tolist()
    for group in range(num_groups):
        values = members(x_N, group_N, mask_N, group)
        assert result[group] == pytest.approx(reference(values) if values else 0.0, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(data=rows())
def test_ranks_and_leave_one_out_equal_a_plain_loop(data: tuple[Tensor, Tensor, int, Tensor]) -> None:
    x_N, group_N, num_groups, mask_N = data
    rank = segment_rank(x_N, group_N, num_groups, mask_N).tolist()
    loo = segment_loo_mean(x_N, group_N, num_groups, mask_N).tolist()
    for row in range(len(x_N)):
        values = members(x_N, group_N, mask_N, int(group_N[row]))
        own = float(x_N[row])
        if bool(mask_N[row]):
            below, equal = sum(v < own for v in values), sum(v == own for v in values)
            assert rank[row] == below + (equal + 1) / 2
            values.remove(own)
        else:
            assert rank[row] == 0
        assert loo[row] == pytest.approx(statistics.fmean(values) if values else 0.0, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(data=rows(), ddof=st.integers(0, 2))
def test_variance_with_any_ddof(data: tuple[Tensor, Tensor, int, Tensor], ddof: int) -> None:
    x_N, group_N, num_groups, mask_N = data
    result = segment_var(x_N, group_N, num_groups, mask_N, ddof).tolist()
    for group in range(num_groups):
        values = members(x_N, group_N, mask_N, group)
        defined = len(values) > ddof
        expected = sum((v - statistics.fmean(values)) ** 2 for v in values) / (len(values) - ddof) if defined else 0.0
        assert result[group] == pytest.approx(expected, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(data=rows(), seed=st.integers(0, 1000))
def test_row_order_does_not_matter(data: tuple[Tensor, Tensor, int, Tensor], seed: int) -> None:
    x_N, group_N, num_groups, mask_N = data
    order = torch.randperm(len(x_N), generator=torch.Generator().manual_seed(seed))
    for name in ("mean", "std", "median", "mad"):
        function = getattr(segments, f"segment_{name}")
        shuffled = function(x_N[order], group_N[order], num_groups, mask_N[order])
        torch.testing.assert_close(shuffled, function(x_N, group_N, num_groups, mask_N))
    rank_N = segment_rank(x_N, group_N, num_groups, mask_N)
    torch.testing.assert_close(segment_rank(x_N[order], group_N[order], num_groups, mask_N[order]), rank_N[order])


def test_a_constant_group_is_exact_in_float32() -> None:
    x_N = torch.full((7,), 0.1)
    group_N = torch.zeros(7, dtype=torch.int64)
    assert torch.equal(segment_mean(x_N, group_N, 1), x_N[:1])
    assert torch.equal(segment_loo_mean(x_N, group_N, 1), x_N)
    assert segment_std(x_N, group_N, 1).item() == 0.0
    assert segment_mad(x_N, group_N, 1).item() == 0.0


@pytest.mark.parametrize(("ddof", "expected"), [(1, 0.4629100), (0, 0.4330127)])
def test_group_of_eight_with_two_right(ddof: int, expected: float) -> None:
    reward_N = torch.tensor([1.0, 0, 0, 0, 1, 0, 0, 0])
    group_N = torch.zeros(8, dtype=torch.int64)
    assert segment_std(reward_N, group_N, 1, ddof=ddof).item() == pytest.approx(expected, abs=1e-7)
    advantage_N = reward_N - segment_loo_mean(reward_N, group_N, 1)  # RLOO
    assert advantage_N[:2].tolist() == pytest.approx([0.8571429, -0.2857143])


def test_a_single_row_and_an_empty_group() -> None:
    x_N, group_N = torch.tensor([3.0]), torch.tensor([1])
    assert segment_count(group_N, 2).tolist() == [0, 1]
    assert segment_mean(x_N, group_N, 2).tolist() == [0, 3]
    assert segment_std(x_N, group_N, 2).tolist() == [0, 0]
    assert segment_loo_mean(x_N, group_N, 2).tolist() == [0]
    assert segment_rank(x_N, group_N, 2).tolist() == [1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_is_kept_and_integers_become_float(dtype: torch.dtype) -> None:
    group_N = torch.tensor([0, 0, 1])
    per_group = (segment_sum, segment_mean, segment_std, segment_median, segment_mad, segment_min, segment_max)
    for function in (*per_group, segment_rank, segment_loo_mean):
        assert function(torch.tensor([1, 2, 3], dtype=dtype), group_N, 2).dtype == dtype
        assert function(torch.tensor([1, 2, 3]), group_N, 2).dtype == torch.float32


def test_low_precision_sums_do_not_saturate() -> None:
    x_N = torch.ones(4096, dtype=torch.bfloat16)
    assert segment_mean(x_N, torch.zeros(4096, dtype=torch.int64), 1).item() == 1.0
    assert segment_sum(x_N, torch.zeros(4096, dtype=torch.int64), 1).item() == 4096.0


def test_gradients_reach_present_rows_only() -> None:
    x_N = torch.tensor([1.0, 3.0, math.nan, 5.0], requires_grad=True)
    mask_N = torch.tensor([True, True, False, True])
    group_N = torch.tensor([0, 0, 0, 1])
    for function in (segment_mean, segment_sum, segment_std, segment_loo_mean):
        (gradient_N,) = torch.autograd.grad(function(x_N, group_N, 2, mask_N)[0], x_N)
        assert torch.isfinite(gradient_N).all()
        assert gradient_N[2:].tolist() == [0, 0]
        assert gradient_N[1] != 0
    (gradient_N,) = torch.autograd.grad(segment_mean(x_N, group_N, 2, mask_N)[0], x_N)
    assert gradient_N.tolist() == [0.5, 0.5, 0, 0]


def test_standard_deviation_of_equal_values_has_gradient_zero() -> None:
    x_N = torch.ones(3, requires_grad=True)
    (gradient_N,) = torch.autograd.grad(segment_std(x_N, torch.zeros(3, dtype=torch.int64), 1).sum(), x_N)
    assert gradient_N.tolist() == [0, 0, 0]


def test_masked_mean_of_nothing_is_exactly_zero_and_attached() -> None:
    x = torch.tensor([1.0, math.nan], requires_grad=True)
    empty = masked_mean(x, torch.zeros(2, dtype=torch.bool))
    assert empty.item() == 0.0
    empty.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 0]
    assert masked_mean(x, torch.tensor([True, False])).item() == 1.0
    no_tokens = torch.zeros(0, requires_grad=True)
    assert masked_mean(no_tokens, torch.zeros(0, dtype=torch.bool)).item() == 0.0
