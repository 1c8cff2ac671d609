"""Per-token signals, each defined once: entropy, top-k, margin, overlap with a teacher, repetition.

The first three read rows of logits, normalised or not (a constant added to a row changes nothing). What they share -
one maximum, one exponential, one sum over the vocabulary - is computed once in :class:`SoftmaxRows`, which sampling
uses as well; pass it instead of the logits where it exists. All are differentiable and never wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.core.lazy import lazy

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

_BLOCK = 64  # entries per block of the two-level top-k
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # multiplier of the n-gram hash, odd, as signed int64


@dataclass(frozen=True, slots=True)
class SoftmaxRows:
    """Rows of logits in float32: ``shift_BV`` = logits - max, ``weight_BV`` = exp(shift), ``total_B`` their sum."""

    shift_BV: torch.Tensor
    weight_BV: torch.Tensor
    total_B: torch.Tensor

    @classmethod
    def of(cls, logits_BV: torch.Tensor) -> SoftmaxRows:
        """The rows of any finite-maximum logits (..., V); -inf entries have weight 0."""
        logits_BV = logits_BV.float()
        shift_BV = logits_BV - logits_BV.detach().amax(-1, keepdim=True)
        weight_BV = shift_BV.exp()
        return cls(shift_BV, weight_BV, weight_BV.sum(-1))

    def logprobs(self) -> torch.Tensor:
        """Log-softmax (..., V)."""
        return self.shift_BV - self.total_B.log()[..., None]


def _rows(logits: torch.Tensor | SoftmaxRows) -> SoftmaxRows:
    return logits if isinstance(logits, SoftmaxRows) else SoftmaxRows.of(logits)


def entropy(logits: torch.Tensor | SoftmaxRows) -> torch.Tensor:
    """Shannon entropy in nats, (..., V) -> (...)."""
    rows = _rows(logits)
    finite = rows.shift_BV.clamp_min(torch.finfo(torch.float32).min)  # 0 * -inf would be NaN
    return rows.total_B.log() - (rows.weight_BV * finite).sum(-1) / rows.total_B


def topk(logits: torch.Tensor | SoftmaxRows, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` most likely ids and their log-probs, most likely first, each (..., k). Ties come in any order."""
    rows = _rows(logits)
    shift, ids = top_values(rows.shift_BV, k)
    return ids, shift - rows.total_B.log()[..., None]


def margin(logits: torch.Tensor | SoftmaxRows) -> torch.Tensor:
    """log p of the most likely token minus log p of the second, (..., V) -> (...)."""
    values = logits.shift_BV if isinstance(logits, SoftmaxRows) else logits.float()
    best, _ = top_values(values, 2)
    return best[..., 0] - best[..., 1]


def top_values(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``values.topk(k)`` over the last axis; equal to it but for the order of ties, and several times faster on a CPU.

    The k largest entries lie in the k blocks with the largest maxima, so only those blocks are searched.
    """
    size = values.shape[-1]
    num_blocks = size // _BLOCK
    if size % _BLOCK or num_blocks < 4 * k:
        best = values.topk(k, -1)
        return best.values, best.indices
    blocks = values.unflatten(-1, (num_blocks, _BLOCK))
    block = blocks.amax(-1).topk(k, -1).indices
    candidates = blocks.gather(-2, block[..., None].expand(*block.shape, _BLOCK)).flatten(-2)
    best = candidates.topk(k, -1)
    within = best.indices
    return best.values, block.gather(-1, within // _BLOCK) * _BLOCK + within % _BLOCK


def overlap(student_ids: torch.Tensor, teacher_ids: torch.Tensor) -> torch.Tensor:
    """|S ∩ T| / k of two lists of distinct ids, most likely first, (..., K) and (..., K') -> (...).

    k is the shorter length; of the longer list the first k count.
    """
    k = min(student_ids.shape[-1], teacher_ids.shape[-1])
    return (student_ids[..., :k, None] == teacher_ids[..., None, :k]).any(-1).float().mean(-1)


def repetition(token_BT: torch.Tensor, count_B: torch.Tensor, *, ngram: int = 4, window: int = 64) -> torch.Tensor:
    """Share of the last ``window`` tokens that complete an n-gram which already occurred, (B, T) -> (B,) in [0, 1].

    A token repeats when the ``ngram`` tokens ending with it also end at some earlier token of the same row, anywhere in
    it. Rows shorter than the window are measured over what they have; rows without an n-gram give 0.

    Args:
        token_BT: ids, valid in the first ``count_B`` columns.
        count_B: valid tokens of each row.
        ngram: tokens per n-gram, at least 1.
        window: tokens looked at, at least 1.
    """
    assert ngram >= 1, ngram
    assert window >= 1, window
    batch, length = token_BT.shape
    column = torch.arange(length, device=token_BT.device)
    hash_BT = torch.zeros_like(token_BT)
    for back in range(ngram):  # hash of the n-gram ending at each column, oldest token weighted most
        hash_BT[:, back:] += (token_BT[:, : max(0, length - back)] + 1) * _power(back)
    has_ngram = (column >= ngram - 1) & (column < count_B[:, None])
    # Stable sort: among equal hashes the earlier column comes first, so "equals its predecessor" means "seen before".
    # Columns without an n-gram are told apart by a second, outer key.
    order = torch.where(has_ngram, hash_BT, 0).sort(dim=1, stable=True).indices
    order = order.gather(1, (~has_ngram).gather(1, order).int().sort(dim=1, stable=True).indices)
    ordered, valid = hash_BT.gather(1, order), has_ngram.gather(1, order)
    seen = torch.zeros(batch, length, dtype=torch.bool, device=token_BT.device)
    seen[:, 1:] = (ordered[:, 1:] == ordered[:, :-1]) & valid[:, 1:]
    repeated = torch.zeros_like(seen).scatter(1, order, seen)
    looked_at = (column < count_B[:, None]) & (column >= count_B[:, None] - window)
    return (repeated & looked_at).sum(1) / looked_at.sum(1).clamp(min=1)


def _power(exponent: int) -> int:
    """``_ODD`` to a power modulo 2^64, as signed int64."""
    value = pow(_ODD, exponent, 1 << 64)
    return value - (1 << 64) if value >= 1 << 63 else value
