"""Several optimiser steps on one batch of rollouts.

Sources: PPO, arXiv 1707.06347, algorithm 1 (K epochs of minibatches); GRPO, arXiv 2402.03300, algorithm 1 (mu
iterations); GSPO, arXiv 2507.18071, section 5.1 (four minibatches a batch of rollouts).

The proximal log-probs are frozen once, before the first of the ``epochs`` x ``minibatches`` updates; from the second
update on ratios differ from 1 and the clip range acts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.part import knob
from trimtab.core.records import Group
from trimtab.core.slots import Schedule, StepContext


@dataclass(kw_only=True)
class Minibatches(Schedule):
    """Trains on each step's groups at once, in several passes and parts."""

    inert: ClassVar[dict[str, object] | None] = {"epochs": 1, "minibatches": 1}

    epochs: int = knob(1, "passes mu over the batch", ge=1)
    minibatches: int = knob(1, "updates a pass", ge=1)

    def batches(self, groups: list[Group], ctx: StepContext) -> Iterator[tuple[list[Group], int, int]]:
        yield groups, self.epochs, self.minibatches
