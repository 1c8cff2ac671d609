"""Means with intervals, comparisons paired by seed, and curves: pure functions over plain numbers.

Intervals are Student t intervals of the mean at 95 %. With fewer than two values there is none: ``low`` and ``high``
are None, never equal to the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache

import numpy as np

LEVEL = 0.95
WITHIN_NOISE, ONE_SEED, NO_SEED = "within noise", "one seed: no interval", "no seed in common"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean of ``n`` values and its interval; None where it does not exist."""

    mean: float | None
    low: float | None
    high: float | None
    n: int

    def to_dict(self) -> dict[str, float | int | None]:
        return asdict(self)


def t_probability(t: float, dof: int) -> float:
    """P(\\|T\\| <= t) of Student's t with ``dof`` degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(dof))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = dof % 2
    term = cosine if odd else 1.0
    total = term if dof > 1 else 0.0
    for i in range(2 + odd, dof - 1, 2):
        term *= cosine * cosine * (i - 1) / i
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


@cache
def t_quantile(dof: int, level: float = LEVEL) -> float:
    """The t with P(\\|T\\| <= t) = ``level``, by bisection."""
    low, high = 0.0, 1.0
    while t_probability(high, dof) < level:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, dof) < level else (low, middle)
    return high


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and t interval of independent values."""
    n = len(values)
    if n == 0:
        return Estimate(None, None, None, 0)
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean, None, None, 1)
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    reach = t_quantile(n - 1) * deviation / math.sqrt(n)
    return Estimate(mean, mean - reach, mean + reach, n)


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Mean of ``values - baseline``; entry i of both has the same seed."""
    return estimate([a - b for a, b in zip(values, baseline, strict=True)])


def paired_ratio(values: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Geometric mean of ``values / baseline`` (all positive), with an interval that is symmetric in its logarithm."""
    logs = estimate([math.log(a / b) for a, b in zip(values, baseline, strict=True)])
    mean, low, high = (None if x is None else math.exp(min(x, 700.0)) for x in (logs.mean, logs.low, logs.high))
    return Estimate(mean, low, high, logs.n)


def verdict(difference: Estimate) -> str:
    """What a paired difference allows to say."""
    if difference.low is None or difference.high is None:
        return ONE_SEED if difference.n else NO_SEED
    if difference.low <= 0 <= difference.high:
        return WITHIN_NOISE
    return "higher" if difference.low > 0 else "lower"


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that one of ``k`` of ``n`` samples, drawn without replacement, is among the ``correct`` ones.

    The unbiased estimator of Chen et al., 2021 (arXiv:2107.03374, equation 1): ``1 - C(n - c, k) / C(n, k)``.
    """
    assert 0 <= correct <= n, (correct, n)
    assert 1 <= k <= n, (k, n)
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def interpolate(x: Sequence[float], y: Sequence[float], grid: Sequence[float]) -> list[float | None]:
    """The curve through the points, ``x`` ascending, at the grid; None outside of it, nothing is extrapolated."""
    if not x:
        return [None] * len(grid)
    found = np.interp(grid, x, y).tolist()
    return [value if x[0] <= at <= x[-1] else None for at, value in zip(grid, found, strict=True)]


def first_reach(x: Sequence[float], y: Sequence[float], target: float) -> float | None:
    """Where the curve through the points first reaches ``target``; None when it never does (right-censored)."""
    for i, value in enumerate(y):
        if value < target:
            continue
        if i == 0:
            return x[0]
        return x[i - 1] + (x[i] - x[i - 1]) * (target - y[i - 1]) / (value - y[i - 1])
    return None
