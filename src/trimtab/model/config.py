"""The description of a decoder-only transformer, read from and written to Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from trimtab.core.errors import ConfigError, DataError, invalid, unknown

Family = Literal["llama", "qwen2", "qwen3", "mistral"]
FAMILIES: tuple[str, ...] = get_args(Family)

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}
_ROPE_SCALING_KEYS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)
# What a family's configuration class assumes when the key is absent from config.json.
_DEFAULT_ROPE_THETA = 10000.0
_DEFAULT_MAX_POSITIONS = {"llama": 2048, "qwen2": 32768, "qwen3": 32768, "mistral": 131072}
_DEFAULT_SLIDING_WINDOW = {"llama": None, "qwen2": None, "qwen3": None, "mistral": 4096}


@dataclass(frozen=True)
class ModelConfig:
    """Shape and arithmetic of one model.

    Attributes:
        family: naming scheme of the checkpoint: llama, qwen2, qwen3 or mistral.
        rope_scaling: None, or `{"rope_type": "linear", "factor": f}`, or the four-key `llama3` rule (Llama 3.1, 3.2).
        max_positions: context length the model was trained for, in tokens; a description, not a limit of the code.
        sliding_window: attention window in tokens, or None. Attention here is always full, which is the same function
            for sequences up to the window; longer sequences are refused.

    Raises:
        ConfigError: a size is not positive, heads do not divide, or a value is outside what is supported.
        DataError: the rotary scaling lacks a number.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    max_positions: int = 2048
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise unknown("model.family", self.family, FAMILIES)
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "max_positions",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise invalid(f"model.{name}", value, "a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise invalid("model.num_heads", self.num_heads, f"multiples of num_kv_heads = {self.num_kv_heads}")
        if self.head_dim % 2:
            raise invalid("model.head_dim", self.head_dim, "even numbers: rotary embedding turns pairs")
        if self.rope_scaling is not None:
            _check_rope_scaling(self.rope_scaling)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read the dictionary of a Hugging Face `config.json` (both the old and the `rope_parameters` spelling).

        Raises:
            ConfigError: unknown architecture, or a feature this transformer does not compute.
            DataError: a required key is missing.
        """
        family = _family_of(config)
        missing = [key for key in _REQUIRED if config.get(key) is None]
        if missing:
            raise DataError(f"config.json of a {family} model lacks {', '.join(missing)}")
        activation = config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise unknown("config.json hidden_act", activation, ["silu"])
        if config.get("partial_rotary_factor", 1.0) != 1.0:
            raise invalid("config.json partial_rotary_factor", config["partial_rotary_factor"], "1.0")
        num_heads = int(config["num_attention_heads"])
        theta, scaling = _rope_of(config)
        bias = bool(config.get("attention_bias", False))
        return cls(
            family=family,
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or _default_head_dim(family, config)),
            intermediate_size=int(config["intermediate_size"]),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            max_positions=int(config.get("max_position_embeddings") or _DEFAULT_MAX_POSITIONS[family]),
            qkv_bias=True if family == "qwen2" else bias and family != "mistral",
            o_bias=bias and family in ("llama", "qwen3"),
            mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
            qk_norm=family == "qwen3",
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            sliding_window=_sliding_window_of(family, config),
        )

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` dictionary; `from_hf(to_hf())` gives an equal config.

        Raises:
            ConfigError: the family's Hugging Face class has no switch for one of the biases or norms set here.
        """
        self._check_expressible()
        out: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tie_embeddings,
        }
        if self.family in ("llama", "qwen3"):
            out["attention_bias"] = self.qkv_bias
        if self.family == "llama":
            out["mlp_bias"] = self.mlp_bias
        else:
            out["sliding_window"] = self.sliding_window
        if self.family in ("qwen2", "qwen3"):
            out["use_sliding_window"] = self.sliding_window is not None
        return out

    def _check_expressible(self) -> None:
        expected = {
            "qkv_bias": {"qwen2": True, "mistral": False}.get(self.family, self.qkv_bias),
            "o_bias": self.qkv_bias if self.family in ("llama", "qwen3") else False,
            "mlp_bias": self.mlp_bias if self.family == "llama" else False,
            "qk_norm": self.family == "qwen3",
        }
        for name, value in expected.items():
            if getattr(self, name) != value:
                raise ConfigError(
                    f"model.{name} = {getattr(self, name)} cannot be written as a {self.family} config.json; "
                    f"that family fixes it to {value}"
                )
        if self.family == "llama" and self.sliding_window is not None:
            raise ConfigError("model.sliding_window cannot be written as a llama config.json; use family mistral")


def _family_of(config: Mapping[str, Any]) -> Family:
    by_class = {architecture: family for family, architecture in _ARCHITECTURES.items()}
    architectures = config.get("architectures") or []
    found = by_class.get(architectures[0]) if architectures else config.get("model_type")
    if found not in FAMILIES:
        name = architectures[0] if architectures else config.get("model_type")
        raise unknown("config.json architectures", name, _ARCHITECTURES.values())
    return cast(Family, found)


def _rope_of(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    parameters = config.get("rope_parameters") or {}
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or _DEFAULT_ROPE_THETA)
    raw = dict(config.get("rope_scaling") or parameters)
    kind = raw.get("rope_type") or raw.get("type") or "default"
    if kind == "default":
        return theta, None
    keys = _ROPE_SCALING_KEYS.get(kind)
    known = raw if keys is None else {key: raw[key] for key in keys if key in raw}
    return theta, {**known, "rope_type": kind}  # an unknown kind or a missing key is refused by the constructor


def _check_rope_scaling(scaling: Mapping[str, Any]) -> None:
    kind = scaling.get("rope_type")
    keys = _ROPE_SCALING_KEYS.get(str(kind))
    if keys is None:
        raise unknown("model.rope_scaling.rope_type", kind, _ROPE_SCALING_KEYS)
    missing = [key for key in keys if key not in scaling]
    if missing:
        raise DataError(f"model.rope_scaling of type {kind!r} lacks {', '.join(missing)}")


def _default_head_dim(family: Family, config: Mapping[str, Any]) -> int:
    if family == "qwen3":
        return 128
    return int(config["hidden_size"]) // int(config["num_attention_heads"])


def _sliding_window_of(family: Family, config: Mapping[str, Any]) -> int | None:
    if family == "llama" or (family != "mistral" and not config.get("use_sliding_window", False)):
        return None
    window = config.get("sliding_window", _DEFAULT_SLIDING_WINDOW[family])
    return None if window is None else int(window)
