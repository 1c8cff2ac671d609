"""One update under way: what is fixed before the gradient pass, the loss of a micro-batch, the numbers at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from trimtab.core.errors import ConfigError
from trimtab.core.records import IntArray
from trimtab.core.slots import Correction, DistillView, TokenView, TopK
from trimtab.learn.aggregate import aggregate, token_coefficients
from trimtab.learn.batch import Batch, MicroBatch
from trimtab.learn.logprob import chunked_loss, token_logprobs, token_logprobs_entropy
from trimtab.model.attention import AttentionPlan

if TYPE_CHECKING:
    from trimtab.learn.learner import Learner

Outcome = Literal["updated", "nothing_to_train", "nonfinite"]


@dataclass(slots=True)
class UpdateResult:
    """What an update did.

    Attributes:
        outcome: ``updated`` when at least one optimiser step was taken; else the optimiser did not move: ``nonfinite``
            when a gradient norm was not finite, ``nothing_to_train`` when no token gave a gradient.
        metrics: means over the tokens trained on, and over optimiser steps (``loss``, ``grad_norm``).
        trained_tokens: distinct tokens in the loss, with a weight, of rows that went through a step that was taken.
        trained_rows: those rows.
        forwarded_tokens: packed tokens through the policy or reference, prompts and repeats included.
    """

    outcome: Outcome
    metrics: dict[str, float] = field(default_factory=dict)
    trained_tokens: int = 0
    trained_rows: int = 0
    forwarded_tokens: int = 0

    @classmethod
    def empty(cls) -> UpdateResult:
        """The result of not having been asked."""
        return cls("nothing_to_train")

    @classmethod
    def joined(cls, results: Sequence[UpdateResult]) -> UpdateResult:
        """Several updates of one step as one: the best outcome, counts summed, metrics of the last that has any."""
        if not results:
            return cls.empty()
        order: tuple[Outcome, ...] = ("updated", "nonfinite", "nothing_to_train")
        return cls(
            outcome=min((r.outcome for r in results), key=order.index),
            metrics=next((r.metrics for r in reversed(results) if r.metrics), {}),
            trained_tokens=sum(r.trained_tokens for r in results),
            trained_rows=sum(r.trained_rows for r in results),
            forwarded_tokens=sum(r.forwarded_tokens for r in results),
        )


@dataclass(slots=True)
class _Fixed:
    """What is known before the gradient pass of an optimiser batch, on the batch's token axis; None = not needed."""

    old: Tensor | None = None  # (T, 1 + K) proximal log-probs of the sampled token and the candidates
    reference_T: Tensor | None = None
    correction: Correction | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    """Some tokens of the batch: their places on its axis (t,), and their rows 0..num_rows-1 (t,)."""

    index_T: Tensor
    row_T: Tensor
    num_rows: int


class _Meter:
    """Masked means and sums, kept on the device until asked for."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}

    def mean(self, name: str, value_T: Tensor, mask_T: Tensor) -> None:
        self.total(name, torch.where(mask_T, value_T.detach(), 0.0).sum())
        self.counts[name] = self.counts.get(name, 0) + mask_T.sum()

    def total(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums.get(name, 0) + value.detach()

    def read(self) -> dict[str, float]:
        """All of them; waits for the device once."""
        if not self.sums:
            return {}
        values = [self.sums[name] / self.counts.get(name, torch.ones(())).clamp(min=1) for name in self.sums]
        return dict(zip(self.sums, torch.stack([v.float().cpu() for v in values]).tolist(), strict=True))


class Update:
    """One call of :meth:`Learner.update` under way."""

    def __init__(
        self, learner: Learner, batch: Batch, active_N: np.ndarray[Any, np.dtype[np.bool_]], entropy: bool
    ) -> None:
        self.learner, self.batch, self.active_N, self.entropy = learner, batch, active_N, entropy
        self.fixed = _Fixed()
        self.meter = _Meter()
        self.norms: list[float] = []
        self.steps_taken = self.forwarded = 0
        self.trained_T = torch.zeros(len(batch.mask_T), dtype=torch.bool)

    def prepare(self, single: bool) -> None:
        """The passes without gradient that come before the first step."""
        learner, rows = self.learner, self.batch.rows
        chosen = np.flatnonzero(self.active_N)
        if learner.uses_reference:
            assert learner.reference is not None
            self.fixed.reference_T = learner.sampled_logprobs(learner.reference, rows, chosen)
            self._count(chosen)
        if self._whole_batch():
            chosen = np.arange(rows.num_rows)  # the correction's statistics run over all rows
        if not single or self._whole_batch():
            self.fixed.old = self._current(chosen)

    def step(self, rows: IntArray) -> None:
        """One optimiser step on these rows; nothing happens when none of them can give a gradient."""
        if not self.active_N[rows].any():
            return
        learner = self.learner
        self.fixed.correction = self._whole_correction(rows) if self._whole_batch() else None
        coef_T = self._coefficients(rows)
        active = self._active(rows, coef_T)
        if not len(active):  # everything was rejected
            return
        for micro in self.batch.rows.micro_batches(learner.config.micro_batch_tokens, active):
            loss = self._micro_loss(micro, coef_T)
            loss.backward()
            learner.optimiser.collect()
            self.meter.total("loss", loss)
            self.forwarded += len(micro.tokens)
        norm, taken = learner.optimiser.step()
        self.norms.append(norm)
        if taken:
            self.steps_taken += 1
            chosen_N = torch.zeros(self.batch.rows.num_rows, dtype=torch.bool)
            chosen_N[active] = True
            self.trained_T |= (coef_T != 0) & chosen_N[self.batch.rows.row_T]

    def result(self) -> UpdateResult:
        """Numbers of the whole update; waits for the device once."""
        metrics = self.meter.read()
        num_steps = len(self.norms)
        if not num_steps:
            return UpdateResult("nothing_to_train", metrics, forwarded_tokens=self.forwarded)
        metrics["loss"] /= num_steps
        metrics |= {
            "grad_norm": float(np.mean(self.norms)),
            "lr": self.learner.optimiser.last_lr,
            "steps": float(self.steps_taken),
            "nonfinite_steps": float(sum(not math.isfinite(norm) for norm in self.norms)),
        }
        unusable: Outcome = "nonfinite" if metrics["nonfinite_steps"] else "nothing_to_train"
        return UpdateResult(
            outcome="updated" if self.steps_taken else unusable,
            metrics=metrics,
            trained_tokens=int(self.trained_T.sum()),
            trained_rows=len(self.batch.rows.row_T[self.trained_T].unique()),
            forwarded_tokens=self.forwarded,
        )

    # ------------------------------------------------------------ before the gradient pass

    def _coefficients(self, rows: IntArray) -> Tensor:
        """Coefficient times weight of every token's loss (T,), fixed on all kept tokens of these rows that no
        correction rejected."""
        batch, objective = self.batch, self.learner.objective
        name, constant = objective.aggregation() if objective else ("token-mean", None)
        chosen_N = torch.zeros(batch.rows.num_rows, dtype=torch.bool)
        chosen_N[rows] = True
        row_T = batch.rows.row_T
        mask_T = batch.mask_T & chosen_N[row_T]
        if self.fixed.correction is not None and self.fixed.correction.divisor_T is not None:
            mask_T = mask_T & self.fixed.correction.divisor_T
        limit = self.learner.max_new_tokens
        return token_coefficients(name, row_T, mask_T, batch.rows.num_rows, constant, limit) * batch.weight_T

    def _active(self, rows: IntArray, coef_T: Tensor) -> IntArray:
        """Those of these rows that can give a gradient under these coefficients."""
        row_T = self.batch.rows.row_T
        live_N = np.bincount(row_T[coef_T != 0].numpy(), minlength=self.batch.rows.num_rows) > 0
        return rows[self.active_N[rows] & live_N[rows]]

    def _whole_batch(self) -> bool:
        return any(part.whole_batch() for part in self.learner.correct)

    def _current(self, chosen: IntArray) -> Tensor:
        """Log-probs (T, 1 + K) under the policy as it stands, of the sampled token and the candidates."""
        self._count(chosen)
        return self.learner.score(self.learner.model, self.batch.rows, chosen, lambda micro: self._ids(_part(micro)))

    def _count(self, chosen: IntArray) -> None:
        micros = self.batch.rows.micro_batches(self.learner.config.micro_batch_tokens, chosen)
        self.forwarded += sum(len(micro.tokens) for micro in micros)

    def _whole_correction(self, rows: IntArray) -> Correction:
        """Correction of every token of the optimiser batch, on the batch's token axis; 1 and True elsewhere."""
        assert self.fixed.old is not None
        now = self._current(rows) if self.steps_taken else self.fixed.old
        place_N = torch.full((self.batch.rows.num_rows,), -1)
        place_N[rows] = torch.arange(len(rows))
        place_T = place_N[self.batch.rows.row_T]
        part = _Part(torch.nonzero(place_T >= 0).flatten(), place_T[place_T >= 0], len(rows))
        found = self._chain(self._view(part, self._take(now, part), self._take(self.fixed.old, part)))
        whole = Correction(torch.ones(len(place_T)), torch.ones(len(place_T), dtype=torch.bool))
        whole.weight_T[part.index_T], whole.mask_T[part.index_T] = found.weight_T.cpu(), found.mask_T.cpu()
        if found.divisor_T is not None:
            whole.divisor_T = torch.ones(len(place_T), dtype=torch.bool)
            whole.divisor_T[part.index_T] = found.divisor_T.cpu()
        return whole

    def _chain(self, view: TokenView) -> Correction:
        correction = Correction(torch.ones_like(view.old), torch.ones_like(view.mask_T))
        for part in self.learner.correct:
            correction = part.correct(view, correction)
        for name, value in correction.logged.items():
            self.meter.mean(name, value, view.mask_T)
        return correction

    # ------------------------------------------------------------ one micro-batch

    def _micro_loss(self, micro: MicroBatch, coef_T: Tensor) -> Tensor:
        """sum(coefficient * weight * loss) of these rows, a scalar attached to the graph."""
        part = _part(micro)
        plan = micro.plan(self.learner.device)
        hidden = micro.hidden(self.learner.model, plan)
        ids = self._ids(part)
        logprob, entropy_T = self._logprobs(hidden, ids)
        old = logprob.detach() if self.fixed.old is None else self._take(self.fixed.old, part)
        view = self._view(part, logprob, old)
        correction = self._correction(part, view)
        if self.learner.mode == "full":
            loss_T, logged = self._beside(view, self._full_loss(micro, plan, hidden))
        elif self.learner.mode == "candidates":
            loss_T, logged = self._candidate_loss(part, view, ids, logprob, old)
        else:
            loss_T, logged = self._objective(view)
        self._measure(part, view, entropy_T, logged)
        scale_T = self._take(coef_T, part) * correction.weight_T.detach()
        return aggregate(loss_T, torch.where(correction.mask_T & view.mask_T, scale_T, 0.0))

    def _take(self, x: Tensor, part: _Part) -> Tensor:
        return x[part.index_T].to(self.learner.device)

    def _ids(self, part: _Part) -> Tensor:
        """Ids (t, 1 + K) whose log-probs are needed: the sampled token, then the candidates or the top-k."""
        token_T = self._take(self.batch.rows.token_T, part)
        if self.learner.topk:
            return torch.cat([token_T[:, None], self._take(self.batch.signals["topk_ids"], part)], 1)
        if self.learner.mode != "candidates":
            return token_T[:, None]
        assert self.learner.distill is not None
        candidates = self.learner.distill.candidates(self._distill_view(part, torch.full(token_T.shape, torch.nan)))
        return torch.cat([token_T[:, None], candidates], 1)

    def _logprobs(self, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        learner = self.learner
        head, temperature, chunk = learner.model.head_weight, learner.temperature, learner.config.logprob_chunk
        if self.entropy:
            return token_logprobs_entropy(hidden, head, ids, temperature, chunk)
        return token_logprobs(hidden, head, ids, temperature, chunk), None

    def _view(self, part: _Part, now: Tensor, old: Tensor) -> TokenView:
        """The sampled tokens as objective and corrections see them, from log-probs (t, 1 + K) of their ids.

        The advantage is the task's times its weight, plus in ``sampled`` distillation the teacher's. The signals of
        ``candidates`` and ``full`` have no place here: pure distillation then shows an advantage of 0.
        """
        old_T = old[:, 0]
        behaviour_T, mask_T = self._take(self.batch.behaviour_T, part), self._take(self.batch.mask_T, part)
        advantage_T = self._take(self.batch.advantage_T, part)
        distill = self.learner.distill
        if distill is not None:
            advantage_T = distill.task_weight() * advantage_T
            if self.learner.mode == "sampled":
                advantage_T = advantage_T + distill.token_advantage(self._distill_view(part, old_T))
        reference_T = self.fixed.reference_T
        return TokenView(
            logp=now[:, 0],
            old=old_T,
            advantage=_inside(mask_T, advantage_T),
            behaviour=torch.where(behaviour_T.isnan(), old_T, behaviour_T),
            row_T=part.row_T.to(self.learner.device),
            num_rows=part.num_rows,
            mask_T=mask_T,
            reference=None if reference_T is None else self._take(reference_T, part),
            topk=self._topk(part, now[:, 1:]) if self.learner.topk else None,
        )

    def _topk(self, part: _Part, logp: Tensor) -> TopK:
        signals = self.batch.signals
        return TopK(
            ids=self._take(signals["topk_ids"], part),
            behaviour=self._take(signals["topk_logprobs"], part),
            logp=logp.detach(),
            token_T=self._take(self.batch.rows.token_T, part),
            vocab_size=len(self.learner.model.head_weight),
        )

    def _correction(self, part: _Part, view: TokenView) -> Correction:
        fixed = self.fixed.correction
        if fixed is not None:
            return Correction(self._take(fixed.weight_T, part), self._take(fixed.mask_T, part))
        found = self._chain(replace(view, logp=view.logp.detach()))
        if found.divisor_T is not None:
            slugs = ", ".join(link.slug for link in self.learner.correct)
            raise ConfigError(f"correct: one of {slugs} rejects tokens, so its whole_batch() must be true.")
        return found

    def _objective(self, view: TokenView) -> tuple[Tensor, dict[str, Tensor]]:
        assert self.learner.objective is not None
        found = self.learner.objective.token_loss(view)
        return found.loss_T, found.logged

    def _candidate_loss(
        self, part: _Part, view: TokenView, ids: Tensor, logprob: Tensor, old: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss (t,) on the candidates' log-probs, and on the sampled token's where the task counts too."""
        distill = self.learner.distill
        assert distill is not None
        scores = self._distill_view(part, view.old)
        advantage = distill.candidate_advantage(scores, ids[:, 1:], old[:, 1:])
        if advantage is None:
            return self._beside(view, distill.candidate_loss(scores, ids[:, 1:], logprob[:, 1:]))
        first = 1
        if self.learner.uses_task:  # the sampled token is one more candidate, so that a reference KL counts once
            first, advantage = 0, torch.cat([view.advantage[:, None], advantage], 1)
        wide = replace(view, logp=logprob[:, first:], old=old[:, first:], sampled_logp=view.logp)
        return self._objective(replace(wide, advantage=_inside(view.mask_T[:, None], advantage)))

    def _beside(self, view: TokenView, loss_T: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """A distillation loss plus what the objective adds: the task, a reference KL, or nothing."""
        logged = {"distill_loss": loss_T.detach()}
        if self.learner.uses_task or self.learner.uses_reference:
            task_T, task_logged = self._objective(view)
            loss_T, logged = loss_T + task_T, logged | task_logged
        return loss_T, logged

    def _full_loss(self, micro: MicroBatch, plan: AttentionPlan, hidden: Tensor) -> Tensor:
        learner = self.learner
        assert learner.teacher is not None
        assert learner.distill is not None
        with torch.no_grad():
            hidden_teacher = micro.hidden(learner.teacher.model, plan)
        return chunked_loss(
            hidden,
            learner.model.head_weight,
            hidden_teacher,
            learner.teacher.model.head_weight,
            learner.distill.full_loss,
            temperature=learner.temperature,
            teacher_temperature=learner.teacher.temperature,
            chunk_tokens=learner.config.logprob_chunk,
        )

    def _distill_view(self, part: _Part, old_T: Tensor) -> DistillView:
        signals = {name: self._take(value, part) for name, value in self.batch.signals.items()}
        return DistillView(
            token_T=self._take(self.batch.rows.token_T, part),
            row_T=part.row_T.to(self.learner.device),
            num_rows=part.num_rows,
            old_T=old_T.to(self.learner.device),
            mask_T=self._take(self.batch.mask_T, part),
            teacher_T=signals["teacher_logprob"],
            student_ids=signals.get("topk_ids"),
            student_logp=signals.get("topk_logprobs"),
            teacher_on_student=signals.get("teacher_on_student"),
            teacher_ids=signals.get("teacher_topk_ids"),
            teacher_logp=signals.get("teacher_topk_logprobs"),
        )

    def _measure(self, part: _Part, view: TokenView, entropy_T: Tensor | None, logged: dict[str, Tensor]) -> None:
        mask_T, gap_T = view.mask_T, view.old - view.behaviour
        self.meter.mean("ratio_mean", (view.logp.detach() - view.old).exp(), mask_T)
        self.meter.mean("behaviour_kl", gap_T.exp() - gap_T - 1, mask_T)
        self.meter.mean("behaviour_log_ratio", gap_T.abs(), mask_T)
        self.meter.total("unscored_tokens", (self._take(self.batch.behaviour_T, part).isnan() & mask_T).sum())
        if entropy_T is not None:
            self.meter.mean("entropy", entropy_T, mask_T)
        for name, value in logged.items():
            self.meter.mean(name, value, mask_T)


def _part(micro: MicroBatch) -> _Part:
    return _Part(micro.index_T, micro.row_T, len(micro.row_N))


def _inside(mask: Tensor, advantage: Tensor) -> Tensor:
    """Detached, and 0 outside the mask."""
    return torch.where(mask, advantage.detach(), 0.0)
