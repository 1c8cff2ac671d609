from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from trimtab.model.attention import plan_sequences
from trimtab.model.config import ModelConfig
from trimtab.model.gguf import GGUFFile, open_gguf
from trimtab.model.load import SMOLLM2, assign_weights, resolve
from trimtab.model.tokenizer import HFTokenizer, Tokenizer
from trimtab.model.transformer import Transformer


def _config(**changes: Any) -> ModelConfig:
    base: dict[str, Any] = {
        "family": "llama",
        "vocab_size": 61,
        "hidden_size": 32,
        "num_layers": 3,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
    }
    return ModelConfig(**{**base, **changes})


def _lively(config: ModelConfig, seed: int = 0) -> Transformer:
    """A model whose attention and biases matter: fresh weights of std 0.02 would hide most faults in rounding."""
    model = Transformer.init(config, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.25)
    return model


@pytest.fixture(scope="session")
def make_config() -> Callable[..., ModelConfig]:
    return _config


@pytest.fixture(scope="session")
def lively() -> Callable[..., Transformer]:
    return _lively


@pytest.fixture
def model() -> Transformer:
    return _lively(_config())


@pytest.fixture(scope="session")
def alone() -> Callable[[Transformer, torch.Tensor], torch.Tensor]:
    """Hidden states of one sequence by itself: what every faster path must reproduce."""
    return lambda model, tokens: model(tokens, plan_sequences([len(tokens)]))


@pytest.fixture(scope="session")
def smollm2_file() -> GGUFFile:
    pytest.importorskip("gguf")
    return open_gguf(resolve(SMOLLM2))


@pytest.fixture(scope="session")
def smollm2(smollm2_file: GGUFFile) -> tuple[Transformer, Tokenizer]:
    model = Transformer.empty(smollm2_file.config)
    assign_weights(model, smollm2_file.tensors())
    return model, HFTokenizer.from_gguf(smollm2_file.metadata)
