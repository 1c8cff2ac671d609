"""How token losses become one number: coefficients c_T, fixed on the whole optimiser batch before it is split.

The loss is sum(c_T * loss_T), so a micro-batch adds its own terms and no split, order or padding can change the total.
The divisor counts kept tokens and rows only: a token masked out, or a row without a kept token, is in neither the
numerator nor the divisor. Weights act on the numerator alone and are not seen here.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from trimtab.core.errors import unknown
from trimtab.core.segments import segment_count
from trimtab.core.slots import AggregationName


def token_coefficients(
    name: AggregationName,
    row_T: Tensor,
    mask_T: Tensor,
    num_rows: int,
    constant: float | None = None,
    max_new_tokens: int | None = None,
) -> Tensor:
    """Coefficient of every token's loss (T,) float32, 0 where ``mask_T`` is False; all 0 when nothing is kept.

    - ``token-mean``: 1 / kept tokens (DAPO, arXiv 2503.14476).
    - ``seq-mean-token-mean``: 1 / (kept tokens of the row * rows with a kept token) (GRPO, arXiv 2402.03300).
    - ``seq-mean-token-sum``: 1 / rows with a kept token.
    - ``constant``: 1 / ``constant``, or 1 / (rows with a kept token * ``max_new_tokens``) when that is None
      (Dr.GRPO, arXiv 2503.20783, with the divisor of TRL).

    Args:
        row_T: (T,) int64, row of each token in ``0..num_rows-1``.
        mask_T: (T,) bool.
    """
    divisor_T = _divisor(name, row_T, mask_T, num_rows, constant, max_new_tokens)
    return torch.where(
        mask_T, 1.0 / divisor_T.to(torch.float32).clamp(min=1e-30), torch.zeros((), device=mask_T.device)
    )


def aggregate(loss_T: Tensor, coef_T: Tensor) -> Tensor:
    """sum(c_T * loss_T), a scalar attached to the graph.

    A token of coefficient 0 adds exactly 0 to value and gradient even where its loss is infinite or NaN.
    """
    return torch.where(coef_T != 0, loss_T, torch.zeros_like(loss_T)).mul(coef_T).sum()


def _divisor(
    name: AggregationName,
    row_T: Tensor,
    mask_T: Tensor,
    num_rows: int,
    constant: float | None,
    max_new_tokens: int | None,
) -> Tensor:
    """What each token's loss is divided by, (T,) or a scalar; meaningless at masked tokens."""
    if name == "token-mean":
        return mask_T.sum()
    kept_N = segment_count(row_T, num_rows, mask_T)
    num_kept_rows = (kept_N > 0).sum()
    if name == "seq-mean-token-mean":
        return kept_N[row_T] * num_kept_rows
    if name == "seq-mean-token-sum":
        return num_kept_rows
    if name == "constant":
        if constant is not None:
            return torch.tensor(constant, device=mask_T.device)
        assert max_new_tokens is not None, "aggregation 'constant' without a value needs max_new_tokens"
        return num_kept_rows * max_new_tokens
    raise unknown("aggregation", name, get_args(AggregationName))
