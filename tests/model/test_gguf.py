from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trimtab.core.errors import ConfigError, DataError, MissingExtraError
from trimtab.model.attention import plan_sequences
from trimtab.model.config import ModelConfig
from trimtab.model.gguf import GGUFFile, open_gguf
from trimtab.model.load import assign_weights, load_model, load_weights
from trimtab.model.tokenizer import Tokenizer
from trimtab.model.transformer import Transformer, rope_frequencies

gguf = pytest.importorskip("gguf")
Make = Callable[..., ModelConfig]
Lively = Callable[..., Transformer]

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def interleave(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp's reordering of query and key rows: half-split pairs become neighbours."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def write(model: Transformer, path: Path, kind: Any = None, extra: Callable[[Any], None] | None = None) -> None:
    """A GGUF file of `model` as llama.cpp's converter lays it out."""
    config = model.config
    arch = config.family
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if extra is not None:
        extra(writer)
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        parts = name.split(".")
        if parts[0] != "blocks":
            stem = {"embed": "token_embd", "norm": "output_norm", "lm_head": "output"}[parts[0]]
            add(writer, f"{stem}.weight", value, kind)
            continue
        _, layer, part, suffix = parts
        if part == "qkv":
            pieces = dict(zip(("attn_q", "attn_k", "attn_v"), value.split([q, kv, kv]), strict=True))
            if arch == "llama":
                pieces["attn_q"] = interleave(pieces["attn_q"], config.num_heads)
                pieces["attn_k"] = interleave(pieces["attn_k"], config.num_kv_heads)
        elif part == "gate_up":
            pieces = dict(zip(("ffn_gate", "ffn_up"), value.chunk(2), strict=True))
        else:
            names = {"o": "attn_output", "down": "ffn_down", "mlp_norm": "ffn_norm"}
            pieces = {names.get(part, part.replace("q_norm", "attn_q_norm").replace("k_norm", "attn_k_norm")): value}
        for stem, piece in pieces.items():
            add(writer, f"blk.{layer}.{stem}.{suffix}", piece, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer: Any, name: str, value: Tensor, kind: Any) -> None:
    data = np.ascontiguousarray(value.numpy())
    if kind is None or value.ndim == 1:
        writer.add_tensor(name, data)
    else:
        writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)


def same_logits(a: Transformer, b: Transformer, tolerance: float = 1e-4) -> None:
    row = torch.randint(61, (30,), generator=torch.Generator().manual_seed(0))
    plan = plan_sequences([30])
    with torch.no_grad():
        want = b.logits(b(row, plan))
        torch.testing.assert_close(a.logits(a(row, plan)), want, rtol=tolerance, atol=tolerance)


def read(path: Path) -> Transformer:
    file = open_gguf(path)
    model = Transformer.empty(file.config)
    assign_weights(model, file.tensors())
    return model


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": True, "rope_theta": 5e5},
        {"qkv_bias": True},  # biases of queries and keys are reordered too
        {"family": "qwen2", "qkv_bias": True},
        {"family": "qwen3", "qk_norm": True},
    ],
)
def test_every_architecture_round_trips(
    tmp_path: Path, make_config: Make, lively: Lively, changes: dict[str, Any]
) -> None:
    model = lively(make_config(**changes))
    write(model, tmp_path / "m.gguf")
    again = read(tmp_path / "m.gguf")
    assert again.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    other = Transformer.init(model.config, 3)
    load_weights(other, tmp_path / "m.gguf")
    same_logits(other, model)


@pytest.mark.parametrize(("kind", "tolerance"), [("Q8_0", 0.01), ("Q4_1", 0.1), ("BF16", 0.005), ("F16", 0.001)])
def test_quantised_types_are_expanded(
    tmp_path: Path, make_config: Make, lively: Lively, kind: str, tolerance: float
) -> None:
    model = lively(make_config(hidden_size=64, intermediate_size=96, head_dim=16))
    write(model, tmp_path / "m.gguf", getattr(gguf.GGMLQuantizationType, kind))
    for (name, a), b in zip(read(tmp_path / "m.gguf").named_parameters(), model.parameters(), strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max(), name


def test_rope_scalings(tmp_path: Path, make_config: Make, lively: Lively) -> None:
    linear = lively(make_config(rope_scaling={"rope_type": "linear", "factor": 2.5}))

    def add_linear(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.5)

    write(linear, tmp_path / "linear.gguf", extra=add_linear)
    assert read(tmp_path / "linear.gguf").config == linear.config

    llama3 = lively(make_config(rope_scaling=LLAMA3, rope_theta=5e5, head_dim=16))
    divisor = rope_frequencies(make_config(rope_theta=5e5, head_dim=16)) / rope_frequencies(llama3.config)
    write(llama3, tmp_path / "l3.gguf", extra=lambda w: w.add_tensor("rope_freqs.weight", divisor.numpy()))
    again = read(tmp_path / "l3.gguf")
    assert again.config == llama3.config
    same_logits(again, llama3)

    odd = divisor.clone()
    odd[2] *= 1.5
    write(llama3, tmp_path / "odd.gguf", extra=lambda w: w.add_tensor("rope_freqs.weight", odd.numpy()))
    with pytest.raises(DataError, match=r"rope_freqs.weight is not the table of Llama 3"):
        open_gguf(tmp_path / "odd.gguf")

    write(linear, tmp_path / "yarn.gguf", extra=lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN))
    with pytest.raises(ConfigError, match=r"'yarn'.*linear"):
        open_gguf(tmp_path / "yarn.gguf")


def test_load_model_reads_weights_and_tokenizer_of_one_file(tmp_path: Path, make_config: Make, lively: Lively) -> None:
    model = lively(make_config())
    tokens = ["<|endoftext|>", "a", "b", "ab"]

    def add_tokenizer(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([3, 1, 1, 1])
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(0)

    write(model, tmp_path / "tiny.gguf", extra=add_tokenizer)
    again, tokenizer = load_model(tmp_path / "tiny.gguf", dtype=torch.bfloat16)
    assert again.dtype == torch.bfloat16
    assert torch.equal(again.embed.weight, model.embed.weight.to(torch.bfloat16))
    assert tokenizer.encode("abb") == [3, 2]
    assert (tokenizer.name, tokenizer.eos_ids) == ("tiny", {0})


def test_unsupported_and_broken_files_are_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "g.gguf", "gemma")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"general.architecture.*'gemma'.*llama, qwen2, qwen3"):
        open_gguf(tmp_path / "g.gguf")
    writer = gguf.GGUFWriter(tmp_path / "e.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(DataError, match=r"lacks llama.attention.head_count"):
        open_gguf(tmp_path / "e.gguf")
    (tmp_path / "no.gguf").write_bytes(b"nothing of the kind, but long enough to be read")
    with pytest.raises(DataError, match="cannot be read as a GGUF file"):
        open_gguf(tmp_path / "no.gguf")


def test_without_the_package_the_install_line_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'trimtab\[gguf\]'"):
        open_gguf(tmp_path / "m.gguf")


def transformers_weights(file: GGUFFile) -> dict[str, Tensor]:
    """The file's weights by transformers' own rules; only the names, which cannot be right by accident, are ours."""
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    processor = LlamaTensorProcessor({"num_attention_heads": 9, "num_key_value_heads": 3})
    weights = {}
    for (name, _), (gguf_name, stored) in zip(file.tensors(), file.stored.items(), strict=True):
        value = gguf.quants.dequantize(stored.data, stored.tensor_type)
        value = processor.process(weights=value, name=gguf_name).weights
        weights[name] = torch.from_numpy(np.array(value))
    return weights


def test_smollm2_logits_equal_transformers(smollm2: tuple[Transformer, Tokenizer], smollm2_file: GGUFFile) -> None:
    transformers = pytest.importorskip("transformers")
    model, tokenizer = smollm2
    config = transformers.LlamaConfig(**{**model.config.to_hf(), "rope_theta": 100000.0, "rms_norm_eps": 1e-5})
    reference = transformers.LlamaForCausalLM(config).eval()
    missing = reference.load_state_dict(transformers_weights(smollm2_file), strict=False).missing_keys
    assert missing == ["lm_head.weight"]  # tied to the embedding
    reference.tie_weights()
    row = torch.tensor(tokenizer.apply_chat([{"role": "user", "content": "What is 17 + 25? Answer briefly."}]))
    with torch.no_grad():
        want = reference(row[None]).logits[0]
        got = model.logits(model(row, plan_sequences([len(row)])))
    assert want.std() > 1
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_smollm2_answers(smollm2: tuple[Transformer, Tokenizer]) -> None:
    model, tokenizer = smollm2
    ids = tokenizer.apply_chat([{"role": "user", "content": "What is the capital of France?"}])
    length, zero = len(ids), torch.tensor([0])
    cache = model.new_cache(1, length + 16)
    hidden = model.extend(torch.tensor([ids]), zero, torch.tensor([length]), cache, zero)[:, -1]
    answer: list[int] = []
    while len(answer) < 16 and not (answer and answer[-1] in tokenizer.eos_ids):
        token = model.logits(hidden).argmax(-1)
        answer.append(int(token))
        hidden = model.decode(token, torch.tensor([length]), cache, slice(0, 1), length + 1)
        length += 1
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] in tokenizer.eos_ids
