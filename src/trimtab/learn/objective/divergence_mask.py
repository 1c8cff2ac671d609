"""Trust regions by divergence at a state in place of a clip on the ratio: DPPO and predictive divergence masks.

Sources: DPPO, arXiv 2602.04879 (Rethinking the Trust Region in LLM RL) and its code; Predictive Divergence Masks for
LLM RL, arXiv 2607.10848. Threshold, K and the top-k estimators of the latter follow a third-party description.

At one state, mu the rollout policy, pi the current one, k the sampled token, A its advantage, r = pi_k / mu_k,
everything detached but the last factor:

    loss = -A min(r, C) M log pi_k

Masked tokens (M = 0) stay in the divisor. M = 0 where the state is outside the trust region and the token's own step
leads further out:

- Divergence D: ``binary-tv`` |pi_k - mu_k|; ``binary-kl`` of the split {k, rest}; ``topk-kl`` KL(mu || pi) and
  ``topk-tv`` over S (the top-k of mu, and k) with everything else in one tail bucket of at least 1e-12.
- ``ratio`` (DPPO): (A > 0, D > delta_high, pi_k > mu_k) or (A < 0, D > delta_low, pi_k < mu_k).
- ``predictive``: D > delta (by the sign of A) and A c_k > 0 with c_k = (pi_k - mu_k) + sum_i pi_i (mu_i - pi_i), the
  first-order change of KL(mu || pi) along the token's own gradient step on the logits. The sum runs over S plus a tail
  term, ``aggregated`` pi_R (mu_R - pi_R) or ``uniform``, the same over the number of tokens in the tail.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trimtab.core.errors import ConfigError, invalid
from trimtab.core.lazy import lazy
from trimtab.core.part import Needs, Part, knob
from trimtab.core.slots import Distill, Objective, TokenLoss, TokenView, TopK

if TYPE_CHECKING:
    import torch

    from trimtab.core.config import RunConfig
else:
    torch = lazy("torch")

Divergence = Literal["topk-kl", "topk-tv", "binary-tv", "binary-kl"]
Tail = Literal["aggregated", "uniform"]
LEAST_MASS = 1e-12
EXPONENT_CLAMP = 20.0


@dataclass(frozen=True, slots=True)
class States:
    """Probabilities of mu and pi on S, the sampled token last, and of the tail; float32, detached.

    Attributes:
        mu, pi: (T, K + 1); a top-k entry that is the sampled token itself is 0 in both.
        mu_tail, pi_tail: (T,), exactly 0 where S is the whole vocabulary.
        tail_size: (T,) tokens outside S.
    """

    mu: torch.Tensor
    pi: torch.Tensor
    mu_tail: torch.Tensor
    pi_tail: torch.Tensor
    tail_size: torch.Tensor


def states(topk: TopK, k: int, behaviour_T: torch.Tensor, logp_T: torch.Tensor) -> States:
    """Both policies on the ``k`` most likely tokens of mu and the sampled one."""
    other = topk.ids[:, :k] != topk.token_T[:, None]
    mu = torch.cat([topk.behaviour[:, :k].float().exp() * other, behaviour_T.float().exp()[:, None]], 1)
    pi = torch.cat([topk.logp[:, :k].float().exp() * other, logp_T.float().exp()[:, None]], 1)
    tail_size = topk.vocab_size - 1 - other.sum(-1)
    return States(mu, pi, tail(mu, tail_size), tail(pi, tail_size), tail_size)


def tail(mass: torch.Tensor, tail_size: torch.Tensor) -> torch.Tensor:
    """What a policy leaves outside S (T,)."""
    left_T = (1 - mass.sum(-1)).clamp(min=LEAST_MASS)
    return torch.where(tail_size > 0, left_T, torch.zeros_like(left_T))


def xlogx(mu: torch.Tensor, pi: torch.Tensor) -> torch.Tensor:
    """mu log(mu / pi), 0 where mu is 0."""
    return torch.where(mu > 0, mu * (mu.clamp(min=LEAST_MASS) / pi.clamp(min=LEAST_MASS)).log(), torch.zeros_like(mu))


def topk_divergence(s: States, kind: Literal["topk-kl", "topk-tv"]) -> torch.Tensor:
    """D (T,) with the tail in one bucket; the KL is never above that of the full distributions."""
    if kind == "topk-kl":
        return xlogx(s.mu, s.pi).sum(-1) + xlogx(s.mu_tail, s.pi_tail)
    return ((s.mu - s.pi).abs().sum(-1) + (s.mu_tail - s.pi_tail).abs()) / 2


def binary_divergence(mu: torch.Tensor, pi: torch.Tensor, kind: Literal["binary-tv", "binary-kl"]) -> torch.Tensor:
    """D of the split into the sampled token and the rest, from its probabilities."""
    if kind == "binary-tv":
        return (pi - mu).abs()
    return xlogx(mu, pi) + xlogx((1 - mu).clamp(min=0), (1 - pi).clamp(min=0))


def predicted_change(s: States, how: Tail) -> torch.Tensor:
    """c (T,): whether a step that raises the sampled token raises (> 0) or lowers KL(mu || pi)."""
    size = s.tail_size.clamp(min=1) if how == "uniform" else 1
    side_T = (s.pi * (s.mu - s.pi)).sum(-1) + s.pi_tail * (s.mu_tail - s.pi_tail) / size
    return s.pi[:, -1] - s.mu[:, -1] + side_T


@dataclass(kw_only=True)
class DivergenceMask(Objective):
    """Masks tokens of states that drifted too far and whose step would drift further; no PPO clip."""

    divergence: Divergence = knob("topk-kl", "drift D of a state: over the top-k and a tail, or over {sampled, rest}")
    direction: Literal["predictive", "ratio"] = knob(
        "predictive", "how outward is told: predicted change of D, or DPPO"
    )
    k: int = knob(20, "K, most likely rollout tokens that are compared; unused by binary divergence with ratio", ge=1)
    delta_low: float = knob(0.15, "bound on D where A < 0 (binary-kl 0.05)", ge=0)
    delta_high: float = knob(0.15, "bound on D where A > 0 (binary-kl 0.05)", ge=0)
    cap: float = knob(20.0, "C, bound on the importance ratio (verl 20, Stable-RL 10)", gt=0)
    tail: Tail = knob("aggregated", "tail term of the predicted change")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.direction == "predictive" and self.divergence != "topk-kl":
            raise invalid(
                "objective.divergence",
                self.divergence,
                "topk-kl with direction 'predictive', which predicts the change of that KL",
                "Or set objective.direction=ratio.",
            )

    def needs(self) -> Needs:
        return Needs(topk=self.k if self.divergence.startswith("topk") else 0)

    def check(self, parts: Mapping[str, list[Part]], settings: RunConfig) -> None:
        for part in parts["distill"]:
            assert isinstance(part, Distill)
            if part.signal() == "candidates":
                raise ConfigError(
                    f"objective: divergence-mask judges the sampled token, and {part.slug!r} trains on several "
                    "candidates a token. Set objective=clip."
                )

    def token_loss(self, view: TokenView) -> TokenLoss:
        behaviour_T = torch.where(view.mask_T, view.behaviour, torch.zeros_like(view.behaviour))
        logp_T = torch.where(view.mask_T, view.logp, torch.zeros_like(view.logp))
        now_T = logp_T.detach()
        divergence_T, change_T = self.drift(view.topk, behaviour_T, now_T)
        outward_T = view.advantage * change_T > 0
        far_T = divergence_T > torch.where(view.advantage > 0, self.delta_high, self.delta_low)
        keep_T = ~(outward_T & far_T)
        ratio_T = (now_T - behaviour_T).clamp(-EXPONENT_CLAMP, EXPONENT_CLAMP).exp()
        weight_T = torch.where(keep_T, view.advantage * ratio_T.clamp(max=self.cap), torch.zeros_like(ratio_T))
        logged = {"ratio": ratio_T, "divergence": divergence_T, "divergence_masked": (~keep_T).to(ratio_T.dtype)}
        return TokenLoss(-weight_T * logp_T, logged)

    def drift(
        self, topk: TopK | None, behaviour_T: torch.Tensor, logp_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """D (T,), and the change of it (T,) whose sign says where the token's own ascent step leads."""
        if self.divergence == "binary-tv" or self.divergence == "binary-kl":
            mu, pi = behaviour_T.exp(), logp_T.exp()
            return binary_divergence(mu, pi, self.divergence), logp_T - behaviour_T
        assert topk is not None
        s = states(topk, self.k, behaviour_T, logp_T)
        change_T = predicted_change(s, self.tail) if self.direction == "predictive" else logp_T - behaviour_T
        return topk_divergence(s, self.divergence), change_T
