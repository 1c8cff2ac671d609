"""Logs of a healthy run, and of the same run with one fault from step 30 on. Built as arrays, no model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from trimtab.doctor.log import Log

STEPS, PROMPTS, GROUP, POOL = 60, 16, 8, 64
ONSET = 30
CAP = 400.0


class World:
    """Columns of a healthy run as float64 arrays (N,), to be spoilt."""

    def __init__(self, seed: int, steps: int = STEPS, prompts: int = PROMPTS, group: int = GROUP) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.rows = steps * prompts * group
        self.step = np.repeat(np.arange(1, steps + 1), prompts * group)
        visit = np.arange(steps * prompts) % max(POOL, prompts)
        self.prompt = np.repeat(visit, group).astype(np.uint64) + np.uint64(1)
        self.late = self.step >= ONSET
        chance = rng.beta(2.0, 2.0, max(POOL, prompts))[visit] * 0.7 + 0.15
        self.solve(np.repeat(chance, group))
        self.failed, self.malformed = np.zeros(self.rows), np.zeros(self.rows)
        self.length = rng.lognormal(np.log(100), 0.2, self.rows).round()
        self.truncated = (rng.random(self.rows) < 0.01).astype(float)
        self.entropy = rng.normal(0.5, 0.03, self.rows)
        self.gap = np.abs(rng.normal(0.004, 0.001, self.rows))
        self.gap_signed = rng.normal(0.0, 0.001, self.rows)
        self.clipped = rng.beta(2, 60, self.rows)
        self.lag = rng.integers(0, 2, self.rows).astype(float)
        self.replayed = (rng.random(self.rows) < 0.1).astype(float)
        self.repetitive, self.invalid = np.zeros(self.rows), np.zeros(self.rows)
        self.weight = np.exp(rng.normal(0, 0.05, self.rows))
        self.extra: dict[str, np.ndarray[Any, Any]] = {}

    def solve(self, chance: np.ndarray[Any, Any]) -> None:
        """Right with that chance; wrong answers scatter over six."""
        self.reward = (self.rng.random(self.rows) < chance).astype(float)
        self.answer = np.where(self.reward == 1, 1, self.rng.integers(2, 8, self.rows)).astype(np.uint64)

    def some(self, share: float) -> np.ndarray[Any, Any]:
        """A share of the rollouts after the onset."""
        return self.late & (self.rng.random(self.rows) < share)

    def advantages(self) -> np.ndarray[Any, Any]:
        """Rewards standardised within their group, as GRPO does it."""
        _, group = np.unique(self.step * 10**6 + self.prompt.astype(np.int64), return_inverse=True)
        count = np.bincount(group)
        average = np.bincount(group, weights=np.nan_to_num(self.reward)) / count
        rest = np.nan_to_num(self.reward) - average[group]
        return rest / (np.sqrt(np.bincount(group, weights=rest**2) / count)[group] + 1e-6)

    def log(self) -> Log:
        names = ("reward", "failed", "malformed", "length", "truncated", "entropy", "gap", "gap_signed", "clipped")
        names += ("lag", "replayed", "repetitive", "invalid", "weight")
        values = {name: getattr(self, name).astype(np.float32) for name in names}
        values["advantage"] = self.advantages().astype(np.float32)
        values |= {name: column.astype(np.float32) for name, column in self.extra.items()}
        return Log(self.step, self.prompt, self.prompt, values, answer_N=self.answer)


Fault = Callable[[World], None]
FAULTS: dict[str, tuple[int, Fault]] = {}


def planted(row: int) -> Callable[[Fault], Fault]:
    """Register a fault under the row that must come out on top."""

    def register(fault: Fault) -> Fault:
        FAULTS[fault.__name__] = (row, fault)
        return fault

    return register


@planted(1)
def reward_flat(w: World) -> None:
    w.reward[w.late] = 0


@planted(1)
def too_hard(w: World) -> None:
    w.reward[w.late] = w.rng.random(int(w.late.sum())) < 0.01


@planted(2)
def too_easy(w: World) -> None:
    w.reward[w.late] = w.rng.random(int(w.late.sum())) < 0.995
    w.answer[w.late & (w.reward == 1)] = 1


@planted(3)
def no_boundary(w: World) -> None:
    """Seven of eight right in half of the groups, one of eight in the others: never constant, never in between."""
    place = np.arange(w.rows) % GROUP
    mostly = (np.arange(w.rows) // GROUP) % 2 == 0
    w.reward = np.where(w.late, np.where(mostly, place != 0, place == 0), w.reward).astype(float)
    w.answer = np.where(w.reward == 1, 1, w.rng.integers(2, 8, w.rows)).astype(np.uint64)


@planted(4)
def cold_temperature(w: World) -> None:
    w.entropy[w.late] *= 0.1
    leader = w.answer.reshape(-1, GROUP)[:, :1].repeat(GROUP, axis=1).ravel()
    first = w.reward.reshape(-1, GROUP)[:, :1].repeat(GROUP, axis=1).ravel()
    same = w.some(0.5)
    w.answer[same], w.reward[same] = leader[same], first[same]


@planted(5)
def entropy_blow_up(w: World) -> None:
    w.entropy[w.late] *= 6


@planted(6)
def duplicates(w: World) -> None:
    w.answer[w.late] = 1


@planted(8)
def length_inflation(w: World) -> None:
    w.length[w.late] *= 3


@planted(31)
def shrinkage(w: World) -> None:
    w.length[w.late] = np.maximum(1, w.length[w.late] * 0.15)


@planted(9)
def everything_truncated(w: World) -> None:
    w.truncated[w.late], w.length[w.late], w.reward[w.late] = 1, 130, 0


@planted(9)
def cap_too_low(w: World) -> None:
    cut = w.some(0.6)
    w.truncated[cut], w.length[cut], w.reward[cut] = 1, 130, 0


@planted(10)
def stragglers(w: World) -> None:
    w.length[w.some(0.02)] *= 15


@planted(11)
def malformed(w: World) -> None:
    broken = w.some(0.6)
    w.malformed[broken], w.reward[broken] = 1, 0


@planted(12)
def verifier_flips(w: World) -> None:
    """20 % of the right answers are called wrong; a quarter of all rollouts is audited."""
    truth = w.reward.copy()
    w.reward[(truth == 1) & (w.rng.random(w.rows) < 0.2)] = 0
    w.extra["audit"] = np.where(w.rng.random(w.rows) < 0.25, truth, np.nan)


@planted(13)
def failures_read_as_zero(w: World) -> None:
    broken = w.some(0.25)
    w.failed[broken], w.reward[broken] = 1, 0


@planted(14)
def reward_hacking(w: World) -> None:
    """Wrong answers come to be rewarded, more and more; a quarter of all rollouts is audited."""
    w.extra["audit"] = np.where(w.rng.random(w.rows) < 0.25, w.reward, np.nan)
    fooled = w.rng.random(w.rows) < np.clip((w.step - ONSET) / 32, 0, 1)
    w.reward[fooled & (w.reward == 0)] = 1


@planted(15)
def judge_likes_length(w: World) -> None:
    w.extra["judge"] = w.rng.normal(0, 1, w.rows) + w.late * (w.length - 100) / 10


@planted(16)
def process_score_useless(w: World) -> None:
    w.extra["process"] = w.rng.normal(0, 0.4, w.rows) + np.where(w.late, 0, w.reward)


@planted(17)
def few_samples_dominate(w: World) -> None:
    w.weight[w.some(0.01)] = 300


@planted(18)
def stale_data(w: World) -> None:
    w.clipped[w.late] = w.rng.beta(5, 5, int(w.late.sum()))
    w.lag[w.late] = 12


@planted(19)
def logprob_convention(w: World) -> None:
    """Temperature left out on one side: the gap is large, of one sign, and tokens fall out of the clip range."""
    w.gap[w.late] = w.rng.normal(0.2, 0.02, int(w.late.sum()))
    w.gap_signed[w.late] = w.gap[w.late]
    w.clipped[w.late] += 0.4


@planted(21)
def starvation(w: World) -> None:
    narrow = np.repeat(np.arange(w.rows // GROUP) % PROMPTS, GROUP).astype(np.uint64) + np.uint64(1)
    w.prompt = np.where(w.step >= 10, narrow, w.prompt)


@planted(22)
def premature_stop(w: World) -> None:
    w.extra["premature"] = np.where(w.rng.random(w.rows) < 0.2, w.some(0.4), np.nan)


@planted(23)
def overthinking(w: World) -> None:
    w.extra["settled_at"] = w.length * np.where(w.late, 0.2, 0.8)


@planted(24)
def poor_tree(w: World) -> None:
    w.extra["twin"] = w.some(0.7).astype(float)


@planted(25)
def hint_dependence(w: World) -> None:
    w.extra["hinted"] = (np.arange(w.rows) % 2).astype(float)
    w.reward[w.late] = np.where(
        w.extra["hinted"][w.late] == 1, w.rng.random(int(w.late.sum())) < 0.8, w.reward[w.late] * 0.2
    )
    w.reward = (w.reward > 0.5).astype(float)


@planted(26)
def old_replay(w: World) -> None:
    old = w.some(0.8)
    w.replayed[old], w.lag[old] = 1, 50


@planted(27)
def corrupt_replay(w: World) -> None:
    w.extra["corrupt"] = w.some(0.2).astype(float)


@planted(28)
def self_evolution_drift(w: World) -> None:
    w.extra["drifted"] = w.some(0.5).astype(float)


@planted(29)
def environment_drift(w: World) -> None:
    """The last window is worse than the one before."""
    w.extra["tool_error"] = (w.rng.random(w.rows) < np.where(w.step > STEPS - 4, 0.3, 0.05)).astype(float)


@planted(30)
def looping_agent(w: World) -> None:
    w.extra["calls"] = np.full(w.rows, 6.0)
    w.extra["repeated_calls"] = np.where(w.late, 4.0, 0.0)


@planted(32)
def repetition(w: World) -> None:
    looping = w.some(0.5)
    w.repetitive[looping], w.truncated[looping], w.length[looping], w.reward[looping] = 1, 1, CAP, 0


@planted(33)
def nan_onset(w: World) -> None:
    broken = w.some(0.3)
    w.invalid[broken], w.reward[broken] = 1, np.nan


def world(seed: int, fault: str = "") -> World:
    """A healthy run, or one with the named fault."""
    made = World(seed)
    if fault:
        FAULTS[fault][1](made)
    return made
