"""Checks of a real vLLM, run by a Python that has it: ``python real_vllm.py inprocess|http FOLDER``.

The folder holds a small model as `WeightFolders` writes it. Prints one JSON line with what was measured; fails with an
assertion. `test_vllm_engine.py` runs this when TRIMTAB_VLLM_PYTHON names such a Python.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.core.config import EngineConfig
from trimtab.core.errors import EngineError
from trimtab.core.records import Prompt, StopReason
from trimtab.core.rng import key
from trimtab.generate.hooks import replay_hooks
from trimtab.generate.http_engine import HttpEngine
from trimtab.generate.protocol import ChunkView, Completion, Request, Sampling
from trimtab.generate.torch_engine import TorchEngine
from trimtab.generate.vllm_engine import VLLMEngine
from trimtab.model.load import load_pretrained
from trimtab.model.transformer import Transformer

EOS = frozenset({0, 2})
NEW_TOKENS = 40
TOLERANCE = 2e-3  # nats; both sides compute in float32


@dataclass
class StopAt:
    """Ends a response at the first token whose id is a multiple of ``of``."""

    of: int = 5
    part: str = "stop-at"
    every: int = 1
    signals: frozenset[str] = frozenset()

    def start(self, num_slots: int, device: torch.device) -> dict[str, Tensor]:
        return {"seen": torch.zeros(num_slots, dtype=torch.int64, device=device)}

    def step(self, state: dict[str, Tensor], view: ChunkView) -> tuple[dict[str, Tensor], Tensor]:
        column = torch.arange(view.token_BC.shape[1], device=view.token_BC.device)
        hit = (view.token_BC % self.of == 0) & (column < view.count_B[:, None]) & (view.index_B[:, None] + column >= 5)
        return {"seen": state["seen"] + view.count_B}, torch.where(hit.any(1), hit.to(torch.int64).argmax(1), -1)


def requests(model: Transformer, group: int = 4, tag: object = 0, **changes: Any) -> list[Request]:
    """Groups of two prompts, one of them longer than vLLM's cache blocks."""
    found = []
    for length in (9, 150):
        tokens = np.random.default_rng(length).integers(3, model.config.vocab_size, size=length)
        prompt = Prompt(id=f"p{length}", text="", tokens=tuple(tokens.tolist()))
        found += [Request(f"{length}-{n}", prompt, n, key(tag, length, n), NEW_TOKENS, **changes) for n in range(group)]
    return found


def gap(model: Transformer, asked: list[Request], done: list[Completion], temperature: float = 1.0) -> float:
    """Largest difference to the log-probs that our own model gives these tokens."""
    judge = TorchEngine(model, eos_ids=EOS, pad_id=2)
    ours = judge.score([r.prompt.tokens for r in asked], [c.tokens.tolist() for c in done], temperature)
    return max(float(np.abs(a - c.logprobs).max()) for a, c in zip(ours, done, strict=True) if len(a))


def check(engine: Any, model: Transformer) -> dict[str, Any]:
    """Everything an engine promises, with one set of weights after the other."""
    facts: dict[str, Any] = {}
    asked = requests(model)
    started = time.perf_counter()
    plain = engine.generate(asked)
    facts["seconds"] = round(time.perf_counter() - started, 2)
    facts["tokens"] = sum(len(c.tokens) for c in plain)
    assert [c.id for c in plain] == [r.id for r in asked]
    for c in plain:
        assert c.stop.reason in (StopReason.EOS, StopReason.LIMIT), c.stop
        assert (c.stop.reason is StopReason.EOS) == (int(c.tokens[-1]) in EOS)
        assert not np.isin(c.tokens[:-1], list(EOS)).any()
    assert len({tuple(c.tokens.tolist()) for c in plain}) == len(plain), "samples of a group are equal"
    facts["gap"] = gap(model, asked, plain)
    assert facts["gap"] < TOLERANCE, facts

    warm = requests(model, sampling=Sampling(temperature=0.7))
    facts["gap_temperature"] = gap(model, warm, engine.generate(warm), 0.7)
    assert facts["gap_temperature"] < TOLERANCE, facts
    greedy = requests(model, group=2, sampling=Sampling(temperature=0.0))
    facts["gap_greedy"] = gap(model, greedy, engine.generate(greedy))
    assert facts["gap_greedy"] < TOLERANCE, facts

    cut = engine.generate(requests(model, group=2, sampling=Sampling(top_k=1)))
    facts["top_k_1"] = max(float(np.abs(c.logprobs).max()) for c in cut)
    assert facts["top_k_1"] < 1e-4, "a truncated draw has log-prob 0 when one token is left"

    top = engine.generate(asked, signals=frozenset({"margin", "topk"}), topk=5)
    for c in top:
        rank = (c.signals["topk_ids"] == c.tokens[:, None]).argmax(1)
        inside = (c.signals["topk_ids"] == c.tokens[:, None]).any(1)
        same = np.take_along_axis(c.signals["topk_logprobs"], rank[:, None], 1)[:, 0]
        assert np.allclose(same[inside], c.logprobs[inside], atol=1e-5)
        assert (np.diff(c.signals["topk_logprobs"], axis=1) <= 0).all()
        assert np.allclose(c.signals["margin"], c.signals["topk_logprobs"][:, 0] - c.signals["topk_logprobs"][:, 1])

    greedy_plain = engine.generate(greedy)
    stopped = engine.generate(greedy, hooks=[StopAt()])
    for a, b in zip(stopped, replay_hooks([StopAt()], greedy_plain), strict=True):
        assert a.tokens.tolist() == b.tokens.tolist(), "stops while running and replayed differ"
        assert a.stop == b.stop
    facts["stopped_by_part"] = sum(c.stop.reason is StopReason.PART for c in stopped)
    facts["overrun"] = sum(c.overrun for c in stopped)
    assert facts["stopped_by_part"]

    part = [
        Request(r.id, r.prompt, r.sample, r.key, NEW_TOKENS, r.sampling, tuple(c.tokens[:7].tolist()))
        for r, c in zip(greedy, greedy_plain, strict=True)
    ]
    for a, b in zip(engine.generate(part), greedy_plain, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist(), "a resumed greedy response differs"
        assert np.isnan(a.logprobs[:7]).all()
        assert np.allclose(a.logprobs[7:], b.logprobs[7:], atol=TOLERANCE)

    polls = iter([False] * 3)
    aborted = engine.generate(asked, should_abort=lambda: next(polls, True))
    assert any(c.stop.reason is StopReason.ABORT for c in aborted)
    facts["aborted_tokens"] = sum(len(c.tokens) for c in aborted)

    facts["updates"] = updates(engine, model, asked)
    return facts


def updates(engine: Any, model: Transformer, asked: list[Request]) -> list[dict[str, float]]:
    """Three weight updates in a row: the log-probs are those of the new weights, over the same, cached, prompts."""
    found = []
    for version in (1, 2, 3):
        old = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * 0.05)
        started = time.perf_counter()
        engine.sync(model, version)
        seconds = time.perf_counter() - started
        done = engine.generate(asked)
        assert {c.version for c in done} == {version}
        found.append({"gap": gap(model, asked, done), "to_old": gap(old, asked, done), "seconds": round(seconds, 2)})
        assert found[-1]["gap"] < TOLERANCE, found
        assert found[-1]["to_old"] > 10 * TOLERANCE, "the update changed too little to be seen"
    return found


def inprocess(folder: Path, model: Transformer) -> dict[str, Any]:
    config = EngineConfig(name="vllm", slots=16, memory_share=0.2, eager=True)
    engine = VLLMEngine(model, None, config, eos_ids=EOS, max_context=1024)
    try:
        return check(engine, model)
    finally:
        engine.close()


def http(folder: Path, model: Transformer) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "1024"]
    command += ["--logprobs-mode", "processed_logprobs", "--gpu-memory-utilization", "0.2", "--enforce-eager"]
    command += ["--hf-overrides", '{"tie_word_embeddings": false}']  # see trimtab.generate.weights
    command += ["--skip-tokenizer-init", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    server = subprocess.Popen(command, env=os.environ | {"VLLM_SERVER_DEV_MODE": "1"}, start_new_session=True)
    config = EngineConfig(
        name="http", url=f"http://127.0.0.1:{port}", slots=16, chunk=8, timeout_s=60, connect_timeout_s=5, retries=1
    )
    options: dict[str, Any] = {"tokenizer": None, "eos_ids": EOS, "vocab_size": model.config.vocab_size}
    try:
        engine = connect(server, config, options)
        engine.check_updates()
        facts = check(engine, model)
        facts["dialect"] = engine.dialect.name
        facts["death"] = death(server, engine, requests(model, group=8))
        return facts
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def connect(server: subprocess.Popen[bytes], config: EngineConfig, options: dict[str, Any]) -> HttpEngine:
    deadline = time.monotonic() + 400
    while True:
        try:
            return HttpEngine(config, max_context=1024, **options)
        except EngineError:
            assert server.poll() is None, "the server died while it started"
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(1)


def death(server: subprocess.Popen[bytes], engine: HttpEngine, asked: list[Request]) -> dict[str, Any]:
    """Kill the server while rollouts run: a clear error soon, with what was done."""
    polls = 0

    def kill_soon() -> bool:
        nonlocal polls
        polls += 1
        if polls == 6:
            os.killpg(server.pid, signal.SIGKILL)
        return False

    started = time.perf_counter()
    failure = EngineError("a dead server raised nothing")
    try:
        engine.generate(asked, should_abort=kill_soon)
    except EngineError as error:
        failure = error
    seconds = time.perf_counter() - started
    assert [c.id for c in failure.completions] == [r.id for r in asked], failure
    assert seconds < 30
    tokens = sum(len(c.tokens) for c in failure.completions)
    return {"seconds": round(seconds, 2), "tokens_kept": tokens, "message": str(failure)[:200]}


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    which, place = sys.argv[1], Path(sys.argv[2])
    facts = {"inprocess": inprocess, "http": http}[which](place, load_pretrained(place))
    print("RESULT " + json.dumps(facts), flush=True)
