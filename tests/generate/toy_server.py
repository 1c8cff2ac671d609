"""A tiny server that speaks three dialects, with a real (tiny) model behind it and faults to switch on."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trimtab.model.attention import plan_sequences
from trimtab.model.load import load_pretrained
from trimtab.model.transformer import Transformer

EOG = frozenset({0})  # what the server itself takes for an end of sequence


@dataclass
class Drawn:
    """Tokens with their log-probs under the raw and the processed distribution, and these distributions (C, V)."""

    tokens: list[int]
    raw: np.ndarray[Any, Any]
    processed: np.ndarray[Any, Any]
    ended: bool


@dataclass
class Toy:
    """Settings, faults and what was seen. ``fault`` is asked before each generation, with its number from 0."""

    model: Transformer
    dialect: str
    processed_logprobs: bool = False  # vLLM: --logprobs-mode processed_logprobs
    dev_mode: bool = True
    seen: list[dict[str, Any]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    fault: Callable[[int], str] = lambda number: ""
    reset_works: bool = True
    honours_salt: bool = True
    says_version: str | None = None
    healthy: bool = True
    in_flight: int = 0
    most_in_flight: int = 0
    cache: dict[Any, Transformer] = field(default_factory=dict)
    version: str = "default"
    release: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    number: Any = field(default_factory=itertools.count)

    def generate(self, context: list[int], limit: int, sampling: dict[str, Any], stop: set[int], salt: str) -> Drawn:
        """Continue ``context``. What was cached for its beginning may come from older weights, as in a real server."""
        with self.lock:
            place = (salt if self.honours_salt else "", tuple(context[:2]))
            model = self.cache.setdefault(place, self.model)
        tokens, raw, processed = list(context), [], []
        temperature, seed = sampling["temperature"], sampling["seed"]
        uniform = np.random.default_rng(seed).random(limit)
        for step in range(limit):
            with torch.inference_mode():
                hidden = model(torch.tensor(tokens), plan_sequences([len(tokens)]))[-1:]
                logits = model.logits(hidden)[0].double()
            plain = torch.log_softmax(logits, 0)
            shaped = torch.log_softmax(logits / (temperature or 1.0), 0)
            shaped = truncate(shaped, sampling["top_k"], sampling["top_p"]) if temperature else shaped
            chosen = plain.argmax() if not temperature else (shaped.exp().cumsum(0) > uniform[step]).int().argmax()
            tokens.append(int(chosen))
            raw.append(plain.numpy())
            processed.append(shaped.numpy())
            if tokens[-1] in stop:
                return Drawn(tokens[len(context) :], np.array(raw), np.array(processed), True)
        return Drawn(tokens[len(context) :], np.array(raw), np.array(processed), False)

    def load(self, folder: str) -> None:
        self.model = load_pretrained(Path(folder))

    def drop_cache(self) -> None:
        if self.reset_works:
            self.cache.clear()


def truncate(logprobs: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    order = logprobs.argsort(descending=True)
    keep = torch.zeros_like(logprobs, dtype=torch.bool)
    keep[order[: top_k if top_k > 0 else len(order)]] = True
    mass = torch.where(keep, logprobs.exp(), 0.0)
    mass = mass / mass.sum()
    before = mass[order].cumsum(0) - mass[order]
    keep[order[before >= top_p]] = False
    return torch.log_softmax(torch.where(keep, logprobs, -torch.inf), 0)


def top(row: np.ndarray[Any, Any], width: int) -> list[int]:
    return np.argsort(-row, kind="stable")[:width].tolist()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ToyServer

    def log_message(self, *args: object) -> None:
        pass

    @property
    def toy(self) -> Toy:
        return self.server.toy

    def answer(self, status: int, body: Any) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        with suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def do_GET(self) -> None:
        toy, routes = self.toy, ROUTES[self.toy.dialect]
        known: dict[str, Any] = {"/health": {}}
        if toy.dialect == "vllm":
            known |= {"/version": {"version": "0.32.0"}, "/v1/models": {"data": [{"id": "toy", "max_model_len": 64}]}}
        elif toy.dialect == "sglang":
            known |= {
                "/model_info": {"model_path": "toy"},
                "/v1/models": {"data": [{"id": "toy", "max_model_len": 64}]},
            }
        else:
            known |= {"/props": {"default_generation_settings": {"n_ctx": 64}}}
        if self.path == "/health" and not toy.healthy:
            self.answer(503, {"error": "dead"})
        elif self.path in known:
            self.answer(200, known[self.path])
        else:
            exists = self.path in routes and (toy.dev_mode or self.path.startswith("/v1"))
            self.answer(405 if exists else 404, {"detail": "no"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        toy = self.toy
        toy.calls.append(self.path)
        if self.path != GENERATE[toy.dialect]:
            self.answer(*control(toy, self.path, body))
            return
        with toy.lock:
            number = next(toy.number)
            toy.seen.append(body)
            toy.in_flight += 1
            toy.most_in_flight = max(toy.most_in_flight, toy.in_flight)
        try:
            self.generate(toy.fault(number), body)
        finally:
            with toy.lock:
                toy.in_flight -= 1

    def generate(self, fault: str, body: dict[str, Any]) -> None:
        if fault == "500":
            self.answer(500, {"error": "out of memory"})
        elif fault == "400":
            self.answer(400, {"error": "prompt too long"})
        elif fault == "hang":
            self.toy.release.wait(20)
        elif fault == "die":
            self.server.die()
        elif fault == "text":
            self.answer(200, "<html>welcome</html>")
        elif fault == "other":
            self.answer(200, {"choices": [{"text": "hello", "finish_reason": "stop"}], "content": "hello"})
        else:
            payload = SPEAK[self.toy.dialect](self.toy, body)
            if fault == "unstopped":
                payload = drop_last(self.toy.dialect, payload)
            if fault == "slow":
                time.sleep(0.1)
            self.answer(200, payload)


def vllm(toy: Toy, body: dict[str, Any]) -> dict[str, Any]:
    assert body["ignore_eos"] is True
    drawn = toy.generate(body["prompt"], body["max_tokens"], body, set(body["stop_token_ids"]), body["cache_salt"])
    scores = drawn.processed if toy.processed_logprobs else drawn.raw
    rows = [
        {f"token_id:{i}": max(float(row[i]), -9999.0) for i in dict.fromkeys([token, *top(row, body["logprobs"])])}
        for token, row in zip(drawn.tokens, scores, strict=True)
    ]
    logprobs = {
        "tokens": [f"token_id:{token}" for token in drawn.tokens],
        "token_logprobs": [float(row[token]) for token, row in zip(drawn.tokens, scores, strict=True)],
        "top_logprobs": rows,
    }
    choice = {"token_ids": drawn.tokens, "logprobs": logprobs, "finish_reason": "stop" if drawn.ended else "length"}
    return {"choices": [choice], "usage": {"prompt_tokens": len(body["prompt"])}}


def sglang(toy: Toy, body: dict[str, Any]) -> dict[str, Any]:
    s = body["sampling_params"]
    sampling = {"temperature": s["temperature"], "top_k": s["top_k"], "top_p": s["top_p"], "seed": s["sampling_seed"]}
    stop = set(s["stop_token_ids"]) | EOG
    drawn = toy.generate(body["input_ids"], s["max_new_tokens"], sampling, stop, body["extra_key"])
    scaled = np.exp(drawn.raw / (s["temperature"] or 1.0))  # after the temperature, before truncation
    scores = np.log(scaled / scaled.sum(1, keepdims=True))
    finish = {"type": "stop", "matched": drawn.tokens[-1]} if drawn.ended else {"type": "length", "length": 0}
    return {
        "output_ids": drawn.tokens,
        "meta_info": {
            "finish_reason": finish,
            "prompt_tokens": len(body["input_ids"]),
            "cached_tokens": 1,
            "weight_version": toy.version if toy.says_version is None else toy.says_version,
            "output_token_logprobs": [[float(row[t]), t, None] for t, row in zip(drawn.tokens, scores, strict=True)],
            "output_top_logprobs": [
                [[float(row[i]), i, None] for i in top(row, body["top_logprobs_num"])] for row in scores
            ],
        },
    }


def llamacpp(toy: Toy, body: dict[str, Any]) -> dict[str, Any]:
    assert body["samplers"] == ["temperature", "top_k", "top_p"]
    drawn = toy.generate(body["prompt"], body["n_predict"], body, set(EOG), "")
    post = body["post_sampling_probs"]
    entries = []
    for token, raw, processed in zip(drawn.tokens, drawn.raw, drawn.processed, strict=True):
        row = processed if post else raw
        best = [i for i in top(row, body["n_probs"]) if np.isfinite(row[i])]
        if post:
            tops = [{"id": i, "prob": float(np.exp(row[i]))} for i in best]
            entries.append({"id": token, "prob": float(np.exp(row[token])), "top_probs": tops})
        else:
            tops = [{"id": i, "logprob": float(row[i])} for i in best]
            entries.append({"id": token, "logprob": float(row[token]), "top_logprobs": tops})
    return {
        "tokens": drawn.tokens,
        "stop_type": "eos" if drawn.ended else "limit",
        "completion_probabilities": entries,
        "timings": {"prompt_n": len(body["prompt"])},
    }


def drop_last(dialect: str, payload: dict[str, Any]) -> dict[str, Any]:
    """The answer of a server that leaves out the token it stopped at."""
    if dialect == "vllm":
        choice = payload["choices"][0]
        choice["token_ids"].pop()
        for values in choice["logprobs"].values():
            values.pop()
    elif dialect == "sglang":
        payload["output_ids"].pop()
        payload["meta_info"]["output_token_logprobs"].pop()
    else:
        payload["tokens"].pop()
        payload["completion_probabilities"].pop()
    return payload


def control(toy: Toy, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    if path not in ROUTES[toy.dialect] or not toy.dev_mode:
        return 404, {"detail": "Not Found"}
    if path == "/collective_rpc":
        assert body["method"] == "reload_weights"
        toy.load(body["kwargs"]["weights_path"])
        return 200, {"results": [None]}
    if path == "/reset_prefix_cache":
        toy.drop_cache()
        return 200, {"success": True}
    if path == "/update_weights_from_disk":
        if not Path(body["model_path"]).is_dir():
            return 400, {"success": False, "message": "no such folder"}
        toy.load(body["model_path"])
        toy.version = body["weight_version"]
        return 200, {"success": True, "message": "ok"}
    toy.drop_cache()  # /flush_cache
    return 200, "Cache flushed."


GENERATE = {"vllm": "/v1/completions", "sglang": "/generate", "llamacpp": "/completion"}
SPEAK = {"vllm": vllm, "sglang": sglang, "llamacpp": llamacpp}
ROUTES = {
    "vllm": {"/v1/completions", "/collective_rpc", "/reset_prefix_cache"},
    "sglang": {"/generate", "/update_weights_from_disk", "/flush_cache"},
    "llamacpp": {"/completion"},
}


class ToyServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, toy: Toy) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.toy = toy
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.open: set[socket.socket] = set()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self.open.add(connection)
        return connection, address

    def handle_error(self, *args: object) -> None:
        """Broken connections are what the tests are about."""

    def die(self) -> None:
        """As if the process were killed: no answers, no new connections."""
        self.socket.close()
        for connection in self.open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        self.toy.release.set()
        self.shutdown()
        self.server_close()
