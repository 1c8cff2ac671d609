from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from trimtab.core.config import EngineConfig
from trimtab.core.errors import ConfigError, EngineError, MissingExtraError
from trimtab.core.records import Prompt, StopReason
from trimtab.core.rng import key
from trimtab.generate.protocol import Request, Sampling
from trimtab.generate.vllm_engine import VLLMEngine, import_vllm, to_piece
from trimtab.generate.weights import WeightCheck, WeightFolders
from trimtab.model.config import ModelConfig
from trimtab.model.transformer import Transformer

EOS = frozenset({0})
REAL = os.environ.get("TRIMTAB_VLLM_PYTHON", "")


class Kind(Enum):
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class FakeCore:
    """The part of vLLM's engine that is used; token t + 1 follows token t, 18 is followed by 0."""

    requests: dict[str, dict[str, Any]] = field(default_factory=dict)
    added: list[dict[str, Any]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    broken_after: int = 10**9
    steps: int = 0
    stops_early: bool = False

    def add_request(self, name: str, prompt: dict[str, Any], params: Any) -> None:
        entry = {"prompt": list(prompt["prompt_token_ids"]), "salt": prompt["cache_salt"], "params": params, "out": []}
        self.requests[name] = entry
        self.added.append(entry)

    def abort_request(self, names: Sequence[str]) -> None:
        self.aborted += names
        for name in names:
            self.requests.pop(name, None)

    def step(self) -> list[Any]:
        self.steps += 1
        if self.steps > self.broken_after:
            raise RuntimeError("EngineCore died")
        outputs = []
        for name, r in list(self.requests.items()):
            p = r["params"]
            token = ([*r["prompt"], *r["out"]][-1] + 1) % 19
            r["out"].append(token)
            over = token in p.stop_token_ids or len(r["out"]) >= p.max_tokens or self.stops_early
            if over:
                del self.requests[name]
            if over or p.output_kind is Kind.DELTA:
                new = r["out"][-1:] if p.output_kind is Kind.DELTA else r["out"]
                logprobs = [
                    {t: SimpleNamespace(logprob=-t / 10), (t + 3) % 19: SimpleNamespace(logprob=-5.0)} for t in new
                ]
                result = SimpleNamespace(token_ids=new, logprobs=logprobs, finish_reason="stop")
                outputs.append(
                    SimpleNamespace(
                        request_id=name,
                        outputs=[result],
                        finished=over,
                        prompt_token_ids=r["prompt"],
                        num_cached_tokens=1,
                    )
                )
        return outputs


class FakeLLM:
    def __init__(self, **options: Any) -> None:
        assert Path(options["model"], "model.safetensors").is_file()
        self.options, self.llm_engine = options, FakeCore()
        self.reloaded: list[str] = []
        self.resets, self.reset_works = 0, True

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> list[None]:
        assert method == "reload_weights"
        assert Path(kwargs["weights_path"], "config.json").is_file()
        self.reloaded.append(kwargs["weights_path"])
        return [None]

    def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return self.reset_works


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module, params = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    params.RequestOutputKind = Kind  # type: ignore[attr-defined]
    for name, value in {
        "__version__": "0.32.1",
        "LLM": FakeLLM,
        "SamplingParams": SimpleNamespace,
        "sampling_params": params,
    }.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)
    monkeypatch.setattr(WeightCheck, "check", lambda *args: None)  # the fake has no weights
    return module


def build(**changes: Any) -> VLLMEngine:
    config = EngineConfig(name="vllm", **{"slots": 4, **changes})
    return VLLMEngine(tiny.tiny_model(), None, config, eos_ids=EOS, max_context=64)


def ask(starts: Sequence[int] = (3, 9, 15), limit: int = 7, **changes: Any) -> list[Request]:
    return [Request(f"r{s}", Prompt(id=f"p{s}", text="", tokens=(1, s)), 0, key(s), limit, **changes) for s in starts]


@dataclass
class StopAfter:
    """Ends a response with its third token."""

    part: str = "third"
    every: int = 1
    signals: frozenset[str] = frozenset()

    def start(self, num_slots: int, device: torch.device) -> dict[str, torch.Tensor]:
        return {"x": torch.zeros(num_slots)}

    def step(self, state: dict[str, torch.Tensor], view: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        column = 2 - view.index_B
        return state, torch.where((column >= 0) & (column < view.count_B), column, -1)


def test_whole_responses(vllm: ModuleType) -> None:
    engine = build()
    options = engine.llm.options
    assert options["logprobs_mode"] == "processed_logprobs"
    assert options["skip_tokenizer_init"]
    done = engine.generate(ask())
    assert [c.tokens.tolist() for c in done] == [list(range(4, 11)), list(range(10, 17)), [16, 17, 18, 0]]
    assert [c.stop.reason for c in done] == [StopReason.LIMIT, StopReason.LIMIT, StopReason.EOS]
    assert np.allclose(done[2].logprobs, [-1.6, -1.7, -1.8, 0.0])
    assert [c.cost.prefilled for c in done] == [1, 1, 1]
    core = engine.llm.llm_engine
    assert core.aborted == []
    for r in core.added:
        p = r["params"]
        assert (p.ignore_eos, p.stop_token_ids, p.detokenize, p.output_kind) == (True, [0], False, Kind.FINAL_ONLY)
        assert 0 <= p.seed < 2**31
    assert len({r["params"].seed for r in core.added}) == 3


@pytest.mark.parametrize(("every", "overrun"), [(1, 0), (2, 1)])
def test_a_hook_ends_a_request_in_vllm_too(vllm: ModuleType, every: int, overrun: int) -> None:
    engine = build(slots=2)
    done = engine.generate(ask((3, 9, 17)), hooks=[StopAfter(every=every)])
    assert [c.tokens.tolist() for c in done] == [[4, 5, 6], [10, 11, 12], [18, 0]]
    assert [c.overrun for c in done] == [overrun, overrun, 0]
    assert [c.stop.reason for c in done] == [StopReason.PART, StopReason.PART, StopReason.EOS]
    assert len(engine.llm.llm_engine.aborted) == 2, "what ended by itself is not aborted"
    assert not engine.llm.llm_engine.requests


def test_resuming_and_aborting(vllm: ModuleType) -> None:
    engine = build()
    (done,) = engine.generate(ask((3,), prefix=(4, 5), prefix_logprobs=(-1.0, -2.0)))
    assert done.tokens.tolist() == list(range(4, 11))
    assert engine.llm.llm_engine.added[0]["prompt"] == [1, 3, 4, 5]
    assert engine.llm.llm_engine.added[0]["params"].max_tokens == 5
    polls = iter([False, False])
    aborted = engine.generate(ask(), should_abort=lambda: next(polls, True))
    assert [len(c.tokens) for c in aborted] == [2, 2, 2]
    assert {c.stop.reason for c in aborted} == {StopReason.ABORT}
    assert not engine.llm.llm_engine.requests, "nothing goes on behind the caller's back"


def test_updates_reload_reset_and_change_the_salt(vllm: ModuleType) -> None:
    engine = build()
    salts = []
    for version in (1, 2, 3):
        engine.sync(tiny.tiny_model(version), version)
        assert engine.generate(ask())[0].version == version
        salts.append(engine.llm.llm_engine.added[-1]["salt"])
    assert len(set(salts)) == 3
    assert len(set(engine.llm.reloaded)) == 3
    assert engine.llm.resets == 3
    engine.llm.reset_works = False
    with pytest.raises(EngineError, match="did not drop the prefix cache"):
        engine.sync(tiny.tiny_model(), 4)
    with pytest.raises(EngineError, match="weights are unknown"):
        engine.generate(ask())


def test_a_dead_vllm_leaves_what_was_done(vllm: ModuleType) -> None:
    engine = build()
    engine.llm.llm_engine.broken_after = 4
    with pytest.raises(EngineError, match="EngineCore died") as caught:
        engine.generate(ask((3, 15), limit=20), should_abort=lambda: False)
    kept = caught.value.completions
    assert [(len(c.tokens), c.stop.reason) for c in kept] == [(4, StopReason.ERROR), (4, StopReason.EOS)]
    engine = build()
    engine.llm.llm_engine.stops_early = True
    with pytest.raises(EngineError, match="before its limit without an end-of-sequence token"):
        engine.generate(ask())


def test_what_vllm_cannot_do_is_refused(vllm: ModuleType) -> None:
    engine = build()
    with pytest.raises(ConfigError, match="'entropy'"):
        engine.generate(ask(), signals=frozenset({"entropy"}))
    with pytest.raises(ConfigError, match=r"0\.01"):
        engine.generate(ask(sampling=Sampling(temperature=0.001)))
    with pytest.raises(ConfigError, match="with signals"):
        engine.generate(ask(sampling=Sampling(top_p=0.5)), topk=2)
    with pytest.raises(ConfigError, match="at most 64"):
        engine.generate(ask(), topk=65)


def test_signals(vllm: ModuleType) -> None:
    (done,) = build().generate(ask((3,), limit=2), signals=frozenset({"margin"}), topk=1)
    assert done.signals["topk_ids"].tolist() == [[4], [5]]
    assert np.allclose(done.signals["topk_logprobs"], [[-0.4], [-0.5]])
    assert np.allclose(done.signals["margin"], [4.6, 4.5])


def test_missing_log_probs_are_refused() -> None:
    with pytest.raises(EngineError, match="0 log-probs for 2 tokens"):
        to_piece([1, 2], None, 0)


def test_only_tested_versions_are_used(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert import_vllm() is vllm
    for version in ("0.31.0", "0.33.0", "1.0.0"):
        monkeypatch.setattr(vllm, "__version__", version)
        with pytest.raises(MissingExtraError, match=rf"tested with vllm >=0.32,<0.33; vllm {version}"):
            import_vllm()
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtraError, match=r"trimtab\[vllm\]"):
        import_vllm()


# ---------------------------------------------------------------- the real one


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that vLLM's CPU kernels take (head size 32), with distributions that are not flat."""
    config = ModelConfig(
        family="llama",
        vocab_size=512,
        hidden_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=256,
        tie_embeddings=True,  # vLLM's CPU build does not reload a tied output layer by itself
    )
    model = Transformer.init(config, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return WeightFolders(str(tmp_path_factory.mktemp("small"))).save(model, None, "small")


@pytest.mark.skipif(not REAL, reason="TRIMTAB_VLLM_PYTHON names no Python with vLLM: vLLM itself is NOT tested here")
@pytest.mark.parametrize("how", ["inprocess", "http"])
def test_real_vllm(small: Path, how: str) -> None:
    """Everything that `real_vllm.py` checks, in a process of the Python that has vLLM."""
    source = Path(__file__).parents[2] / "src"
    run = subprocess.run(
        [REAL, str(Path(__file__).with_name("real_vllm.py")), how, str(small)],
        env=os.environ | {"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    facts = json.loads(run.stdout.rpartition("RESULT ")[2])
    assert len(facts["updates"]) == 3
