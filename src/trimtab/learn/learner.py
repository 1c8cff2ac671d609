"""The learner: from groups with advantages or teacher scores to optimiser steps.

Per optimiser batch: coefficients are fixed on the whole of it (:mod:`trimtab.learn.aggregate`); then, micro-batch by
micro-batch, the policy's log-probs, the proximal and behaviour log-probs beside them, the correction chain, the token
loss, and one backward pass of sum(coefficient * weight * loss); then one clipped AdamW step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.core.config import LearnerConfig
from trimtab.core.errors import ConfigError
from trimtab.core.records import FloatArray, Group, IntArray, Rollout
from trimtab.core.rng import generator
from trimtab.core.slots import Correct, Distill, Objective, StepContext
from trimtab.learn.batch import Batch, MicroBatch, Rows
from trimtab.learn.logprob import token_logprobs
from trimtab.learn.optimiser import MasterAdamW
from trimtab.learn.selfcheck import SelfCheck, compare
from trimtab.learn.teacher import Teacher
from trimtab.learn.update import Update, UpdateResult
from trimtab.model.transformer import Transformer

__all__ = ["Learner", "LearnerConfig", "UpdateResult"]


class Learner:
    """Trains ``model`` in place.

    Args:
        objective, correct, distill: the parts of these slots. No ``distill`` trains on the task advantage alone; no
            ``objective`` is for a distillation that is a loss by itself, summed as token mean.
        teacher: needed for ``full`` distillation only; the other modes read the rollouts' teacher signals.
        reference: frozen policy, needed when the objective asks for it.
        temperature: of sampling, at which all log-probs are taken; 0 (greedy) means 1, as for behaviour log-probs.
        max_new_tokens: static response limit, the constant of Dr.GRPO's aggregation.

    Raises:
        ConfigError: a part needs the teacher, the reference or an objective, and there is none.
    """

    def __init__(
        self,
        model: Transformer,
        config: LearnerConfig,
        *,
        objective: Objective | None,
        correct: Sequence[Correct] = (),
        distill: Distill | None = None,
        teacher: Teacher | None = None,
        reference: Transformer | None = None,
        temperature: float = 1.0,
        max_new_tokens: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.model, self.config, self.device = model.to(device), config, torch.device(device)
        self.objective, self.correct, self.distill = objective, list(correct), distill
        self.teacher, self.reference = teacher, reference
        self.temperature, self.max_new_tokens = temperature or 1.0, max_new_tokens
        self.mode = distill.signal() if distill else None
        self.uses_task = distill is None or distill.task_weight() > 0
        self.uses_reference = objective is not None and objective.needs().reference
        self.readers: list[Objective | Correct] = [
            *([objective] if objective else []),
            *self.correct,
        ]  # parts that are shown token views
        # candidates take the place of the top-k in the view; a part that needs both refuses the combination itself
        self.topk = 0 if self.mode == "candidates" else max((part.needs().topk for part in self.readers), default=0)
        self._check_parts()
        self.optimiser = MasterAdamW(
            model.parameters(),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            grad_clip=config.grad_clip,
            warmup_steps=config.warmup_steps,
        )

    def _check_parts(self) -> None:
        if self.objective is None and (self.uses_task or self.mode == "sampled"):
            raise ConfigError(
                "objective: none is set, but there are advantages to train on. Set objective, e.g. to clip."
            )
        if self.uses_reference and self.reference is None:
            raise ConfigError("objective: needs a reference policy, and the run has none. Set reference to a model.")
        if self.mode == "full" and self.teacher is None:
            raise ConfigError(
                "distill: a loss on the full vocabulary needs the teacher itself. Set teacher to a model."
            )

    # ------------------------------------------------------------ update

    def update(
        self, groups: Sequence[Group], *, epochs: int = 1, minibatches: int = 1, ctx: StepContext, entropy: bool = False
    ) -> UpdateResult:
        """Train on the kept rollouts of ``groups``: ``epochs`` passes, each cut into ``minibatches`` optimiser steps.

        The proximal policy is the one at the call. With a single step it is the policy being differentiated, so every
        ratio is exactly 1 and no pass is spent on it. Rows that cannot give a gradient (all advantages or weights 0, no
        teacher, no reference) are not computed but count in every divisor.

        Args:
            entropy: log the policy's entropy too, at the price of one more pass over each chunk of logits.

        Raises:
            DataError: a rollout that cannot be trained on (see :meth:`Batch.from_groups`).
        """
        batch = Batch.from_groups(groups, self._signals())
        if not self._reads_whole_rows():
            batch = batch.without_tails()
        active_N = self._active_rows(batch)
        if not active_N.any():
            return UpdateResult.empty()
        run = Update(self, batch, active_N, entropy)
        parts = self._parts(batch, epochs, minibatches, ctx)
        run.prepare(single=len(parts) == 1)
        for rows in parts:
            run.step(rows)
        return run.result()

    def _reads_whole_rows(self) -> bool:
        distill = [self.distill] if self.distill else []
        whole = any(part.whole_batch() for part in self.correct)
        return whole or any(part.whole_rows() for part in [*self.readers, *distill])

    def _parts(self, batch: Batch, epochs: int, minibatches: int, ctx: StepContext) -> list[IntArray]:
        """Rows of every optimiser step, in order."""
        if epochs == minibatches == 1:
            return [np.arange(batch.rows.num_rows)]
        draws = (generator(*ctx.key("minibatches", epoch)) for epoch in range(epochs))
        return [rows for draw in draws for rows in batch.minibatches(minibatches, draw)]

    def _active_rows(self, batch: Batch) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Rows (N,) bool that can give a gradient."""
        token_T = batch.mask_T & (batch.weight_T != 0)
        if self.distill is None and not self.uses_reference:
            token_T = token_T & (batch.advantage_T != 0)
        return np.bincount(batch.rows.row_T[token_T].numpy(), minlength=batch.rows.num_rows) > 0

    def _signals(self) -> list[str]:
        """Rollout signals that the distillation, the objective or a correction reads."""
        if self.topk:
            return list(dict.fromkeys([*self._teacher_signals(), "topk_ids", "topk_logprobs"]))
        return self._teacher_signals()

    def _teacher_signals(self) -> list[str]:
        if self.distill is None or self.mode == "full":
            return []
        needs = self.distill.needs()
        names = ["teacher_logprob"]
        if needs.topk:
            names += ["topk_ids", "topk_logprobs"]
        if needs.teacher_topk:
            names += ["teacher_topk_ids", "teacher_topk_logprobs"]
        if needs.topk and needs.teacher_topk:
            names.append("teacher_on_student")
        return names

    # ------------------------------------------------------------ log-probs without gradient

    def logprobs(self, rollouts: Sequence[Rollout]) -> list[FloatArray]:
        """Log-probs (T,) of each rollout's tokens under the present policy, at the learner's temperature."""
        rows = Rows.from_rollouts(rollouts)
        logprob_T = self.sampled_logprobs(self.model, rows, np.flatnonzero(rows.length_N))
        return [part.numpy() for part in logprob_T.split(rows.length_N.tolist())]

    def self_check(
        self, rollouts: Sequence[Rollout], tolerance: float, *, top_p: float = 1.0, top_k: int = 0
    ) -> SelfCheck:
        """Compare the engine's log-probs with the learner's own on at most one micro-batch of these rollouts.

        Args:
            tolerance: largest mean absolute difference, nats.
            top_p, top_k: truncation the engine was told to sample with; its log-probs must then be renormalised.

        Raises:
            MismatchError: they disagree; names the convention that would explain the numbers best.
        """
        present = [rollout for rollout in rollouts if rollout.length]
        micros = Rows.from_rollouts(present).micro_batches(self.config.micro_batch_tokens)
        if not micros:
            return SelfCheck(0, 0.0, 0.0)
        micro = micros[0]
        with torch.no_grad():
            hidden = micro.hidden(self.model, micro.plan(self.device))
            return compare(
                [present[row] for row in micro.row_N],
                hidden,
                self.model.head_weight,
                temperature=self.temperature,
                top_p=top_p,
                top_k=top_k,
                chunk_tokens=self.config.logprob_chunk,
                tolerance=tolerance,
            )

    def sampled_logprobs(self, model: Transformer, rows: Rows, chosen: IntArray) -> Tensor:
        """Log-probs of the response tokens under ``model`` (T,) on the CPU, 0 at rows that were not chosen."""
        return self.score(model, rows, chosen, lambda micro: rows.token_T[micro.index_T, None])[:, 0]

    @torch.no_grad()
    def score(self, model: Transformer, rows: Rows, chosen: IntArray, ids: Callable[[MicroBatch], Tensor]) -> Tensor:
        """Log-probs (T, width) on the CPU of ``ids(micro)`` (t, width) at every response token of the chosen rows."""
        out: Tensor | None = None
        for micro in rows.micro_batches(self.config.micro_batch_tokens, chosen):
            hidden = micro.hidden(model, micro.plan(self.device))
            ids_TC = ids(micro).to(self.device)
            logprob = token_logprobs(hidden, model.head_weight, ids_TC, self.temperature, self.config.logprob_chunk)
            if out is None:
                out = torch.zeros(len(rows.token_T), ids_TC.shape[1], dtype=logprob.dtype)
            out[micro.index_T] = logprob.cpu()
        return torch.zeros(len(rows.token_T), 1) if out is None else out

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimiser and step count; tensors are shared with the learner, not copied."""
        return {"model": self.model.state_dict(), "optimiser": self.optimiser.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where :meth:`state_dict` was taken."""
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
