"""Drawing one token per row by inverse CDF from one uniform, at per-row temperature, top-k and top-p.

A row's token depends on its own logits, its sampling and its uniform, never on the rows beside it. The outcomes lie on
the unit interval in the order of their ids; a row takes the first whose cumulative probability exceeds its uniform. The
sum over the vocabulary is cut in blocks (block sums first, then inside one block), so that no cumulative sum over the
whole vocabulary and, without truncation, no sort is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trimtab.core.errors import invalid
from trimtab.core.rng import uniform
from trimtab.core.signals import SoftmaxRows, top_values
from trimtab.generate.protocol import Sampling

_BLOCK = 128  # vocabulary entries per block of the two-level search
_CANDIDATES = 256  # most likely tokens in which a truncation is sought before the whole vocabulary is sorted

_MIN_TEMPERATURE = 1e-4  # below it logits / temperature may leave float32


def check_sampling(sampling: Sampling, path: str) -> None:
    """Raise ConfigError for values outside their range."""
    if sampling.temperature != 0.0 and not _MIN_TEMPERATURE <= sampling.temperature < float("inf"):
        raise invalid(f"{path}.temperature", sampling.temperature, f"0 (greedy) or a number >= {_MIN_TEMPERATURE}")
    if not 0.0 < sampling.top_p <= 1.0:
        raise invalid(f"{path}.top_p", sampling.top_p, "a number in (0, 1]; 1 is off")
    if sampling.top_k < 0:
        raise invalid(f"{path}.top_k", sampling.top_k, "an integer >= 0; 0 is off")


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The sampling of B rows as tensors. Where all rows agree the tensors have one row, which broadcasts.

    ``temperature_B`` (B, 1) is 1 in greedy rows; greedy rows do not truncate. The flags are known to the host, so that
    nothing is computed for what no row asks.
    """

    temperature_B: Tensor
    top_p_B: Tensor
    top_k_B: Tensor  # int64, very large where off
    greedy_B: Tensor  # bool
    max_top_k: int
    scaled: bool
    truncated: bool
    greedy: bool

    @classmethod
    def of(cls, samplings: Sequence[Sampling], device: torch.device | str = "cpu") -> SamplingRows:
        """The rows of a non-empty list; equal samplings collapse to one row."""
        rows = list(samplings)
        if len(set(rows)) == 1:
            rows = rows[:1]
        greedy = [s.temperature == 0.0 for s in rows]
        free = [Sampling() if g else s for s, g in zip(rows, greedy, strict=True)]
        off = torch.iinfo(torch.int64).max
        return cls(
            temperature_B=torch.tensor([[s.temperature] for s in free], dtype=torch.float32, device=device),
            top_p_B=torch.tensor([s.top_p for s in free], dtype=torch.float32, device=device),
            top_k_B=torch.tensor([s.top_k or off for s in free], dtype=torch.int64, device=device),
            greedy_B=torch.tensor(greedy, dtype=torch.bool, device=device),
            max_top_k=max(s.top_k for s in free),
            scaled=any(s.temperature != 1.0 for s in free),
            truncated=any(s.top_p < 1.0 or s.top_k > 0 for s in free),
            greedy=any(greedy),
        )

    def pick(self, index_B: Tensor) -> SamplingRows:
        """The sampling of the rows ``index_B``."""
        if len(self.greedy_B) == 1:
            return self
        return SamplingRows(
            self.temperature_B[index_B],
            self.top_p_B[index_B],
            self.top_k_B[index_B],
            self.greedy_B[index_B],
            self.max_top_k,
            self.scaled,
            self.truncated,
            self.greedy,
        )

    def softmax(self, logits_BV: Tensor) -> SoftmaxRows:
        """The distribution at each row's temperature before truncation: what signals are computed on."""
        return SoftmaxRows.of(logits_BV.float() / self.temperature_B if self.scaled else logits_BV)


def draw(rows: SoftmaxRows, uniform_B: Tensor, sampling: SamplingRows) -> tuple[Tensor, Tensor]:
    """One token per row, and its log-prob under the distribution really drawn from.

    Truncated rows are renormalised over what is left. Greedy rows take the first most likely token, with its log-prob
    at temperature 1. The token drawn always has positive probability.

    Args:
        rows: ``sampling.softmax(logits)`` of B rows.
        uniform_B: (B,) in (0, 1).

    Returns:
        tokens (B,) int64 and log-probs (B,) float32.
    """
    weight_BV, total_B = rows.weight_BV, rows.total_B
    if sampling.truncated:
        weight_BV = weight_BV * (weight_BV >= _threshold(rows, sampling)[:, None])
        total_B = weight_BV.sum(-1)
    token_B = _invert(weight_BV, uniform_B)
    if sampling.greedy:
        token_B = torch.where(sampling.greedy_B, rows.shift_BV.argmax(-1), token_B)
    chosen_B = weight_BV.gather(1, token_B[:, None]).squeeze(1)
    return token_B, (chosen_B / total_B).log()


def _threshold(rows: SoftmaxRows, sampling: SamplingRows) -> Tensor:
    """(B,) smallest weight kept: the k-th largest, and within those the last needed to reach top-p of their mass.

    Tokens tied with it are kept too, so the kept set does not depend on how a sort orders ties. 0 keeps everything.
    """
    size = rows.weight_BV.shape[-1]
    wide = min(size, max(_CANDIDATES, sampling.max_top_k))
    threshold_B, enough = _search(rows, sampling, wide)
    if wide < size and not bool(enough):  # some row's top-p reaches beyond the candidates
        threshold_B, _ = _search(rows, sampling, size)
    return threshold_B


def _search(rows: SoftmaxRows, sampling: SamplingRows, wide: int) -> tuple[Tensor, Tensor]:
    top_p, top_k = sampling.top_p_B[:, None], sampling.top_k_B[:, None]
    value_BM, _ = top_values(rows.weight_BV, wide)
    in_k = torch.arange(wide, device=value_BM.device) < top_k
    mass_BM = (value_BM * in_k).cumsum(-1)
    total = torch.where(top_k <= wide, mass_BM[:, -1:], rows.total_B[:, None])
    keep = in_k & (mass_BM - value_BM < top_p * total)
    found = (mass_BM[:, -1:] >= top_p * total) | (top_k <= wide) | (top_p >= 1.0)
    threshold_B = torch.where(keep, value_BM, torch.inf).amin(-1)
    off = (sampling.top_p_B >= 1.0) & (sampling.top_k_B > wide)
    return torch.where(off, 0.0, threshold_B), found.all()


def _invert(weight_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """(B,) id at which the cumulative weight first exceeds ``uniform`` times the total."""
    size = weight_BV.shape[-1]
    if size <= 2 * _BLOCK:
        cumulative = weight_BV.cumsum(-1)
        return _first_above(weight_BV, cumulative, uniform_B * cumulative[:, -1])
    blocks = F.pad(weight_BV, (0, -size % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    mass = blocks.sum(-1)
    cumulative = mass.cumsum(-1)
    target_B = uniform_B * cumulative[:, -1]
    block = _first_above(mass, cumulative, target_B)
    before_B = F.pad(cumulative, (1, 0)).gather(1, block[:, None]).squeeze(1)
    inner = blocks.gather(1, block[:, None, None].expand(-1, 1, _BLOCK)).squeeze(1)
    return block * _BLOCK + _first_above(inner, inner.cumsum(-1), target_B - before_B)


def _first_above(weight: Tensor, cumulative: Tensor, target_B: Tensor) -> Tensor:
    """(B,) first column of positive weight whose cumulative weight exceeds the target.

    Rounding may leave no such column (the target is then at the very end): the last column of positive weight.
    """
    size = weight.shape[-1]
    column = torch.arange(size, device=weight.device)
    rank = torch.where(cumulative > target_B[:, None], size - column, column - size)
    return torch.where(weight > 0, rank, -size - 1).argmax(-1)


class UniformBlocks:
    """The uniforms of running slots, computed many positions at a time.

    Slot s draws at time t with position ``t + offset[s]``, the response index of the token. The first positions of
    every request are computed in one go, so that admitting a request is one copy.

    Args:
        key_N: (N,) int64, key of every request.
        first_N: (N,) int64, response index of the first token each request draws.
        num_slots: running slots.
        size: positions per block.
    """

    def __init__(self, key_N: Tensor, first_N: Tensor, num_slots: int, size: int = 32) -> None:
        self.key_N, self.first_N, self.size = key_N, first_N, size
        self._step = torch.arange(size, device=key_N.device)
        self._head_NC = uniform(key_N[:, None], first_N[:, None] + self._step)
        self._key_S = key_N.new_zeros(num_slots)
        self._offset_S = key_N.new_zeros(num_slots)
        self._block_CS = torch.zeros(size, num_slots, device=key_N.device)

    def admit(self, slots: Tensor, rows: Tensor, time: int) -> None:
        """Requests ``rows`` draw their first token at ``time`` in ``slots`` (both (M,) int64)."""
        column = time % self.size
        self._key_S[slots] = self.key_N[rows]
        self._offset_S[slots] = self.first_N[rows] - time
        self._block_CS[column:, slots] = self._head_NC[rows, : self.size - column].T

    def move(self, src: Tensor, dst: Tensor) -> None:
        """Slots ``dst`` continue what slots ``src`` drew."""
        for values in (self._key_S, self._offset_S, self._block_CS):
            values[..., dst] = values[..., src]

    def at(self, time: int, num_rows: int) -> Tensor:
        """(num_rows,) uniforms of the first slots; ``time`` advances by one a call."""
        column = time % self.size
        if column == 0:
            self._block_CS = uniform(self._key_S, self._offset_S + time + self._step[:, None])
        return self._block_CS[column, :num_rows]
