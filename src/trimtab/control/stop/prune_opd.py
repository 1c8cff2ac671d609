"""Prune-OPD: a response counts only as far as the teacher would still act locally like the student.

Source: "Prune-OPD: Efficient and Reliable On-Policy Distillation for Long-Horizon Reasoning", arXiv 2605.07804, and
the authors' release (yangzhch6/Prune-OPD), which this follows; the streaming form is ours.

On every sampled response token t, with S_t and T_t the top k of student and teacher:

1. Compatibility o_t = |S_t n T_t| / k, unsmoothed. Drift event b_t = [o_t < tau]; with ``teacher_top_p_accept``
   instead, b_t = [y_t is not in the shortest prefix of the teacher's ranked top k whose mass reaches tau].
2. Reliability w_t = max(0, 1 - w_drop C_t), C_t = sum_{u <= t} b_u an integer: non-increasing, 0 from event K =
   ceil(1 / w_drop) on ("severe drift").
3. Loss weight lambda_t = w_t + w_base. Weights leave the divisor alone: every valid token is counted.
4. Effective length E_i = #{t: w_t > 1e-8}.
5. Limit of the next step, from h = share of responses with E_i >= max(min_len, L - margin): if h >= hit_ratio, L
   grows by ``step``; after ``shrink_patience`` steps in a row without, it shrinks by ``step``; always min_len <= L <=
   min(max_len, the response limit of the run). L starts at init_len. A truncation is thus learnt with one step's
   delay, for the whole batch.

Forms. ``release``: as above; a response is generated up to L whatever happens in it. ``streaming``: the teacher reads
along in chunks and a response ends at its K-th event, whatever the chunk. The event's own token shows why it stopped
and stays in the record; it and all tokens with w_t = 0 are masked out, so the loss sees exactly the E_i reliable
tokens. These have the same weights lambda_t in both forms. With w_base = 0 the pruned tokens have weight 0 in the
release, so numerators are equal; the release's divisor of a token mean counts them and this one does not (the
objective's aggregate=constant makes the gradients equal too). With w_base > 0 the release trains pruned tokens at
weight w_base and streaming does not: that is its saving.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from trimtab.core.errors import ConfigError, DataError, invalid
from trimtab.core.lazy import lazy
from trimtab.core.part import Needs, Part, knob
from trimtab.core.records import DropReason, Group, Rollout, Source, flatten
from trimtab.core.slots import Filter, Keep, StepContext, StepRecord, Stop
from trimtab.generate.protocol import ChunkView, StopHook

if TYPE_CHECKING:
    import torch

    from trimtab.core.config import RunConfig
else:
    torch = lazy("torch")

Metric = Literal["overlap_ratio", "teacher_top_p_accept"]
LEAST_WEIGHT = 1e-8
OVERLAP, TEACHER_IDS, TEACHER_LOGP = "overlap", "teacher_topk_ids", "teacher_topk_logprobs"


def low_overlap(overlap: torch.Tensor, threshold: float) -> torch.Tensor:
    """Drift events of the metric ``overlap_ratio``: strictly below it (...) bool. NaN (not scored) is none."""
    return overlap < threshold


def outside_nucleus(
    token: torch.Tensor, teacher_ids: torch.Tensor, teacher_logp: torch.Tensor, threshold: float
) -> torch.Tensor:
    """Drift events of ``teacher_top_p_accept`` (...) bool; teacher top k (..., K), most likely first.

    The accepted set is the shortest prefix whose mass reaches the threshold, all K where none does.
    """
    mass = teacher_logp.exp()
    before = mass.cumsum(-1) - mass
    return ~((teacher_ids == token[..., None]) & (before < threshold)).any(-1)


def reliability(count: torch.Tensor, w_drop: float) -> torch.Tensor:
    """w from the number of events so far (int64), float64: the events are counted, not summed up as decrements."""
    return (1 - w_drop * count.double()).clamp(min=0)


def effective_length(weight_T: torch.Tensor) -> torch.Tensor:
    """E: tokens with a weight above 1e-8, a scalar; the length of a prefix, as weights never rise."""
    return (weight_T > LEAST_WEIGHT).sum()


def severe(w_drop: float) -> float:
    """K, the number of events at which the weight is 0: infinite without a drop."""
    return math.ceil((1 - LEAST_WEIGHT) / w_drop) if w_drop > 0 else math.inf


def hit_share(effective_N: Sequence[int], limit: int, min_len: int, margin: int) -> float:
    """h: share of responses that are reliable up to (nearly) the limit."""
    bound = max(min_len, limit - margin)
    return sum(length >= bound for length in effective_N) / len(effective_N)


def next_limit(
    limit: int, misses: int, share: float, *, lowest: int, highest: int, step: int, hit_ratio: float, patience: int
) -> tuple[int, int]:
    """(L, steps without enough hits) after a step whose share of hits was ``share``."""
    if share >= hit_ratio:
        return min(limit + step, highest), 0
    if misses + 1 >= patience:
        return max(limit - step, lowest), 0
    return limit, misses + 1


@dataclass
class Window:
    """The controller: the limit in force (0 before the first step), steps in a row without enough hits, last share."""

    limit: int = 0
    misses: int = 0
    share: float | None = None
    effective: float | None = None  # mean effective length of the last step


@dataclass
class PruneHook:
    """Counts drift events of running rollouts and ends each at its K-th."""

    owner: PruneOPD
    severe: float
    part: str
    every: int
    signals: frozenset[str] = frozenset({"teacher"})

    def start(self, num_slots: int, device: torch.device) -> dict[str, torch.Tensor]:
        return {"events": torch.zeros(num_slots, dtype=torch.int64, device=device)}

    def step(self, state: dict[str, torch.Tensor], view: ChunkView) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        column = torch.arange(view.token_BC.shape[1], device=view.token_BC.device)
        valid = column < view.count_B[:, None]
        event = self.owner.events(view.token_BC, view.signals) & valid
        count = state["events"][:, None] + event.cumsum(-1)
        reached = (count >= self.severe) & valid
        first = reached.to(torch.int64).argmax(-1)
        last = torch.where(reached.any(-1), first, torch.full_like(first, -1))
        return {"events": state["events"] + event.sum(-1)}, last


@dataclass(kw_only=True)
class PruneOPD(Stop, Filter):
    """Weights tokens by reliability, and learns how long responses are worth generating."""

    State: ClassVar[type] = Window
    inert: ClassVar[dict[str, object] | None] = {"w_drop": 0.0, "w_base": 0.0, "controller": False}

    metric: Metric = knob("overlap_ratio", "what counts as drift")
    k: int = knob(16, "k of both top-k sets", ge=1)
    threshold: float = knob(0.7, "tau: overlap below it, or teacher mass outside it, is drift", gt=0, le=1)
    w_drop: float = knob(
        0.01, "weight lost at each drift event; K = ceil(1 / w_drop) events end a response", ge=0, le=1
    )
    w_base: float = knob(0.5, "weight every generated token keeps", ge=0)
    controller: bool = knob(True, "learn the response limit L from the effective lengths")
    init_len: int = knob(2048, "L of the first step, tokens (1024 for the Qwen3-4B pair)", ge=1)
    min_len: int = knob(1024, "smallest L, tokens", ge=1)
    max_len: int = knob(12288, "largest L, tokens", ge=1)
    step: int = knob(100, "change of L, tokens", ge=1)
    margin: int = knob(100, "how far below L an effective length still counts as reaching it, tokens", ge=0)
    hit_ratio: float = knob(0.1, "share of responses that must reach L for it to grow", ge=0, le=1)
    shrink_patience: int = knob(3, "steps in a row without that share before L shrinks", ge=1)
    form: Literal["release", "streaming"] = knob("release", "prune the loss only, or stop drifted responses as well")
    chunk: int = knob(32, "tokens between readings of the teacher, 'streaming' only", ge=1)

    def needs(self) -> Needs:
        student_k = self.k if self.metric == "overlap_ratio" else 0
        return Needs(teacher=True, topk=student_k, teacher_topk=self.k)

    def required_slots(self) -> tuple[str, ...]:
        return ("stop", "filter") if self.controller or self.form == "streaming" else ("filter",)

    def check(self, parts: Mapping[str, list[Part]], settings: RunConfig) -> None:
        highest = min(self.max_len, settings.sampling.max_new_tokens)
        if self.controller and self.min_len > highest:
            allowed = f"at most {highest}, the smaller of max_len and sampling.max_new_tokens"
            raise invalid("stop.prune-opd.min_len", self.min_len, allowed, "Or set stop.prune-opd.controller=false.")
        for part in (p for chain in parts.values() for p in chain):
            asked = max(part.needs().topk, part.needs().teacher_topk)
            if self.metric == "overlap_ratio" and asked > self.k:
                raise ConfigError(
                    f"stop.prune-opd.k: {self.k}, but {part.slug!r} asks for a top k of {asked}, and both read the "
                    "same sets. Set the two k equal."
                )

    # ------------------------------------------------------------ before and during the rollout

    def limit(self, ctx: StepContext) -> int | None:
        if not self.controller:
            return None
        return self.state.limit or self.clipped(self.init_len, ctx)

    def hook(self, ctx: StepContext) -> StopHook | None:
        events = severe(self.w_drop)
        if self.form == "release" or events == math.inf:
            return None
        return PruneHook(self, events, self.slug, self.chunk)

    def clipped(self, length: int, ctx: StepContext) -> int:
        """A limit within the controller's range."""
        return max(self.min_len, min(length, self.max_len, ctx.max_new_tokens))

    # ------------------------------------------------------------ the loss

    def events(self, token: torch.Tensor, signals: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Drift events (...) bool, from the teacher's signals at the same tokens."""
        if self.metric == "overlap_ratio":
            return low_overlap(signals[OVERLAP], self.threshold)
        ids, logp = signals[TEACHER_IDS][..., : self.k], signals[TEACHER_LOGP][..., : self.k]
        return outside_nucleus(token, ids, logp, self.threshold)

    def weights(self, rollout: Rollout) -> torch.Tensor:
        """w (T,) float64 of a rollout; tokens the student did not choose are no events."""
        names = (OVERLAP,) if self.metric == "overlap_ratio" else (TEACHER_IDS, TEACHER_LOGP)
        missing = [name for name in names if name not in rollout.signals]
        if missing:
            raise DataError(
                f"rollout {rollout.id}: prune-opd needs the signal {missing[0]!r}; was the teacher run on it?"
            )
        signals = {name: torch.as_tensor(rollout.signals[name]) for name in names}
        event_T = self.events(torch.as_tensor(rollout.tokens), signals)
        if rollout.source is not None:
            event_T = event_T & torch.as_tensor(np.isin(rollout.source, (Source.SAMPLED, Source.REUSED)))
        return reliability(event_T.cumsum(-1), self.w_drop)

    def filter(self, groups: Sequence[Group], ctx: StepContext) -> Keep:
        rollouts = flatten(groups)
        weight = [self.weights(r).numpy() if readable(r) else np.ones(r.length) for r in rollouts]
        streaming = self.form == "streaming"
        return Keep(
            np.ones(len(rollouts), dtype=bool),
            reason=DropReason.PRUNED,
            token_weight=[(w + self.w_base).astype(np.float32) for w in weight] if self.w_drop or self.w_base else None,
            token_mask=[w > LEAST_WEIGHT for w in weight] if streaming and self.w_drop else None,
        )

    # ------------------------------------------------------------ after the step

    def observe(self, record: StepRecord, ctx: StepContext) -> None:
        effective = [int(effective_length(self.weights(r))) for r in flatten(record.groups) if readable(r)]
        if not effective:
            return
        self.state.effective = sum(effective) / len(effective)
        if not self.controller:
            return
        limit = self.state.limit or self.clipped(self.init_len, ctx)
        self.state.share = hit_share(effective, limit, self.min_len, self.margin)
        self.state.limit, self.state.misses = next_limit(
            limit,
            self.state.misses,
            self.state.share,
            lowest=self.min_len,
            highest=self.clipped(self.max_len, ctx),
            step=self.step,
            hit_ratio=self.hit_ratio,
            patience=self.shrink_patience,
        )

    def metrics(self) -> dict[str, float]:
        found = {"effective_length": self.state.effective, "hit_ratio": self.state.share}
        found |= {"next_limit": float(self.state.limit), "misses": float(self.state.misses)} if self.controller else {}
        return {name: value for name, value in found.items() if value is not None}


def readable(rollout: Rollout) -> bool:
    """False for a quarantined rollout, which has no signals and does not train."""
    return rollout.dropped != DropReason.QUARANTINED
