"""Attention over packed sequences of different lengths.

The tokens of a batch lie on one flat axis of length T, so embeddings, projections and norms never see padding. Only
attention needs rectangles; a plan holds the index tensors that cut the flat axis into a few rectangles of similar
lengths and put the results back. Prompts shared by several responses appear once on the flat axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from trimtab.core.errors import DataError

# A bucket takes further rows while at most this share of its query x key cells is padding,
MAX_PADDING = 0.15
# or at most this many cells: computing them costs less than launching another bucket.
FREE_CELLS = 4096
# Rows are sorted by key length in classes this far apart, then by query length, so that both vary little in a bucket.
_CLASS_RATIO = 1.3


@dataclass(frozen=True)
class AttentionBucket:
    """R rows of similar length, attended together.

    Attributes:
        q_index: (R, Tq) int64, positions on the packed axis; padding repeats the row's last token.
        k_index: (R, Tk) int64, likewise.
        mask: (R, 1, Tq, Tk) bool, True where a query sees a key; None for plain causal rows, where Tq = Tk and the
            padding, being at the end, is never seen by a valid query.
    """

    q_index: Tensor
    k_index: Tensor
    mask: Tensor | None

    def to(self, device: torch.device | str) -> AttentionBucket:
        """The same bucket with its tensors on `device`."""
        mask = None if self.mask is None else self.mask.to(device)
        return AttentionBucket(self.q_index.to(device), self.k_index.to(device), mask)


@dataclass(frozen=True)
class AttentionPlan:
    """How the packed tokens of one batch attend to each other.

    Attributes:
        num_tokens: T.
        max_length: longest sequence, prompt included, in tokens.
        padding: share of the attention cells (query x key) that is padding, between 0 and 1.
        buckets: rectangles that together hold every packed token as a query exactly once.
        out_index: (T,) int64, where each packed token's output lies in the concatenated bucket outputs.
        positions: (T,) int64, position of each token inside its own sequence.
        predict_index: (M,) int64, packed index of the token whose hidden state predicts target m.
        target_index: (M,) int64, packed index of target m: with shared prompts every response token, row by row;
            with plain sequences every token but each sequence's first.
    """

    num_tokens: int
    max_length: int
    padding: float
    buckets: tuple[AttentionBucket, ...]
    out_index: Tensor
    positions: Tensor
    predict_index: Tensor
    target_index: Tensor

    def to(self, device: torch.device | str) -> AttentionPlan:
        """The same plan with its tensors on `device`."""
        return replace(
            self,
            buckets=tuple(bucket.to(device) for bucket in self.buckets),
            out_index=self.out_index.to(device),
            positions=self.positions.to(device),
            predict_index=self.predict_index.to(device),
            target_index=self.target_index.to(device),
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of every packed token over its own sequence.

        Args:
            q: (T, heads, head_dim), rotated.
            k: (T, kv_heads, head_dim), rotated.
            v: (T, kv_heads, head_dim).

        Returns:
            (T, heads, head_dim), differentiable in all three.
        """
        if not self.buckets:
            return q
        outputs = [_attend_bucket(bucket, q, k, v) for bucket in self.buckets]
        return torch.cat(outputs).index_select(0, self.out_index)


def plan_sequences(lengths: Sequence[int], device: torch.device | str = "cpu") -> AttentionPlan:
    """Plain causal attention of sequences packed one after the other, each alone.

    Args:
        lengths: tokens of each sequence; zero is allowed and takes no place.

    Raises:
        DataError: a negative length.
    """
    rows = _Rows.alone(_lengths("lengths", lengths, minimum=0), offset=0)
    positions = rows.positions()
    target = torch.nonzero(positions > 0).flatten()
    return _plan([rows], positions, predict_index=target - 1, target_index=target).to(device)


def plan_shared_prompts(
    prompt_lengths_P: Sequence[int],
    prompt_of_row_N: Sequence[int],
    response_lengths_N: Sequence[int],
    device: torch.device | str = "cpu",
) -> AttentionPlan:
    """Responses that attend to a prompt packed once for its whole group.

    Packed order: every prompt once, in order, then every response, in order. Values and gradients equal those of each
    prompt and response run as one sequence.

    Args:
        prompt_lengths_P: tokens of each prompt, at least one.
        prompt_of_row_N: index into the prompts for each response.
        response_lengths_N: tokens of each response; zero is allowed.

    Raises:
        DataError: an empty prompt, an index outside the prompts, a negative length, or lists that disagree.
    """
    prompts = _Rows.alone(_lengths("prompt_lengths_P", prompt_lengths_P, minimum=1), offset=0)
    length_N = _lengths("response_lengths_N", response_lengths_N, minimum=0)
    prompt_N = _prompt_of_row(prompt_of_row_N, len(prompts.length), len(length_N))
    num_prompt_tokens = int(prompts.length.sum())
    responses = _Rows(
        start=_starts(length_N, num_prompt_tokens),
        length=length_N,
        prefix_start=prompts.start[prompt_N],
        prefix=prompts.length[prompt_N],
    )
    positions = responses.positions()
    target = torch.arange(num_prompt_tokens, num_prompt_tokens + len(positions))
    first = torch.repeat_interleave(responses.start, length_N) == target
    last_prompt_token = torch.repeat_interleave(responses.prefix_start + responses.prefix - 1, length_N)
    return _plan(
        [prompts, responses],
        torch.cat([prompts.positions(), positions]),
        predict_index=torch.where(first, last_prompt_token, target - 1),
        target_index=target,
    ).to(device)


@dataclass(frozen=True)
class _Rows:
    """Rows of queries, each seeing a (possibly empty) prefix and then itself; all fields (R,) int64."""

    start: Tensor
    length: Tensor
    prefix_start: Tensor
    prefix: Tensor

    @classmethod
    def alone(cls, length: Tensor, offset: int) -> _Rows:
        zero = torch.zeros_like(length)
        return cls(_starts(length, offset), length, zero, zero)

    def pick(self, index: Tensor) -> _Rows:
        return _Rows(self.start[index], self.length[index], self.prefix_start[index], self.prefix[index])

    def positions(self) -> Tensor:
        """(sum of lengths,) position inside the sequence, row by row."""
        total = int(self.length.sum())
        shift = self.prefix - (self.length.cumsum(0) - self.length)
        return torch.arange(total) + torch.repeat_interleave(shift, self.length)

    def bucket(self) -> AttentionBucket:
        tq = int(self.length.max())
        tk = int((self.prefix + self.length).max())
        prefix, prefix_start, start = self.prefix[:, None], self.prefix_start[:, None], self.start[:, None]
        last = self.length[:, None] - 1
        query, key = torch.arange(tq)[None], torch.arange(tk)[None]
        q_index = start + torch.minimum(query, last)
        own = start + torch.minimum(key - prefix, last)
        k_index = torch.where(key < prefix, prefix_start + key, own)
        causal = not bool(self.prefix.any())
        mask = None if causal else (key[:, None] <= prefix[:, None] + query[:, :, None])[:, None]
        return AttentionBucket(q_index, k_index, mask)

    def split(self) -> list[_Rows]:
        """Groups of similar shape, empty rows left out, so that each wastes at most MAX_PADDING or FREE_CELLS."""
        key_length = (self.prefix + self.length).clamp(min=1)
        key_class = (key_length.double().log() / math.log(_CLASS_RATIO)).long()
        present = torch.nonzero(self.length > 0).flatten().tolist()
        length, keys, classes = self.length.tolist(), key_length.tolist(), key_class.tolist()
        present.sort(key=lambda row: (classes[row], length[row], keys[row]), reverse=True)
        groups: list[list[int]] = []
        tq = tk = used = 0
        for row in present:
            wide, tall = max(tk, keys[row]), max(tq, length[row])
            useful = length[row] * keys[row]
            cells = (len(groups[-1]) + 1) * wide * tall if groups else 0
            if groups and cells - used - useful <= max(MAX_PADDING * cells, FREE_CELLS):
                groups[-1].append(row)
                tq, tk, used = tall, wide, used + useful
            else:
                groups.append([row])
                tq, tk, used = length[row], keys[row], useful
        return [self.pick(torch.tensor(group)) for group in groups]


def _plan(parts: list[_Rows], positions: Tensor, predict_index: Tensor, target_index: Tensor) -> AttentionPlan:
    groups = [group for rows in parts for group in rows.split()]
    buckets = tuple(group.bucket() for group in groups)
    num_tokens = len(positions)
    out_index = torch.zeros(num_tokens, dtype=torch.int64)
    base = useful = cells = 0
    for group, bucket in zip(groups, buckets, strict=True):
        rows, tq = bucket.q_index.shape
        cell = torch.arange(base, base + rows * tq).view(rows, tq)
        valid = torch.arange(tq)[None] < group.length[:, None]
        out_index[bucket.q_index[valid]] = cell[valid]
        base += rows * tq
        cells += bucket.q_index.numel() * bucket.k_index.shape[1]
        useful += int((group.length * (group.prefix + group.length)).sum())
    return AttentionPlan(
        num_tokens=num_tokens,
        max_length=int(positions.max()) + 1 if num_tokens else 0,
        padding=1.0 - useful / cells if cells else 0.0,
        buckets=buckets,
        out_index=out_index,
        positions=positions,
        predict_index=predict_index,
        target_index=target_index,
    )


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention over rectangles.

    Args:
        q: (R, heads, Tq, D).
        k, v: (R, kv_heads, Tk, D).
        mask: broadcasts to (R, heads, Tq, Tk), boolean or added to the scores; None is causal with Tq = Tk.

    Returns:
        (R, heads, Tq, D).
    """
    group = q.shape[1] // k.shape[1]
    if group > 1 and mask is not None and q.is_cuda:
        # No fused CUDA kernel takes both a mask and grouped heads; the fallback would hold every score in memory.
        k, v, group = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), 1
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=group > 1)


def _attend_bucket(bucket: AttentionBucket, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = _gather(q, bucket.q_index), _gather(k, bucket.k_index), _gather(v, bucket.k_index)
    out = attend(q, k, v, bucket.mask)
    return out.transpose(1, 2).flatten(0, 1)


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """(T, heads, dim) and (R, Tx) -> (R, heads, Tx, dim)."""
    return x.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)


def _lengths(name: str, values: Sequence[int], minimum: int) -> Tensor:
    length = torch.as_tensor(values, dtype=torch.int64).cpu()
    bad = torch.nonzero(length < minimum).flatten()
    if len(bad):
        row = int(bad[0])
        raise DataError(f"{name}[{row}] = {int(length[row])} must be at least {minimum}")
    return length


def _prompt_of_row(values: Sequence[int], num_prompts: int, num_rows: int) -> Tensor:
    prompt = torch.as_tensor(values, dtype=torch.int64).cpu()
    if len(prompt) != num_rows:
        raise DataError(f"prompt_of_row_N has {len(prompt)} entries but response_lengths_N has {num_rows}")
    bad = torch.nonzero((prompt < 0) | (prompt >= num_prompts)).flatten()
    if len(bad):
        row = int(bad[0])
        raise DataError(f"prompt_of_row_N[{row}] = {int(prompt[row])} must lie in 0..{num_prompts - 1}")
    return prompt


def _starts(length: Tensor, offset: int) -> Tensor:
    return length.cumsum(0) - length + offset
