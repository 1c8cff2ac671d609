"""The arithmetic of the monitor: intervals, running means, severities. Pure functions, S steps."""

from __future__ import annotations

import numpy as np

from trimtab.doctor.log import Bool, Float, Values

Z = 1.96
BETA = 0.9


def wilson(k: Float, n: Float) -> tuple[Float, Float]:
    """Wilson's 95 % interval of the rate k / n (any shape); NaN where n is 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        rate = np.asarray(k, float) / n
        centre = rate + Z**2 / (2 * n)
        half = Z * np.sqrt(rate * (1 - rate) / n + Z**2 / (4 * n**2))
        scale = 1 + Z**2 / n
        low, high = (centre - half) / scale, (centre + half) / scale
    # rounding must not leave a rate of exactly 0 with a positive lower end, which a threshold of 0 would see
    return np.where(rate == 0, 0.0, low), np.where(rate == 1, 1.0, high)


def running_mean(value_S: Float) -> Float:
    """Exponential mean with beta 0.9, bias corrected; a step without a value (NaN) leaves it as it was."""
    result = np.full(len(value_S), np.nan)
    total = weight = 0.0
    for index, value in enumerate(value_S):
        if np.isfinite(value):
            total, weight = BETA * total + (1 - BETA) * value, BETA * weight + (1 - BETA)
        if weight:
            result[index] = total / weight
    return result


def severity(low: Float, high: Float, warn: float, critical: float) -> Float:
    """0 at the warning threshold and 1 at the critical one, from the end of the interval that is on the safe side.

    Where ``critical`` is below ``warn``, low values are bad. NaN stays NaN.
    """
    bound = low if critical > warn else high
    result: Float = (np.asarray(bound, float) - warn) / (critical - warn)
    return result


def effective_share(weight_N: Values) -> float:
    """Effective sample size over n, (sum w)^2 / (n sum w^2), of non-negative weights (N,); NaN when all are 0."""
    squares = float(np.square(weight_N, dtype=float).sum())
    return float(weight_N.sum(dtype=float) ** 2 / (len(weight_N) * squares)) if squares else float("nan")


def area_under_curve(score_N: Values, positive_N: Bool) -> float:
    """Chance that a positive has the higher score, ties counting half; NaN unless there are both kinds."""
    positives, negatives = int(positive_N.sum()), int((~positive_N).sum())
    if not positives or not negatives:
        return float("nan")
    _, inverse, counts = np.unique(score_N, return_inverse=True, return_counts=True)
    rank = np.cumsum(counts) - (counts - 1) / 2
    total = float(rank[inverse][positive_N].sum())
    return (total - positives * (positives + 1) / 2) / (positives * negatives)


def correlation(a_N: Values, b_N: Values) -> float:
    """Pearson's correlation; NaN when one of them is constant or there are fewer than three pairs."""
    if len(a_N) < 3:
        return float("nan")
    a, b = a_N.astype(float) - a_N.mean(dtype=float), b_N.astype(float) - b_N.mean(dtype=float)
    scale = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum() / scale) if scale > 1e-12 else float("nan")


def slope(time_S: Float, value_S: Float) -> tuple[float, float]:
    """Least-squares slope and its standard error; NaN with fewer than three points."""
    known = np.isfinite(value_S)
    x, y = time_S[known], value_S[known]
    if len(x) < 3:
        return float("nan"), float("nan")
    x = x - x.mean()
    spread = float((x * x).sum())
    if spread == 0:
        return float("nan"), float("nan")
    gradient = float((x * (y - y.mean())).sum() / spread)
    rest = y - y.mean() - gradient * x
    return gradient, float(np.sqrt((rest * rest).sum() / (len(x) - 2) / spread))
