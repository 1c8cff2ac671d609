from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trimtab.core.errors import ConfigError, DataError
from trimtab.model.config import ModelConfig

Make = Callable[..., ModelConfig]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
HF: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "tie_embeddings": True, "rope_scaling": LLAMA3},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 5e5, "max_positions": 4096},
        {"family": "qwen2", "qkv_bias": True},
        {"family": "qwen2", "qkv_bias": True, "sliding_window": 16},
        {"family": "qwen3", "qk_norm": True},
        {"family": "qwen3", "qk_norm": True, "qkv_bias": True, "o_bias": True},
        {"family": "mistral", "sliding_window": 32},
        {"family": "mistral", "sliding_window": None},
    ],
)
def test_round_trip(make_config: Make, changes: dict[str, Any]) -> None:
    config = make_config(**changes)
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_defaults_of_absent_keys() -> None:
    llama = ModelConfig.from_hf(HF)
    assert (llama.num_kv_heads, llama.head_dim, llama.rope_theta, llama.tie_embeddings) == (4, 8, 10000.0, False)
    assert ModelConfig.from_hf({**HF, "architectures": ["MistralForCausalLM"]}).sliding_window == 4096
    qwen = ModelConfig.from_hf({**HF, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 64})
    assert (qwen.qkv_bias, qwen.sliding_window) == (True, None)  # the window is off unless use_sliding_window says so
    assert ModelConfig.from_hf({**HF, "architectures": ["Qwen3ForCausalLM"]}).head_dim == 128
    by_type = {key: value for key, value in HF.items() if key != "architectures"} | {"model_type": "qwen3"}
    assert ModelConfig.from_hf(by_type).family == "qwen3"


def test_both_spellings_of_rope_are_read() -> None:
    old = ModelConfig.from_hf({**HF, "rope_theta": 5e5, "rope_scaling": LLAMA3})
    new = ModelConfig.from_hf({**HF, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}})
    assert old == new
    assert old.rope_scaling == LLAMA3
    linear = ModelConfig.from_hf({**HF, "rope_scaling": {"type": "linear", "factor": 4.0}})
    assert linear.rope_scaling == {"rope_type": "linear", "factor": 4.0}
    assert ModelConfig.from_hf({**HF, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}).rope_theta == 7.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "'GemmaForCausalLM'.*LlamaForCausalLM.*Qwen3ForCausalLM"),
        ({"architectures": None, "model_type": "gpt2"}, "'gpt2'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'.*linear, llama3"),
        ({"hidden_act": "gelu"}, "hidden_act.*'gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4, "head_dim": 8}, "num_heads: 6.*num_kv_heads = 4"),
        ({"head_dim": 7}, "head_dim: 7"),
        ({"num_hidden_layers": 0}, "num_layers: 0"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf({**HF, **changes})


def test_missing_keys_are_listed() -> None:
    with pytest.raises(DataError, match="lacks vocab_size, intermediate_size"):
        ModelConfig.from_hf({key: v for key, v in HF.items() if key not in ("vocab_size", "intermediate_size")})
    with pytest.raises(DataError, match="'llama3' lacks factor"):
        ModelConfig.from_hf({**HF, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "factor"}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "mistral", "qkv_bias": True}, "qkv_bias = True.*mistral"),
        ({"family": "qwen2"}, "qkv_bias = False.*qwen2"),
        ({"family": "qwen3"}, "qk_norm = False.*qwen3"),
        ({"o_bias": True}, "o_bias = True"),
        ({"sliding_window": 8}, "sliding_window"),
        ({"family": "qwen3", "qk_norm": True, "mlp_bias": True}, "mlp_bias = True"),
    ],
)
def test_what_a_family_cannot_express_is_refused(make_config: Make, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(**changes).to_hf()


def test_unknown_family_suggests_the_nearest(make_config: Make) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'qwen2'"):
        make_config(family="qwen22")
