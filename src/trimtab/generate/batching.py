"""Continuous batching: one call of the embedded engine's `generate`.

Running rollouts occupy the first B slots, so a decode step works on a slice. Every running slot takes one token a step;
slots whose rollout ended are refilled in the same step, and where nothing waits any more the last ones move into the
holes. Lengths are known to the host, so a step waits for the device once, for its tokens and the hooks' cuts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from trimtab.core import signals as sig
from trimtab.core.errors import EngineError
from trimtab.core.records import Cost, FloatArray, IntArray, StopReason, StopRecord
from trimtab.core.rng import keys_tensor
from trimtab.core.signals import SoftmaxRows
from trimtab.generate.hooks import SIGNAL_ARRAYS, TEACHER, HookChain, Reader, Slots, cut_applies, signal_names
from trimtab.generate.prompts import Context, PromptStore
from trimtab.generate.protocol import Completion, Request, StopHook, StreamScorer
from trimtab.generate.sampling import SamplingRows, UniformBlocks, draw
from trimtab.generate.tape import Tape
from trimtab.model.transformer import KVCache

if TYPE_CHECKING:
    from trimtab.generate.torch_engine import TorchEngine

_HEAD_ROWS = 256  # rows of full-vocabulary logits computed at once outside decoding
_CACHE_STEP = 64  # the cache's length is a multiple of this
_PROGRESS_STEPS = 32


@dataclass(slots=True)
class _Plan:
    """What is known about a request before it runs: the prefix it keeps, its limit and the reason at the limit."""

    request: Request
    prefix: IntArray
    limit: int
    limit_reason: StopReason
    cost: Cost = field(default_factory=Cost)
    context: Context | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)  # the scorer's signals of the prefix, (L, ...)

    @classmethod
    def of(cls, request: Request, max_context: int) -> _Plan:
        room = max(0, max_context - len(request.prompt.tokens))
        limit = max(0, min(request.max_new_tokens, room))
        reason = StopReason.LIMIT if request.max_new_tokens <= room else StopReason.CONTEXT
        return cls(request, np.array(request.prefix[:limit], dtype=np.int64), limit, reason)

    def prefix_logprobs(self) -> FloatArray:
        if self.request.prefix_logprobs:
            return np.array(self.request.prefix_logprobs[: len(self.prefix)], dtype=np.float32)
        return np.full(len(self.prefix), np.nan, dtype=np.float32)


class _Slots:
    """Host state of the slots, one array a quantity (S,)."""

    def __init__(self, num_slots: int) -> None:
        self.row = np.zeros(num_slots, dtype=np.int64)  # request index
        self.born = np.zeros(num_slots, dtype=np.int64)  # step of the first token drawn
        self.prompt = np.zeros(num_slots, dtype=np.int64)  # prompt tokens
        self.prefix = np.zeros(num_slots, dtype=np.int64)  # prefix tokens
        self.length = np.zeros(num_slots, dtype=np.int64)  # response tokens, the prefix included
        self.limit = np.zeros(num_slots, dtype=np.int64)  # response tokens allowed
        self.scored = np.zeros(num_slots, dtype=np.int64)  # response tokens the scorer has seen
        self.eos = np.zeros(num_slots, dtype=bool)  # the last token ended the response

    def move(self, src: IntArray, dst: IntArray) -> None:
        for values in vars(self).values():
            values[dst] = values[src]


class GenerateCall:
    """One call of `generate`: its requests, the cache, and the loop."""

    def __init__(
        self,
        engine: TorchEngine,
        requests: Sequence[Request],
        hooks: Sequence[StopHook],
        asked: frozenset[str],
        topk: int,
        scorer: StreamScorer | None,
    ) -> None:
        self.engine, self.model, self.device = engine, engine.model, engine.device
        self.asked, self.topk = asked, topk
        self.scorer = scorer if any(TEACHER in hook.signals for hook in hooks) else None
        self.plans = [_Plan.of(request, engine.max_context) for request in requests]
        self.done: list[Completion | None] = [None] * len(requests)
        self.num_done = self.num_tokens = self.running = 0
        num_slots = min(engine.num_slots, len(requests))
        self.slots = _Slots(num_slots)
        self.token_S = torch.zeros(num_slots, dtype=torch.int64, device=self.device)
        self.tape = Tape(num_slots, self.device)
        self.chain = HookChain(hooks, num_slots, self.device)
        self.sampling_N = SamplingRows.of([r.sampling for r in requests], self.device)
        self.sampling = self.sampling_N
        first_N = torch.tensor([len(plan.prefix) for plan in self.plans], device=self.device)
        keys_N = keys_tensor([r.key for r in requests], self.device)
        self.uniforms = UniformBlocks(keys_N, first_N, num_slots)
        self.waiting = self._contexts()
        self.cache = self._new_cache(num_slots + max(1, num_slots // 8))
        store_slots = range(num_slots, self.cache.num_slots)
        self.store = PromptStore(
            self.model, self.cache, store_slots, engine.prefill_tokens, self._signals_of if asked else None
        )

    # ------------------------------------------------------------ the loop

    def run(self, should_abort: Callable[[], bool] | None, progress: Callable[[int, int], None] | None) -> None:
        """Run all requests to their end."""
        started, reported = False, -1
        while self.running or not started:
            if should_abort is not None and should_abort():
                self._abort()
                break
            if not started:
                started, self.running = True, self._num_waiting()
                self._refill(np.arange(self.running))
            if self.running:
                self._step()
            if progress is not None and (self.num_done != reported or self.tape.time % _PROGRESS_STEPS == 0):
                reported = self.num_done
                progress(self.num_done, self.num_tokens)
        if progress is not None and self.num_done != reported:
            progress(self.num_done, self.num_tokens)

    def _step(self) -> None:
        """One token for every running slot."""
        state, num = self.slots, self.running
        rows = slice(0, num)
        start_B = state.prompt[rows] + state.length[rows] - 1
        needed = int(start_B.max()) + 1
        self._reserve(needed)
        hidden = self.model.decode(self.token_S[rows], self._tensor(start_B), self.cache, rows, needed)
        dist = self.sampling.softmax(self.model.logits(hidden))
        token_B, logprob_B = draw(dist, self.uniforms.at(self.tape.time, num), self.sampling)
        values = {"tokens": token_B, "logprobs": logprob_B, **self._signals(dist)}
        self.tape.append(values, oldest=int(state.born[rows].min()))
        self.token_S[rows] = token_B
        state.length[rows] += 1
        self.num_tokens += num

        due = self.chain.due(self.tape.time)
        cuts = [self.chain.feed(h, rows, state.length[rows], self._read) for h in due]
        host = torch.stack([token_B, *cuts]).cpu().numpy()  # the step's one wait for the device
        cut_HB = self._no_cuts(num)
        cut_HB[due] = host[1:]
        state.eos[rows] = self.engine.is_eos_V[host[0]]
        ended = state.eos[rows] | (state.length[rows] >= state.limit[rows]) | (cut_HB >= 0).any(0)
        if ended.any():
            slots = np.flatnonzero(ended)
            self._finish(slots, cut_HB[:, slots], self._read)
            self._refill(slots)

    def _abort(self) -> None:
        slots = np.arange(self.running)
        if len(slots):
            self._finish(slots, self._no_cuts(len(slots)), self._read, aborting=True)
        for context in self.waiting:
            for row in context.waiting:
                self._complete_early(row, StopReason.ABORT)
        self.waiting.clear()
        self.running = 0

    # ------------------------------------------------------------ admission

    def _contexts(self) -> deque[Context]:
        """Requests grouped by what they share, in order of first appearance; those that need no pass are completed."""
        contexts: dict[tuple[Any, ...], Context] = {}
        for row, plan in enumerate(self.plans):
            request, prefix = plan.request, plan.prefix
            ended = len(prefix) > 0 and self.engine.is_eos_V[prefix[-1]]
            full = ended or len(prefix) >= plan.limit
            if full and not (len(prefix) and (self.asked or self.chain.hooks)):
                self._complete_early(row, StopReason.EOS if ended else plan.limit_reason)
                continue
            # Signals of a prefix depend on the temperature they are computed at.
            temperature = (request.sampling.temperature or 1.0) if len(prefix) else 1.0
            key = (request.prompt.id, request.prompt.tokens, prefix.tobytes(), temperature)
            if key not in contexts:
                tokens = np.concatenate([np.array(request.prompt.tokens, dtype=np.int64), prefix])
                contexts[key] = Context(tokens, len(request.prompt.tokens), temperature)
            contexts[key].waiting.append(row)
            plan.context = contexts[key]
        return deque(contexts.values())

    def _new_cache(self, total_slots: int) -> KVCache:
        live = [plan for plan in self.plans if plan.context is not None]
        self.longest = max((len(p.request.prompt.tokens) + p.limit for p in live), default=1)
        first = max((len(context.tokens) for context in self.waiting), default=1)
        return self.model.new_cache(total_slots, min(self.longest, _round_up(first + 2 * _CACHE_STEP)))

    def _reserve(self, length: int) -> None:
        """Room for ``length`` positions a slot; grows by half, so that copying stays a small share."""
        size = self.cache.max_len
        if length > size:
            self.cache.grow(min(self.longest, _round_up(max(length, size + size // 2))))

    def _refill(self, holes: IntArray) -> None:
        """Start waiting requests in ``holes`` (free slots below ``running``) and close the holes left over."""
        while len(holes) and self.waiting:
            slots = holes[: self._num_waiting()]
            self._place(slots)
            ended = self._show_prefixes(slots)
            holes = np.sort(np.concatenate([ended, holes[len(slots) :]]))
        if len(holes):
            self._compact(holes)
        self._rows_changed()

    def _num_waiting(self) -> int:
        """Waiting requests, counted no further than there are slots."""
        num_slots, total = len(self.slots.row), 0
        for context in self.waiting:
            total += len(context.waiting)
            if total >= num_slots:
                return num_slots
        return total

    def _place(self, slots: IntArray) -> None:
        """Fork the next waiting requests into ``slots``."""
        rows: list[int] = []
        while len(rows) < len(slots):
            context = self.waiting[0]
            if context.slot < 0:
                for loaded in self.store.load(self.waiting):
                    self.plans[loaded.waiting[0]].cost.prefilled += len(loaded.tokens)
            num = min(len(slots) - len(rows), len(context.waiting))
            taken = [context.waiting.popleft() for _ in range(num)]
            self.store.fork(context, slots[len(rows) : len(rows) + num].tolist())
            rows += taken
            if not context.waiting:
                self.waiting.popleft()
        self._start(slots, np.array(rows, dtype=np.int64))

    def _start(self, slots: IntArray, rows: IntArray) -> None:
        state, plans = self.slots, [self.plans[row] for row in rows]
        contexts = [cast(Context, plan.context) for plan in plans]
        state.row[slots], state.born[slots] = rows, self.tape.time
        state.prompt[slots] = [c.prompt_length for c in contexts]
        state.prefix[slots] = state.length[slots] = [len(p.prefix) for p in plans]
        state.limit[slots] = [p.limit for p in plans]
        state.scored[slots] = 0
        last = np.array([c.tokens[-1] for c in contexts], dtype=np.int64)
        state.eos[slots] = (state.prefix[slots] > 0) & self.engine.is_eos_V[last]
        index = self._tensor(slots)
        self.token_S[index] = self._tensor(last)
        self.uniforms.admit(index, self._tensor(rows), self.tape.time)
        self.chain.reset(slots, rows)
        if self.scorer is not None:
            self.scorer.admit(slots.tolist(), [plan.request.prompt.tokens for plan in plans])

    def _show_prefixes(self, slots: IntArray) -> IntArray:
        """Let the hooks see prefixes; returns the slots that ended by it."""
        state = self.slots
        slots = slots[state.prefix[slots] > 0]
        if not len(slots):
            return slots
        cut_HB = self._no_cuts(len(slots))
        self.chain.flush(slots, state.length[slots], self._read_prefix, cut_HB)
        ended = state.eos[slots] | (state.length[slots] >= state.limit[slots]) | (cut_HB >= 0).any(0)
        if ended.any():
            self._finish(slots[ended], cut_HB[:, ended], self._read_prefix)
        return slots[ended]

    def _compact(self, holes: IntArray) -> None:
        """Move the last running slots into ``holes``."""
        state = self.slots
        keep = np.setdiff1d(np.arange(self.running), holes)
        self.running = len(keep)
        length = int((state.prompt[keep] + state.length[keep]).max()) - 1 if len(keep) else 0
        order = np.array(self.cache.compact(keep.tolist(), length), dtype=np.int64)
        dst = np.flatnonzero(order != np.arange(len(order)))
        src = order[dst]
        if not len(dst):
            return
        state.move(src, dst)
        self.chain.move(src, dst)
        source, target = self._tensor(src), self._tensor(dst)
        self.token_S[target] = self.token_S[source]
        self.tape.move(source, target)
        self.uniforms.move(source, target)
        if self.scorer is not None:
            self.scorer.move(src.tolist(), dst.tolist())

    def _rows_changed(self) -> None:
        self.sampling = self.sampling_N.pick(self._tensor(self.slots.row[: self.running]))

    # ------------------------------------------------------------ signals, hooks, teacher

    def _signals(self, dist: SoftmaxRows) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        if "entropy" in self.asked:
            values["entropy"] = sig.entropy(dist)
        if "margin" in self.asked:
            values["margin"] = sig.margin(dist)
        if "topk" in self.asked:
            values["topk_ids"], values["topk_logprobs"] = sig.topk(dist, self.topk)
        return values

    def _signals_of(self, hidden: Tensor, temperature: float) -> dict[str, Tensor]:
        pieces = [
            self._signals(SoftmaxRows.of(self.model.logits(piece).float() / temperature))
            for piece in hidden.split(_HEAD_ROWS)
        ]
        return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}

    def _read(self, slots: Slots, count_B: IntArray, hook: StopHook) -> tuple[Tensor, dict[str, Tensor]]:
        """The newest tokens of running slots, for a hook."""
        if TEACHER in hook.signals:
            self._score(slots)
        names = signal_names(hook, list(self.tape.arrays))
        values = self.tape.newest(["tokens", *names], slots, count_B)
        return self._padded(values.pop("tokens"), count_B), values

    def _padded(self, token_BC: Tensor, count_B: IntArray) -> Tensor:
        if int(count_B.min()) == token_BC.shape[1]:
            return token_BC
        column = torch.arange(token_BC.shape[1], device=self.device)
        return token_BC.masked_fill(column >= self._tensor(count_B)[:, None], self.engine.pad_id)

    def _score(self, slots: Slots) -> None:
        """Let the teacher read what it has not of these slots."""
        state, index = self.slots, np.arange(self.slots.row.size)[slots]
        pending = state.length[index] - state.scored[index]
        index, pending = index[pending > 0], pending[pending > 0]
        if not len(index):
            return
        names = [name for signal in sorted(self.asked) for name in SIGNAL_ARRAYS[signal]]
        values = self.tape.newest(["tokens", "logprobs", *names], index, pending)
        self.tape.put(
            self._teacher(index, self._padded(values.pop("tokens"), pending), pending, values), index, pending
        )

    def _teacher(
        self, slots: IntArray, token_BC: Tensor, count_B: IntArray, values: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        scorer = cast(StreamScorer, self.scorer)
        self.slots.scored[slots] += count_B
        return scorer.extend(self._tensor(slots), token_BC, self._tensor(count_B), values)

    def _read_prefix(self, slots: Slots, count_B: IntArray, hook: StopHook) -> tuple[Tensor, dict[str, Tensor]]:
        """The prefixes of slots that just started, for a hook."""
        index = np.arange(self.slots.row.size)[slots]
        plans = [self.plans[row] for row in self.slots.row[index]]
        token_BC = torch.full((len(plans), int(count_B.max())), self.engine.pad_id, dtype=torch.int64)
        for row, plan in enumerate(plans):
            token_BC[row, : len(plan.prefix)] = torch.from_numpy(plan.prefix)
        token_BC = token_BC.to(self.device)
        if TEACHER in hook.signals and not self.slots.scored[index].any():
            student = _stacked([self._prefix_values(plan) for plan in plans])
            for name, value in self._teacher(index, token_BC, count_B, student).items():
                for row, plan in enumerate(plans):
                    plan.extra[name] = value[row, : len(plan.prefix)]
        values = _stacked([self._prefix_values(plan) for plan in plans])
        return token_BC, {name: values[name] for name in signal_names(hook, list(values))}

    def _prefix_values(self, plan: _Plan) -> dict[str, Tensor]:
        context = cast(Context, plan.context)
        logprobs = torch.from_numpy(plan.prefix_logprobs()).to(self.device)
        return {"logprobs": logprobs, **context.prefix_signals, **plan.extra}

    # ------------------------------------------------------------ results

    def _no_cuts(self, num_rows: int) -> IntArray:
        return np.full((len(self.chain.hooks), num_rows), -1, dtype=np.int64)

    def _finish(self, slots: IntArray, cut_HB: IntArray, read: Reader, aborting: bool = False) -> None:
        """Complete the rollouts in ``slots``: the hooks see the rest of them, then the earliest stop counts."""
        state = self.slots
        length_B = state.length[slots]
        self.chain.flush(slots, length_B, read, cut_HB)
        position_B, hook_B = self.chain.resolve(cut_HB, length_B)
        for slot, position, h in zip(slots.tolist(), position_B.tolist(), hook_B.tolist(), strict=True):
            plan, length = self.plans[state.row[slot]], int(state.length[slot])
            plan.cost.sampled += length - len(plan.prefix)
            plan.cost.scored += int(state.scored[slot])
            reason, part, kept = self._own_reason(slot, plan, aborting), "", length
            if reason is None or cut_applies(position, length, reason):
                reason, part, kept = StopReason.PART, self.chain.hooks[h].part, position + 1
            overrun = length - max(kept, len(plan.prefix))
            self._complete(int(state.row[slot]), self._arrays(plan, slot, kept), reason, part, overrun)

    def _own_reason(self, slot: int, plan: _Plan, aborting: bool) -> StopReason | None:
        """Why the rollout ends apart from hooks; None when only a hook ends it."""
        if self.slots.eos[slot]:
            return StopReason.EOS
        if self.slots.length[slot] >= plan.limit:
            return plan.limit_reason
        return StopReason.ABORT if aborting else None

    def _arrays(self, plan: _Plan, slot: int, kept: int) -> dict[str, np.ndarray[Any, Any]]:
        """The first ``kept`` values of everything recorded of a rollout."""
        num_prefix = min(kept, len(plan.prefix))
        pieces: dict[str, list[np.ndarray[Any, Any]]] = {}
        if num_prefix:
            known = {"tokens": torch.from_numpy(plan.prefix), **self._prefix_values(plan)}
            pieces = {name: [value[:num_prefix].cpu().numpy()] for name, value in known.items()}
        if kept > num_prefix:
            born = int(self.slots.born[slot])
            for name in self.tape.arrays:
                pieces.setdefault(name, []).append(self.tape.column(name, slot, born, kept - num_prefix))
            _check_finite(plan.request.id, pieces["logprobs"][-1], num_prefix)
        return {name: np.concatenate(parts) for name, parts in pieces.items()}

    def _complete_early(self, row: int, reason: StopReason) -> None:
        """Complete a request that never ran with its prefix."""
        plan = self.plans[row]
        self._complete(row, {"tokens": plan.prefix, "logprobs": plan.prefix_logprobs()}, reason, "", 0)

    def _complete(
        self, row: int, arrays: dict[str, np.ndarray[Any, Any]], reason: StopReason, part: str, overrun: int
    ) -> None:
        plan = self.plans[row]
        tokens = arrays.pop("tokens")
        self.done[row] = Completion(
            id=plan.request.id,
            tokens=tokens,
            logprobs=arrays.pop("logprobs"),
            stop=StopRecord(reason, len(tokens) - 1, part, plan.request.max_new_tokens),
            version=self.engine.version,
            signals=arrays,
            cost=plan.cost,
            overrun=overrun,
        )
        self.num_done += 1

    def completions(self) -> list[Completion]:
        """The results in request order, every one with every signal; what is not known is NaN, or -1 for ids."""
        done = [cast(Completion, completion) for completion in self.done]
        shapes: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        for name in (name for signal in sorted(self.asked) for name in SIGNAL_ARRAYS[signal]):
            dtype = np.dtype(np.int64 if name == "topk_ids" else np.float32)
            shapes[name] = ((self.topk,) if name.startswith("topk") else ()), dtype
        for completion in done:
            shapes |= {name: (value.shape[1:], value.dtype) for name, value in completion.signals.items()}
        for completion in done:
            for name, (shape, dtype) in shapes.items():
                if name not in completion.signals:
                    unknown_value = np.nan if dtype.kind == "f" else -1
                    completion.signals[name] = np.full((len(completion.tokens), *shape), unknown_value, dtype=dtype)
        return done

    def _tensor(self, values: IntArray) -> Tensor:
        return torch.as_tensor(values, device=self.device)


def _check_finite(request: str, logprobs: FloatArray, first: int) -> None:
    """Refuse log-probs of sampled tokens that are not numbers: NaN would pass for "not scored" later on."""
    wrong = np.flatnonzero(~np.isfinite(logprobs))
    if len(wrong):
        raise EngineError(
            f"request {request}: the log-prob of response token {first + wrong[0]} is {logprobs[wrong[0]]}; "
            "the model's weights or logits are not finite"
        )


def _stacked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Rows (L, ...) of different length as (B, C, ...), padded with zeros."""
    return {name: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True) for name in rows[0]}


def _round_up(length: int) -> int:
    return -(-length // _CACHE_STEP) * _CACHE_STEP
