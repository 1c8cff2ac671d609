"""The clipped policy-gradient objective, with the switches in which the GRPO family differs.

Sources: PPO, arXiv 1707.06347, equation 7; GRPO, arXiv 2402.03300, equation 3; DAPO, arXiv 2503.14476, equation 8
(separate clip ranges, token mean); GSPO, arXiv 2507.18071, equations 5 to 7 (sequence ratio) and 13 to 15
(GSPO-token); dual clip, arXiv 1912.09729, equation 5. Clamps and constants as in verl, two-sided clipping as in TRL.

Per token, in stages, each a function below. ``old`` is the proximal policy, ``theta`` the current one:

1. Ratio: ``token`` w = exp(logp_theta - logp_old), the exponent clamped to +-20; ``sequence`` the exponential of the
   row's mean over its trained tokens, clamped to at most 10; ``sequence-token`` its value with each token's own
   gradient.
2. Surrogate: -min(w A, clip(w, 1 - eps_low, 1 + eps_high) A). Two-sided: the unclipped w is replaced by min(w,
   delta).
3. Dual clip: where A < 0, at most -c A.
4. KL to the reference policy at the sampled tokens, d = logp_theta - logp_ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d
   - 1, k3+ = the value of k3 with the gradient of k2. As a loss term, k1 has zero expected gradient and only k2 and
   k3+ estimate the gradient of the KL.

On several candidates a token (T, K) the ratio is per candidate and the losses are summed over K. At theta = old every
ratio is 1 and the gradient is that of REINFORCE, -A grad logp, whatever the clip range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trimtab.core.errors import ConfigError, invalid
from trimtab.core.lazy import lazy
from trimtab.core.part import Needs, Part, knob
from trimtab.core.segments import segment_mean
from trimtab.core.slots import AggregationName, Distill, Objective, TokenLoss, TokenView

if TYPE_CHECKING:
    import torch

    from trimtab.core.config import RunConfig
else:
    torch = lazy("torch")

Level = Literal["token", "sequence", "sequence-token"]
Estimator = Literal["k1", "k2", "k3", "k3+"]
TOKEN_CLAMP = 20.0
SEQUENCE_CLAMP = 10.0
KL_CLAMP = 10.0


def log_ratio(logp: torch.Tensor, old: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """``logp - old``, exactly 0 with gradient 0 outside the mask, whatever stands there."""
    mask = mask_T if logp.ndim == 1 else mask_T[:, None]
    return torch.where(mask, logp - old, torch.zeros_like(logp))


def token_ratio(difference: torch.Tensor) -> torch.Tensor:
    """Importance ratio per token or candidate."""
    return difference.clamp(-TOKEN_CLAMP, TOKEN_CLAMP).exp()


def sequence_ratio(
    difference_T: torch.Tensor, row_T: torch.Tensor, num_rows: int, mask_T: torch.Tensor
) -> torch.Tensor:
    """Length-normalised ratio of the whole row at each of its tokens (T,); gradient to all tokens of the row."""
    return segment_mean(difference_T, row_T, num_rows, mask_T)[row_T].clamp(max=SEQUENCE_CLAMP).exp()


def sequence_token_ratio(
    difference_T: torch.Tensor, row_T: torch.Tensor, num_rows: int, mask_T: torch.Tensor
) -> torch.Tensor:
    """Value of :func:`sequence_ratio`, gradient to the token alone (T,)."""
    sequence_T = sequence_ratio(difference_T.detach(), row_T, num_rows, mask_T)
    return sequence_T * (difference_T - difference_T.detach()).exp()


def surrogate(
    ratio: torch.Tensor, advantage: torch.Tensor, eps_low: float, eps_high: float, delta: float = 0.0
) -> torch.Tensor:
    """Clipped loss, shape of ``ratio``; ``delta`` > 0 bounds the unclipped ratio as well."""
    free = ratio.clamp(max=delta) if delta > 0 else ratio
    return -torch.minimum(free * advantage, ratio.clamp(1 - eps_low, 1 + eps_high) * advantage)


def dual_clip(loss: torch.Tensor, advantage: torch.Tensor, c: float) -> torch.Tensor:
    """At most ``-c A`` where the advantage is negative: one very unlikely token cannot dominate a step."""
    return torch.where(advantage < 0, torch.minimum(loss, -c * advantage), loss)


def kl_estimate(logp_T: torch.Tensor, reference_T: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """KL(theta || reference) estimated at the sampled tokens (T,)."""
    d_T = logp_T - reference_T
    if estimator == "k1":
        return d_T
    k2_T = d_T.square() / 2
    if estimator == "k2":
        return k2_T
    bounded_T = d_T.clamp(-TOKEN_CLAMP, TOKEN_CLAMP)
    k3_T = ((-bounded_T).exp() + bounded_T - 1).clamp(-KL_CLAMP, KL_CLAMP)
    return k3_T if estimator == "k3" else k3_T.detach() + k2_T - k2_T.detach()


def clip_shares(
    ratio: torch.Tensor, advantage: torch.Tensor, eps_low: float, eps_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """1 where the lower (A < 0) and the upper (A > 0) bound cut the gradient, else 0; shape of ``ratio``."""
    low = (ratio < 1 - eps_low) & (advantage < 0)
    high = (ratio > 1 + eps_high) & (advantage > 0)
    return low.to(ratio.dtype), high.to(ratio.dtype)


@dataclass(kw_only=True)
class Clip(Objective):
    """Ratio, surrogate, clip and KL of the policy loss (PPO, GRPO, Dr.GRPO, DAPO, RLOO, REINFORCE++, GSPO)."""

    ratio: Level = knob("token", "importance ratio: per token, per sequence (GSPO), or its value with token gradients")
    eps_low: float = knob(0.2, "lower clip range e_lo", ge=0, le=1)
    eps_high: float = knob(0.2, "upper clip range e_hi (DAPO 0.28)", ge=0)
    dual_clip: float = knob(0.0, "bound c on the loss where A < 0, above 1 (verl 3, DAPO 10); 0 = off", ge=0)
    delta: float = knob(0.0, "bound on the unclipped ratio, above 1 + eps_high (TRL); 0 = off", ge=0)
    kl_coef: float = knob(0.0, "weight beta of the KL to the reference policy; 0 = off (GRPO paper 0.04)", ge=0)
    kl: Estimator = knob("k3", "estimator of that KL")
    aggregate: AggregationName = knob("token-mean", "how token losses are summed")
    constant: float = knob(0.0, "divisor of 'constant'; 0 = rollouts times the response limit (Dr.GRPO in TRL)", ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.dual_clip <= 1:
            raise invalid("objective.dual_clip", self.dual_clip, "0 (off) or a value above 1")
        if 0 < self.delta <= 1 + self.eps_high:
            raise invalid("objective.delta", self.delta, f"0 (off) or a value above 1 + eps_high = {1 + self.eps_high}")
        if self.constant > 0 and self.aggregate != "constant":
            raise invalid("objective.constant", self.constant, "0 unless aggregate is 'constant'")

    def needs(self) -> Needs:
        return Needs(reference=self.kl_coef > 0)

    def check(self, parts: Mapping[str, list[Part]], settings: RunConfig) -> None:
        for part in parts["distill"]:
            assert isinstance(part, Distill)
            if self.ratio != "token" and part.signal() == "candidates":
                raise ConfigError(
                    f"objective.ratio: {self.ratio!r} averages over the sampled tokens, and {part.slug!r} trains on "
                    "several candidates a token. Allowed here: token."
                )

    def whole_rows(self) -> bool:
        return self.ratio != "token"

    def aggregation(self) -> tuple[AggregationName, float | None]:
        return self.aggregate, self.constant or None

    def token_loss(self, view: TokenView) -> TokenLoss:
        difference = log_ratio(view.logp, view.old, view.mask_T)
        ratio = self.importance(difference, view)
        loss = surrogate(ratio, view.advantage, self.eps_low, self.eps_high, self.delta)
        if self.dual_clip > 0:
            loss = dual_clip(loss, view.advantage, self.dual_clip)
        low, high = clip_shares(ratio, view.advantage, self.eps_low, self.eps_high)
        logged = {"ratio": ratio, "clip_low": low, "clip_high": high}
        if loss.ndim == 2:
            loss, logged = loss.sum(-1), {name: value.mean(-1) for name, value in logged.items()}
        if self.kl_coef > 0:
            kl_T = self.penalty(view)
            loss, logged["kl"] = loss + self.kl_coef * kl_T, kl_T
        return TokenLoss(loss, {name: value.detach() for name, value in logged.items()})

    def importance(self, difference: torch.Tensor, view: TokenView) -> torch.Tensor:
        """The ratio of stage 1, shape of ``difference``."""
        if self.ratio == "token":
            return token_ratio(difference)
        compute = sequence_ratio if self.ratio == "sequence" else sequence_token_ratio
        return compute(difference, view.row_T, view.num_rows, view.mask_T)

    def penalty(self, view: TokenView) -> torch.Tensor:
        """The KL of stage 4 (T,), 0 outside the mask."""
        logp_T = view.logp if view.logp.ndim == 1 else view.sampled_logp
        assert logp_T is not None
        assert view.reference is not None
        kl_T = kl_estimate(logp_T, view.reference, self.kl)
        return torch.where(view.mask_T, kl_T, torch.zeros_like(kl_T))
