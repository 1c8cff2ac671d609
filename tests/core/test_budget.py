"""Allocation rules: exact totals, bounds, monotonicity, no dependence on order, and agreement with a plain loop."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trimtab.core import budget
from trimtab.core.budget import (
    Allocation,
    Reason,
    bernoulli_std,
    bisect_multiplier,
    even,
    greedy,
    largest_remainder,
    square_root,
    water_fill,
)
from trimtab.core.errors import ConfigError
from trimtab.core.rng import generator

Array = np.ndarray[Any, Any]


def rng(*parts: object) -> np.random.Generator:
    return generator("test", *parts)


def geometric_gain(weight_P: Array) -> Callable[[Array, Array], Array]:
    """Gains weight * 0.8^k: concave, with ties between prompts of equal weight."""
    return lambda index, number: weight_P[index] * 0.8**number


def multiplier_counts(weight_P: Array) -> Callable[[float], Array]:
    """Counts round(weight / sqrt(x))."""
    return lambda x: np.rint(weight_P / np.sqrt(x))


RULES: dict[str, Callable[..., Allocation]] = {
    "largest_remainder": largest_remainder,
    "square_root": lambda weight_P, total, **k: square_root(weight_P, total, **k),
    "water_fill": lambda weight_P, total, **k: water_fill(-weight_P, total, **k),
    "greedy": lambda weight_P, total, **k: greedy(geometric_gain(weight_P), total, size=len(weight_P), **k),
    "bisect": lambda weight_P, total, **k: bisect_multiplier(multiplier_counts(weight_P), total, **k),
}
ALL = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


@st.composite
def requests(draw: st.DrawFn, *, costs: bool = False) -> dict[str, Any]:
    """Weights, a total, floors and caps of up to 12 prompts; weights include 0, repeats and very different sizes."""
    size = draw(st.integers(1, 12))
    numbers = st.one_of(st.integers(0, 3).map(float), st.floats(0, 1e6, allow_subnormal=True))
    weight_P = np.array(draw(st.lists(numbers, min_size=size, max_size=size)))
    floor_P = np.array(draw(st.lists(st.integers(0, 4), min_size=size, max_size=size)))
    room_P = np.array(draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)))
    request: dict[str, Any] = {"weight_P": weight_P, "floor": floor_P, "cap": floor_P + room_P}
    if costs:
        request["cost"] = np.array(draw(st.lists(st.integers(1, 40), min_size=size, max_size=size)), dtype=float)
    request["total"] = draw(st.integers(0, 600 if costs else 120))
    return request


def allocate(rule: Callable[..., Allocation], request: dict[str, Any], seed: int = 0) -> Allocation:
    return rule(**request, rng=rng(seed))


# ---------------------------------------------------------------- conservation and bounds


@ALL
@given(request=requests())
@settings(max_examples=30, deadline=None)
def test_rollouts_are_spent_to_the_last_one_within_floors_and_caps(
    rule: Callable[..., Allocation], request: dict[str, Any]
) -> None:
    found = allocate(rule, request)
    total, floor_P, cap_P = request["total"], request["floor"], request["cap"]
    assert found.counts.dtype == np.int64
    assert found.spent == found.counts.sum()
    assert found.spent + found.unspent == total
    if floor_P.sum() > total:
        assert found.reason == Reason.FLOORS
        assert found.spent == total
        assert (found.counts <= floor_P).all()
        return
    assert (floor_P <= found.counts).all()
    assert (found.counts <= cap_P).all()
    if found.reason == Reason.RANGE:  # a weight of (nearly) 0 asks for nothing at any multiplier
        assert request["weight_P"].min() < 1e-100
    elif cap_P.sum() <= total:
        assert (found.counts == cap_P).all()
        assert found.reason == (Reason.CAPS if cap_P.sum() < total else Reason.NONE)
    else:
        assert found.spent == total
        assert found.reason == Reason.NONE


@ALL
@given(request=requests(costs=True))
@settings(max_examples=30, deadline=None)
def test_tokens_are_never_exceeded_and_the_rest_buys_nothing(
    rule: Callable[..., Allocation], request: dict[str, Any]
) -> None:
    found = allocate(rule, request)
    total, cost_P = request["total"], request["cost"]
    assert found.spent == cost_P @ found.counts
    assert found.spent <= total
    assert found.spent + found.unspent == total
    cap_P = request["floor"] if found.reason == Reason.FLOORS else request["cap"]
    assert (found.counts <= cap_P).all()
    if found.reason == Reason.FLOORS:
        assert cost_P @ request["floor"] > total
    else:
        assert (request["floor"] <= found.counts).all()
    open_P = found.counts < cap_P
    if open_P.any() and found.reason != Reason.RANGE:
        assert found.unspent < cost_P[open_P].min()
    if found.reason in (Reason.REST, Reason.NONE):
        assert (found.reason == Reason.REST) == (found.unspent > 0)


@ALL
@given(request=requests(costs=True))
@settings(max_examples=30, deadline=None)
def test_same_seed_same_result_and_inputs_are_left_alone(
    rule: Callable[..., Allocation], request: dict[str, Any]
) -> None:
    before = {name: np.copy(value) for name, value in request.items()}
    first, second = allocate(rule, request), allocate(rule, request)
    assert (first.counts == second.counts).all()
    assert all(np.array_equal(before[name], request[name]) for name in request)


@ALL
@given(request=requests(), seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_the_order_of_the_prompts_does_not_matter(
    rule: Callable[..., Allocation], request: dict[str, Any], seed: int
) -> None:
    size = len(request["weight_P"])
    request["weight_P"] = np.sqrt(np.arange(2.0, 2 + size)) * 1.2345678  # no two shares, levels or gains are equal
    request["weight_P"] = request["weight_P"][np.random.default_rng(seed).permutation(size)]
    shuffle = np.random.default_rng(seed + 1).permutation(size)
    moved = {name: value if name == "total" else value[shuffle] for name, value in request.items()}
    plain = allocate(rule, request)
    if plain.reason != Reason.FLOORS:  # floors that give way are levels, hence ties
        assert (allocate(rule, moved).counts == plain.counts[shuffle]).all()


# ---------------------------------------------------------------- monotonicity


@pytest.mark.parametrize("name", ["largest_remainder", "water_fill", "greedy"])
@given(request=requests(), which=st.integers(0, 11), more=st.floats(0.01, 100))
@settings(max_examples=50, deadline=None)
def test_a_larger_claim_never_gets_less(name: str, request: dict[str, Any], which: int, more: float) -> None:
    before = allocate(RULES[name], request)
    which %= len(request["weight_P"])
    request["weight_P"] = request["weight_P"].copy()
    request["weight_P"][which] += more
    assert allocate(RULES[name], request).counts[which] >= before.counts[which]


@pytest.mark.parametrize("name", ["water_fill", "greedy"])
@given(request=requests())
@settings(max_examples=50, deadline=None)
def test_a_larger_total_takes_from_nobody(name: str, request: dict[str, Any]) -> None:
    before = allocate(RULES[name], request)
    request["total"] += 1
    after = allocate(RULES[name], request)
    if after.reason != Reason.FLOORS and before.reason != Reason.FLOORS:
        assert (after.counts >= before.counts).all()


def test_largest_remainder_has_the_alabama_paradox_and_no_more_than_one_rollout_of_it() -> None:
    populations = np.array([15.0, 15.0, 9.0, 5.0, 5.0, 2.0])
    at_25 = largest_remainder(populations, 25, rng=rng())
    at_26 = largest_remainder(populations, 26, rng=rng())
    assert at_25.counts.tolist() == [7, 7, 4, 3, 3, 1]
    assert at_26.counts.tolist() == [8, 8, 5, 2, 2, 1]


# ---------------------------------------------------------------- values


def test_largest_remainder_keeps_quota() -> None:
    weight_P = np.array([5.0, 3.0, 2.0, 1.0])
    found = largest_remainder(weight_P, 10, rng=rng())
    share_P = 10 * weight_P / weight_P.sum()
    assert (np.floor(share_P) <= found.counts).all()
    assert (found.counts <= np.ceil(share_P)).all()
    assert found.counts.tolist() == [4, 3, 2, 1]  # shares 4.545, 2.727, 1.818, .909


def test_largest_remainder_rescales_what_floors_and_caps_leave() -> None:
    found = largest_remainder(np.array([8.0, 4.0, 2.0, 1.0]), 20, floor=2, cap=6, rng=rng())
    assert found.counts.tolist() == [6, 6, 5, 3]  # capped, capped, then 2 : 1 of the other 8 (5.33, 2.67)


def test_weights_zero_get_their_floor_until_the_others_are_capped() -> None:
    weight_P = np.array([1.0, 0.0, 0.0])
    assert largest_remainder(weight_P, 6, floor=1, cap=5, rng=rng()).counts.tolist() == [4, 1, 1]
    assert largest_remainder(weight_P, 11, floor=1, cap=5, rng=rng()).counts.tolist() == [5, 3, 3]
    assert largest_remainder(np.zeros(3), 9, rng=rng()).counts.tolist() == [3, 3, 3]


def test_weights_of_extreme_scale_do_not_overflow() -> None:
    for weight_P in (np.array([5e-324, 5e-324]), np.array([1e308, 1e308]), np.array([1e-150, 1e-150])):
        assert largest_remainder(weight_P, 8, rng=rng()).counts.tolist() == [4, 4]
    assert largest_remainder(np.array([1e308, 1e-300]), 8, rng=rng()).counts.tolist() == [8, 0]


def test_square_root_of_bernoulli_deviations() -> None:
    std_P = bernoulli_std(np.array([0.5, 0.1, 0.9, 0.0, 1.0]))
    np.testing.assert_allclose(std_P, [0.5, 0.3, 0.3, 0.0, 0.0])
    assert square_root(std_P, 22, rng=rng()).counts.tolist() == [10, 6, 6, 0, 0]


def test_square_root_minimises_the_variance_under_costs() -> None:
    std_P, cost_P = np.array([2.0, 1.0, 3.0]), np.array([100.0, 25.0, 400.0])
    found = square_root(std_P, 100_000, cost=cost_P, rng=rng())
    variance = (std_P**2 / found.counts).sum()
    best_P = std_P / np.sqrt(cost_P) * 100_000 / (std_P * np.sqrt(cost_P)).sum()
    assert variance == pytest.approx((std_P**2 / best_P).sum(), rel=1e-3)


def test_water_fill_evens_levels_out() -> None:
    assert water_fill(np.array([0.0, 3.0, 5.0, 5.0]), 7, rng=rng()).counts.tolist() == [5, 2, 0, 0]
    assert water_fill(np.array([0.0, 3.0, 5.0]), 4, floor=1, rng=rng()).counts.tolist() == [2, 1, 1]
    assert water_fill(np.zeros(3), 9, cap=np.array([1, 2, 20]), rng=rng()).counts.tolist() == [1, 2, 6]


def test_duet_worked_example_by_bisection() -> None:
    """Surrogates, lengths, total and lambda of the published rule; its own trim step is not part of this."""
    s_P, length_P = np.array([0.8, 1.2, 0.5, 1.5]), np.array([300.0, 400.0, 250.0, 600.0])

    def count_of(x: float) -> Array:
        return np.clip(np.rint(s_P / np.sqrt(x * length_P)), 1, 32)

    assert count_of(1.747e-4).tolist() == [3, 5, 2, 5]
    found = bisect_multiplier(count_of, 6200, floor=1, cap=32, cost=length_P, rng=rng())
    assert found.spent <= 6200
    assert found.unspent < length_P.min()
    doubled = bisect_multiplier(lambda x: count_of(x / 4), 6200, floor=1, cap=32, cost=length_P, rng=rng())
    assert doubled.counts.tolist() == found.counts.tolist()


def test_bisection_is_exact_where_many_prompts_change_at_once() -> None:
    def count_of(x: float) -> Array:
        return np.full(10, np.floor(8 / x))

    found = bisect_multiplier(count_of, 73, rng=rng())
    assert sorted(found.counts.tolist()) == [7] * 7 + [8] * 3
    assert found.unspent == 0


def test_bisection_reports_a_multiplier_out_of_range() -> None:
    found = bisect_multiplier(lambda x: np.full(3, 2), 10, rng=rng())
    assert found.counts.tolist() == [2, 2, 2]
    assert (found.unspent, found.reason) == (4, Reason.RANGE)
    greedy_for_more = bisect_multiplier(lambda x: np.full(3, 9), 10, floor=1, rng=rng())
    assert (greedy_for_more.counts.sum(), greedy_for_more.reason) == (10, Reason.NONE)
    assert greedy_for_more.counts.min() >= 1


def test_greedy_of_logarithmic_gains_equals_brute_force() -> None:
    weight_P = np.array([3.0, 2.0, 1.0])
    gain = weight_P[:, None] * np.diff(np.log1p(np.arange(8)))
    found = greedy(gain, 7, floor=1, rng=rng())
    value = {
        (a, b, 7 - a - b): weight_P @ np.log1p([a, b, 7 - a - b]) for a in range(1, 6) for b in range(1, 6) if a + b < 7
    }
    assert tuple(found.counts.tolist()) == max(value, key=lambda n: value[n])


# ---------------------------------------------------------------- greedy against the plain heap


def heap_greedy(
    gain: Array, total: float, floor_P: Array, cap_P: Array, cost_P: Array, generator_: np.random.Generator
) -> Array:
    """One rollout at a time to the largest gain per cost that still fits."""
    tie_P, counts_P = generator_.permutation(len(gain)), floor_P.copy()
    left = total - cost_P @ counts_P
    heap = [(-gain[i, n] / cost_P[i], n, tie_P[i], i) for i, n in enumerate(counts_P) if n < cap_P[i]]
    heapq.heapify(heap)
    while heap:
        _, n, tie, i = heapq.heappop(heap)
        if cost_P[i] > left:
            continue
        left -= cost_P[i]
        counts_P[i] += 1
        if n + 1 < cap_P[i]:
            heapq.heappush(heap, (-gain[i, n + 1] / cost_P[i], n + 1, tie, i))
    return counts_P


@given(
    seed=st.integers(0, 10**6),
    levels=st.integers(1, 6),
    costs=st.sampled_from([1, 3, 50]),
    share=st.floats(0, 1.1),
    sample=st.sampled_from([1, 2, 8, 10**6]),
)
@example(seed=2819, levels=1, costs=50, share=0.3077488981219589, sample=1)
@settings(max_examples=150, deadline=None)
def test_greedy_equals_the_heap(seed: int, levels: int, costs: int, share: float, sample: int) -> None:
    draw = np.random.default_rng(seed)
    size, width = draw.integers(1, 60), draw.integers(1, 12)
    gain = -np.sort(-draw.integers(-1, levels, (size, width)).astype(float), axis=1)  # few values: many ties
    cost_P = draw.integers(1, costs + 1, size).astype(float)
    floor_P = draw.integers(0, 3, size).clip(max=width)
    cap_P = np.minimum(floor_P + draw.integers(0, width + 1, size), width)
    low = int(cost_P @ floor_P)
    total = low + int(share * (cost_P @ cap_P - low))
    expected = heap_greedy(gain, total, floor_P, cap_P, cost_P, rng(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "_SAMPLE", sample)
        found = greedy(gain, total, floor=floor_P, cap=cap_P, cost=None if costs == 1 else cost_P, rng=rng(seed))
    assert found.counts.tolist() == expected.tolist()


def test_greedy_refuses_gains_that_rise_or_are_not_numbers() -> None:
    with pytest.raises(ConfigError, match="do not rise"):
        greedy(np.array([[1.0, 2.0]]), 2, rng=rng())
    with pytest.raises(ConfigError, match="do not rise"):
        greedy(lambda index, number: number + 1.0, 4, size=2, rng=rng())
    with pytest.raises(ConfigError, match="finite"):
        greedy(np.array([[1.0, np.nan]]), 2, rng=rng())


# ---------------------------------------------------------------- ties, bounds, bad requests


@ALL
def test_ties_are_settled_by_the_seed_and_fairly(rule: Callable[..., Allocation]) -> None:
    got = sum(rule(weight_P=np.full(8, 2.0), total=4, rng=rng("ties", seed)).counts for seed in range(300))
    assert got.sum() == 1200
    assert (abs(got - 150) < 60).all()  # 60 is about 5 standard deviations


@ALL
def test_no_prompts(rule: Callable[..., Allocation]) -> None:
    found = rule(weight_P=np.zeros(0), total=5, rng=rng())
    assert (len(found.counts), found.spent, found.unspent, found.reason) == (0, 0, 5, Reason.EMPTY)


@ALL
def test_floors_that_cost_too_much_give_way_evenly(rule: Callable[..., Allocation]) -> None:
    found = rule(weight_P=np.array([9.0, 1.0, 1.0]), total=5, floor=np.array([4, 4, 1]), rng=rng())
    assert found.reason == Reason.FLOORS
    assert sorted(found.counts[:2].tolist()) == [2, 2]
    assert found.counts[2] == 1


@ALL
def test_a_budget_below_every_cost_buys_nothing(rule: Callable[..., Allocation]) -> None:
    found = rule(weight_P=np.array([1.0, 2.0]), total=9, cost=np.array([10.0, 20.0]), rng=rng())
    assert (found.counts.tolist(), found.unspent, found.reason) == ([0, 0], 9, Reason.REST)


@ALL
def test_fractional_costs_stay_within_the_total(rule: Callable[..., Allocation]) -> None:
    draw = np.random.default_rng(3)
    cost_P = draw.gamma(2, 50.3, 400)
    found = rule(weight_P=draw.random(400) + 0.1, total=123_456.789, cost=cost_P, rng=rng())
    assert found.spent <= 123_456.789 * (1 + 1e-12)
    assert found.unspent < cost_P.min()


@pytest.mark.parametrize(
    ("bad", "key"),
    [
        ({"total": -1}, "total"),
        ({"total": 2.5}, "total"),
        ({"total": float("inf")}, "total"),
        ({"floor": 3, "cap": 2}, "floor"),
        ({"floor": -1}, "floor"),
        ({"cap": 2.5}, "cap"),
        ({"cap": np.array([1, 2])}, "cap"),
        ({"cost": np.array([1.0, 0.0, 1.0])}, "cost"),
        ({"cost": np.array([1.0, np.nan, 1.0])}, "cost"),
        ({"weight_P": np.array([1.0, np.nan, 1.0])}, "weight"),
        ({"weight_P": np.array([1.0, -1.0, 1.0])}, "weight"),
    ],
)
def test_impossible_requests_name_what_is_wrong(bad: dict[str, Any], key: str) -> None:
    request = {"weight_P": np.ones(3), "total": 6, "rng": rng()} | bad
    with pytest.raises(ConfigError, match=f"^{key}: "):
        largest_remainder(**request)


# ---------------------------------------------------------------- size


@pytest.fixture(scope="module")
def million() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    cost_P = draw.integers(20, 2000, 1_000_000).astype(float)
    claims = {"weight_P": draw.gamma(1, 1, len(cost_P)), "floor": 1, "cap": 32}
    return claims | {"cost": cost_P, "total": int(8 * cost_P.sum())}


@ALL
def test_a_million_prompts(rule: Callable[..., Allocation], million: dict[str, Any]) -> None:
    start = time.process_time()
    found = allocate(rule, million)
    assert time.process_time() - start < 4  # about 1 s on an idle core
    assert found.unspent < 20
    assert found.counts.min() >= 1
    assert found.counts.max() <= 32


@given(st.lists(st.integers(0, 2**63), unique=True, max_size=30), st.integers(0, 500), st.randoms())
def test_even_counts_differ_by_at_most_one_and_follow_the_tie_numbers(ties: list[int], total: int, random: Any) -> None:
    counts_P = even(total, np.array(ties, dtype=np.uint64))
    if not ties:
        assert len(counts_P) == 0
        return
    assert counts_P.sum() == total
    assert counts_P.max() - counts_P.min() <= 1
    by_tie = dict(zip(ties, counts_P.tolist(), strict=True))
    assert sorted(by_tie.values(), reverse=True) == [by_tie[tie] for tie in sorted(ties)]
    random.shuffle(ties)
    assert even(total, np.array(ties, dtype=np.uint64)).tolist() == [by_tie[tie] for tie in ties]
