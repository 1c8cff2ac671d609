"""The arithmetic, against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from trimtab.doctor import statistics as st


@pytest.mark.parametrize(
    ("k", "n", "low", "severity"),
    [(20, 32, 0.452541, 0.508470), (40, 64, 0.502502, 0.675005), (14, 32, 0.281651, -0.061163)],
)
def test_wilson_and_severity(k: int, n: int, low: float, severity: float) -> None:
    found = st.wilson(np.array([k], float), np.array([n], float))
    assert found[0][0] == pytest.approx(low, abs=1e-6)
    assert st.severity(*found, 0.30, 0.60)[0] == pytest.approx(severity, abs=1e-5)


def test_low_values_can_be_the_bad_ones() -> None:
    assert st.severity(np.array([0.0]), np.array([0.2]), 0.30, 0.10)[0] == pytest.approx(0.5)


def test_a_rate_of_nought_has_a_lower_end_of_nought() -> None:
    low, high = st.wilson(np.array([0.0, 5.0]), np.array([7.0, 5.0]))
    assert low[0] == 0
    assert high[1] == 1


def test_no_observations_are_no_rate() -> None:
    assert np.isnan(st.wilson(np.zeros(1), np.zeros(1))).all()


def test_running_mean_is_corrected_and_passes_over_gaps() -> None:
    found = st.running_mean(np.array([np.nan, 2.0, np.nan, 4.0]))
    assert np.isnan(found[0])
    assert found[1:] == pytest.approx([2, 2, (0.09 * 2 + 0.1 * 4) / 0.19])


def test_effective_share() -> None:
    assert st.effective_share(np.array([1, 1, 1, 5], np.float32)) == pytest.approx(0.571429, abs=1e-6)
    assert st.effective_share(np.ones(7, np.float32)) == 1
    assert np.isnan(st.effective_share(np.zeros(3, np.float32)))


def test_area_under_curve_counts_ties_half() -> None:
    score = np.array([1, 2, 2, 3], np.float32)
    assert st.area_under_curve(score, np.array([False, False, True, True])) == pytest.approx(3.5 / 4)
    assert np.isnan(st.area_under_curve(score, np.ones(4, bool)))


def test_slope_with_its_error() -> None:
    gradient, error = st.slope(np.arange(4.0), np.array([0.0, 1.0, 2.0, 4.0]))
    assert gradient == pytest.approx(1.3)
    assert error == pytest.approx(np.sqrt(0.3 / 2 / 5))
    assert np.isnan(st.slope(np.arange(2.0), np.zeros(2))).all()


def test_correlation_of_a_constant_is_unknown() -> None:
    assert np.isnan(st.correlation(np.ones(5, np.float32), np.arange(5, dtype=np.float32)))
    assert st.correlation(np.arange(5, dtype=np.float32), -np.arange(5, dtype=np.float32)) == pytest.approx(-1)
