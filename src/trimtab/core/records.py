"""What flows through a step: prompts, rollouts, verdicts and groups.

Shapes: a rollout's per-token arrays all have length T, the number of response tokens (prompt tokens are not in them).
A worked example, a rollout of three sampled tokens that a stopper cut::

    Rollout(id="0-7f3a-2", prompt=p, sample=2, tokens=[5, 9, 4], logprobs=[-.1, -2.3, -.7], source=[0, 0, 0],
            stop=StopRecord(reason=StopReason.PART, part="prune-opd", index=2, limit=64))
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

import numpy as np

from trimtab.core.errors import DataError

IntArray = np.ndarray[Any, np.dtype[np.int64]]
FloatArray = np.ndarray[Any, np.dtype[np.float32]]


class Source(IntEnum):
    """Where a response token came from. Only SAMPLED and REUSED tokens may carry a policy gradient by default."""

    SAMPLED = 0
    FORCED = 1
    REUSED = 2
    ENVIRONMENT = 3
    FOREIGN = 4
    PADDING = 5


class StopReason(StrEnum):
    """Why a rollout ended. EOS is the engine's finding, never inferred from the last token."""

    EOS = "eos"
    LIMIT = "limit"  # the token limit in force
    CONTEXT = "context"  # the model's context is full
    PART = "part"  # a stop part ended it
    ABORT = "abort"  # cut from outside, partial result kept
    ERROR = "error"


class Status(StrEnum):
    """How the verification of a rollout went, apart from what it found."""

    OK = "ok"
    MALFORMED = "malformed"  # no answer could be read: a finding about the rollout
    TIMEOUT = "timeout"  # the evaluator did not answer in time: a finding about the evaluator
    ERROR = "error"  # the evaluator raised or returned nonsense
    UNSCORED = "unscored"  # not verified (yet)

    @property
    def failed(self) -> bool:
        """True when the evaluator, not the rollout, is at fault: the reward is missing, never zero."""
        return self in _FAILED


_FAILED = frozenset({Status.TIMEOUT, Status.ERROR, Status.UNSCORED})


class DropReason(StrEnum):
    """Why a rollout or token did not enter the update. Parts may add free text beside it."""

    CONSTANT_GROUP = "constant_group"
    TRUNCATED = "truncated"
    UNSCORED = "unscored"
    QUARANTINED = "quarantined"  # per-token arrays do not line up
    FILTERED = "filtered"
    MASKED = "masked"  # single tokens out of a kept rollout
    PRUNED = "pruned"
    STALE = "stale"
    SURPLUS = "surplus"
    FORCED = "forced"
    SKIPPED_STEP = "skipped_step"
    ZERO_SIGNAL = "zero_signal"  # kept, and counted in the divisor, but with advantage or weight exactly 0: no gradient


def prompt_id(text: str, answer: object = None, task: str = "", occurrence: int = 0) -> str:
    """Stable content hash (16 hex digits). ``occurrence`` keeps equal-text prompts of one data set apart."""
    content = json.dumps([task, text, answer, occurrence], sort_keys=True, default=str, ensure_ascii=False)
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem to roll out."""

    id: str
    text: str
    tokens: tuple[int, ...]
    answer: Any = None
    task: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, str], ...] = ()


@dataclass(slots=True)
class Verdict:
    """What a verifier found. ``correct`` is in [0, 1] (graded or binary) and None when the evaluator failed."""

    correct: float | None = None
    status: Status = Status.UNSCORED
    detail: str = ""
    components: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        assert (self.correct is None) == self.status.failed, (self.correct, self.status)


@dataclass(slots=True)
class StopRecord:
    """Where and why a rollout ended: ``index`` is the last response token kept (-1 for an empty response)."""

    reason: StopReason
    index: int
    part: str = ""
    limit: int | None = None
    detail: str = ""


@dataclass(slots=True)
class Cost:
    """Tokens by what was done with them, and wall seconds. Prefill counts each computed prompt token once."""

    prefilled: int = 0
    sampled: int = 0
    forced: int = 0
    reused: int = 0
    scored: int = 0  # teacher or reference passes
    probed: int = 0
    seconds: float = 0.0

    def add(self, other: Cost) -> None:
        for name in ("prefilled", "sampled", "forced", "reused", "scored", "probed", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class Rollout:
    """One response with everything that is known about it."""

    id: str
    prompt: Prompt
    sample: int
    tokens: IntArray  # [T]
    logprobs: FloatArray  # [T] behaviour log-probs under the distribution sampled from; NaN = not scored
    stop: StopRecord
    source: IntArray | None = None  # [T] Source values; None = all sampled
    versions: IntArray | None = None  # [T] policy version per token; None = all `version`
    version: int = 0
    signals: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)  # each [T, ...]
    text: str = ""
    verdict: Verdict = field(default_factory=Verdict)
    reward: float | None = None  # None = unscored
    components: dict[str, float] = field(default_factory=dict)
    keep: bool = True
    dropped: str = ""  # DropReason, or "" while kept
    dropped_by: str = ""
    weight: float = 1.0
    token_weight: FloatArray | None = None  # [T] loss weight per token
    token_mask: np.ndarray[Any, np.dtype[np.bool_]] | None = None  # [T] False = leaves numerator and divisor
    advantage: float | FloatArray | None = None  # one number or [T]
    inclusion: float = 1.0  # probability with which this rollout would have been kept
    parent: str = ""
    birth: int = 0
    cost: Cost = field(default_factory=Cost)

    @property
    def length(self) -> int:
        """Number of response tokens."""
        return len(self.tokens)

    @property
    def truncated(self) -> bool:
        """True when the response was cut before it ended by itself."""
        return self.stop.reason != StopReason.EOS

    def drop(self, reason: str, by: str, inclusion: float = 0.0) -> None:
        """Take the rollout out of the update; the first reason given stays."""
        if self.keep:
            self.keep, self.dropped, self.dropped_by, self.inclusion = False, str(reason), by, inclusion

    def check_aligned(self) -> None:
        """Raise DataError naming the rollout when a per-token array does not have exactly T entries."""
        arrays: dict[str, Any] = {"logprobs": self.logprobs, "source": self.source, "versions": self.versions}
        arrays |= {"token_weight": self.token_weight, "token_mask": self.token_mask}
        arrays |= {f"signals.{name}": value for name, value in self.signals.items()}
        for name, value in arrays.items():
            if value is not None and len(value) != self.length:
                raise DataError(f"rollout {self.id}: {name} has {len(value)} entries for {self.length} tokens")


@dataclass(slots=True)
class Group:
    """All rollouts of one prompt in one step. Sizes may differ from group to group; a group may be empty."""

    prompt: Prompt
    rollouts: list[Rollout] = field(default_factory=list)
    inclusion: float = 1.0  # probability with which the selector would have chosen this prompt

    @property
    def scored(self) -> list[Rollout]:
        """Rollouts whose verifier answered."""
        return [r for r in self.rollouts if not r.verdict.status.failed]

    def constant(self) -> bool:
        """True when all scored rollouts are equally correct: the one definition of a constant group.

        Correctness, not the shaped reward, decides, so that a length penalty does not make an all-wrong group look
        informative. A group with fewer than two scored rollouts is constant.
        """
        return len({r.verdict.correct for r in self.scored}) < 2


def flatten(groups: Sequence[Group]) -> list[Rollout]:
    """All rollouts, group by group: the row order every flat array of a step uses."""
    return [rollout for group in groups for rollout in group.rollouts]


def group_ids(groups: Sequence[Group]) -> IntArray:
    """Group index of every row of :func:`flatten` (N,)."""
    sizes = [len(group.rollouts) for group in groups]
    return np.repeat(np.arange(len(groups), dtype=np.int64), sizes)
