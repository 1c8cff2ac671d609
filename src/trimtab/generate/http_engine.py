"""Rollouts from a server: vLLM, SGLang or llama.cpp's, token ids in and out.

Without stop hooks a response is one request; with them it is fetched in chunks, the hooks read each chunk and cut at
the exact token, and what the server sampled past the cut is counted as overrun. A response cut short goes on from its
tokens, so an abort or a dying server costs at most the chunk in flight.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import torch

from trimtab.core.config import EngineConfig
from trimtab.core.errors import EngineError, invalid, missing_extra, unknown
from trimtab.core.lazy import lazy
from trimtab.core.rng import key
from trimtab.generate.dialects import DIALECTS, Answer, Ask, Dialect, detect, refused
from trimtab.generate.external import Asked, ExternalRollouts, Piece, check_request, check_signals
from trimtab.generate.protocol import Completion, Request, Sampling, StopHook, StreamScorer
from trimtab.generate.weights import WeightCheck, WeightFolders
from trimtab.model.tokenizer import Tokenizer
from trimtab.model.transformer import Transformer

httpx = lazy("httpx")
T = TypeVar("T")

SEED_MASK = 0x7FFF_FFFF  # what every server takes as a seed
_POLL_S = 0.1  # between looks at should_abort
_PROBE_TOKENS = 4  # contexts tried to tell conventions apart
_TOLD_APART = 0.2  # nats that two log-probs must differ by for a probe to say something


class HttpEngine:
    """Generates at a server that returns token ids and log-probs.

    Args:
        config: address and limits, see :class:`EngineConfig`.
        tokenizer: of the policy; its files go with weight updates.
        eos_ids, vocab_size: of the policy.
        max_context: prompt and response tokens of one rollout; the server's own limit counts too.
        device: where stop hooks and a teacher compute.
        backoff_s: wait before the first repetition of a failed request; doubles.

    Raises:
        ConfigError: no address, an unknown model name.
        EngineError: the server cannot be reached or is of no known kind.
        MissingExtraError: httpx is not installed.
    """

    name = "http"

    def __init__(
        self,
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | None,
        eos_ids: frozenset[int],
        vocab_size: int,
        max_context: int,
        device: torch.device | str = "cpu",
        backoff_s: float = 0.5,
    ) -> None:
        if not config.url.startswith(("http://", "https://")):
            raise invalid(
                "engine.url", config.url, "an address such as http://127.0.0.1:8000", "engine.name=http needs it."
            )
        try:
            httpx.Client  # noqa: B018 - the first use imports it
        except ImportError as error:
            raise missing_extra("httpx", "http", "engine.name=http") from error
        self.config, self.tokenizer, self.version = config, tokenizer, 0
        # Made once: reading the certificates takes longer than a request.
        self._tls = ssl.create_default_context() if config.url.startswith("https:") else False
        self.eos_ids, self.vocab_size = frozenset(eos_ids), vocab_size
        self.device, self.backoff_s = torch.device(device), backoff_s
        self.dialect: Dialect = detect(self._get) if config.dialect == "auto" else DIALECTS[config.dialect]
        served, context = self.dialect.models(self._get)
        if config.served_model and served and config.served_model != served:
            self._check_served(config.served_model)
        self.model = config.served_model or served
        self.max_context = min(max_context, context or max_context)
        self._known: dict[str, bool] = {}  # outcome of each probe
        self._trusted = True  # False while a weight update failed half-way
        self._synced = ""  # weight version the server must name, if it names any
        self._run = uuid.uuid4().hex[:12]  # a server may hold what another run cached
        self._weights, self._check = WeightFolders(config.weights_dir), WeightCheck()

    # ------------------------------------------------------------ generation

    def generate(
        self,
        requests: Sequence[Request],
        *,
        hooks: Sequence[StopHook] = (),
        signals: frozenset[str] = frozenset(),
        topk: int = 0,
        scorer: StreamScorer | None = None,
        should_abort: Callable[[], bool] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Completion]:
        """See :meth:`trimtab.generate.protocol.Engine.generate`.

        Signals are "margin" and "topk". The seed of a request is a function of its key and of the response index it
        goes on from, so the same call gives the same tokens wherever the server's arithmetic is reproducible; another
        ``engine.chunk`` gives others.

        Raises:
            ConfigError: a signal this engine cannot give, hooks that read signals along a reused prefix.
            DataError: a request without prompt tokens or with ids outside the vocabulary.
            EngineError: the server failed; ``completions`` holds all that was done by then.
        """
        if not self._trusted:
            raise EngineError("the last weight update failed; the server's weights are unknown until one succeeds")
        for request in requests:
            check_request(request, self.vocab_size)
        asked = check_signals(self.name, signals, topk, hooks, scorer is not None)
        if not requests:
            return []
        self._check_conventions(requests, asked)
        rollouts = ExternalRollouts(
            requests,
            hooks=hooks,
            asked=asked,
            scorer=scorer,
            eos_ids=self.eos_ids,
            max_context=self.max_context,
            num_slots=self.config.slots,
            version=self.version,
            device=self.device,
        )
        chunk = self.config.chunk if hooks or should_abort is not None else None
        with torch.inference_mode():
            _run_async(_Call(self, rollouts, chunk, should_abort, progress).run())
        return rollouts.completions()

    def ask(self, rollouts: ExternalRollouts, row: int, chunk: int | None) -> Ask:
        """The request for the next tokens of a running row."""
        request, room = rollouts.rows[row].request, rollouts.room(row)
        return Ask(
            context=rollouts.context(row),
            max_tokens=room if chunk is None else min(room, chunk),
            sampling=request.sampling,
            seed=key(request.key, rollouts.length(row)) & SEED_MASK,
            width=rollouts.asked.width,
            eos_ids=self.eos_ids,
            salt=self._salt(),
            model=self.model,
        )

    def read(self, payload: Any, ask: Ask, request: str) -> Answer:
        """An answer in the common form, refused when it is not what was asked for."""
        try:
            answer = self.dialect.read(payload, ask)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise EngineError(
                f"request {request}: the answer is not that of a {self.dialect.name} server with token ids and "
                f"log-probs: {type(error).__name__}: {error}; it was {str(payload)[:200]}"
            ) from error
        answer.piece.check(request, self.vocab_size, ask.width)
        last = int(answer.piece.tokens[-1])
        if answer.ended and last not in self.eos_ids:
            raise EngineError(
                f"request {request}: the server ended the response after token {last}, which is none of the policy's "
                f"end-of-sequence ids {sorted(self.eos_ids)}: it left out the stop token or stops at one of its own"
            )
        if self._synced and answer.weight_version and answer.weight_version != self._synced:
            raise EngineError(
                f"request {request}: the server generated with weights {answer.weight_version!r}, not with the "
                f"{self._synced!r} of the last update; does another run update it too?"
            )
        return answer

    def _salt(self) -> str:
        return f"{self._run}-{self.version}"

    # ------------------------------------------------------------ log-prob conventions

    def _check_conventions(self, requests: Sequence[Request], asked: Asked) -> None:
        """Refuse sampling under which the server's log-probs are not those of the distribution sampled from."""
        for sampling in {request.sampling for request in requests}:
            self.dialect.check_sampling(sampling)
            if asked.any and (sampling.top_p < 1.0 or sampling.top_k):
                raise invalid("sampling.top_p and top_k", (sampling.top_p, sampling.top_k), "1 and 0 with signals")
            for probe in sorted(self.dialect.probes(sampling)):
                if probe not in self._known:
                    self._known[probe] = self._probe(probe, requests[0].prompt.tokens)
                if not self._known[probe]:
                    raise EngineError(
                        f"engine.url: the server reports log-probs without the {probe} that {sampling} samples with, "
                        f"so every importance ratio would be wrong. {self.dialect.remedy()}"
                    )

    def _probe(self, what: str, prompt: Sequence[int]) -> bool:
        """Whether reported log-probs follow the temperature, or the truncation, tokens are drawn with."""
        for length in range(len(prompt), max(0, len(prompt) - _PROBE_TOKENS), -1):
            context = prompt[:length]
            if what == "truncation":
                (plain,), (cut,) = self._top(context, Sampling(), 1), self._top(context, Sampling(top_k=1), 1)
                if plain < -_TOLD_APART:
                    return cut > -1e-3  # all the mass is on the one token left
            else:
                (a, b), (c, d) = self._top(context, Sampling(), 2), self._top(context, Sampling(temperature=0.5), 2)
                if a - b > _TOLD_APART:
                    return abs((c - d) - 2 * (a - b)) < 0.25 * (a - b)
        return False

    def _top(self, context: Sequence[int], sampling: Sampling, width: int) -> list[float]:
        ask = Ask(context, 1, sampling, 1, width, self.eos_ids, self._salt(), self.model)
        status, payload = self._post(self.dialect.path, self.dialect.body(ask))
        if status != 200:
            raise refused(status, payload, "the log-prob convention could not be probed")
        best = self.read(payload, ask, "probe").piece.top_logprobs
        assert best is not None
        return [float(value) for value in best[0]]

    # ------------------------------------------------------------ weights

    def check_updates(self) -> None:
        """Raise EngineError, with what to do, when the server cannot take new weights."""
        self.dialect.check_updates(self._get)

    def sync(self, model: Transformer, version: int) -> None:
        """Save the weights of ``model`` and make the server load them; nothing cached from older ones is used again.

        Raises:
            EngineError: the server did not take them, or not all of them. Generation is refused until a later
                update succeeds.
        """
        label = f"{self._run}-{version}"
        self._trusted = False
        self.dialect.update(self._post, self._weights.save(model, self.tokenizer, label), label)
        self.version, self._synced, self._trusted = version, label, True
        try:
            self._check.check(self, model, version)
        except EngineError:
            self._trusted = False
            raise

    # ------------------------------------------------------------ HTTP

    def client_options(self) -> dict[str, Any]:
        """What both kinds of client are made with. The environment's proxies are for the internet, not for a server."""
        c = self.config
        token = os.environ.get(c.api_key_env, "") if c.api_key_env else ""
        return {
            "base_url": c.url,
            "timeout": httpx.Timeout(c.timeout_s, connect=c.connect_timeout_s, pool=None),
            "limits": httpx.Limits(max_connections=c.slots, max_keepalive_connections=c.slots),
            "headers": {"Authorization": f"Bearer {token}"} if token else {},
            "trust_env": False,
            "verify": self._tls,
        }

    def _get(self, path: str) -> tuple[int, Any]:
        """Status and body of a GET; EngineError when the server is not there."""
        with httpx.Client(**self.client_options()) as client:
            try:
                return _unpack(client.get(path, timeout=self.config.connect_timeout_s))
            except httpx.HTTPError as error:
                raise EngineError(
                    f"engine.url: {self.config.url} does not answer ({_say(error)}). Is it up?"
                ) from error

    def _post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        with httpx.Client(**self.client_options()) as client:
            try:
                return _unpack(client.post(path, json=body))
            except httpx.HTTPError as error:
                raise EngineError(f"engine.url: {self.config.url}{path} failed ({_say(error)})") from error

    def _check_served(self, wanted: str) -> None:
        status, answer = self._get("/v1/models")
        names = [str(m.get("id")) for m in answer.get("data", [])] if status == 200 and isinstance(answer, dict) else []
        if names and wanted not in names:
            raise unknown("engine.served_model", wanted, names)


class _Call:
    """One `generate` call: at most a request a slot in flight, everything that comes decided in one place."""

    def __init__(
        self,
        engine: HttpEngine,
        rollouts: ExternalRollouts,
        chunk: int | None,
        should_abort: Callable[[], bool] | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.engine, self.config, self.rollouts, self.chunk = engine, engine.config, rollouts, chunk
        self.should_abort, self.progress = should_abort, progress
        self.tasks: dict[asyncio.Task[Piece], int] = {}
        self.failure: EngineError | None = None

    async def run(self) -> None:
        """Fetch until everything ended.

        Raises:
            EngineError: with all that was done by then.
        """
        async with httpx.AsyncClient(**self.engine.client_options()) as client:
            try:
                await self._fetch(client)
            finally:
                for task in self.tasks:
                    task.cancel()
                await asyncio.gather(*self.tasks, return_exceptions=True)
        if self.failure is not None:
            done = self.rollouts.num_done
            raise EngineError(
                f"{self.failure} ({done} of {len(self.rollouts.rows)} rollouts were finished)", self.rollouts.salvage()
            ) from self.failure

    async def _fetch(self, client: Any) -> None:
        poll = self.config.stall_s if self.should_abort is None else min(_POLL_S, self.config.stall_s)
        heard = time.monotonic()
        while self.failure is None:
            if self.should_abort is not None and self.should_abort():
                self.rollouts.abort()
                break
            for row in self.rollouts.admit():
                self._launch(client, row)
            if not self.tasks:
                break
            if await self._collect(client, poll):
                heard = time.monotonic()
            elif time.monotonic() - heard >= self.config.stall_s:
                await self._check_health(client)
                heard = time.monotonic()
        if self.failure is not None and self.tasks:  # what is nearly there is worth a moment
            await self._collect(client, self.config.connect_timeout_s, asyncio.ALL_COMPLETED)
        if self.progress is not None:
            self.progress(self.rollouts.num_done, self.rollouts.num_tokens)

    def _launch(self, client: Any, row: int) -> None:
        ask = self.engine.ask(self.rollouts, row, self.chunk)
        request = self.rollouts.rows[row].request.id
        self.tasks[asyncio.create_task(self._tokens(client, ask, request))] = row

    async def _collect(self, client: Any, seconds: float, when: str = asyncio.FIRST_COMPLETED) -> bool:
        """Wait for answers and go on with what has not ended; False when nothing came."""
        done, _ = await asyncio.wait(self.tasks, timeout=seconds, return_when=when)
        pieces: dict[int, Piece] = {}
        for task in done:
            row = self.tasks.pop(task)
            try:
                pieces[row] = task.result()
            except EngineError as error:
                self.failure = self.failure or error
        if pieces:
            ended = set(self.rollouts.add(dict(sorted(pieces.items()))))
            if self.failure is None:
                for row in sorted(pieces.keys() - ended):
                    self._launch(client, row)
            if self.progress is not None:
                self.progress(self.rollouts.num_done, self.rollouts.num_tokens)
        return bool(done)

    async def _tokens(self, client: Any, ask: Ask, request: str) -> Piece:
        """One answer, the request repeated where that may help."""
        engine, body = self.engine, self.engine.dialect.body(ask)
        for attempt in range(self.config.retries + 1):
            if attempt:
                await asyncio.sleep(engine.backoff_s * 2 ** (attempt - 1))
            try:
                async with asyncio.timeout(self.config.timeout_s):
                    response = await client.post(engine.dialect.path, json=body)
            except (TimeoutError, httpx.ReadTimeout) as error:
                raise EngineError(
                    f"request {request}: no answer from {self.config.url} in {self.config.timeout_s:g} s "
                    f"(engine.timeout_s) for {ask.max_tokens} tokens"
                ) from error
            except httpx.HTTPError as error:
                problem = f"the connection to {self.config.url} failed ({_say(error)})"
                continue
            status, payload = _unpack(response)
            if status == 200:
                return engine.read(payload, ask, request).piece
            problem = f"{self.config.url} answered {status}: {str(payload)[:300]}"
            if status < 500 and status not in (408, 429):
                break
        raise EngineError(f"request {request}: {problem} (tried {attempt + 1} times)")

    async def _check_health(self, client: Any) -> None:
        """Tell a busy server from a dead one."""
        try:
            response = await client.get("/health", timeout=self.config.connect_timeout_s)
        except httpx.HTTPError as error:
            answer = _say(error)
        else:
            if response.status_code == 200:
                return
            answer = f"status {response.status_code}"
        self.failure = EngineError(
            f"engine.url: nothing came from {self.config.url} for {self.config.stall_s:g} s (engine.stall_s) and its "
            f"health check failed ({answer})"
        )


def _unpack(response: Any) -> tuple[int, Any]:
    try:
        return response.status_code, response.json()
    except ValueError:
        return response.status_code, response.text


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, also where an event loop is running already (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    result: list[T] = []
    failure: list[BaseException] = []

    def target() -> None:
        try:
            with torch.inference_mode():  # it holds for one thread
                result.append(asyncio.run(coroutine))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]
