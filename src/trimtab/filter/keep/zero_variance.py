"""Drops groups whose rollouts are all equally correct: DAPO's group filter.

Source: DAPO, arXiv 2503.14476, section 3.2 and equation 11 (0 < number of correct answers < G).

A constant group has advantage 0 under every group baseline, so that it takes room in the batch and in the divisors
and gives no gradient. Correctness decides, not the shaped reward; groups with fewer than two scored rollouts count as
constant. Rollouts whose verifier failed are ignored in the decision and kept or dropped with their group. Dropping
alone shrinks the batch; with ``dynamic-sampling`` in the slot ``select`` it is filled up again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.core.part import Needs
from trimtab.core.records import DropReason, Group
from trimtab.core.slots import Filter, Keep, StepContext


def informative(groups: Sequence[Group]) -> np.ndarray:
    """True for the rows (N,) of groups that are not constant."""
    return np.array([not group.constant() for group in groups for _ in group.rollouts], dtype=bool)


@dataclass(kw_only=True)
class ZeroVariance(Filter):
    """Keeps a group if its rollouts differ in correctness."""

    def needs(self) -> Needs:
        return Needs(verdicts=True, min_group=2)

    def filter(self, groups: Sequence[Group], ctx: StepContext) -> Keep:
        return Keep(informative(groups), reason=DropReason.CONSTANT_GROUP)
