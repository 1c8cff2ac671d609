"""DPS: roll out the prompts that a learned state model expects to be partly solved.

Source: "Dynamics-Predictive Sampling for Active RL Finetuning of Large Reasoning Models", arXiv 2603.10887, and the
authors' release (maoyixiu/DPS).

A prompt is a hidden Markov chain over steps with the states wrong, partly solved, solved. A group that was rolled out
shows its state. Matrices are (to, from): P[i, j] = alpha[i, j] / sum_i alpha[i, j].

1. M = min(round(c B), prompts) candidates are read in epoch order; they are tracked from then on.
2. The B of them with the highest score are rolled out: ``topk`` pi(partly); ``topk+entropy`` pi(partly) + w_H H(pi);
   ``uniform`` a random choice. Ties are settled at random. With M <= B nothing is chosen and this is plain sampling.
3. After the step, for every tracked prompt: its posterior is the state that its group showed, else its belief pi.
4. For observed ones xi[i, j] is proportional to posterior[i] previous[j] P[i, j], total 1 (0 where no transition of
   the prior allows the step); then for all alpha <- lambda alpha + (1 - lambda) alpha0 + xi.
5. pi <- P posterior with the new alpha; previous <- posterior.

A group is wrong or solved when all its scored outcomes are equal and below, or not below, one half (so 0 and 1 for
binary outcomes), partly solved when they differ. A group without a verdict shows nothing.

Bias. The choice is not random: prompts below the cut have probability 0, so that no weight makes the gradient that of
all prompts. Which prompts are trained is the method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from trimtab.core.history import prompt_keys
from trimtab.core.outcomes import Outcomes
from trimtab.core.part import Needs, knob
from trimtab.core.records import Group, IntArray
from trimtab.core.rng import scrambled
from trimtab.core.slots import PromptStream, Select, Selection, StepContext, StepRecord
from trimtab.core.table import PromptTable

Array = np.ndarray[Any, Any]
Prior = Literal["ones", "progress", "stability", "local"]
Start = Literal["uniform", "wrong", "partly", "solved"]
WRONG, PARTLY, SOLVED = range(3)

PRIORS: Mapping[str, list[list[float]]] = {  # (to, from)
    "ones": [[1, 1, 1], [1, 1, 1], [1, 1, 1]],
    "progress": [[1, 0.5, 0.5], [1, 1, 0.5], [1, 1, 1]],
    "stability": [[1, 0.5, 0.5], [0.5, 1, 0.5], [0.5, 0.5, 1]],
    "local": [[1, 1, 0], [1, 1, 1], [0, 1, 1]],
}
STARTS: Mapping[str, list[float]] = {
    "uniform": [1 / 3, 1 / 3, 1 / 3],
    "wrong": [1, 0, 0],
    "partly": [0, 1, 0],
    "solved": [0, 0, 1],
}


def transitions(alpha: Array) -> Array:
    """Expected transition matrices (..., 3, 3), columns summing to 1."""
    return alpha / alpha.sum(-2, keepdims=True)


def joint(posterior: Array, previous: Array, alpha: Array) -> Array:
    """xi (..., 3, 3): which transition happened; all 0 where none of positive probability can have."""
    weight = posterior[..., :, None] * previous[..., None, :] * transitions(alpha)
    total = weight.sum((-2, -1), keepdims=True)
    return np.divide(weight, total, out=np.zeros_like(weight), where=total > 0)


def predicted(alpha: Array, posterior: Array) -> Array:
    """Belief (..., 3) about the next step."""
    belief = np.einsum("...ij,...j->...i", alpha, posterior / alpha.sum(-2))
    return belief / belief.sum(-1, keepdims=True)


def entropy(belief: Array) -> Array:
    """Entropy of beliefs (..., 3), nats."""
    return -(belief * np.log(np.where(belief > 0, belief, 1.0))).sum(-1)


def chosen_best(score_M: Array, tie_M: Array, num: int) -> tuple[IntArray, Array]:
    """Positions of the ``num`` best, ascending, and the probability each had over the random ties."""
    least = np.partition(score_M, len(score_M) - num)[len(score_M) - num]
    above, equal = np.flatnonzero(score_M > least), np.flatnonzero(score_M == least)
    lucky = equal[np.argpartition(tie_M[equal], num - len(above) - 1)[: num - len(above)]]
    best = np.sort(np.concatenate([above, lucky]))
    return best, np.where(score_M[best] == least, len(lucky) / len(equal), 1.0)


def shown(groups: Sequence[Group]) -> tuple[list[str], IntArray]:
    """Prompt ids and states of the groups that showed one, the groups of one prompt taken together."""
    merged: dict[str, Group] = {}
    for group in groups:
        merged.setdefault(group.prompt.id, Group(group.prompt)).rollouts.extend(group.rollouts)
    found = Outcomes.of(list(merged.values()))
    same_P = np.where(found.mean_P < 0.5, WRONG, SOLVED)
    seen_P = found.scored_P > 0
    ids = [name for name, seen in zip(merged, seen_P.tolist(), strict=True) if seen]
    return ids, np.where(found.constant_P, same_P, PARTLY)[seen_P]


@dataclass
class Last:
    """What the last step's choice and its outcome were."""

    candidates: int = 0
    passed_over: int = 0
    predicted: float = 0.0  # mean pi(partly) of the chosen prompts
    cut: float = 0.0  # lowest score chosen
    inclusion: float = 1.0
    partly: float = 0.0  # share of partly solved groups
    hit: float = 0.0  # share of groups whose state was the likeliest one
    tracked: int = 0


@dataclass
class Beliefs:
    """alpha, pi and the previous posterior of every tracked prompt, and the last step's numbers."""

    table: PromptTable | None = None
    last: dict[str, float] = field(default_factory=lambda: dict(vars(Last())))


@dataclass(kw_only=True)
class DPS(Select):
    """Predicts each prompt's state and rolls out those most likely to be partly solved."""

    State: ClassVar[type] = Beliefs
    inert: ClassVar[dict[str, object] | None] = {"candidates": 1.0}

    candidates: float = knob(32.0, "candidates c, in prompts_per_step (MATH 32, Countdown and Geometry3k 8)", ge=1)
    strategy: Literal["topk", "topk+entropy", "uniform"] = knob("topk", "how candidates are scored")
    entropy_weight: float = knob(0.0, "w_H, of 'topk+entropy'", ge=0)
    decay: float = knob(0.7, "lambda, kept share of transition counts (Countdown, Geometry3k 0.5)", ge=0, le=1)
    prior: Prior = knob("ones", "transition counts alpha0 of a new prompt")
    start: Start = knob("uniform", "belief pi0 of a new prompt")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.state.table = self.new_table()

    def new_table(self) -> PromptTable:
        """Beliefs about no prompt yet."""
        pi0 = np.array(STARTS[self.start], dtype=np.float64)
        return PromptTable(alpha=np.array(PRIORS[self.prior], dtype=np.float64), pi=pi0, previous=pi0)

    def needs(self) -> Needs:
        return Needs(verdicts=True, min_group=2)

    # ------------------------------------------------------------ before the rollout

    def select(self, stream: PromptStream, num: int, ctx: StepContext) -> Selection:
        pool = len(stream.pool)
        size = min(math.floor(self.candidates * num + 0.5), pool)
        if size <= num:
            index = stream.take(num)
            rows = self.table.add(stream.keys[index])
            self.note(Last(candidates=len(index), predicted=self.expectation(rows)))
            return Selection(index, [1.0] * len(index))
        candidate_M = distinct(stream, size)
        key_M = stream.keys[candidate_M]
        rows_M = self.table.add(key_M)
        tie_M = scrambled(key_M, ctx.seed, self.slug, ctx.step, stream.epoch, stream.cursor)
        score_M = self.scores(self.table["pi"][rows_M])
        best, inclusion = chosen_best(score_M, tie_M, num)
        self.note(
            Last(
                candidates=size,
                passed_over=size - num,
                predicted=self.expectation(rows_M[best]),
                cut=float(score_M[best].min()),
                inclusion=float(inclusion.mean()),
            )
        )
        return Selection(candidate_M[best].tolist(), inclusion.tolist(), {"score": size - num})

    @property
    def table(self) -> PromptTable:
        table: PromptTable = self.state.table
        return table

    def scores(self, pi_M: Array) -> Array:
        """What candidates with these beliefs (M, 3) are ranked by (M,)."""
        if self.strategy == "uniform":
            return np.zeros(len(pi_M))
        if self.strategy == "topk":
            return pi_M[:, PARTLY]
        return pi_M[:, PARTLY] + self.entropy_weight * entropy(pi_M)

    def expectation(self, rows: IntArray) -> float:
        """Mean probability of being partly solved."""
        return float(self.table["pi"][rows, PARTLY].mean()) if len(rows) else 0.0

    def note(self, last: Last) -> None:
        self.state.last = dict(vars(last))

    # ------------------------------------------------------------ after the step

    def observe(self, record: StepRecord, ctx: StepContext) -> None:
        ids, state_S = shown(record.groups)
        rows = self.table.add(prompt_keys(ids))
        likeliest_S = self.table["pi"][rows].argmax(-1)
        self.learn(rows, state_S)
        self.state.last |= {
            "partly": float((state_S == PARTLY).mean()) if len(rows) else 0.0,
            "hit": float((state_S == likeliest_S).mean()) if len(rows) else 0.0,
            "tracked": len(self.table),
        }

    def learn(self, rows: IntArray, state_S: IntArray) -> None:
        """One step of every tracked prompt; those of ``rows``, all different, were seen in these states."""
        alpha, pi, previous = self.table["alpha"], self.table["pi"], self.table["previous"]
        seen = np.eye(3)[state_S]
        xi = joint(seen, previous[rows], alpha[rows])
        alpha *= self.decay
        alpha += (1 - self.decay) * np.array(PRIORS[self.prior], dtype=np.float64)
        alpha[rows] += xi
        previous[:] = pi
        previous[rows] = seen
        pi[:] = predicted(alpha, previous)

    def metrics(self) -> dict[str, float]:
        return dict(self.state.last)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"table": self.table.state_dict()}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        table = self.new_table()
        table.load_state_dict(values["table"])
        super().load_state_dict({**values, "table": table})


def distinct(stream: PromptStream, size: int) -> IntArray:
    """The next ``size`` different prompts of the stream; ``size`` is at most the pool."""
    taken = np.zeros(0, dtype=np.int64)
    known = np.zeros(len(stream.pool), dtype=bool)
    while len(taken) < size:  # epoch by epoch: the end of one and the start of the next may share some
        left = max(len(stream.pool) - stream.cursor, 0) or len(stream.pool)
        index = np.array(stream.take(min(size - len(taken), left)), dtype=np.int64)
        taken = np.concatenate([taken, index[~known[index]]])
        known[index] = True
    return taken
