"""GRESO: skip, before any rollout, prompts whose last visits all gave constant groups.

Source: "Act Only When It Pays: Efficient Reinforcement Learning for LLM Reasoning via Selective Rollouts", arXiv
2506.02177, and the authors' release (Infini-AI-Lab/GRESO), whose constants these are.

On correctness (right or graded), never on the shaped reward:

1. z_easy = the number of most recent visits in a row whose group had mean >= ``easy_at``, z_hard = the same for mean <=
   ``hard_at``. A visit between the two resets both; a visit without a verdict is none.
2. A prompt is skipped with probability 1 - max(p^z, ``floor``), p = p_easy or p_hard; never where z = 0. A skipped
   prompt costs nothing, gets no visit, and comes up again in the next epoch.
3. Prompts are read in epoch order until B_s survivors are found; B_s = ``oversample`` x prompts_per_step at first.
4. With a share a of the last draw constant and ``missing`` groups, B = floor(``safety`` x missing / (1 - a)) more are
   asked for. If B is at most the first draw's size this draw is the last one; what it leaves short stays short. Drawn
   are B, at least ``least_draw`` x prompts_per_step and at most the first draw's size; that size too where a = 1.
5. After the step, from the second epoch on, for either kind: with the share of its constant groups among all that were
   rolled out at its target or above, p falls by ``delta_p``, else it rises, within [0.05, 0.95].

Bias. A skipped prompt would most likely have given no gradient. Where it has begun to vary, it is seen less often than
in plain sampling, by the factor max(p^z, floor), which is every group's ``inclusion``: weighting groups by its inverse
removes the bias of a step's gradient, at the price of variance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from trimtab.core.errors import ConfigError
from trimtab.core.history import prompt_keys
from trimtab.core.outcomes import Outcomes
from trimtab.core.part import Needs, Part, knob
from trimtab.core.records import IntArray
from trimtab.core.rng import uniforms
from trimtab.core.slots import PromptStream, Select, Selection, StepContext, StepRecord
from trimtab.core.table import PromptTable

if TYPE_CHECKING:
    from trimtab.core.config import RunConfig

Array = np.ndarray[Any, Any]
LEAST_P, MOST_P = 0.05, 0.95
_ROUNDING = 1e-9


def next_run(run_P: IntArray, easy_P: Array, hard_P: Array) -> IntArray:
    """Runs after a visit, z_easy as positive and z_hard as negative numbers (P,)."""
    return np.where(easy_P, np.maximum(run_P, 0) + 1, np.where(hard_P, np.minimum(run_P, 0) - 1, 0))


def skip_probability(run_P: IntArray, p_easy: float, p_hard: float, floor: float) -> Array:
    """Probability (P,) with which prompts of these runs are skipped."""
    p_P = np.where(run_P > 0, p_easy, p_hard)
    return np.where(run_P == 0, 0.0, 1 - np.maximum(p_P ** abs(run_P), floor))


def further(missing: int, constant: float, most: int, least: int, safety: float) -> tuple[int, bool]:
    """Prompts of the next draw, and whether it is the step's last one."""
    if constant >= 1:
        return most, False
    estimate = math.floor(safety * missing / (1 - constant) + _ROUNDING)
    return max(least, min(estimate, most)), estimate <= most


def steered(p: float, share: float, target: float, delta: float) -> float:
    """An exploration probability after a step in which ``share`` of the groups were constant of its kind."""
    if delta == 0:
        return p
    return min(max(p - delta if share >= target else p + delta, LEAST_P), MOST_P)


@dataclass
class Runs:
    """What was learnt about prompts (``run``, see :func:`next_run`), the controller, and the present step's counts."""

    table: PromptTable = field(default_factory=lambda: PromptTable(run=np.int32(0)))
    p_easy: float | None = None  # None = the knob's
    p_hard: float | None = None
    step: int = -1
    epoch: int = 0
    read: int = 0  # prompts looked at in this step
    skipped_easy: int = 0
    skipped_hard: int = 0
    skipped_mass: float = 0.0  # sum of the skipped prompts' probabilities
    chosen: int = 0
    inclusion: float = 0.0  # sum over the chosen prompts
    last_draw: int = 0
    kept: int = 0  # groups kept before the last draw
    last: bool = False
    share_easy: float = 0.0  # among the groups of the last step
    share_hard: float = 0.0


@dataclass(kw_only=True)
class GRESO(Select):
    """Skips prompts that keep giving constant groups, and sizes every further draw by what is missing."""

    State: ClassVar[type] = Runs
    inert: ClassVar[dict[str, object] | None] = {
        "p_easy": 1.0,
        "p_hard": 1.0,
        "delta_p": 0.0,
        "oversample": 1.0,
        "max_draws": 1,
    }

    p_easy: float = knob(0.5, "first exploration probability of prompts that were all right", ge=0, le=1)
    p_hard: float = knob(0.5, "first exploration probability of prompts that were all wrong", ge=0, le=1)
    target_easy: float = knob(1 / 12, "share of all-right groups to steer at", ge=0, le=1)
    target_hard: float = knob(1 / 6, "share of all-wrong groups to steer at", ge=0, le=1)
    delta_p: float = knob(0.01, "change of an exploration probability a step; 0 = keep them", ge=0, le=1)
    floor: float = knob(0.01, "least probability of keeping a prompt", ge=1e-4, le=1)
    easy_at: float = knob(0.98, "mean correctness from which a visit counts as all right", ge=0, le=1)
    hard_at: float = knob(0.11, "mean correctness up to which a visit counts as all wrong", ge=0, le=1)
    oversample: float = knob(1.5, "first draw, in prompts_per_step (the release draws 384 for 256)", ge=1)
    least_draw: float = knob(0.25, "smallest further draw, in prompts_per_step (the release: 64 for 256)", ge=0)
    safety: float = knob(1.25, "factor on the prompts that are thought to be missing", ge=1)
    max_draws: int = knob(10, "most draws a step, the first included", ge=1)

    def needs(self) -> Needs:
        return Needs(verdicts=True, min_group=2)

    def check(self, parts: Mapping[str, list[Part]], settings: RunConfig) -> None:
        if not parts["filter"]:
            raise ConfigError(
                "select.greso: no filter is set, so the constant groups that slip through fill the batch. Add one, for "
                "example filter=zero-variance."
            )
        if self.hard_at >= self.easy_at:
            raise ConfigError(f"select.greso: hard_at ({self.hard_at}) must lie below easy_at ({self.easy_at}).")

    # ------------------------------------------------------------ before the rollout

    def select(self, stream: PromptStream, num: int, ctx: StepContext) -> Selection:
        s = self.state
        if s.step != ctx.step:
            self.begin(ctx)
            num = math.floor(self.oversample * num + _ROUNDING)
        index: list[int] = []
        inclusion: list[float] = []
        skipped = {"easy": 0, "hard": 0}
        while len(index) < num:
            read = np.array(stream.take(min(num - len(index), len(stream.pool))), dtype=np.int64)
            if not len(read):
                break
            run_P = s.table.values("run", stream.keys[read])
            skip_P = skip_probability(run_P, *self.exploration(), self.floor)
            skipped_P = uniforms(stream.keys[read], ctx.seed, self.slug, ctx.step, stream.epoch) < skip_P
            index += read[~skipped_P].tolist()
            inclusion += (1 - skip_P[~skipped_P]).tolist()
            skipped["easy"] += int((skipped_P & (run_P > 0)).sum())
            skipped["hard"] += int((skipped_P & (run_P < 0)).sum())
            s.read, s.skipped_mass = s.read + len(read), s.skipped_mass + float(skip_P[skipped_P].sum())
        s.epoch, s.last_draw = stream.epoch, len(index)
        s.skipped_easy, s.skipped_hard = s.skipped_easy + skipped["easy"], s.skipped_hard + skipped["hard"]
        s.chosen, s.inclusion = s.chosen + len(index), s.inclusion + sum(inclusion)
        return Selection(index, inclusion, skipped)

    def begin(self, ctx: StepContext) -> None:
        """Counts of a new step."""
        s = self.state
        s.step, s.last, s.kept = ctx.step, False, 0
        s.read = s.skipped_easy = s.skipped_hard = s.chosen = 0
        s.skipped_mass = s.inclusion = 0.0

    def exploration(self) -> tuple[float, float]:
        """p_easy and p_hard in force."""
        s = self.state
        return (self.p_easy if s.p_easy is None else s.p_easy, self.p_hard if s.p_hard is None else s.p_hard)

    def refill(self, kept: int, wanted: int, draws: int, ctx: StepContext) -> int:
        s = self.state
        if kept >= wanted or s.last or draws >= self.max_draws or not s.last_draw:
            return 0
        constant = 1 - (kept - s.kept) / s.last_draw
        most = math.floor(self.oversample * wanted + _ROUNDING)
        least = max(1, math.floor(self.least_draw * wanted + _ROUNDING))
        num, s.last = further(wanted - kept, constant, most, min(least, most), self.safety)
        s.kept = kept
        return num

    # ------------------------------------------------------------ after the step

    def observe(self, record: StepRecord, ctx: StepContext) -> None:
        found = Outcomes.of(record.groups)
        seen = found.scored_P > 0
        easy_P, hard_P = found.mean_P >= self.easy_at, found.mean_P <= self.hard_at
        run = self.state.table
        rows = run.add(prompt_keys([group.prompt.id for group in record.groups]))
        for row, easy, hard in zip(rows[seen].tolist(), easy_P[seen].tolist(), hard_P[seen].tolist(), strict=True):
            run["run"][row] = next_run(run["run"][row], easy, hard)  # one by one: a prompt may come twice
        constant_P = found.constant_P & seen
        total = max(int(seen.sum()), 1)
        self.steer(
            float((constant_P & easy_P).sum() / total), float((constant_P & hard_P).sum() / total), bool(seen.any())
        )

    def steer(self, share_easy: float, share_hard: float, any_seen: bool) -> None:
        """Move the exploration probabilities, from the second epoch on."""
        s = self.state
        s.share_easy, s.share_hard = share_easy, share_hard
        s.p_easy, s.p_hard = self.exploration()
        if s.epoch > 0 and any_seen:
            s.p_easy = steered(s.p_easy, share_easy, self.target_easy, self.delta_p)
            s.p_hard = steered(s.p_hard, share_hard, self.target_hard, self.delta_p)

    def metrics(self) -> dict[str, float]:
        s = self.state
        skipped = s.skipped_easy + s.skipped_hard
        p_easy, p_hard = self.exploration()
        return {
            "read": s.read,
            "skipped_easy": s.skipped_easy,
            "skipped_hard": s.skipped_hard,
            "skipped_probability": s.skipped_mass / skipped if skipped else 0.0,
            "inclusion": s.inclusion / s.chosen if s.chosen else 1.0,
            "share_easy": s.share_easy,
            "share_hard": s.share_hard,
            "p_easy": p_easy,
            "p_hard": p_hard,
        }

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"table": self.state.table.state_dict()}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        table = Runs().table
        table.load_state_dict(values["table"])
        super().load_state_dict({**values, "table": table})
