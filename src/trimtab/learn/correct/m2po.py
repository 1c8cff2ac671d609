"""A budget on the second moment of the importance ratio in place of a fixed clip (M2PO).

Source: Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs?, arXiv 2510.01161: its
algorithm (``mask``) and the authors' code (``cap``); AReaL's ``m2_threshold`` (``candidates: all``, ``ratio: prox``).
The scope is ours: statistics run over the whole optimiser batch, where the authors take the micro-batch, so that no
split can change the result. This costs one forward pass without gradient per optimiser step.

With d = log pi_theta - log pi_behaviour at the sampled token, r = exp(d), advantage A, budget tau, all tokens in the
loss:

1. Candidates: tokens pushed outward, (A > 0 and d > 0) or (A < 0 and d < 0). Tokens with A = 0 never are.
2. ``mask``: drop candidates, the largest d^2 first, until the mean of d^2 over those left is at most tau (a candidate
   above tau that is left alone is dropped too). Equal d^2 fall in the order of the tokens.
3. Loss -M r A, gradient through r; dropped tokens stay in the divisor.

``cap`` keeps outward tokens with d^2 at most t2: with n candidates, m ascending and k the first with sum_{i<=k} m_i +
(n - k) m_k >= n tau, t2 = m_{k-1} (0 for the first), no bound when the mean is inside the budget. The authors write it
as PPO's surrogate with bounds exp(+-sqrt t2), not tighter than 1 - miniclip_low and 1 + miniclip_high; the mask has the
same gradient and a loss value without the clipped constants. ``candidates: all`` takes every token whatever its sign
and advantage, asks for a mean strictly below tau and never drops the last candidate. ``ratio: prox`` measures the gap
from behaviour to the proximal policy and leaves the loss to another objective, PPO's clip as a rule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from trimtab.core.errors import ConfigError, invalid
from trimtab.core.lazy import lazy
from trimtab.core.part import Part, knob
from trimtab.core.slots import Correct, Correction, Distill, Objective, TokenLoss, TokenView

if TYPE_CHECKING:
    import torch

    from trimtab.core.config import RunConfig
else:
    torch = lazy("torch")

Mode = Literal["mask", "cap"]
Candidates = Literal["outward", "all"]
EXPONENT_CLAMP = 20.0


def outward(difference_T: torch.Tensor, advantage_T: torch.Tensor) -> torch.Tensor:
    """True (T,) where the update pushes the ratio further from 1."""
    return difference_T * advantage_T.sign() > 0


def budget_mask(moment_T: torch.Tensor, candidate_T: torch.Tensor, tau: float, strict: bool = False) -> torch.Tensor:
    """Kept tokens (T,) bool: the most candidates, smallest moment first, whose mean moment is at most ``tau``.

    Tokens that are no candidates are kept. ``strict`` asks for a mean below ``tau`` and keeps the smallest candidate.
    Sums run in float64, so that the order of the tokens cannot move the threshold by rounding.
    """
    ordered = torch.where(candidate_T, moment_T.double(), torch.inf)
    # reversed twice: of equal moments the earlier token is dropped first
    order = len(ordered) - 1 - torch.argsort(ordered.flip(0), stable=True)
    place = torch.arange(1, len(ordered) + 1, device=ordered.device)
    mean = ordered[order].cumsum(0) / place
    inside = (mean < tau) | (place == 1) if strict else mean <= tau
    # the mean of ever larger moments never falls, so that the kept candidates are a prefix; rounding must not cut it
    kept = inside.flip(0).to(torch.int64).cummax(0).values.flip(0).bool() if len(inside) else inside
    found = torch.zeros_like(candidate_T)
    found[order] = kept
    return found | ~candidate_T


def cap_threshold(moment_T: torch.Tensor, candidate_T: torch.Tensor, tau: float) -> torch.Tensor:
    """Scalar t2 of ``cap``, infinite when the mean over the candidates is at most ``tau``."""
    ordered = torch.where(candidate_T, moment_T.double(), torch.inf).sort().values
    n = candidate_T.sum()
    place = torch.arange(1, len(ordered) + 1, device=ordered.device)
    present = place <= n
    finite = torch.where(present, ordered, 0.0)
    capped = finite.cumsum(0) + (n - place) * finite
    first = (present & (capped < n * tau)).sum()  # capped sums rise with k: how many stay below is the k of the rule
    below = torch.where(place == first, finite, 0.0).sum()
    return torch.where(finite.sum() > n * tau, below, torch.inf)


@dataclass(kw_only=True)
class M2PO(Objective, Correct):
    """Drops the outward tokens that carry the second moment of the ratio over its budget; no clip beside it."""

    tau: float = knob(0.04, "budget tau on the mean squared log ratio of the candidates (M2_budget)", ge=0)
    mode: Mode = knob("mask", "drop candidates until their mean is inside (paper), or cap each of them (authors' code)")
    candidates: Candidates = knob("outward", "tokens pushed outward, or all of them (AReaL)")
    ratio: Literal["theta", "prox"] = knob("theta", "policy measured against behaviour: current, or proximal (AReaL)")
    miniclip_low: float = knob(0.0, "'cap': lower bound is at least as wide as 1 minus this; 0 = off", ge=0, lt=1)
    miniclip_high: float = knob(0.0, "'cap': upper bound is at least as wide as 1 plus this; 0 = off", ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode == "cap" and self.candidates == "all":
            raise invalid("m2po.candidates", self.candidates, "outward with mode 'cap', which bounds one side only")
        if self.mode == "mask" and (self.miniclip_low or self.miniclip_high):
            raise invalid("m2po.miniclip", (self.miniclip_low, self.miniclip_high), "0 unless mode is 'cap'")

    def required_slots(self) -> tuple[str, ...]:
        return ("objective", "correct") if self.ratio == "theta" else ("correct",)

    def check(self, parts: Mapping[str, list[Part]], settings: RunConfig) -> None:
        if self.ratio == "prox" and any(part is self for part in parts["objective"]):
            raise ConfigError(
                "objective: with ratio=prox m2po only masks, and has no trust region of its own. Set objective=clip."
            )
        for part in parts["distill"]:
            assert isinstance(part, Distill)
            if part.signal() != "sampled":
                raise ConfigError(
                    f"m2po: judges the sampled token by its advantage, and {part.slug!r} trains on "
                    f"{part.signal()!r} signals. Allowed beside it: a distillation of sampled tokens, or none."
                )

    def whole_batch(self) -> bool:
        return True

    def token_loss(self, view: TokenView) -> TokenLoss:
        difference_T = gap(view.logp, view.behaviour, view.mask_T)
        ratio_T = difference_T.clamp(-EXPONENT_CLAMP, EXPONENT_CLAMP).exp()
        return TokenLoss(-ratio_T * view.advantage, {"ratio": ratio_T.detach()})

    def correct(self, view: TokenView, correction: Correction) -> Correction:
        difference_T = gap(view.logp if self.ratio == "theta" else view.old, view.behaviour, view.mask_T).detach()
        usable_T = view.mask_T & correction.mask_T
        outward_T = outward(difference_T, view.advantage)
        candidate_T = usable_T & outward_T if self.candidates == "outward" else usable_T
        keep_T = self.kept(difference_T, candidate_T)
        moment_T = difference_T.square()
        mean = torch.where(candidate_T, moment_T, 0.0).sum() / candidate_T.sum().clamp(min=1)
        logged = {"m2": mean.expand(moment_T.shape), "m2_masked": (~keep_T).to(moment_T.dtype)}
        return replace(correction, mask_T=correction.mask_T & keep_T, logged=correction.logged | logged)

    def kept(self, difference_T: torch.Tensor, candidate_T: torch.Tensor) -> torch.Tensor:
        """Tokens (T,) bool that stay in the loss."""
        wide_T = difference_T.double()  # where the root of a square is the number itself
        moment_T = wide_T.square()
        if self.mode == "mask":
            return budget_mask(moment_T, candidate_T, self.tau, strict=self.candidates == "all")
        bound = cap_threshold(moment_T, candidate_T, self.tau).sqrt()
        low = bound.clamp(min=-math.log1p(-self.miniclip_low))
        high = bound.clamp(min=math.log1p(self.miniclip_high))
        return ~candidate_T | (wide_T.abs() <= torch.where(wide_T < 0, low, high))


def gap(logp_T: torch.Tensor, behaviour_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """Log ratio (T,), exactly 0 outside the mask."""
    return torch.where(mask_T, logp_T - behaviour_T, torch.zeros_like(logp_T))
