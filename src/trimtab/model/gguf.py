"""Reading GGUF files: configuration, weights under Hugging Face names, tokenizer metadata."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trimtab.core.errors import DataError, missing_extra, unknown
from trimtab.model.config import ModelConfig
from trimtab.model.transformer import rope_frequencies

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader, ReaderTensor

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# GGUF keeps Llama 3's frequency scaling as a table of divisors, not as the rule that made it.
_ROPE_TABLE = "rope_freqs.weight"


@dataclass(frozen=True)
class GGUFFile:
    """An opened GGUF file.

    Attributes:
        config: the model's shape.
        metadata: every key-value pair of the file, arrays as lists.
        stored: tensors under their GGUF names, still quantised.
    """

    path: Path
    config: ModelConfig
    metadata: dict[str, Any]
    stored: dict[str, ReaderTensor]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face name and float32 weight, one at a time; every quantised type is expanded."""
        for name, tensor in self.stored.items():
            if name != _ROPE_TABLE:
                yield _hf_name(name), _unpermute(name, _dequantise(tensor), self.config)


def open_gguf(path: str | Path) -> GGUFFile:
    """Open a GGUF file of a Llama (also Mistral, SmolLM2), Qwen2 or Qwen3 model.

    Raises:
        MissingExtraError: the `gguf` package is not installed.
        DataError: not a GGUF file, or metadata or tensors are missing.
        ConfigError: another architecture or rotary scaling.
    """
    path = Path(path)
    reader = _reader(path)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    return GGUFFile(path, _config(metadata, tensors), metadata, tensors)


def _reader(path: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise missing_extra("gguf", "gguf", "reading a GGUF file") from error
    try:
        return GGUFReader(path)
    except ValueError as error:
        raise DataError(f"{path} cannot be read as a GGUF file: {error}") from error


def _config(metadata: dict[str, Any], tensors: dict[str, ReaderTensor]) -> ModelConfig:
    arch = metadata.get("general.architecture")
    if arch not in _ARCHITECTURES:
        raise unknown("general.architecture", arch, _ARCHITECTURES)

    def read(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{key}", default)
        if value is None:
            raise DataError(f"the GGUF metadata lacks {arch}.{key}")
        return value

    if "token_embd.weight" not in tensors:
        raise DataError("the GGUF file lacks the tensor token_embd.weight")
    heads, hidden = int(read("attention.head_count")), int(read("embedding_length"))
    base: dict[str, Any] = {
        "family": arch,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "num_layers": int(read("block_count")),
        "num_heads": heads,
        "num_kv_heads": int(read("attention.head_count_kv", heads)),
        "head_dim": int(read("attention.key_length", read("rope.dimension_count", hidden // heads))),
        "intermediate_size": int(read("feed_forward_length")),
        "rms_norm_eps": _decimal(read("attention.layer_norm_rms_epsilon")),
        "rope_theta": _decimal(read("rope.freq_base", 10000.0)),
        "max_positions": int(read("context_length")),
        "qkv_bias": "blk.0.attn_q.bias" in tensors,
        "o_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        "tie_embeddings": "output.weight" not in tensors,
    }
    config = ModelConfig(**base)
    return ModelConfig(**base, rope_scaling=_rope_scaling(metadata, arch, tensors.get(_ROPE_TABLE), config))


def _decimal(value: float) -> float:
    """The decimal number somebody wrote, of which the file holds the nearest float32 (1e-5, not 9.99999974e-06)."""
    return float(f"{value:.7g}")


def _rope_scaling(
    metadata: dict[str, Any], arch: str, table: ReaderTensor | None, unscaled: ModelConfig
) -> dict[str, Any] | None:
    if table is not None:
        return _llama3_scaling(_dequantise(table), unscaled)
    kind = metadata.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise unknown(f"{arch}.rope.scaling.type", kind, ["none", "linear"])
    return {"rope_type": "linear", "factor": _decimal(metadata[f"{arch}.rope.scaling.factor"])}


def _llama3_scaling(divisor: Tensor, unscaled: ModelConfig) -> dict[str, Any]:
    """The rule of Llama 3.1 and 3.2 that gives this table; only their published constants are tried."""
    rule = {
        "rope_type": "llama3",
        "factor": float(divisor.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled = ModelConfig(**{**vars(unscaled), "rope_scaling": rule})
    if not torch.allclose(rope_frequencies(unscaled) / divisor, rope_frequencies(scaled), rtol=1e-4):
        raise DataError(
            f"{_ROPE_TABLE} is not the table of Llama 3.1 or 3.2; use the model's safetensors folder instead"
        )
    return rule


def _hf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        return f"model.layers.{layer}.{_LAYER_NAMES.get(part, part)}.{suffix}"
    return f"{_NAMES.get(stem, stem)}.{suffix}"


def _unpermute(name: str, weight: Tensor, config: ModelConfig) -> Tensor:
    """Undo the reordering of Llama query and key rows.

    llama.cpp turns neighbouring pairs, Hugging Face and this transformer turn the two halves of a head; for Qwen the
    file keeps the halves.
    """
    part = name.split(".")[2] if name.startswith("blk.") else ""
    if config.family != "llama" or part not in ("attn_q", "attn_k"):
        return weight
    heads = config.num_heads if part == "attn_q" else config.num_kv_heads
    pairs = weight.unflatten(0, (heads, config.head_dim // 2, 2))
    return pairs.transpose(1, 2).flatten(0, 2)


def _dequantise(tensor: ReaderTensor) -> Tensor:
    from gguf.quants import dequantize

    values: np.ndarray = dequantize(tensor.data, tensor.tensor_type)
    return torch.from_numpy(values.astype("float32"))  # astype copies: the file is mapped read-only
