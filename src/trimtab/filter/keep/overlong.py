"""Overlong filtering: rollouts that did not end by themselves do not enter the update.

Source: DAPO, arXiv 2503.14476, section 3.4 (overlong filtering).

The reward of a cut rollout says that it was cut, not that its reasoning was wrong. "Ended by itself" is the engine's
finding (end of sequence), so a rollout ended by a limit, by a full context or by a stop part is dropped alike. Its
reward still informs the baseline of its group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.core.records import DropReason, Group, flatten
from trimtab.core.slots import Filter, Keep, StepContext


@dataclass(kw_only=True)
class Overlong(Filter):
    """Keeps rollouts that ended with an end of sequence."""

    def filter(self, groups: Sequence[Group], ctx: StepContext) -> Keep:
        ended_N = np.array([not rollout.truncated for rollout in flatten(groups)], dtype=bool)
        return Keep(ended_N, reason=DropReason.TRUNCATED)
