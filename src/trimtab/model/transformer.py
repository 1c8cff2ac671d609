"""One lean decoder-only transformer, used both to generate and to train, so that both compute the same numbers.

Llama, Qwen2, Qwen3 and Mistral are one architecture with switches: rotary positions, grouped-query attention, RMSNorm,
SwiGLU, optional biases, optional query/key norms, tied or untied head. A block takes its attention as a callable, so
packed training, chunked extension of a cache and single-token decoding share every other line.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimtab.core.errors import DataError, invalid
from trimtab.model.attention import AttentionPlan, attend
from trimtab.model.config import ModelConfig

# (q, k, v) of shapes (M, heads, D), (M, kv_heads, D), (M, kv_heads, D) -> (M, heads, D)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Slots = slice | Tensor


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Rotary(nn.Module):
    """Angles of rotary position embedding, in float32 whatever the model's dtype (bfloat16 would blur positions)."""

    inv_freq: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("inv_freq", rope_frequencies(config), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        super()._apply(fn, recurse)
        self.inv_freq = rope_frequencies(self.config).to(self.inv_freq.device)
        return self

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(M,) positions -> cos and sin, each (M, 1, head_dim), the sine's first half negated for `rotate`."""
        angle = positions[:, None, None].to(torch.float32) * self.inv_freq
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


def rope_frequencies(config: ModelConfig) -> Tensor:
    """(head_dim / 2,) float32 radians per position, after the config's scaling.

    `linear` divides all frequencies by the factor. `llama3` divides those whose wavelength exceeds the original context
    over `low_freq_factor`, keeps those shorter than it over `high_freq_factor`, and interpolates between.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    inv_freq = 1.0 / config.rope_theta**exponent
    scaling = config.rope_scaling
    if scaling is None:
        return inv_freq
    factor = float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return inv_freq / factor
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = float(scaling["original_max_position_embeddings"]) * inv_freq / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * inv_freq + (1.0 - keep) * inv_freq / factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn (M, heads, D) by its positions, halves paired (the Hugging Face convention)."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


class Block(nn.Module):
    """Pre-norm attention and SwiGLU, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.qkv = nn.Linear(config.hidden_size, q_size + 2 * kv_size, bias=config.qkv_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.o = nn.Linear(q_size, config.hidden_size, bias=config.o_bias)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """(M, H) residual stream in and out; the tokens meet only inside `attend`."""
        heads = self.qkv(self.attn_norm(x)).unflatten(-1, (-1, self.head_dim))
        qk, v = heads.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split([self.num_heads, self.num_kv_heads], 1)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], 1)
        q, k = rotate(qk, cos, sin).split([self.num_heads, self.num_kv_heads], 1)
        x = x + self.o(attend(q, k, v).flatten(-2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class KVCache:
    """Keys and values of running sequences, one slot each.

    Attributes:
        k, v: (L, num_slots, kv_heads, max_len, head_dim); `k[layer]` is one layer's keys. What lies beyond a slot's
            cached length is unspecified but finite, which masked attention relies on.
    """

    def __init__(
        self, config: ModelConfig, num_slots: int, max_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (config.num_layers, num_slots, config.num_kv_heads, max_len, config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def num_slots(self) -> int:
        return self.k.shape[1]

    @property
    def max_len(self) -> int:
        return self.k.shape[3]

    def copy_slots(self, src_slots: Sequence[int] | Tensor, dst_slots: Sequence[int] | Tensor, length: int) -> None:
        """Copy the first `length` positions of each source slot to the destination slot next to it in the lists.

        Forks a prefilled prompt to its group. All sources are read before any destination is written, so the lists may
        overlap; a destination must not appear twice.
        """
        src, dst = self._slots(src_slots), self._slots(dst_slots)
        if len(src) != len(dst):
            raise DataError(f"copy_slots: {len(src)} sources but {len(dst)} destinations")
        self.check_length(length)
        for x in (self.k, self.v):
            for layer in x:
                layer[dst, :, :length] = layer[src, :, :length]

    def compact(self, keep: Sequence[int], length: int) -> list[int]:
        """Bring the slots `keep` to the front, moving only those that lie behind it.

        Args:
            keep: distinct slots still in use, in any order.
            length: positions to carry along, at least the longest kept sequence.

        Returns:
            `order`, as long as `keep`: slot i now holds what slot `order[i]` held.
        """
        n = len(keep)
        kept = set(keep)
        if len(kept) != n:
            raise DataError("compact: a slot is named twice")
        order = list(range(n))
        holes = [slot for slot in range(n) if slot not in kept]
        movers = sorted(slot for slot in kept if slot >= n)
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        if movers:
            self.copy_slots(movers, holes, length)
        return order

    def grow(self, max_len: int) -> None:
        """Make room for `max_len` positions a slot, keeping the contents; never shrinks."""
        extra = max_len - self.max_len
        if extra > 0:
            self.k, self.v = F.pad(self.k, (0, 0, 0, extra)), F.pad(self.v, (0, 0, 0, extra))

    def _slots(self, slots: Sequence[int] | Tensor) -> Tensor:
        return torch.as_tensor(slots, dtype=torch.int64, device=self.k.device)

    def check_length(self, length: int) -> None:
        """Raise DataError when `length` positions do not fit a slot."""
        if length > self.max_len:
            raise DataError(f"length = {length} exceeds the cache's max_len = {self.max_len}; call grow first")


class Transformer(nn.Module):
    """Decoder-only language model over packed tokens or a cache.

    There is no batch axis: tokens lie on one flat axis, and an `AttentionPlan` or a `KVCache` says which see which.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @classmethod
    def init(cls, config: ModelConfig, seed: int) -> Transformer:
        """A fresh model: weights normal with std 0.02, those that write to the residual stream over sqrt(2 L)."""
        generator = torch.Generator().manual_seed(seed)
        model = cls.empty(config)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                nn.init.ones_(parameter)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                writes = name.endswith(("o.weight", "down.weight"))
                std = 0.02 / math.sqrt(2 * config.num_layers) if writes else 0.02
                nn.init.normal_(parameter, std=std, generator=generator)
        return model

    @classmethod
    def empty(cls, config: ModelConfig) -> Transformer:
        """A model whose weights are allocated but not set."""
        with torch.device("meta"):
            model = cls(config)
        return model.to_empty(device="cpu")

    @property
    def head_weight(self) -> Tensor:
        """(V, H) output projection: the embedding when tied."""
        return self.embed.weight if self.lm_head is None else self.lm_head.weight

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    def num_parameters(self) -> int:
        """Number of distinct weights (a tied head counts once)."""
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, tokens_T: Tensor, plan: AttentionPlan) -> Tensor:
        """Hidden states of packed tokens after the final norm, (T, H); differentiable.

        Raises:
            DataError: the plan is for another number of tokens, or a sequence exceeds the sliding window.
        """
        if tokens_T.shape != (plan.num_tokens,):
            raise DataError(f"tokens have shape {tuple(tokens_T.shape)}, the plan is for ({plan.num_tokens},)")
        self._check_window(plan.max_length)
        return self._run(tokens_T, plan.positions, lambda _, q, k, v: plan.attend(q, k, v))

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, H) -> (N, V)."""
        return F.linear(hidden, self.head_weight)

    def new_cache(self, num_slots: int, max_len: int, dtype: torch.dtype | None = None) -> KVCache:
        """A zeroed cache on the model's device, in the model's dtype unless told otherwise."""
        return KVCache(self.config, num_slots, max_len, dtype or self.dtype, self.device)

    @torch.no_grad()
    def extend(self, tokens: Tensor, start_B: Tensor, count_B: Tensor, cache: KVCache, slots_B: Tensor) -> Tensor:
        """Append up to Tq tokens to each row's slot and return their hidden states.

        Only the valid tokens pass through the linear layers and are written to the cache. Waits for the device once, to
        learn the counts.

        Args:
            tokens: (B, Tq) int64, valid in the first `count_B` columns.
            start_B: (B,) int64, cached length of each row before the call.
            count_B: (B,) int64, valid tokens of each row, 0..Tq.
            slots_B: (B,) int64, distinct cache slots.

        Returns:
            (B, Tq, H); zero at padding.

        Raises:
            DataError: a row would outgrow the cache or the sliding window.
        """
        batch, width = tokens.shape
        column = torch.arange(width, device=tokens.device)
        row_M, column_M = torch.nonzero(column < count_B[:, None], as_tuple=True)
        length = int((start_B + count_B).max()) if batch else 0
        cache.check_length(length)
        self._check_window(length)
        position_M = start_B[row_M] + column_M
        slot_M = slots_B[row_M]
        position = start_B[:, None] + column
        mask = (torch.arange(length, device=tokens.device) <= position[:, :, None])[:, None]

        def attend_cache(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            layer_k, layer_v = cache.k[layer], cache.v[layer]
            layer_k[slot_M, :, position_M] = k.to(layer_k.dtype)
            layer_v[slot_M, :, position_M] = v.to(layer_v.dtype)
            q_B = q.new_zeros(batch, width, *q.shape[1:])
            q_B[row_M, column_M] = q
            keys, values = layer_k[slots_B, :, :length].to(q.dtype), layer_v[slots_B, :, :length].to(q.dtype)
            out = attend(q_B.transpose(1, 2), keys, values, mask)
            return out.transpose(1, 2)[row_M, column_M]

        hidden = self._run(tokens[row_M, column_M], position_M, attend_cache)
        out = hidden.new_zeros(batch, width, hidden.shape[-1])
        out[row_M, column_M] = hidden
        return out

    @torch.no_grad()
    def decode(self, tokens_B: Tensor, start_B: Tensor, cache: KVCache, slots: Slots, length: int) -> Tensor:
        """Append one token to each row's slot and return its hidden state. Never waits for the device.

        Args:
            tokens_B: (B,) int64.
            start_B: (B,) int64, cached length of each row before the call.
            slots: a slice of B slots, attended in place, or (B,) int64 slots, whose keys are copied out first.
            length: largest `start_B` plus one, which the caller knows; a larger value is correct but slower.

        Returns:
            (B, H).

        Raises:
            DataError: `length` exceeds the cache or the sliding window.
        """
        cache.check_length(length)
        self._check_window(length)
        slot_B = slots
        if isinstance(slots, slice):
            slot_B = torch.arange(cache.num_slots, device=tokens_B.device)[slots]
        seen = torch.arange(length, device=tokens_B.device) <= start_B[:, None, None, None]
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device).masked_fill_(~seen, -torch.inf)

        def attend_cache(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            layer_k, layer_v = cache.k[layer], cache.v[layer]
            layer_k[slot_B, :, start_B] = k.to(layer_k.dtype)
            layer_v[slot_B, :, start_B] = v.to(layer_v.dtype)
            # The heads that share a key head become its queries, so that grouped keys are read once, not repeated.
            q_B = q.unflatten(1, (layer_k.shape[1], -1))
            keys, values = layer_k[slots, :, :length].to(q.dtype), layer_v[slots, :, :length].to(q.dtype)
            return attend(q_B, keys, values, mask).flatten(1, 2)

        return self._run(tokens_B, start_B, attend_cache)

    def _run(
        self, tokens_M: Tensor, positions_M: Tensor, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        x = self.embed(tokens_M)
        cos, sin = self.rotary(positions_M, x.dtype)
        for layer, block in enumerate(self.blocks):
            x = block(x, cos, sin, partial(attend, layer))
        return self.norm(x)

    def _check_window(self, length: int) -> None:
        window = self.config.sliding_window
        if window is not None and length > window:
            raise DataError(
                f"a sequence of {length} tokens exceeds the model's sliding window of {window}; attention beyond the "
                "window is not supported, so keep prompt plus response within it"
            )


def drop_layers(model: Transformer, keep: Sequence[int]) -> Transformer:
    """A new, shallower model with copies of the layers `keep` and of everything around them.

    Args:
        keep: strictly increasing layer indices, at least one.

    Raises:
        ConfigError: an index outside the model, out of order or repeated, or none at all.
    """
    last = model.config.num_layers - 1
    ordered = all(a < b for a, b in itertools.pairwise(keep))
    if not keep or not ordered or keep[0] < 0 or keep[-1] > last:
        raise invalid("keep", list(keep), f"strictly increasing layer indices within 0..{last}, at least one")
    shallow = copy.deepcopy(model)
    shallow.zero_grad(set_to_none=True)
    shallow.blocks = nn.ModuleList(shallow.blocks[layer] for layer in keep)
    shallow.config = replace(model.config, num_layers=len(keep))
    return shallow
