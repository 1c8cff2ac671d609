from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.run.statistics import (
    NO_SEED,
    ONE_SEED,
    WITHIN_NOISE,
    Estimate,
    estimate,
    first_reach,
    interpolate,
    paired_difference,
    paired_ratio,
    pass_at_k,
    t_probability,
    t_quantile,
    verdict,
)


@pytest.mark.parametrize(
    ("dof", "level", "known"),  # tables of Student's t
    [(1, 0.95, 12.7062047), (2, 0.95, 4.3026527), (3, 0.95, 3.1824463), (4, 0.95, 2.7764451), (5, 0.95, 2.5705818),
     (9, 0.95, 2.2621572), (10, 0.95, 2.2281389), (29, 0.95, 2.0452296), (30, 0.95, 2.0422725), (1000, 0.95, 1.9623391),
     (4, 0.99, 4.6040949), (7, 0.90, 1.8945786)],
)  # fmt: skip
def test_quantiles_are_those_of_the_tables(dof: int, level: float, known: float) -> None:
    assert t_quantile(dof, level) == pytest.approx(known, abs=2e-7)


@given(st.integers(1, 60), st.floats(0.01, 0.999))
def test_quantile_inverts_the_probability(dof: int, level: float) -> None:
    assert t_probability(t_quantile(dof, level), dof) == pytest.approx(level, abs=1e-9)


def test_interval_of_a_known_sample() -> None:
    found = estimate([1.0, 2.0, 3.0, 4.0, 5.0])
    reach = 2.7764451 * math.sqrt(2.5) / math.sqrt(5)
    assert found.mean == 3
    assert found.low == pytest.approx(3 - reach, abs=1e-6)
    assert found.high == pytest.approx(3 + reach, abs=1e-6)


def test_intervals_cover_the_mean_as_often_as_they_say() -> None:
    draw = random.Random(0)
    found = [estimate([draw.gauss(2, 3) for _ in range(4)]) for _ in range(4000)]
    covered = sum((e.low or 0) <= 2 <= (e.high or 0) for e in found) / len(found)
    assert covered == pytest.approx(0.95, abs=0.012)


def test_one_value_has_no_interval_and_none_has_no_mean() -> None:
    assert estimate([0.5]) == Estimate(0.5, None, None, 1)
    assert estimate([]) == Estimate(None, None, None, 0)
    assert paired_ratio([], []) == Estimate(None, None, None, 0)
    assert paired_ratio([2.0], [4.0]) == Estimate(pytest.approx(0.5), None, None, 1)


def test_pairing_takes_out_what_seeds_share() -> None:
    baseline = [0.1, 0.5, 0.9]
    found = paired_difference([0.2, 0.61, 0.99], baseline)
    assert verdict(found) == "higher"
    assert verdict(paired_difference(baseline, [0.2, 0.61, 0.99])) == "lower"
    with pytest.raises(ValueError):
        paired_difference([1.0], [1.0, 2.0])


def test_verdicts() -> None:
    assert verdict(estimate([-0.1, 0.2, 0.05])) == WITHIN_NOISE
    assert verdict(estimate([0.0, 0.0])) == WITHIN_NOISE
    assert verdict(estimate([0.3])) == ONE_SEED
    assert verdict(estimate([])) == NO_SEED


def test_ratio_is_geometric_and_its_inverse_is_the_ratio_the_other_way() -> None:
    a, b = [1.0, 2.0, 8.0], [2.0, 2.0, 2.0]
    there, back = paired_ratio(a, b), paired_ratio(b, a)
    assert there.mean == pytest.approx((0.5 * 1 * 4) ** (1 / 3))
    assert there.low == pytest.approx(1 / (back.high or 0))
    assert there.high == pytest.approx(1 / (back.low or 0))
    huge = paired_ratio([1e-9, 1e9], [1.0, 1.0])
    assert huge.high is not None
    assert math.isfinite(huge.high)


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(n: int, data: st.DataObject) -> None:
    correct, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations([i < correct for i in range(n)], k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_curves() -> None:
    x, y = [0.0, 10.0, 20.0], [0.2, 0.4, 0.3]
    assert interpolate(x, y, [-1, 0, 5, 20, 21]) == [None, 0.2, pytest.approx(0.3), 0.3, None]
    assert interpolate([], [], [1]) == [None]
    assert first_reach(x, y, 0.3) == pytest.approx(5)
    assert first_reach(x, y, 0.1) == 0
    assert first_reach(x, y, 0.41) is None
    assert first_reach([], [], 0.1) is None
