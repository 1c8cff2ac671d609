"""vLLM in this process, unpatched.

The engine drives vLLM step by step through ``LLM.llm_engine`` (`add_request`, `step`, `abort_request`): it sees every
token as it is sampled, lets the stop hooks read it, and aborts a request in the step in which a hook ends it. That
takes the place of a logits processor which would force an end-of-sequence token: nothing that the policy did not sample
enters a response, and it does not depend on which of vLLM's two logits-processor interfaces the model runner has.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from trimtab.core.config import EngineConfig
from trimtab.core.errors import ConfigError, EngineError, MissingExtraError, invalid, missing_extra
from trimtab.core.rng import key
from trimtab.generate.external import Asked, ExternalRollouts, Piece, check_request, check_signals
from trimtab.generate.protocol import Completion, Request, StopHook, StreamScorer
from trimtab.generate.weights import WeightCheck, WeightFolders
from trimtab.model.tokenizer import Tokenizer
from trimtab.model.transformer import Transformer

OLDEST, BEYOND = (0, 32), (0, 33)  # tested: 0.32
MAX_TOPK = 64  # most likely tokens a position may be asked for
SEED_MASK = 0x7FFF_FFFF


class VLLMEngine:
    """Generates with vLLM's engine, which has its own copy of the weights.

    Args:
        model: the policy; vLLM starts from its weights.
        tokenizer: of the policy; its files go with the weights.
        config: see :class:`EngineConfig`.
        eos_ids: tokens that end a response; vLLM's own idea of it is switched off.
        max_context: prompt and response tokens of one rollout.
        device: where stop hooks and a teacher compute.

    Raises:
        MissingExtraError: vLLM is not installed, or in a version that was not tested.
        EngineError: vLLM did not start, or gives other log-probs than the policy.
    """

    name = "vllm"

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        *,
        eos_ids: frozenset[int],
        max_context: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._vllm = import_vllm()
        self.config, self.tokenizer, self.version = config, tokenizer, 0
        self.eos_ids, self.vocab_size = frozenset(eos_ids), model.config.vocab_size
        self.max_context, self.device = max_context, torch.device(device)
        self._run = uuid.uuid4().hex[:12]
        self._weights, self._check = WeightFolders(config.weights_dir), WeightCheck()
        self._trusted = True
        try:
            self.llm = self._vllm.LLM(
                model=str(self._weights.save(model, tokenizer, f"{self._run}-0")),
                skip_tokenizer_init=True,
                dtype=str(model.dtype).removeprefix("torch."),
                max_model_len=max_context,
                max_num_seqs=config.slots,
                max_logprobs=MAX_TOPK,
                logprobs_mode="processed_logprobs",
                # vLLM's CPU build packs a tied output layer apart and does not reload it with the embedding.
                hf_overrides={"tie_word_embeddings": False},
                generation_config="vllm",  # no sampling defaults of the model
                enable_prefix_caching=True,
                gpu_memory_utilization=config.memory_share,
                enforce_eager=config.eager,
            )
        except Exception as error:
            raise EngineError(f"vLLM did not start: {type(error).__name__}: {error}") from error
        self._check.check(self, model, 0)

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
        """See :meth:`trimtab.generate.protocol.Engine.generate`. Signals are "margin" and "topk".

        Raises:
            ConfigError: a signal this engine cannot give, hooks that read signals along a reused prefix, a
                temperature that vLLM would change.
            DataError: a request without prompt tokens or with ids outside the vocabulary.
            EngineError: vLLM failed; ``completions`` holds all that was done by then.
        """
        if not self._trusted:
            raise EngineError("the last weight update failed; vLLM's weights are unknown until one succeeds")
        asked = check_signals(self.name, signals, topk, hooks, scorer is not None)
        for request in requests:
            check_request(request, self.vocab_size)
            _check_sampling(request, asked)
        if not requests:
            return []
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
        stepwise = bool(hooks) or should_abort is not None
        with torch.inference_mode():
            self._run_all(rollouts, stepwise, should_abort, progress)
        return rollouts.completions()

    def sync(self, model: Transformer, version: int) -> None:
        """Save the weights of ``model``, reload them in vLLM's workers, drop its prefix cache.

        Raises:
            EngineError: vLLM did not take them, or not all of them. Generation is refused until a later
                update succeeds.
        """
        self._trusted = False
        folder = self._weights.save(model, self.tokenizer, f"{self._run}-{version}")
        try:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
            dropped = self.llm.reset_prefix_cache()
        except Exception as error:
            raise EngineError(f"vLLM did not load the weights of version {version}: {error}") from error
        if not dropped:
            raise EngineError(f"vLLM did not drop the prefix cache of the weights before version {version}")
        self.version, self._trusted = version, True
        try:
            self._check.check(self, model, version)
        except EngineError:
            self._trusted = False
            raise

    def close(self) -> None:
        """End vLLM's processes."""
        self.llm.llm_engine.engine_core.shutdown()

    # ------------------------------------------------------------ inside

    def _run_all(
        self,
        rollouts: ExternalRollouts,
        stepwise: bool,
        should_abort: Callable[[], bool] | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        """Step vLLM until everything ended. ``stepwise`` takes tokens as they come, else whole responses."""
        call = _Running(self, rollouts, stepwise)
        try:
            while should_abort is None or not should_abort():
                call.admit()
                if not call.rows:
                    return
                if call.step() and progress is not None:
                    progress(rollouts.num_done, rollouts.num_tokens)
            rollouts.abort()
        except EngineError as error:
            raise EngineError(str(error), rollouts.salvage()) from error
        finally:
            call.close()

    def params(self, rollouts: ExternalRollouts, row: int, stepwise: bool) -> Any:
        """vLLM's sampling parameters for the rest of a running row."""
        request = rollouts.rows[row].request
        sampling = request.sampling
        kind = self._vllm.sampling_params.RequestOutputKind
        return self._vllm.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p if sampling.temperature else 1.0,
            top_k=sampling.top_k if sampling.temperature else 0,
            seed=key(request.key, rollouts.length(row)) & SEED_MASK,
            max_tokens=rollouts.room(row),
            ignore_eos=True,
            stop_token_ids=sorted(self.eos_ids),
            logprobs=rollouts.asked.width,
            detokenize=False,
            output_kind=kind.DELTA if stepwise else kind.FINAL_ONLY,
        )

    def salt(self) -> str:
        """Keeps what vLLM cached under other weights apart."""
        return f"{self._run}-{self.version}"


class _Running:
    """The requests vLLM works on during one call."""

    def __init__(self, owner: VLLMEngine, rollouts: ExternalRollouts, stepwise: bool) -> None:
        self.owner, self.rollouts, self.stepwise = owner, rollouts, stepwise
        self.engine, self.call = owner.llm.llm_engine, uuid.uuid4().hex[:8]
        self.rows: dict[str, int] = {}  # vLLM's request id -> row
        self.silent: set[str] = set()  # requests that have not had a token

    def admit(self) -> None:
        """Hand vLLM what the free slots can hold."""
        for row in self.rollouts.admit():
            name = f"{self.call}-{row}"
            prompt = {"prompt_token_ids": self.rollouts.context(row), "cache_salt": self.owner.salt()}
            _call(self.engine.add_request, name, prompt, self.owner.params(self.rollouts, row, self.stepwise))
            self.rows[name] = row
            self.silent.add(name)

    def step(self) -> bool:
        """One step of vLLM; abort what the hooks end. True when a rollout ended."""
        pieces: dict[int, Piece] = {}
        finished: set[str] = set()
        for output in _call(self.engine.step):
            if output.request_id in self.rows:  # else aborted in an earlier step
                piece = self.piece(output)
                if piece is not None:
                    pieces[self.rows[output.request_id]] = piece
                if output.finished:
                    finished.add(output.request_id)
        ended = set(self.rollouts.add(pieces)) if pieces else set()
        over = [name for name, row in self.rows.items() if row in ended]
        for name in over:
            del self.rows[name]
        cut = [name for name in over if name not in finished]
        if cut:
            _call(self.engine.abort_request, cut)
        if early := finished & self.rows.keys():
            raise EngineError(f"vLLM ended request {min(early)} before its limit without an end-of-sequence token")
        return bool(ended)

    def piece(self, output: Any) -> Piece | None:
        """The new tokens of a request, None when there are none yet."""
        name, result, width = output.request_id, output.outputs[0], self.rollouts.asked.width
        if not len(result.token_ids):
            return None
        piece = to_piece(result.token_ids, result.logprobs, width)
        piece.check(name, self.owner.vocab_size, width)
        if name in self.silent:
            self.silent.discard(name)
            piece.prefilled = len(output.prompt_token_ids) - (output.num_cached_tokens or 0)
        return piece

    def close(self) -> None:
        """End what still runs when the call is over."""
        if self.rows:
            _quietly(self.engine.abort_request, list(self.rows))


def to_piece(token_ids: Sequence[int], logprobs: Sequence[dict[int, Any]] | None, width: int) -> Piece:
    """vLLM's tokens with a mapping from id to log-prob each as a piece.

    Raises:
        EngineError: log-probs are missing.
    """
    if logprobs is None or len(logprobs) != len(token_ids):
        raise EngineError(f"vLLM gave {len(logprobs or ())} log-probs for {len(token_ids)} tokens")
    scores = [entry[token].logprob for token, entry in zip(token_ids, logprobs, strict=True)]
    piece = Piece(np.array(token_ids, dtype=np.int64), np.array(scores, dtype=np.float32))
    if width:
        best = [
            sorted(((lp.logprob, token) for token, lp in entry.items()), reverse=True)[:width] for entry in logprobs
        ]
        piece.top_ids = np.array([[token for _, token in row] for row in best], dtype=np.int64)
        piece.top_logprobs = np.array([[value for value, _ in row] for row in best], dtype=np.float32)
    return piece


def import_vllm() -> Any:
    """The module, in a version that was tested.

    Raises:
        MissingExtraError: it is absent or too old or too new.
    """
    try:
        vllm = importlib.import_module("vllm")
        importlib.import_module("vllm.sampling_params")
    except ImportError as error:
        raise missing_extra("vllm", "vllm", "engine.name=vllm") from error
    found = tuple(int(number) for number in re.findall(r"\d+", vllm.__version__)[:2])
    if not OLDEST <= found < BEYOND:
        oldest, beyond = (".".join(map(str, version)) for version in (OLDEST, BEYOND))
        raise MissingExtraError(
            f"engine.name=vllm was tested with vllm >={oldest},<{beyond}; vllm {vllm.__version__} is installed. "
            "Install a tested one with: pip install 'trimtab[vllm]', or reach this one with engine.name=http."
        )
    return vllm


def _check_sampling(request: Request, asked: Asked) -> None:
    sampling = request.sampling
    if 0 < sampling.temperature < 0.01:
        raise invalid("sampling.temperature", sampling.temperature, "0 or a number >= 0.01; vLLM raises smaller ones")
    if asked.any and (sampling.top_p < 1.0 or sampling.top_k):
        raise invalid("sampling.top_p and top_k", (sampling.top_p, sampling.top_k), "1 and 0 with signals")
    if asked.width > MAX_TOPK:
        raise invalid("topk", asked.width, f"at most {MAX_TOPK} with engine.name=vllm")


def _call(function: Callable[..., Any], *args: Any) -> Any:
    """Call into vLLM; what goes wrong there becomes an EngineError."""
    try:
        return function(*args)
    except ConfigError:
        raise
    except Exception as error:
        raise EngineError(f"vLLM failed: {type(error).__name__}: {error}") from error


def _quietly(function: Callable[..., Any], *args: Any) -> None:
    """Clean up behind a failure that is reported already."""
    with contextlib.suppress(Exception):  # the engine may be dead
        function(*args)
