"""Do engine and learner mean the same by a log-probability? Checked once, on the first batch.

A wrong convention (temperature, truncation, alignment, stale weights) makes every importance ratio wrong without any
error. The check compares numbers; when they differ it recomputes them under each likely mistake and names the best fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trimtab.core.errors import MismatchError
from trimtab.core.records import Rollout, Source
from trimtab.learn.logprob import softmax_dtype, token_logprobs

# A mistake explains the numbers when it leaves at most this share of the difference (or no more than the tolerance).
EXPLAINED = 0.25


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Compared tokens, and mean and largest absolute difference of their log-probs in nats."""

    tokens: int
    mean_gap: float
    max_gap: float


@dataclass(frozen=True, slots=True)
class Distribution:
    """Packed states (T, H) that predict the tokens ``token_T``, and the head that turns them into logits."""

    hidden: Tensor
    head_weight: Tensor
    token_T: Tensor
    chunk_tokens: int

    def logprobs(self, temperature: float, top_p: float = 1.0, top_k: int = 0) -> Tensor:
        """Log-probs (T,) under the tempered, truncated, renormalised distribution.

        A token outside the truncated set counts as inside: rounding decides at the edge, and the two must not differ.
        """
        logprob_T = token_logprobs(self.hidden, self.head_weight, self.token_T, temperature, self.chunk_tokens)
        if top_p >= 1.0 and not top_k:
            return logprob_T
        chunks = (kept_mass(p_CV, top_p, top_k) for p_CV in self.sorted_probabilities(temperature, self.hidden))
        return logprob_T - torch.cat(list(chunks)).log()

    def sorted_probabilities(self, temperature: float, hidden: Tensor) -> Iterator[Tensor]:
        """Probabilities (C, V) of successive chunks of states, most likely first."""
        for part in hidden.split(self.chunk_tokens):
            logits = part @ self.head_weight.T
            probability = torch.softmax(logits.to(softmax_dtype(logits)) / temperature, -1)
            yield probability.sort(-1, descending=True).values


def kept_mass(sorted_CV: Tensor, top_p: float, top_k: int) -> Tensor:
    """Probability (C,) of what top-k, then top-p within it, leave; ``sorted_CV`` descending."""
    top = sorted_CV[:, :top_k] if top_k else sorted_CV
    share = top / top.sum(-1, keepdim=True)
    before = share.cumsum(-1) - share
    return torch.where(before < top_p, top, 0.0).sum(-1)


def compare(
    rollouts: Sequence[Rollout],
    hidden: Tensor,
    head_weight: Tensor,
    *,
    temperature: float,
    top_p: float,
    top_k: int,
    chunk_tokens: int,
    tolerance: float,
) -> SelfCheck:
    """Compare the behaviour log-probs of freshly sampled tokens with those the learner computes.

    Args:
        rollouts: whose response tokens, one after the other, ``hidden`` (T, H) predicts.
        top_p, top_k: truncation that the engine applied by order.
        tolerance: largest mean absolute difference, nats.

    Raises:
        MismatchError: the mean difference is larger, or not a number.
    """
    device = hidden.device
    engine_T = torch.from_numpy(np.concatenate([r.logprobs for r in rollouts]).astype(np.float32)).to(device)
    token_T = torch.from_numpy(np.concatenate([r.tokens for r in rollouts]).astype(np.int64)).to(device)
    sampled_T = torch.from_numpy(np.concatenate([_sampled(r) for r in rollouts])).to(device) & ~engine_T.isnan()
    if not sampled_T.any():
        return SelfCheck(0, 0.0, 0.0)
    model = Distribution(hidden, head_weight, token_T, chunk_tokens)
    gap_T = (engine_T - model.logprobs(temperature, top_p, top_k)).abs()[sampled_T]
    check = SelfCheck(int(sampled_T.sum()), gap_T.mean().item(), gap_T.max().item())
    if check.mean_gap <= tolerance:
        return check
    length_N = torch.tensor([r.length for r in rollouts], device=device)
    gaps = dict(_explanations(model, engine_T, sampled_T, length_N, temperature, top_p, top_k))
    raise MismatchError(_message(check, tolerance, gaps))


def _sampled(rollout: Rollout) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    if rollout.source is None:
        return np.ones(rollout.length, dtype=np.bool_)
    return np.asarray(rollout.source) == Source.SAMPLED


def _explanations(
    model: Distribution,
    engine_T: Tensor,
    sampled_T: Tensor,
    length_N: Tensor,
    temperature: float,
    top_p: float,
    top_k: int,
) -> Iterator[tuple[str, float]]:
    """Each likely mistake of the engine, with the mean absolute difference it leaves."""

    def gap(predicted_T: Tensor, counted_T: Tensor = sampled_T) -> float:
        return (engine_T - predicted_T).abs()[counted_T].mean().item()

    if temperature != 1.0:
        yield "temperature not applied", gap(model.logprobs(1.0, top_p, top_k))
        yield "temperature applied twice", gap(model.logprobs(temperature**2, top_p, top_k))
    plain_T = model.logprobs(temperature)
    if top_p < 1.0 or top_k:
        yield "truncated distribution not renormalised", gap(plain_T)
    else:
        for name, p, k in _fit_truncation(model, engine_T - plain_T, sampled_T, temperature):
            yield f"{name} truncated distribution renormalised", gap(model.logprobs(temperature, p, k))
    end_N = length_N.cumsum(0)
    for shift, edge_N in ((1, end_N - length_N), (-1, end_N - 1)):
        inside_T = sampled_T.clone()
        inside_T[edge_N] = False
        if inside_T.any():
            name = f"shifted by one token ({'later' if shift > 0 else 'earlier'})"
            yield name, gap(plain_T.roll(shift), inside_T)


def _fit_truncation(
    model: Distribution, excess_T: Tensor, sampled_T: Tensor, temperature: float
) -> Iterator[tuple[str, float, int]]:
    """The top-k and the top-p that would explain the token whose log-prob is raised the most.

    Renormalising adds -log(kept mass). Under top-p no token keeps less than p, and the least kept mass is the best
    estimate of p; under top-k that token tells k.
    """
    excess_T = torch.where(sampled_T, excess_T, -torch.inf)
    token = int(excess_T.argmax())
    mass = (-excess_T[token]).exp().item()
    if mass >= 1.0:
        return
    (sorted_1V,) = model.sorted_probabilities(temperature, model.hidden[token : token + 1])
    top_k = int((sorted_1V[0].cumsum(0) - mass).abs().argmin()) + 1
    yield f"top-k = {top_k}", 1.0, top_k
    yield f"top-p = {mass:.3f}", mass * (1 - 1e-5), 0


def _message(check: SelfCheck, tolerance: float, gaps: dict[str, float]) -> str:
    best = min(gaps, key=lambda name: gaps[name], default="")
    explained = bool(best) and gaps[best] <= max(tolerance, EXPLAINED * check.mean_gap)
    verdict = f"the engine's numbers fit '{best}' best" if explained else "no wrong convention fits: different weights"
    tried = ", ".join(f"{name} {gap:.4g}" for name, gap in sorted(gaps.items(), key=lambda item: item[1]))
    return (
        f"engine and learner disagree on the log-probs of {check.tokens} sampled tokens: mean |difference| "
        f"{check.mean_gap:.4g} nats, largest {check.max_gap:.4g}, tolerance {tolerance:.4g}. Most likely: {verdict}. "
        f"Mean |difference| under each assumption: {tried or 'none applies'}."
    )
