"""What groups came out as, in numbers, one a group: shared by everything that decides on outcomes.

An outcome is correctness, right or graded, as the verifier found it; a missing one is in no mean and in no count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trimtab.core.records import Group, IntArray, group_ids

Array = np.ndarray[Any, Any]


def moments(x_N: Array, group_N: IntArray, num: int) -> tuple[Array, Array, Array]:
    """Count, mean and sum of squared deviations of the present (not NaN) values of each group, three times (P,)."""
    present = ~np.isnan(x_N)
    x, group = x_N[present], group_N[present]
    count = np.bincount(group, minlength=num)
    mean = np.bincount(group, x, num) / np.maximum(count, 1)
    return count, mean, np.bincount(group, (x - mean[group]) ** 2, num)


def correctness(groups: Sequence[Group]) -> Array:
    """Correctness of every row of ``flatten(groups)``, float64 (N,); NaN where the verifier did not answer."""
    return np.array([r.verdict.correct for group in groups for r in group.rollouts], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Correctness of P groups; mean and variance are 0 where nothing was scored."""

    size_P: IntArray  # rollouts
    scored_P: IntArray  # of these, with a verdict
    mean_P: Array
    var_P: Array  # divisor n; exactly 0 where all outcomes are equal
    best_P: Array  # -inf where nothing was scored
    worst_P: Array  # inf where nothing was scored

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Outcomes:
        """Outcomes of all rollouts the groups have so far."""
        correct_N, group_N = correctness(groups), group_ids(groups)
        scored_P, mean_P, squares_P = moments(correct_N, group_N, len(groups))
        best_P, worst_P = np.full(len(groups), -np.inf), np.full(len(groups), np.inf)
        np.fmax.at(best_P, group_N, correct_N)
        np.fmin.at(worst_P, group_N, correct_N)
        var_P = np.where(best_P > worst_P, squares_P / np.maximum(scored_P, 1), 0.0)
        return cls(np.bincount(group_N, minlength=len(groups)), scored_P, mean_P, var_P, best_P, worst_P)

    @property
    def constant_P(self) -> Array:
        """As :meth:`trimtab.core.records.Group.constant`, bool (P,)."""
        return (self.best_P <= self.worst_P) | (self.scored_P < 2)
