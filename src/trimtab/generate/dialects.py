"""What the servers behind ``engine.name=http`` call things: bodies out, answers in, weight updates.

Field names were read in the servers' sources: vLLM 0.32 (``/v1/completions``), SGLang 0.5 (``/generate``), llama.cpp's
server of late 2026 (``/completion``). All take and give token ids. Log-probs of an untempered, untruncated draw mean
the same everywhere; what a server reports otherwise differs, and :meth:`Dialect.probes` says what is to be found out.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from trimtab.core.errors import EngineError, invalid
from trimtab.core.records import FloatArray, IntArray
from trimtab.generate.external import Piece
from trimtab.generate.protocol import Sampling

Get = Callable[[str], tuple[int, Any]]  # path -> status, JSON or text
Post = Callable[[str, dict[str, Any]], tuple[int, Any]]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to the server: continue ``context`` by at most ``max_tokens``; ``width`` top log-probs a token."""

    context: Sequence[int]
    max_tokens: int
    sampling: Sampling
    seed: int
    width: int
    eos_ids: frozenset[int]
    salt: str  # keeps what was cached under other weights apart
    model: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came: the tokens, whether the server ended the response by itself, and the weights it named, if it does."""

    piece: Piece
    ended: bool
    weight_version: str = ""


class Dialect(ABC):
    """One server's API. Reading an answer raises KeyError, TypeError, ValueError or IndexError when it is another's."""

    name: ClassVar[str]
    path: ClassVar[str]

    @abstractmethod
    def body(self, ask: Ask) -> dict[str, Any]:
        """The JSON to post to ``path``."""

    @abstractmethod
    def read(self, answer: Any, ask: Ask) -> Answer:
        """Tokens and log-probs out of an answer."""

    @abstractmethod
    def models(self, get: Get) -> tuple[str, int | None]:
        """Name of the served model and its context length, where the server says them."""

    @abstractmethod
    def check_updates(self, get: Get) -> None:
        """Raise EngineError, with what to do, when the server cannot take new weights."""

    @abstractmethod
    def update(self, post: Post, folder: Path, version: str) -> None:
        """Make the server load the weights in ``folder`` and forget what it cached under the old ones."""

    def check_sampling(self, sampling: Sampling) -> None:
        """Raise ConfigError for what the server would silently change."""
        del sampling  # nothing by default

    def probes(self, sampling: Sampling) -> frozenset[str]:
        """What must be found out before log-probs under ``sampling`` can be trusted: "temperature", "truncation"."""
        found = {"temperature"} if sampling.temperature not in (0.0, 1.0) else set()
        return frozenset(found | ({"truncation"} if truncates(sampling) else set()))

    def remedy(self) -> str:
        """What to do when a probe fails."""
        return "Use sampling.temperature=1 without top_p and top_k."


def truncates(sampling: Sampling) -> bool:
    """Whether top-k or top-p cut the distribution; greedy draws are not truncated."""
    return sampling.temperature != 0.0 and (sampling.top_p < 1.0 or sampling.top_k > 0)


def refused(status: int, answer: Any, what: str, hint: str = "") -> EngineError:
    """The error for a call that the server did not carry out."""
    text = str(answer)[:300]
    return EngineError(f"{what}: the server answered {status} ({text}).{' ' + hint if hint else ''}")


def route_exists(get: Get, path: str) -> bool:
    """Whether a POST route is there: a GET on it answers "method not allowed", not "not found"."""
    status, _ = get(path)
    return status != 404


# ---------------------------------------------------------------- vLLM


class VLLM(Dialect):
    """vLLM's OpenAI-compatible server."""

    name = "vllm"
    path = "/v1/completions"

    def body(self, ask: Ask) -> dict[str, Any]:
        s = ask.sampling
        # Every knob is said: what is left out comes from the model's generation_config.json. The server's own end of
        # sequence is ignored and ours given as stop tokens, so that no other token ends a response.
        return {
            "model": ask.model,
            "prompt": list(ask.context),
            "max_tokens": ask.max_tokens,
            "temperature": s.temperature,
            "top_p": s.top_p if s.temperature else 1.0,
            "top_k": s.top_k if s.temperature else 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": ask.seed,
            "ignore_eos": True,
            "stop_token_ids": sorted(ask.eos_ids),
            "logprobs": ask.width,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            "add_special_tokens": False,
            "cache_salt": ask.salt,
        }

    def read(self, answer: Any, ask: Ask) -> Answer:
        choice = answer["choices"][0]
        reported = choice["logprobs"]
        tokens = [_token_id(token) for token in reported["tokens"]]
        details = answer["usage"].get("prompt_tokens_details")
        if choice.get("token_ids") is not None and list(choice["token_ids"]) != tokens:
            raise ValueError("choices[0].token_ids and choices[0].logprobs.tokens differ")
        tops = None
        if ask.width:
            tops = [[(_token_id(t), v) for t, v in row.items()] for row in reported["top_logprobs"]]
        piece = _piece(tokens, reported["token_logprobs"], tops, ask.width)
        if details:  # only with --enable-prompt-tokens-details
            piece.prefilled = answer["usage"]["prompt_tokens"] - int(details.get("cached_tokens") or 0)
        return Answer(piece, _ended(choice["finish_reason"]))

    def models(self, get: Get) -> tuple[str, int | None]:
        return _openai_models(get)

    def check_updates(self, get: Get) -> None:
        if not route_exists(get, "/collective_rpc") or not route_exists(get, "/reset_prefix_cache"):
            raise EngineError(
                "engine.url: this vLLM server takes no new weights, so training would run on stale ones. Start it with "
                "the environment variable VLLM_SERVER_DEV_MODE=1 (on a trusted network), or use engine.name=vllm."
            )

    def update(self, post: Post, folder: Path, version: str) -> None:
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        status, answer = post("/collective_rpc", call)
        if status != 200:
            raise refused(status, answer, f"weights of version {version} were not loaded", _SHARED)
        status, answer = post("/reset_prefix_cache", {})
        if status != 200 or (isinstance(answer, dict) and answer.get("success") is False):
            raise refused(status, answer, f"the prefix cache of weights before version {version} was not dropped")

    def check_sampling(self, sampling: Sampling) -> None:
        if 0 < sampling.temperature < 0.01:
            raise invalid(
                "sampling.temperature", sampling.temperature, "0 or a number >= 0.01; vLLM raises smaller ones"
            )

    def remedy(self) -> str:
        return "Start vLLM with --logprobs-mode processed_logprobs, or sample at temperature 1 without top_p and top_k."


# ---------------------------------------------------------------- SGLang


class SGLang(Dialect):
    """SGLang's native endpoint. Seeds count only where the server runs with ``--enable-deterministic-inference``."""

    name = "sglang"
    path = "/generate"

    def body(self, ask: Ask) -> dict[str, Any]:
        s = ask.sampling
        return {
            "input_ids": list(ask.context),
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": ask.width,
            "extra_key": ask.salt,
            "sampling_params": {
                "max_new_tokens": ask.max_tokens,
                "temperature": s.temperature,
                "top_p": s.top_p if s.temperature else 1.0,
                "top_k": s.top_k if s.temperature and s.top_k else -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "sampling_seed": ask.seed,
                "stop_token_ids": sorted(ask.eos_ids),
                "skip_special_tokens": False,
                "no_stop_trim": True,
            },
        }

    def read(self, answer: Any, ask: Ask) -> Answer:
        meta = answer["meta_info"]
        reported = meta["output_token_logprobs"]  # [log-prob, id, text] each
        tokens = [int(entry[1]) for entry in reported]
        if list(answer["output_ids"]) != tokens:
            raise ValueError("output_ids and meta_info.output_token_logprobs differ")
        tops = None
        if ask.width:
            tops = [[(int(e[1]), e[0]) for e in row] for row in meta["output_top_logprobs"]]
        finish = meta["finish_reason"]
        piece = _piece(tokens, [entry[0] for entry in reported], tops, ask.width)
        piece.prefilled = int(meta["prompt_tokens"]) - int(meta.get("cached_tokens") or 0)
        return Answer(piece, _ended(finish["type"]), str(meta.get("weight_version", "")))

    def models(self, get: Get) -> tuple[str, int | None]:
        return _openai_models(get)

    def check_updates(self, get: Get) -> None:
        if not route_exists(get, "/update_weights_from_disk"):
            raise EngineError(
                "engine.url: this SGLang server has no /update_weights_from_disk, so training would run on stale "
                "weights. Use SGLang 0.5 or newer, reached directly, not through a router that hides it."
            )

    def update(self, post: Post, folder: Path, version: str) -> None:
        call = {"model_path": str(folder), "weight_version": version, "flush_cache": True}
        status, answer = post("/update_weights_from_disk", call)
        if status != 200 or not (isinstance(answer, dict) and answer.get("success") is True):
            raise refused(status, answer, f"weights of version {version} were not loaded", _SHARED)
        status, answer = post("/flush_cache", {})
        if status != 200:
            raise refused(status, answer, f"the prefix cache of weights before version {version} was not dropped")

    def remedy(self) -> str:
        return (
            "SGLang reports log-probs after the temperature and before top_p and top_k: sample without these, and "
            "leave SGLANG_RETURN_ORIGINAL_LOGPROB unset at the server."
        )


# ---------------------------------------------------------------- llama.cpp


class LlamaCpp(Dialect):
    """llama.cpp's server. It cannot take new weights; it serves evaluation and generation for others to train on."""

    name = "llamacpp"
    path = "/completion"

    def body(self, ask: Ask) -> dict[str, Any]:
        s = ask.sampling
        return {
            "prompt": list(ask.context),
            "n_predict": ask.max_tokens,
            "temperature": s.temperature,
            "top_p": s.top_p if s.temperature else 1.0,
            "top_k": s.top_k if s.temperature else 0,
            "samplers": ["temperature", "top_k", "top_p"],  # the order in which our own engine applies them
            "min_p": 0.0,
            "typical_p": 1.0,
            "repeat_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "dry_multiplier": 0.0,
            "xtc_probability": 0.0,
            "mirostat": 0,
            "dynatemp_range": 0.0,
            "seed": ask.seed,
            "n_probs": max(1, ask.width),
            "post_sampling_probs": bool(self._shaped(s)),
            "return_tokens": True,
            "cache_prompt": True,
            "stream": False,
        }

    @staticmethod
    def _shaped(sampling: Sampling) -> bool:
        """Whether the distribution sampled from is not the model's own; greedy reports the model's own."""
        return sampling.temperature not in (0.0, 1.0) or truncates(sampling)

    def read(self, answer: Any, ask: Ask) -> Answer:
        tokens = [int(token) for token in answer["tokens"]]
        entries, tops = answer["completion_probabilities"], None
        shaped = self._shaped(ask.sampling)
        scores = _align(tokens, [int(e["id"]) for e in entries])
        if ask.width:
            if (scores < 0).any():
                raise ValueError("top log-probs are missing for tokens that are part of a character")
            key, value = ("top_probs", "prob") if shaped else ("top_logprobs", "logprob")
            tops = [[(int(e["id"]), _log(e[value]) if shaped else e[value]) for e in entries[i][key]] for i in scores]
        reported = [_log(e["prob"]) if shaped else e["logprob"] for e in entries]
        logprobs = [reported[i] if i >= 0 else None for i in scores]
        piece = _piece(tokens, logprobs, tops, ask.width)
        piece.prefilled = int(answer.get("timings", {}).get("prompt_n") or 0)
        return Answer(piece, _ended(answer["stop_type"]))

    def models(self, get: Get) -> tuple[str, int | None]:
        status, answer = get("/props")
        settings = answer.get("default_generation_settings", {}) if status == 200 and isinstance(answer, dict) else {}
        context = settings.get("n_ctx")
        return "", int(context) if context else None

    def check_updates(self, get: Get) -> None:
        raise EngineError(
            "engine.url: llama.cpp's server cannot take new weights while it runs, so training would run on stale "
            "ones. It can evaluate (steps=0); to train use engine.name=torch or vllm, or a vLLM or SGLang server."
        )

    def update(self, post: Post, folder: Path, version: str) -> None:
        self.check_updates(lambda path: (404, path))

    def probes(self, sampling: Sampling) -> frozenset[str]:
        return frozenset()  # it says of each answer whether the probabilities are those after the sampling chain


DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (VLLM(), SGLang(), LlamaCpp())}
_SHARED = "The folder must be readable at the server: set engine.weights_dir to one that both machines see."


def detect(get: Get) -> Dialect:
    """The dialect of a server.

    Raises:
        EngineError: it answers none of the questions that tell them apart.
    """
    for path, key, name in (
        ("/model_info", "model_path", "sglang"),
        ("/get_model_info", "model_path", "sglang"),
        ("/props", "default_generation_settings", "llamacpp"),
        ("/version", "version", "vllm"),
    ):
        status, answer = get(path)
        if status == 200 and isinstance(answer, dict) and key in answer:
            return DIALECTS[name]
    raise EngineError(
        "engine.dialect: the server does not say what it is. Set engine.dialect to vllm, sglang or llamacpp; other "
        "servers do not return token ids with log-probs."
    )


# ---------------------------------------------------------------- reading


def _openai_models(get: Get) -> tuple[str, int | None]:
    status, answer = get("/v1/models")
    if status != 200 or not isinstance(answer, dict) or not answer.get("data"):
        return "", None
    first = answer["data"][0]
    return str(first.get("id", "")), first.get("max_model_len")


def _ended(reason: str) -> bool:
    """True when the server ended the response, False when it was the token limit."""
    if reason in ("stop", "eos"):
        return True
    if reason in ("length", "limit"):
        return False
    raise ValueError(f"it stopped for the reason {reason!r}")


def _token_id(text: str) -> int:
    prefix, _, number = text.partition(":")
    if prefix != "token_id":
        raise ValueError(f"a token came as the text {text!r}, not as its id")
    return int(number)


def _log(probability: float) -> float:
    return math.log(probability) if probability > 0 else -math.inf


def _piece(
    tokens: list[int],
    logprobs: Sequence[float | None],
    tops: Sequence[Sequence[tuple[int, float]]] | None,
    width: int,
) -> Piece:
    scores: FloatArray = np.array([math.nan if value is None else value for value in logprobs], dtype=np.float32)
    piece = Piece(np.array(tokens, dtype=np.int64), scores)
    if tops is not None:
        best = [sorted(row, key=lambda pair: -pair[1])[:width] for row in tops]
        if any(len(row) != width for row in best):
            raise ValueError(f"fewer than {width} top log-probs came for a token")
        shape = (len(best), width)
        piece.top_ids = np.array([[token for token, _ in row] for row in best], dtype=np.int64).reshape(shape)
        piece.top_logprobs = np.array([[value for _, value in row] for row in best], dtype=np.float32).reshape(shape)
    return piece


def _align(tokens: Sequence[int], scored: Sequence[int]) -> IntArray:
    """For each token the index of its entry in ``scored``, -1 where none is certain.

    llama.cpp leaves out entries of tokens that end inside a character. An entry's place is certain when it is the same
    in the leftmost and in the rightmost way to fit the entries into the tokens.
    """
    left, right = _fit(tokens, scored), [len(tokens) - 1 - i for i in _fit(tokens[::-1], scored[::-1])][::-1]
    place = np.full(len(tokens), -1, dtype=np.int64)
    for index, (first, last) in enumerate(zip(left, right, strict=True)):
        if first == last:
            place[first] = index
    return place


def _fit(tokens: Sequence[int], scored: Sequence[int]) -> list[int]:
    places, position = [], 0
    for token in scored:
        while position < len(tokens) and tokens[position] != token:
            position += 1
        if position == len(tokens):
            raise ValueError("completion_probabilities names tokens that are not in tokens")
        places.append(position)
        position += 1
    return places
