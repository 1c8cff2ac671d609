"""The log by step, by group and by window: what the indicators are computed from.

Rollouts whose evaluator failed are left out of every group statistic. S steps in order, P groups, N rollouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trimtab.doctor.log import Bool, Float, Int, Key, Log, Values

WINDOW_GROUPS = 64
REFERENCE_STEPS = 20
EPSILON = 1e-6


@dataclass(frozen=True)
class Groups:
    """Numbers per group (P,), groups in order of their step; only rollouts whose evaluator answered count."""

    step_P: Int  # index of the step
    prompt_P: Key
    size_P: Int
    low_P: Values
    high_P: Values
    mean_P: Values


class View:
    """A log with its steps, groups and windows worked out once."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.steps, self.step_N = np.unique(log.step_N, return_inverse=True)
        self.failed_N: Bool = log.values["failed"] == 1 if "failed" in log.values else np.zeros(len(log), dtype=bool)

    # ------------------------------------------------------------ steps and windows

    def per_step(self, mask_N: Bool, weight_N: Values | None = None) -> Float:
        """Sum of weights, or count, of masked rollouts by step (S,)."""
        weights = None if weight_N is None else weight_N[mask_N].astype(float)
        return np.bincount(self.step_N[mask_N], weights=weights, minlength=len(self.steps)).astype(float)

    @cached_property
    def window_start_S(self) -> Int:
        """First step (index) of each step's window: the fewest latest whole steps that hold 64 groups.

        Whole steps, so that the order of groups within a step does not matter.
        """
        count_S = np.bincount(self.group_step_P, minlength=len(self.steps))
        total_S = np.cumsum(count_S)
        start = np.searchsorted(total_S, total_S - WINDOW_GROUPS, side="right")
        return np.where(total_S < WINDOW_GROUPS, 0, start)

    def windowed(self, value_S: Float) -> Float:
        """Sum over each step's window (S,)."""
        total = np.concatenate([[0.0], np.cumsum(value_S)])
        return total[1:] - total[self.window_start_S]

    # ------------------------------------------------------------ groups

    @cached_property
    def grouping(self) -> tuple[Int, Int, Int]:
        """Order of rollouts by group, start of each group in it, and the group of each rollout."""
        log = self.log
        key = np.arange(len(log), dtype=np.uint64) if log.group_N is None else log.group_N
        order = np.lexsort((key, self.step_N))
        step, sorted_key = self.step_N[order], key[order]
        new = np.ones(len(order), dtype=bool)
        new[1:] = (step[1:] != step[:-1]) | (sorted_key[1:] != sorted_key[:-1])
        group_N = np.empty(len(order), dtype=np.int64)
        group_N[order] = np.cumsum(new) - 1
        return order, np.flatnonzero(new), group_N

    @property
    def group_N(self) -> Int:
        """Index of each rollout's group (N,)."""
        return self.grouping[2]

    @cached_property
    def group_step_P(self) -> Int:
        """Index of each group's step (P,), failed rollouts or not."""
        order, starts, _ = self.grouping
        return self.step_N[order[starts]]

    @cached_property
    def grouped(self) -> bool:
        """True when the log tells groups apart and one of them has two rollouts."""
        return self.log.group_N is not None and len(self.grouping[1]) < len(self.log)

    def groups(self, value_N: Values) -> Groups:
        """Statistics of ``value_N`` by group, over finite values of rollouts whose evaluator answered."""
        order, starts, _ = self.grouping
        usable = (np.isfinite(value_N) & ~self.failed_N)[order]
        value = value_N[order]
        size = np.add.reduceat(usable.astype(np.int64), starts)
        low = np.minimum.reduceat(np.where(usable, value, np.float32(np.inf)), starts)
        high = np.maximum.reduceat(np.where(usable, value, np.float32(-np.inf)), starts)
        total = np.add.reduceat(np.where(usable, value, np.float32(0)).astype(float), starts)
        keep = size > 0
        prompt = self.log.prompt_N if self.log.prompt_N is not None else np.zeros(len(order), dtype=np.uint64)
        return Groups(
            self.group_step_P[keep],
            prompt[order[starts]][keep],
            size[keep],
            low[keep],
            high[keep],
            (total[keep] / size[keep]).astype(np.float32),
        )

    def count_groups(self, groups: Groups, mask_P: Bool) -> Float:
        """Masked groups by step (S,)."""
        return np.bincount(groups.step_P[mask_P], minlength=len(self.steps)).astype(float)

    def mean_groups(self, groups: Groups, value_P: Values | Float) -> Float:
        """Mean over groups by step (S,); NaN where there is none."""
        count = np.bincount(groups.step_P, minlength=len(self.steps)).astype(float)
        total = np.bincount(groups.step_P, weights=value_P.astype(float), minlength=len(self.steps))
        return total / np.where(count, count, np.nan)

    # ------------------------------------------------------------ scores

    @cached_property
    def score_N(self) -> Values | None:
        """Correctness from 0 (floor) to 1 (ceiling) by rollout; None when the log does not settle what they are."""
        if self.log.has("correct"):
            return self.log.values["correct"]
        if not self.log.has("reward"):
            return None
        reward = self.log.values["reward"]
        ends = scale(reward[np.isfinite(reward) & ~self.failed_N])
        if ends is None:
            return None
        return ((reward - ends[0]) / (ends[1] - ends[0])).astype(np.float32)

    @cached_property
    def outcomes(self) -> Groups | None:
        """Groups of :attr:`score_N`."""
        return None if self.score_N is None else self.groups(self.score_N)

    @cached_property
    def accuracy_rose_S(self) -> Bool | None:
        """Whether accuracy has risen since the start, by step (S,); None when the log does not say.

        Held-out accuracy where it was logged (at least one point up), else the accuracy on the training prompts of the
        window against that of the first 20 steps, two standard errors apart.
        """
        if len(self.log.evals) > 1:
            at, accuracy = (np.array(column, dtype=float) for column in zip(*self.log.evals, strict=True))
            latest = np.searchsorted(at, self.steps, side="right") - 1
            return np.asarray(accuracy[np.maximum(latest, 0)] > accuracy[0] + 0.01)
        if self.score_N is None:
            return None
        known = np.isfinite(self.score_N) & ~self.failed_N
        right_S, all_S = self.per_step(known, self.score_N), self.per_step(known)
        early = slice(None, REFERENCE_STEPS)
        before = right_S[early].sum() / max(1.0, all_S[early].sum())
        count_S = np.maximum(self.windowed(all_S), 1)
        now_S = self.windowed(right_S) / count_S
        return np.asarray(now_S > before + 2 * np.sqrt(0.25 / count_S))


def scale(reward_N: Values) -> tuple[float, float] | None:
    """Floor and ceiling of rewards where their values settle them; else None.

    They do when all lie in {0, 1} or in {-1, 1}, when there are just two different values, and when graded values stay
    in [0, 1] and reach both ends.
    """
    if not len(reward_N):
        return None
    low, high = float(reward_N.min()), float(reward_N.max())
    if not len(reward_N[(reward_N != low) & (reward_N != high)]):
        for ends in ((0.0, 1.0), (-1.0, 1.0)):
            if low in ends and high in ends:
                return ends
        return (low, high) if high > low else None
    return (0.0, 1.0) if (low, high) == (0.0, 1.0) else None
