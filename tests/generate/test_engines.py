from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from generate import toy_server

from trimtab.core.config import RunConfig
from trimtab.core.errors import ConfigError, EngineError
from trimtab.core.part import Needs
from trimtab.generate.engines import build_engine
from trimtab.generate.http_engine import HttpEngine
from trimtab.generate.torch_engine import TorchEngine

CPU = torch.device("cpu")
TOKENIZER: Any = SimpleNamespace(eos_ids=frozenset({0}), pad_id=0, save=lambda folder: None)


@pytest.fixture(params=["vllm", "llamacpp"])
def server(request: pytest.FixtureRequest) -> Iterator[toy_server.ToyServer]:
    found = toy_server.ToyServer(toy_server.Toy(tiny.tiny_model(), request.param))
    yield found
    found.stop()


def settings(**engine: Any) -> RunConfig:
    return RunConfig.build({"steps": engine.pop("steps", 1), "engine": engine})


def test_torch_is_the_default() -> None:
    engine = build_engine(settings(slots=3), tiny.tiny_model(), TOKENIZER, CPU)
    assert isinstance(engine, TorchEngine)
    assert engine.num_slots == 3


def test_an_address_without_http_is_a_contradiction() -> None:
    with pytest.raises(ConfigError, match=r"engine.url.*engine.name is 'torch'"):
        build_engine(settings(url="http://127.0.0.1:1"), tiny.tiny_model(), TOKENIZER, CPU)


def test_a_signal_no_server_gives_is_refused_before_anything_is_built() -> None:
    asked = settings(name="http", url="http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="'entropy'"):
        build_engine(asked, tiny.tiny_model(), TOKENIZER, CPU, Needs(signals=frozenset({"entropy"})))


def test_a_training_run_starts_with_its_own_weights_at_the_server(server: toy_server.ToyServer) -> None:
    policy = tiny.tiny_model(seed=5)
    config = settings(name="http", url=server.url)
    if server.toy.dialect == "llamacpp":
        with pytest.raises(EngineError, match="cannot take new weights"):
            build_engine(config, policy, TOKENIZER, CPU)
        return
    engine = build_engine(config, policy, TOKENIZER, CPU)
    assert isinstance(engine, HttpEngine)
    assert torch.equal(server.toy.model.embed.weight, policy.embed.weight)


def test_an_evaluation_takes_the_servers_weights(server: toy_server.ToyServer) -> None:
    build_engine(settings(name="http", url=server.url, steps=0), tiny.tiny_model(seed=5), TOKENIZER, CPU)
    assert server.toy.calls == []
