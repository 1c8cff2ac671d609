"""The embedded rollout engine: checks requests, runs them with continuous batching, scores, takes over weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch

from trimtab.core.errors import ConfigError, DataError, invalid, unknown
from trimtab.core.part import SIGNALS
from trimtab.core.records import FloatArray
from trimtab.generate.batching import GenerateCall
from trimtab.generate.hooks import TEACHER
from trimtab.generate.protocol import Completion, Request, StopHook, StreamScorer
from trimtab.generate.sampling import check_sampling
from trimtab.learn.logprob import token_logprobs
from trimtab.model.attention import plan_shared_prompts
from trimtab.model.transformer import Transformer

_SCORE_TOKENS = 256  # rows of full-vocabulary logits held while scoring


class TorchEngine:
    """Generates with a :class:`Transformer` of this process.

    A request's tokens depend on the weights and the request alone: not on ``num_slots``, the other requests or their
    order (up to float rounding where a uniform lies on the boundary of two tokens).

    Args:
        model: used as it is, not copied, unless it lies on another device.
        eos_ids: tokens that end a response; the one that did is the response's last token. May be empty.
        pad_id: fills token arrays beyond their valid part; never compared with, so it may be an EOS id.
        num_slots: rollouts decoded at the same time.
        max_context: prompt and response tokens of one rollout; default the model's trained context.
        device: default the model's.
        prefill_tokens: tokens, padding included, of one prefill forward pass.

    Raises:
        ConfigError: a value outside its range.
    """

    name = "torch"

    def __init__(
        self,
        model: Transformer,
        *,
        eos_ids: Sequence[int] | frozenset[int],
        pad_id: int,
        num_slots: int = 64,
        max_context: int | None = None,
        device: torch.device | str | None = None,
        prefill_tokens: int = 4096,
    ) -> None:
        config = model.config
        if device is not None and not _same_device(torch.device(device), model.device):
            model = copy.deepcopy(model).to(device)
        self.model, self.version = model, 0
        self.eos_ids, self.pad_id = frozenset(eos_ids), pad_id
        self.num_slots, self.prefill_tokens = num_slots, prefill_tokens
        longest = min(config.max_positions, config.sliding_window or config.max_positions)
        self.max_context = longest if max_context is None else max_context
        for name, value in (("num_slots", num_slots), ("prefill_tokens", prefill_tokens)):
            if value < 1:
                raise invalid(f"engine.{name}", value, "an integer >= 1")
        if self.max_context < 2 or (config.sliding_window and self.max_context > config.sliding_window):
            allowed = f"2..{config.sliding_window}" if config.sliding_window else ">= 2"
            raise invalid("engine.max_context", self.max_context, f"an integer {allowed}")
        for token in (*self.eos_ids, pad_id):
            if not 0 <= token < config.vocab_size:
                raise invalid("engine.eos_ids and pad_id", token, f"0..{config.vocab_size - 1}")
        self.is_eos_V = np.zeros(config.vocab_size, dtype=bool)
        self.is_eos_V[list(self.eos_ids)] = True

    @property
    def device(self) -> torch.device:
        return self.model.device

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

        Signals are those of the distribution at the request's temperature (1 when greedy), before top-k and top-p.
        They cover prefix tokens as well, under the present weights, and hooks see the prefix first, so a resumed
        rollout stops where an uninterrupted one would. A prefix is kept up to the token limit; one that ends in EOS is
        complete. Requests that an abort finds waiting return their prefix, with NaN (ids: -1) as its signals.

        Raises:
            ConfigError: unknown signals, a hook that lacks what it needs, a sampling value out of range.
            DataError: a request without prompt tokens or with ids outside the vocabulary.
        """
        for request in requests:
            self._check(request)
        asked = _asked_signals(signals, topk, hooks, scorer is not None, self.model.config.vocab_size)
        if not requests:
            return []
        with torch.inference_mode():
            call = GenerateCall(self, requests, hooks, asked, topk, scorer)
            call.run(should_abort, progress)
        return call.completions()

    def sync(self, model: Transformer, version: int) -> None:
        """Take over the weights of ``model``. Nothing computed with older weights outlives a call of `generate`.

        The engine's own module only gets the new version; of another one the weights are copied.

        Raises:
            ConfigError: the model has another architecture.
        """
        if model is not self.model:
            if model.config != self.model.config:
                raise ConfigError(f"engine.sync: the engine holds {self.model.config}, the model is {model.config}")
            self.model.load_state_dict(model.state_dict())
        self.version = version

    def score(
        self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[FloatArray]:
        """Log-probs (T,) of given responses by packed forward passes, a prompt computed once for its neighbours."""
        assert len(prompts) == len(responses), (len(prompts), len(responses))
        scored: list[FloatArray] = []
        with torch.inference_mode():
            lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
            for first, stop in _token_batches(lengths, self.prefill_tokens):
                scored += self._score_batch(prompts[first:stop], responses[first:stop], temperature)
        return scored

    def _score_batch(
        self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], temperature: float
    ) -> list[FloatArray]:
        index = {prompt: i for i, prompt in enumerate(dict.fromkeys(tuple(p) for p in prompts))}
        plan = plan_shared_prompts(
            [len(p) for p in index], [index[tuple(p)] for p in prompts], [len(r) for r in responses], self.device
        )
        packed = [token for part in (*index, *responses) for token in part]
        tokens_T = torch.tensor(packed, dtype=torch.int64, device=self.device)
        hidden = self.model(tokens_T, plan)[plan.predict_index]
        target = tokens_T[plan.target_index]
        logprobs = token_logprobs(hidden, self.model.head_weight, target, temperature, _SCORE_TOKENS)
        flat = logprobs.cpu().numpy()
        return np.split(flat, np.cumsum([len(r) for r in responses])[:-1])

    def _check(self, request: Request) -> None:
        check_sampling(request.sampling, f"request {request.id}: sampling")
        if not request.prompt.tokens:
            raise DataError(f"request {request.id}: prompt {request.prompt.id} has no tokens; at least one is needed")
        if request.prefix_logprobs and len(request.prefix_logprobs) != len(request.prefix):
            raise DataError(
                f"request {request.id}: {len(request.prefix_logprobs)} prefix_logprobs for {len(request.prefix)} "
                "prefix tokens; give one each, or none"
            )
        for name, tokens in (("prompt", request.prompt.tokens), ("prefix", request.prefix)):
            if tokens and not 0 <= min(tokens) <= max(tokens) < self.model.config.vocab_size:
                wrong = min(tokens) if min(tokens) < 0 else max(tokens)
                raise DataError(
                    f"request {request.id}: {name} holds the token id {wrong}; the vocabulary is "
                    f"0..{self.model.config.vocab_size - 1}"
                )


def _same_device(wanted: torch.device, present: torch.device) -> bool:
    return wanted.type == present.type and wanted.index in (None, present.index)


def _asked_signals(
    signals: frozenset[str], topk: int, hooks: Sequence[StopHook], has_scorer: bool, vocab_size: int
) -> frozenset[str]:
    """The engine signals to compute, after checking that everything asked for can be had."""
    for name in signals:
        if name not in SIGNALS:
            raise unknown("signals", name, SIGNALS)
    asked = set(signals) | ({"topk"} if topk else set())
    for hook in hooks:
        for name in hook.signals:
            if name == TEACHER and not has_scorer:
                raise ConfigError(f"stop.{hook.part}: needs a teacher while rollouts run, but there is no scorer")
            if name not in (*SIGNALS, TEACHER):
                raise unknown(f"stop.{hook.part}.signals", name, (*SIGNALS, TEACHER))
        asked |= hook.signals - {TEACHER}
    if not 0 <= topk <= vocab_size or ("topk" in asked and not topk):
        raise invalid("topk", topk, f"1..{vocab_size} where top-k signals are asked for, else 0")
    return frozenset(asked)


def _token_batches(lengths: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """Consecutive ranges of rows, each within ``budget`` tokens or one row long."""
    ranges: list[tuple[int, int]] = []
    first = total = 0
    for row, length in enumerate(lengths):
        if row > first and total + length > budget:
            ranges.append((first, row))
            first, total = row, 0
        total += length
    return [*ranges, (first, len(lengths))] if lengths else []
