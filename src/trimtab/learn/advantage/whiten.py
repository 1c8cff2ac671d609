"""Token-level whitening of the advantage over the whole batch (REINFORCE++).

Source: REINFORCE++, arXiv 2501.03262, section 3 (global advantage normalisation), constants as in OpenRLHF and verl.

A <- (A - mean) / sqrt(var + eps), mean and variance (ddof 1) over all response tokens of scored rollouts, eps = 1e-8
under the root. With an outcome reward and gamma = 1 the return of every token is the rollout's reward, so that a
rollout counts once per token. Equal rewards, or a single token, give exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from trimtab.core.lazy import lazy
from trimtab.core.part import Needs, knob
from trimtab.core.slots import Advantage, AdvantageRows

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")


def whitened(value_T: torch.Tensor, mask_T: torch.Tensor, eps: float) -> torch.Tensor:
    """``value_T`` (T,) minus its mean, over its deviation, both over the mask; 0 outside it.

    Sums run in float64, where the mean of equal float32 values is exactly that value.
    """
    zero = torch.zeros((), dtype=torch.float64, device=value_T.device)
    wide_T, count = value_T.double(), mask_T.sum()
    mean = torch.where(mask_T, wide_T, zero).sum() / count.clamp(min=1)
    centred_T = torch.where(mask_T, wide_T - mean, zero)
    variance = centred_T.square().sum() / (count - 1).clamp(min=1)
    return (centred_T / (variance + eps).sqrt()).to(value_T.dtype)


@dataclass(kw_only=True)
class Whiten(Advantage):
    """Whitens over all tokens of the batch; needs no group."""

    per_token: ClassVar[bool] = True

    eps: float = knob(1e-8, "added to the variance", gt=0)

    def needs(self) -> Needs:
        return Needs(verdicts=True)

    def advantage(self, rows: AdvantageRows, advantage: torch.Tensor) -> torch.Tensor:
        return whitened(advantage, rows.scored_N[rows.row_T], self.eps)
