"""Importance weights and rejection between the engine's policy and the learner's (TIS, MIS, IcePop).

Sources: FP8-RL, arXiv 2601.18150 (token-level truncation at 2), and verl's rollout correction, whose options these are.

mu is the rollout engine, pi_old the learner's policy before the updates, l = log pi_old - log mu at the sampled token,
clamped to +-20 before it is exponentiated, rho = exp(l). Everything is detached.

Weights, a factor on the token's loss that leaves the divisor alone:

- ``token``: w = rho. ``sequence``: w = exp(sum of l over the row), the same at all its tokens. ``none``: w = 1.
- ``truncate`` (TIS): min(w, cap). ``band`` (IcePop): w inside [low, high], else 0.
- ``batch_normalize``: afterwards divided by their mean over the tokens, or over the rows, of the optimiser batch; left
  as they are where that mean is 0.

Rejection (MIS) takes tokens out of the loss and its divisor. Every test named in ``reject`` must pass:

- ``token_k1``: rho in [low, high]. ``seq_sum_k1``: the row's product of rho. ``seq_mean_k1``: its geometric mean.
  Bounds are on pi_old / mu (verl's are on mu / pi_old, which differs unless low = 1 / high). One number h is [1/h, h].
- k2 = l^2 / 2 and k3 = rho - 1 - l, at most the bound: ``token_k2``, ``seq_sum_k2``, ``seq_mean_k2``, ``seq_max_k2``,
  and the same with k3.

A token whose engine log-prob is missing counts as rho = 1. A batch of which nothing is left makes no update. Advantages
of a rejected rollout's group are not computed again. The learner needs a forward pass without gradient before the
update where tokens are rejected or weights normalised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from trimtab.core.errors import invalid, unknown
from trimtab.core.lazy import lazy
from trimtab.core.part import knob
from trimtab.core.segments import segment_count, segment_max, segment_mean, segment_sum
from trimtab.core.slots import Correct, Correction, TokenView

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

CLAMP = 20.0
K1_TESTS = ("token_k1", "seq_sum_k1", "seq_mean_k1")
UPPER_TESTS = tuple(f"{over}_{k}" for k in ("k2", "k3") for over in ("token", "seq_sum", "seq_mean", "seq_max"))


def exp(log: torch.Tensor) -> torch.Tensor:
    """exp of the clamped log ratio."""
    return log.clamp(-CLAMP, CLAMP).exp()


def k_statistic(log_T: torch.Tensor, name: str) -> torch.Tensor:
    """k1 = l, k2 or k3 (T,), of which the last two are never negative."""
    if name == "k1":
        return log_T
    return log_T.square() / 2 if name == "k2" else (exp(log_T) - 1 - log_T.clamp(-CLAMP, CLAMP)).clamp(min=0)


def over_row(
    value_T: torch.Tensor, over: str, row_T: torch.Tensor, num_rows: int, mask_T: torch.Tensor
) -> torch.Tensor:
    """``value_T`` itself ('token'), or its sum, mean or largest value over the row's tokens in the mask (T,)."""
    if over == "token":
        return value_T
    statistic = {"seq_sum": segment_sum, "seq_mean": segment_mean, "seq_max": segment_max}[over]
    return statistic(value_T, row_T, num_rows, mask_T)[row_T]


def passes(
    log_T: torch.Tensor,
    test: str,
    bounds: tuple[float, float],
    row_T: torch.Tensor,
    num_rows: int,
    mask_T: torch.Tensor,
) -> torch.Tensor:
    """True (T,) where one rejection test is passed, both bounds included."""
    over, _, k = test.rpartition("_")
    value_T = over_row(k_statistic(log_T, k), over, row_T, num_rows, mask_T)
    value_T = exp(value_T) if k == "k1" else value_T
    return (value_T >= bounds[0]) & (value_T <= bounds[1])


def normalised(
    weight_T: torch.Tensor, by_row: bool, row_T: torch.Tensor, num_rows: int, mask_T: torch.Tensor
) -> torch.Tensor:
    """Weights over their mean, every token or every row with a token counting once (T,)."""
    part_T = mask_T.to(weight_T.dtype)
    if by_row:
        part_T = part_T / segment_count(row_T, num_rows, mask_T).clamp(min=1)[row_T]
    mean = (weight_T * part_T).sum() / part_T.sum().clamp(min=1e-30)
    return torch.where(mean > 0, weight_T / torch.where(mean > 0, mean, torch.ones_like(mean)), weight_T)


@dataclass(kw_only=True)
class FP8Rollout(Correct):
    """Truncated or banded importance weights per token or sequence, and rejection of mismatched tokens or rows."""

    inert: ClassVar[dict[str, object] | None] = {"level": "none", "reject": {}}

    level: Literal["token", "sequence", "none"] = knob("token", "one weight a token, one a row, or no weights")
    form: Literal["truncate", "band"] = knob("truncate", "weights above the cap become the cap, or outside the band 0")
    cap: float = knob(2.0, "C of 'truncate' (token 1.5 to 5, sequence 2 to 10)", gt=0)
    low: float = knob(0.5, "least weight of 'band'", ge=0)
    high: float = knob(5.0, "largest weight of 'band'", gt=0)
    batch_normalize: bool = knob(False, "divide weights by their mean over the optimiser batch")
    reject: dict[str, Any] = knob(dict, "tests that must pass, each with [low, high] or one bound", factory=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low >= self.high:
            raise invalid("correct.low", self.low, f"a value below high = {self.high}")
        for test, bounds in self.reject.items():
            check_bounds(test, bounds)

    def whole_batch(self) -> bool:
        return bool(self.reject) or (self.batch_normalize and self.level != "none")

    def whole_rows(self) -> bool:
        return self.level == "sequence"

    def correct(self, view: TokenView, correction: Correction) -> Correction:
        log_T = torch.where(view.mask_T, view.old - view.behaviour, torch.zeros_like(view.old)).detach()
        rows = view.row_T, view.num_rows, view.mask_T
        weight_T = self.weights(log_T, *rows)
        logged = {"is_weight": weight_T, "is_weight_square": weight_T.square()}
        pass_T = None
        if self.reject:
            pass_T = torch.ones_like(view.mask_T)
            for test, bounds in self.reject.items():
                pass_T = pass_T & passes(log_T, test, interval(test, bounds), *rows)
            logged["is_rejected"] = (~pass_T).to(log_T.dtype)
            pass_T = pass_T if correction.divisor_T is None else pass_T & correction.divisor_T
        return replace(
            correction,
            weight_T=correction.weight_T * weight_T,
            logged=correction.logged | logged,
            divisor_T=correction.divisor_T if pass_T is None else pass_T,
        )

    def weights(self, log_T: torch.Tensor, row_T: torch.Tensor, num_rows: int, mask_T: torch.Tensor) -> torch.Tensor:
        """Importance weights (T,) of log ratios that are 0 outside the mask."""
        if self.level == "none":
            return torch.ones_like(log_T)
        by_row = self.level == "sequence"
        weight_T = exp(over_row(log_T, "seq_sum", row_T, num_rows, mask_T) if by_row else log_T)
        if self.form == "truncate":
            weight_T = weight_T.clamp(max=self.cap)
        else:
            inside_T = (weight_T >= self.low) & (weight_T <= self.high)
            weight_T = torch.where(inside_T, weight_T, torch.zeros_like(weight_T))
        return normalised(weight_T, by_row, row_T, num_rows, mask_T) if self.batch_normalize else weight_T


def interval(test: str, bounds: Any) -> tuple[float, float]:
    """Lower and upper bound of a test from its knob."""
    if isinstance(bounds, (list, tuple)):
        return float(bounds[0]), float(bounds[1])
    return (1 / bounds, float(bounds)) if test in K1_TESTS else (-math.inf, float(bounds))


def check_bounds(test: str, bounds: Any) -> None:
    """Refuse an unknown test or bounds that no token, or every token, would pass by mistake."""
    path = f"correct.reject.{test}"
    if test not in K1_TESTS + UPPER_TESTS:
        raise unknown(path, test, K1_TESTS + UPPER_TESTS)
    numbers = list(bounds) if isinstance(bounds, (list, tuple)) else [bounds]
    number = all(isinstance(x, (int, float)) and not isinstance(x, bool) and x == x for x in numbers)
    if test in UPPER_TESTS:
        if not number or isinstance(bounds, (list, tuple)) or bounds < 0:
            raise invalid(path, bounds, "one number >= 0")
    elif not number or len(numbers) not in (1, 2) or not 0 <= interval_low(numbers) <= numbers[-1]:
        raise invalid(path, bounds, "one number >= 1, or [low, high] with 0 <= low <= high")


def interval_low(numbers: list[float]) -> float:
    """Lower bound of a k1 test written as one or two numbers."""
    return numbers[0] if len(numbers) == 2 else (1 / numbers[0] if numbers[0] else math.inf)
