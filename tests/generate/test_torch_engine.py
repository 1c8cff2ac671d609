from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from trimtab.core.errors import ConfigError, DataError, EngineError
from trimtab.core.records import Prompt, StopReason
from trimtab.core.rng import key
from trimtab.core.signals import overlap
from trimtab.generate.hooks import replay_hooks
from trimtab.generate.protocol import ChunkView, Completion, Request, Sampling, StopHook
from trimtab.generate.torch_engine import TorchEngine
from trimtab.model.attention import plan_sequences
from trimtab.model.config import ModelConfig
from trimtab.model.transformer import Transformer

VOCAB, EOS = 40, 0


def _model(seed: int = 0, **changes: Any) -> Transformer:
    """Weights far from their initial scale, so that what a token sees changes what follows it."""
    base: dict[str, Any] = {
        "family": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
    }
    model = Transformer.init(ModelConfig(**{**base, **changes}), seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return model


@pytest.fixture(scope="module")
def model() -> Transformer:
    return _model()


def _engine(model: Transformer, **changes: Any) -> TorchEngine:
    return TorchEngine(model, **{"eos_ids": [EOS], "pad_id": EOS, "num_slots": 4, "max_context": 200, **changes})


def _prompt(length: int, name: str = "") -> Prompt:
    return Prompt(
        id=name or f"p{length}", text="", tokens=tuple((7 * i + length) % (VOCAB - 1) + 1 for i in range(length))
    )


def _requests(
    lengths: Sequence[int] = (3, 1, 17, 60, 5), group: int = 3, max_new_tokens: int = 25, **changes: Any
) -> list[Request]:
    return [
        Request(
            id=f"{length}-{sample}",
            prompt=_prompt(length),
            sample=sample,
            key=key(0, length, sample),
            max_new_tokens=max_new_tokens,
            **changes,
        )
        for length, sample in itertools.product(lengths, range(group))
    ]


def _logits(model: Transformer, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
    """(T, V) logits that predict each response token, by one plain forward pass over the whole sequence."""
    tokens = torch.tensor([*prompt, *response])
    with torch.no_grad():
        hidden = model(tokens, plan_sequences([len(tokens)]))
        return model.logits(hidden[len(prompt) - 1 : -1])


def _assert_same(a: Completion, b: Completion) -> None:
    assert a.id == b.id
    assert a.tokens.tolist() == b.tokens.tolist()
    assert np.allclose(a.logprobs, b.logprobs, atol=1e-5, equal_nan=True)
    assert a.stop == b.stop
    assert set(a.signals) == set(b.signals)
    for name in a.signals:
        assert np.allclose(a.signals[name], b.signals[name], atol=1e-4, equal_nan=True), name


# ---------------------------------------------------------------- tokens and log-probs


def test_greedy_equals_step_by_step_argmax_of_the_full_forward_pass(model: Transformer) -> None:
    requests = _requests(group=1, sampling=Sampling(temperature=0.0))
    for request, completion in zip(requests, _engine(model, num_slots=3).generate(requests), strict=True):
        expected: list[int] = []
        while len(expected) < request.max_new_tokens and expected[-1:] != [EOS]:
            expected.append(int(_logits(model, request.prompt.tokens, [*expected, 1])[-1].argmax()))
        assert completion.tokens.tolist() == expected
        logp = _logits(model, request.prompt.tokens, expected).log_softmax(-1)
        assert np.allclose(completion.logprobs, logp[range(len(expected)), expected], atol=1e-5)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(0.7), Sampling(top_p=0.8), Sampling(top_k=6), Sampling(1.3, top_p=0.9, top_k=9)],
    ids=str,
)
def test_behaviour_log_probs_are_those_of_the_distribution_sampled_from(model: Transformer, sampling: Sampling) -> None:
    requests = _requests(sampling=sampling)
    for request, completion in zip(requests, _engine(model).generate(requests), strict=True):
        tokens = completion.tokens.tolist()
        p = (_logits(model, request.prompt.tokens, tokens).double() / sampling.temperature).softmax(-1)
        ranked = p.sort(-1, descending=True)
        kept = torch.arange(VOCAB) < (sampling.top_k or VOCAB)
        mass = (ranked.values * kept).cumsum(-1)
        kept = kept & ((mass - ranked.values) < sampling.top_p * mass[:, -1:])
        p = torch.zeros_like(p).scatter(1, ranked.indices, ranked.values * kept)
        expected = (p / p.sum(-1, keepdim=True))[range(len(tokens)), tokens].log()
        assert np.allclose(completion.logprobs, expected, atol=1e-5)


def test_score_equals_the_behaviour_log_probs(model: Transformer) -> None:
    requests = _requests(sampling=Sampling(temperature=0.7))
    engine = _engine(model, prefill_tokens=90)
    completions = engine.generate(requests)
    scored = engine.score(
        [r.prompt.tokens for r in requests], [c.tokens.tolist() for c in completions], temperature=0.7
    )
    assert all(np.allclose(s, c.logprobs, atol=2e-5) for s, c in zip(scored, completions, strict=True))
    assert engine.score([], []) == []
    assert [len(s) for s in engine.score([[1], [1, 2]], [[], [3]])] == [0, 1]


def test_the_engine_samples_its_distribution(model: Transformer) -> None:
    """First tokens of 4000 samples of one prompt against exact probabilities (5 standard deviations)."""
    n = 4000
    requests = [Request(str(i), _prompt(5), i, key(1, i), 1) for i in range(n)]
    completions = _engine(model, num_slots=500).generate(requests)
    p = _logits(model, _prompt(5).tokens, [1])[0].double().softmax(-1).numpy()
    share = np.bincount([c.tokens[0] for c in completions], minlength=VOCAB) / n
    assert (np.abs(share - p) <= 5 * np.sqrt(p * (1 - p) / n) + 1e-9).all()


# ---------------------------------------------------------------- determinism


ALL_SIGNALS = {"signals": frozenset({"entropy", "margin"}), "topk": 3}


def test_tokens_do_not_depend_on_slots_order_or_company(model: Transformer) -> None:
    """Mixed samplings, many lengths: one slot, three, more slots than requests, shuffled, and each alone."""
    samplings = [Sampling(), Sampling(0.5, top_p=0.8), Sampling(0.0), Sampling(top_k=4)]
    requests = [replace(r, sampling=samplings[i % 4]) for i, r in enumerate(_requests(group=4))]
    reference = _engine(model, num_slots=3).generate(requests, **ALL_SIGNALS)
    assert {c.stop.reason for c in reference} == {StopReason.EOS, StopReason.LIMIT}
    for num_slots in (1, 64):
        for a, b in zip(reference, _engine(model, num_slots=num_slots).generate(requests, **ALL_SIGNALS), strict=True):
            _assert_same(a, b)
    order = np.random.default_rng(0).permutation(len(requests))
    shuffled = _engine(model, num_slots=3).generate([requests[i] for i in order], **ALL_SIGNALS)
    for i, completion in zip(order, shuffled, strict=True):
        _assert_same(reference[i], completion)
    for request, completion in zip(requests[:6], reference, strict=False):
        _assert_same(_engine(model).generate([request], **ALL_SIGNALS)[0], completion)


def test_prefill_in_pieces_changes_nothing(model: Transformer) -> None:
    requests = _requests(lengths=(90, 2, 33, 120, 90, 1), group=2)
    reference = _engine(model).generate(requests)
    for a, b in zip(reference, _engine(model, prefill_tokens=7).generate(requests), strict=True):
        _assert_same(a, b)


def test_results_come_in_request_order_and_long_runs_outgrow_the_first_buffers(model: Transformer) -> None:
    requests = _requests(lengths=(4, 150), group=2, max_new_tokens=400)
    completions = _engine(model, eos_ids=[], max_context=600).generate(requests, topk=2, signals=frozenset({"entropy"}))
    assert [c.id for c in completions] == [r.id for r in requests]
    for request, completion in zip(requests, completions, strict=True):
        assert len(completion.tokens) == 400
        logp = _logits(model, request.prompt.tokens, completion.tokens.tolist()).log_softmax(-1)
        assert np.allclose(completion.logprobs, logp[range(400), completion.tokens.tolist()], atol=1e-4)
        assert np.allclose(completion.signals["entropy"], -(logp.exp() * logp).sum(-1), atol=1e-4)


# ---------------------------------------------------------------- how rollouts end


def test_limits_eos_and_context(model: Transformer) -> None:
    requests = [
        *_requests(lengths=(5, 9), group=8, max_new_tokens=40),
        *_requests(lengths=(60,), group=8, max_new_tokens=40),
    ]
    completions = _engine(model, max_context=70).generate(requests)
    assert {c.stop.reason for c in completions} == {StopReason.EOS, StopReason.LIMIT, StopReason.CONTEXT}
    for request, c in zip(requests, completions, strict=True):
        ends = c.stop.reason is StopReason.EOS
        assert (EOS in c.tokens) == ends
        assert EOS not in c.tokens[:-1]
        assert c.stop.index == len(c.tokens) - 1
        assert (c.stop.limit, c.stop.part, c.overrun) == (40, "", 0)
        if not ends:
            expected = 40 if c.stop.reason is StopReason.LIMIT else 70 - len(request.prompt.tokens)
            assert len(c.tokens) == expected


def test_the_last_token_of_the_context_is_used(model: Transformer) -> None:
    request = replace(_requests((5,), 1)[0], max_new_tokens=5)
    exact = _engine(model, eos_ids=[], max_context=10).generate([request])[0]
    short = _engine(model, eos_ids=[], max_context=9).generate([request])[0]
    assert (len(exact.tokens), exact.stop.reason) == (5, StopReason.LIMIT)
    assert (len(short.tokens), short.stop.reason) == (4, StopReason.CONTEXT)
    assert exact.tokens[:4].tolist() == short.tokens.tolist()


def test_any_of_several_eos_ids_ends_a_response_and_stays_in_it(model: Transformer) -> None:
    requests = _requests(group=6, max_new_tokens=60)
    completions = _engine(model, eos_ids={3, 8, 21}).generate(requests)
    last = {int(c.tokens[-1]) for c in completions if c.stop.reason is StopReason.EOS}
    assert last == {3, 8, 21}
    assert not any({3, 8, 21} & set(c.tokens[:-1].tolist()) for c in completions)
    assert all(np.isfinite(c.logprobs).all() for c in completions)


def test_without_eos_ids_only_the_limit_ends_a_response(model: Transformer) -> None:
    assert {len(c.tokens) for c in _engine(model, eos_ids=[]).generate(_requests())} == {25}


@pytest.mark.parametrize("pad_id", [EOS, 5, VOCAB - 1])
def test_the_pad_id_has_no_say(model: Transformer, pad_id: int) -> None:
    """Neither when it is the EOS id nor when it is an ordinary token that gets sampled."""
    requests = _requests(group=4)
    completions = _engine(model, pad_id=pad_id).generate(requests)
    assert any(pad_id in c.tokens for c in completions)
    for a, b in zip(_engine(model, pad_id=17).generate(requests), completions, strict=True):
        _assert_same(a, b)


def test_no_requests_no_tokens_no_room(model: Transformer) -> None:
    engine = _engine(model, max_context=20)
    assert engine.generate([]) == []
    requests = [
        replace(_requests((5,), 1)[0], id="none", max_new_tokens=0),
        replace(_requests((5,), 1)[0], id="negative", max_new_tokens=-3),
        replace(_requests((20,), 1)[0], id="full"),
        replace(_requests((33,), 1)[0], id="over"),
        replace(_requests((5,), 1)[0], id="runs", max_new_tokens=4),
    ]
    completions = engine.generate(requests, **ALL_SIGNALS)
    reasons = {c.id: (c.stop.reason, len(c.tokens)) for c in completions}
    assert reasons["none"] == reasons["negative"] == (StopReason.LIMIT, 0)
    assert reasons["full"] == reasons["over"] == (StopReason.CONTEXT, 0)
    assert reasons["runs"][1] > 0
    assert completions[0].stop.index == -1
    assert {name: v.shape for name, v in completions[0].signals.items()} == {
        "entropy": (0,),
        "margin": (0,),
        "topk_ids": (0, 3),
        "topk_logprobs": (0, 3),
    }
    only_empty = engine.generate(requests[:2], **ALL_SIGNALS)
    assert only_empty[0].signals["topk_ids"].shape == (0, 3)
    assert only_empty[0].cost.prefilled == 0


# ---------------------------------------------------------------- groups, refill, cost


class _CountingModel:
    """Counts the tokens of every forward pass of a model."""

    def __init__(self, model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.extended = self.decoded = 0
        self.batches: list[int] = []
        extend, decode = model.extend, model.decode

        def count_extend(tokens: Any, start: Any, count: Any, *rest: Any) -> Any:
            self.extended += int(count.sum())
            return extend(tokens, start, count, *rest)

        def count_decode(tokens: Any, *rest: Any) -> Any:
            self.decoded += len(tokens)
            self.batches.append(len(tokens))
            return decode(tokens, *rest)

        monkeypatch.setattr(model, "extend", count_extend)
        monkeypatch.setattr(model, "decode", count_decode)


@pytest.mark.parametrize("num_slots", [1, 3, 5, 64])
def test_each_prompt_is_prefilled_once_however_its_group_is_split(
    model: Transformer, monkeypatch: pytest.MonkeyPatch, num_slots: int
) -> None:
    counting = _CountingModel(model, monkeypatch)
    requests = _requests(lengths=(30, 12, 1), group=7)
    np.random.default_rng(1).shuffle(requests)  # type: ignore[arg-type]
    completions = _engine(model, num_slots=num_slots).generate(requests)
    assert counting.extended == 29 + 11  # a prompt's last token is the first input of each sample
    assert counting.decoded == sum(c.cost.sampled for c in completions) == sum(len(c.tokens) for c in completions)
    booked = [(len(r.prompt.tokens), c.cost.prefilled) for r, c in zip(requests, completions, strict=True)]
    for length in (30, 12, 1):
        own = [prefilled for n, prefilled in booked if n == length]
        assert own[0] == length
        assert not any(own[1:])


def test_prompts_that_differ_in_id_or_tokens_are_kept_apart(model: Transformer) -> None:
    same_id = [replace(_requests((n,), 1)[0], id=str(n), prompt=replace(_prompt(n), id="same")) for n in (4, 9)]
    apart = _engine(model).generate(same_id)
    for request, completion in zip(same_id, apart, strict=True):
        _assert_same(_engine(model).generate([request])[0], completion)
    assert [c.cost.prefilled for c in apart] == [4, 9]


def test_slots_are_refilled_in_the_step_they_come_free_and_the_tail_is_compact(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = _CountingModel(model, monkeypatch)
    limits = [1, 9, 2, 30, 4, 4, 11, 3, 7, 1, 1, 16]
    requests = [replace(r, max_new_tokens=n) for r, n in zip(_requests((6, 20), 6), limits, strict=True)]
    completions = _engine(model, eos_ids=[], num_slots=4).generate(requests)
    assert [len(c.tokens) for c in completions] == limits
    left, running, expected = list(limits), [], []
    while left or running:
        while left and len(running) < 4:
            running.append(left.pop(0))
        expected.append(len(running))
        running = [n - 1 for n in running if n > 1]
    assert counting.batches == expected


def test_progress_and_version(model: Transformer) -> None:
    calls: list[tuple[int, int]] = []
    engine = _engine(model)
    engine.sync(model, 12)
    completions = engine.generate(_requests(), progress=lambda done, tokens: calls.append((done, tokens)))
    assert calls == sorted(calls)
    assert calls[-1] == (15, sum(c.cost.sampled for c in completions))
    assert {c.version for c in completions} == {12}


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_signals_are_those_of_the_distribution_at_temperature_before_truncation(
    model: Transformer, temperature: float
) -> None:
    requests = _requests(sampling=Sampling(temperature, top_p=0.7, top_k=5))
    for request, c in zip(requests, _engine(model).generate(requests, **ALL_SIGNALS), strict=True):
        logp = (_logits(model, request.prompt.tokens, c.tokens.tolist()) / temperature).log_softmax(-1)
        best = logp.topk(3)
        assert np.allclose(c.signals["entropy"], -(logp.exp() * logp).sum(-1), atol=1e-4)
        assert np.allclose(c.signals["margin"], best.values[:, 0] - best.values[:, 1], atol=1e-4)
        assert np.array_equal(c.signals["topk_ids"], best.indices)
        assert np.allclose(c.signals["topk_logprobs"], best.values, atol=1e-4)


def test_only_what_is_asked_for_is_computed(model: Transformer) -> None:
    engine = _engine(model)
    assert engine.generate(_requests())[0].signals == {}
    assert set(engine.generate(_requests(), topk=2)[0].signals) == {"topk_ids", "topk_logprobs"}


# ---------------------------------------------------------------- hooks


@dataclass
class _Hook:
    """Base: never stops, notes what it sees by request."""

    part: str = "hook"
    every: int = 1
    signals: frozenset[str] = frozenset()
    seen: dict[int, list[tuple[int, int, float]]] = field(default_factory=dict)

    def start(self, num_slots: int, device: torch.device) -> dict[str, torch.Tensor]:
        return {"total": torch.zeros(num_slots, dtype=torch.int64, device=device)}

    def columns(self, view: ChunkView) -> torch.Tensor:
        return torch.full_like(view.token_BC, -1).bool()

    def step(self, state: dict[str, torch.Tensor], view: ChunkView) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        assert torch.equal(state["total"], view.index_B)
        for b, row in enumerate(view.row_B.tolist()):
            first, count = int(view.index_B[b]), int(view.count_B[b])
            tokens, logprobs = view.token_BC[b].tolist(), view.signals["logprobs"][b].tolist()
            self.seen.setdefault(row, []).extend((first + c, tokens[c], logprobs[c]) for c in range(count))
        valid = torch.arange(view.token_BC.shape[1]) < view.count_B[:, None]
        hit = self.columns(view) & valid
        column = torch.where(hit.any(-1), hit.int().argmax(-1), -1)
        return {"total": state["total"] + view.count_B}, column


@dataclass
class _AtHook(_Hook):
    at: Sequence[int] = ()

    def columns(self, view: ChunkView) -> torch.Tensor:
        position = view.index_B[:, None] + torch.arange(view.token_BC.shape[1])
        return position == torch.tensor(self.at)[view.row_B][:, None]


@dataclass
class _TokenHook(_Hook):
    """Stops at certain tokens once ``after`` tokens have gone by: depends on tokens and positions."""

    tokens: frozenset[int] = frozenset()
    after: int = 0

    def columns(self, view: ChunkView) -> torch.Tensor:
        position = view.index_B[:, None] + torch.arange(view.token_BC.shape[1])
        return torch.isin(view.token_BC, torch.tensor(sorted(self.tokens))) & (position >= self.after)


@dataclass
class _SignalHook(_Hook):
    """Stops where a signal is above a threshold."""

    name: str = "entropy"
    above: float = 0.0

    def columns(self, view: ChunkView) -> torch.Tensor:
        return view.signals[self.name] > self.above


def _plain(model: Transformer, requests: Sequence[Request], **changes: Any) -> list[Completion]:
    return _engine(model).generate(requests, **{**ALL_SIGNALS, **changes})


@pytest.mark.parametrize("every", [1, 3, 7, 1000])
@pytest.mark.parametrize("num_slots", [1, 4, 64])
def test_hooks_cut_at_exactly_the_positions_they_name(model: Transformer, every: int, num_slots: int) -> None:
    requests = _requests()
    at = [(5 * i) % 13 - 1 for i in range(len(requests))]
    hook = _AtHook(every=every, at=at)
    completions = _engine(model, num_slots=num_slots).generate(requests, hooks=[hook], **ALL_SIGNALS)
    stopped = 0
    for row, (c, full) in enumerate(zip(completions, _plain(model, requests), strict=True)):
        cut = 0 <= at[row] < len(full.tokens) - 1
        kept = at[row] + 1 if cut else len(full.tokens)
        stopped += cut
        assert c.tokens.tolist() == full.tokens[:kept].tolist()
        assert np.allclose(c.logprobs, full.logprobs[:kept], atol=1e-5)
        assert all(np.allclose(v, full.signals[name][:kept], atol=1e-4) for name, v in c.signals.items())
        assert (c.stop.reason, c.stop.part) == ((StopReason.PART, "hook") if cut else (full.stop.reason, ""))
        assert c.stop.index == kept - 1
        assert c.cost.sampled == kept + c.overrun
        assert 0 <= c.overrun < every
        seen = hook.seen[row]
        assert [(i, token) for i, token, _ in seen] == list(enumerate(full.tokens[: kept + c.overrun].tolist()))
        assert np.allclose([logprob for *_, logprob in seen], full.logprobs[: kept + c.overrun], atol=1e-5)
    assert stopped > 4


def test_stopping_in_chunks_equals_masking(model: Transformer) -> None:
    """Two hooks at several cadences against the same rules applied to the finished rollouts."""
    requests = _requests(group=6)
    finished = _plain(model, requests)

    def hooks(a: int, b: int) -> list[StopHook]:
        return [
            _TokenHook("token", a, tokens=frozenset({4, 9, 17, 30}), after=6),
            _SignalHook("signal", b, frozenset({"entropy"}), above=3.12),
        ]

    expected = replay_hooks(hooks(1, 1), finished, chunk=5)
    assert {c.stop.part for c in expected} == {"", "token", "signal"}
    for a, b, num_slots in ((1, 1, 2), (3, 3, 5), (7, 7, 2), (1, 7, 5), (3, 1, 2), (7, 3, 5)):
        run = _engine(model, num_slots=num_slots).generate(requests, hooks=hooks(a, b), **ALL_SIGNALS)
        for online, offline in zip(run, expected, strict=True):
            _assert_same(online, offline)


def test_hooks_leave_the_other_rollouts_alone(model: Transformer) -> None:
    requests = _requests()
    at = [3 if row % 2 else -1 for row in range(len(requests))]
    cut = _engine(model).generate(requests, hooks=[_AtHook(every=2, at=at)], **ALL_SIGNALS)
    for row, (c, full) in enumerate(zip(cut, _plain(model, requests), strict=True)):
        if row % 2 == 0:
            _assert_same(c, full)


def test_a_hook_computes_its_signals_by_itself(model: Transformer) -> None:
    hook = _SignalHook("signal", 4, frozenset({"margin"}), name="margin", above=1e9)
    completions = _engine(model).generate(_requests(), hooks=[hook])
    assert set(completions[0].signals) == {"margin"}


# ---------------------------------------------------------------- teacher


class _Scorer:
    """A teacher that gives each token its successor in the vocabulary, checking that it is fed in order, once."""

    def __init__(self, num_slots: int) -> None:
        self.read: list[list[int]] = [[] for _ in range(num_slots)]
        self.prompt: list[tuple[int, ...]] = [()] * num_slots
        self.scored = 0
        self.rows: dict[tuple[int, ...], list[list[int]]] = {}

    def admit(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        for slot, prompt in zip(slots, prompts, strict=True):
            self.prompt[slot], self.read[slot] = tuple(prompt), []
            self.rows.setdefault(tuple(prompt), []).append(self.read[slot])

    def extend(
        self, slot_B: torch.Tensor, token_BC: torch.Tensor, count_B: torch.Tensor, signals: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        for slot, tokens, count in zip(slot_B.tolist(), token_BC.tolist(), count_B.tolist(), strict=True):
            self.read[slot] += tokens[:count]
        self.scored += int(count_B.sum())
        teacher_ids = torch.stack([token_BC, (token_BC + 1) % VOCAB, (token_BC + 2) % VOCAB], -1)
        return {"teacher_topk_ids": teacher_ids, "overlap": overlap(signals["topk_ids"], teacher_ids)}

    def move(self, src: Sequence[int], dst: Sequence[int]) -> None:
        for s, d in zip(src, dst, strict=True):
            self.prompt[d], self.read[d] = self.prompt[s], self.read[s]


@pytest.mark.parametrize("cadences", [(1, 1), (4, 4), (3, 5)])
def test_the_teacher_reads_every_token_once_and_its_scores_stay(model: Transformer, cadences: tuple[int, int]) -> None:
    requests = _requests(group=4)
    finished = _plain(model, requests)
    for c in finished:
        tokens = torch.from_numpy(c.tokens)
        ids = torch.stack([tokens, (tokens + 1) % VOCAB, (tokens + 2) % VOCAB], -1)
        c.signals["overlap"] = overlap(torch.from_numpy(c.signals["topk_ids"]), ids).numpy()
        c.signals["teacher_topk_ids"] = ids.numpy()

    def hooks() -> list[StopHook]:
        teacher = frozenset({"teacher"})
        return [
            _SignalHook("drift", cadences[0], teacher, name="overlap", above=0.6),
            _TokenHook("token", cadences[1], teacher, tokens=frozenset({9, 17}), after=9),
        ]

    scorer = _Scorer(4)
    completions = _engine(model).generate(requests, hooks=hooks(), scorer=scorer, **ALL_SIGNALS)
    expected = replay_hooks(hooks(), finished)
    assert {c.stop.part for c in expected} >= {"drift", "token"}
    for online, offline in zip(completions, expected, strict=True):
        _assert_same(online, offline)
    assert sum(c.cost.scored for c in completions) == scorer.scored == sum(c.cost.sampled for c in completions)
    read = sorted(tokens for rows in scorer.rows.values() for tokens in rows)
    sampled = sorted(full.tokens[: c.cost.sampled].tolist() for full, c in zip(finished, completions, strict=True))
    assert read == sampled


def test_the_scorer_rests_when_no_hook_asks(model: Transformer) -> None:
    scorer = _Scorer(4)
    _engine(model).generate(_requests(), hooks=[_Hook()], scorer=scorer, topk=3)
    assert scorer.scored == 0
    assert not scorer.rows


# ---------------------------------------------------------------- resume and abort


@pytest.mark.parametrize("known", [True, False])
def test_resume_equals_uninterrupted(model: Transformer, known: bool) -> None:
    requests = _requests(sampling=Sampling(temperature=0.9))
    full = _plain(model, requests)
    resumed = []
    for i, (request, c) in enumerate(zip(requests, full, strict=True)):
        n = (3 * i) % len(c.tokens)
        logprobs = tuple(c.logprobs[:n].tolist()) if known else ()
        resumed.append(replace(request, prefix=tuple(c.tokens[:n].tolist()), prefix_logprobs=logprobs))
    assert any(r.prefix for r in resumed)
    for request, c, expected in zip(resumed, _plain(model, resumed), full, strict=True):
        n = len(request.prefix)
        if not known:
            assert np.isnan(c.logprobs[:n]).all()
            assert not np.isnan(c.logprobs[n:]).any()
            expected = replace(expected, logprobs=np.concatenate([np.full(n, np.nan), expected.logprobs[n:]]))
        _assert_same(c, expected)
        assert c.cost.sampled == len(c.tokens) - n


def test_a_prefix_shared_by_a_group_is_prefilled_once(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = _CountingModel(model, monkeypatch)
    requests = [replace(r, prefix=(4, 5, 6)) for r in _requests((10,), group=5)]
    completions = _engine(model, num_slots=2).generate(requests)
    assert counting.extended == 12
    assert [c.cost.prefilled for c in completions] == [13, 0, 0, 0, 0]
    assert all(c.tokens[:3].tolist() == [4, 5, 6] for c in completions)


@pytest.mark.parametrize("asked", [{}, ALL_SIGNALS])
def test_a_prefix_that_leaves_nothing_to_do(model: Transformer, asked: dict[str, Any]) -> None:
    base = replace(_requests((5,), 1)[0], max_new_tokens=4)
    requests = [
        replace(base, id="at the limit", prefix=(1, 2, 3, 4)),
        replace(base, id="beyond it", prefix=(1, 2, 3, 4, 5, 6), prefix_logprobs=(-1.0,) * 6),
        replace(base, id="ended", prefix=(1, EOS)),
        replace(base, id="no room", prefix=(1, 2, 3), max_new_tokens=9),
        replace(base, id="none wanted", prefix=(1, 2), max_new_tokens=0),
    ]
    results = {c.id: c for c in _engine(model, max_context=8).generate(requests, **asked)}
    assert {name: (c.tokens.tolist(), c.stop.reason) for name, c in results.items()} == {
        "at the limit": ([1, 2, 3], StopReason.CONTEXT),
        "beyond it": ([1, 2, 3], StopReason.CONTEXT),
        "ended": ([1, EOS], StopReason.EOS),
        "no room": ([1, 2, 3], StopReason.CONTEXT),
        "none wanted": ([], StopReason.LIMIT),
    }
    assert results["beyond it"].logprobs.tolist() == [-1.0] * 3
    for c in results.values():
        assert c.cost.sampled == 0
        assert {len(v) for v in c.signals.values()} <= {len(c.tokens)}
        assert not any(np.isnan(v).any() for v in c.signals.values())
    if asked:
        logp = _logits(model, base.prompt.tokens, [1, 2, 3]).log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        assert np.allclose(results["no room"].signals["entropy"], entropy, atol=1e-4)


@pytest.mark.parametrize("every", [1, 3])
def test_hooks_and_teacher_see_the_prefix_first(model: Transformer, every: int) -> None:
    """A resumed rollout stops where an uninterrupted one does, inside the prefix included."""
    requests = _requests(group=4)
    full = _plain(model, requests)
    full_tokens = {c.id: c.tokens for c in full}
    resumed = [replace(r, prefix=tuple(full_tokens[r.id][:8].tolist())) for r in requests]

    def run(rows: Sequence[Request]) -> tuple[list[Completion], _Scorer]:
        teacher = frozenset({"teacher"})
        hooks: list[StopHook] = [
            _TokenHook("token", every, tokens=frozenset({9, 17}), after=5),
            _SignalHook("drift", every, teacher, name="overlap", above=0.6),
            _SignalHook("signal", 2, frozenset({"entropy"}), above=3.12),
        ]
        scorer = _Scorer(4)
        return _engine(model).generate(rows, hooks=hooks, scorer=scorer, **ALL_SIGNALS), scorer

    expected, _ = run(requests)
    completions, scorer = run(resumed)
    assert any(c.stop.reason is StopReason.PART and c.stop.index < 7 for c in expected)
    assert any(c.stop.reason is StopReason.PART and c.stop.index > 7 for c in expected)
    for a, b in zip(completions, expected, strict=True):
        n = min(8, len(a.tokens))
        assert np.isnan(a.logprobs[:n]).all()
        _assert_same(replace(a, logprobs=np.concatenate([b.logprobs[:n], a.logprobs[n:]])), b)
        assert a.cost.scored == a.cost.sampled + min(8, len(full_tokens[a.id]))
        assert a.overrun == a.cost.sampled - max(0, len(a.tokens) - 8)
    assert scorer.scored == sum(c.cost.scored for c in completions)


def _abort_after(steps: int) -> Callable[[], bool]:
    calls = itertools.count()
    return lambda: next(calls) >= steps


@pytest.mark.parametrize("steps", [0, 1, 6])
def test_abort_keeps_partial_results(model: Transformer, steps: int) -> None:
    requests = [replace(r, prefix=(4, 5) if i % 2 else ()) for i, r in enumerate(_requests(group=2))]
    full = _plain(model, requests)
    aborted = _engine(model).generate(requests, should_abort=_abort_after(steps), **ALL_SIGNALS)
    assert [c.id for c in aborted] == [r.id for r in requests]
    assert any(c.stop.reason is StopReason.ABORT for c in aborted)
    for request, c, whole in zip(requests, aborted, full, strict=True):
        n = len(request.prefix)
        assert c.tokens.tolist() == whole.tokens[: len(c.tokens)].tolist()
        assert len(c.tokens) >= n
        assert set(c.signals) == set(whole.signals)
        assert {len(v) for v in c.signals.values()} == {len(c.tokens)}
        if c.stop.reason is StopReason.ABORT:
            assert c.stop.index == len(c.tokens) - 1
            assert c.cost.sampled == len(c.tokens) - n <= steps
            if c.cost.sampled == 0 and n:
                assert np.isnan(c.signals["entropy"]).all()
                assert (c.signals["topk_ids"] == -1).all()
    if steps == 0:
        assert sum(c.cost.prefilled for c in aborted) == 0


def test_abort_shows_hooks_the_rest_and_books_what_was_prefilled(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = _CountingModel(model, monkeypatch)
    requests = _requests(lengths=(9, 4, 30, 12, 20), group=3)
    hook = _AtHook("hook", 100, at=[2] * 15)
    completions = _engine(model, eos_ids=[]).generate(requests, hooks=[hook], should_abort=_abort_after(3))
    assert [c.stop.reason for c in completions[:4]] == [
        StopReason.PART
    ] * 4  # position 2 is the last: the rule was first
    assert {c.stop.reason for c in completions[4:]} == {StopReason.ABORT}
    loaded = [r.prompt.tokens for r, c in zip(requests, completions, strict=True) if c.cost.prefilled]
    assert counting.extended == sum(len(tokens) - 1 for tokens in loaded)


def test_an_aborted_rollout_resumes_to_the_uninterrupted_one(model: Transformer) -> None:
    requests = _requests()
    full = _engine(model).generate(requests)
    partial = _engine(model).generate(requests, should_abort=_abort_after(9))
    again = [
        replace(r, prefix=tuple(c.tokens.tolist()), prefix_logprobs=tuple(c.logprobs.tolist()))
        for r, c in zip(requests, partial, strict=True)
    ]
    for a, b in zip(_engine(model).generate(again), full, strict=True):
        _assert_same(a, b)


# ---------------------------------------------------------------- weights


def test_three_updates_in_a_row_leave_no_stale_keys_and_values() -> None:
    """The engine shares the trained module: in-place updates, then from another module."""
    model = _model()
    engine, requests = _engine(model), _requests()
    previous: list[list[int]] = []
    for version in range(1, 4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.05).add_(0.01 * version)
        engine.sync(model, version)
        completions = engine.generate(requests)
        fresh = _engine(copy.deepcopy(model)).generate(requests)
        for a, b in zip(completions, fresh, strict=True):
            _assert_same(replace(a, version=0), b)
            assert a.version == version
        tokens = [c.tokens.tolist() for c in completions]
        assert tokens != previous
        previous = tokens


def test_sync_copies_the_weights_of_another_module() -> None:
    learner = _model(seed=3)
    engine, requests = _engine(_model(seed=4)), _requests()
    engine.sync(learner, 5)
    expected = _engine(copy.deepcopy(learner)).generate(requests)
    with torch.no_grad():
        learner.embed.weight.zero_()  # later training must not reach the engine before the next sync
    for a, b in zip(engine.generate(requests), expected, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.version == 5
    with pytest.raises(ConfigError, match=r"engine\.sync"):
        engine.sync(_model(num_layers=1), 6)
    assert engine.version == 5


def test_training_goes_on_after_generation(model: Transformer) -> None:
    """Nothing made while generating may break autograd through the shared module."""
    model = copy.deepcopy(model)
    _engine(model).generate(_requests(group=1))
    tokens = torch.arange(1, 9)
    model.logits(model(tokens, plan_sequences([8]))).logsumexp(-1).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


# ---------------------------------------------------------------- bad input


def test_bad_requests_are_named(model: Transformer) -> None:
    engine = _engine(model)
    base = _requests((5,), 1)[0]
    for request, message in (
        (replace(base, prompt=Prompt("e", "", ())), "request 5-0: prompt e has no tokens"),
        (replace(base, prompt=Prompt("e", "", (1, VOCAB))), f"prompt holds the token id {VOCAB}; .* 0..{VOCAB - 1}"),
        (replace(base, prefix=(1, -2)), "prefix holds the token id -2"),
        (replace(base, prefix=(1, 2), prefix_logprobs=(-1.0,)), "1 prefix_logprobs for 2 prefix"),
    ):
        with pytest.raises(DataError, match=message):
            engine.generate([base, request])
    with pytest.raises(ConfigError, match=r"request 5-0: sampling\.top_p"):
        engine.generate([replace(base, sampling=Sampling(top_p=0.0))])


def test_weights_that_are_not_finite_are_an_error_not_unscored_tokens() -> None:
    model = _model()
    with torch.no_grad():
        model.norm.weight.fill_(torch.nan)
    with pytest.raises(EngineError, match="request 5-0: the log-prob of response token 2 is nan"):
        _engine(model).generate([replace(_requests((5,), 1)[0], prefix=(1, 2))])


def test_bad_demands_are_named(model: Transformer) -> None:
    engine, requests = _engine(model), _requests()
    for demand, message in (
        ({"signals": frozenset({"entrpy"})}, "'entrpy'.*Did you mean 'entropy'"),
        ({"signals": frozenset({"topk"})}, "topk: 0"),
        ({"topk": VOCAB + 1}, f"topk: {VOCAB + 1}"),
        ({"hooks": [_Hook(signals=frozenset({"teacher"}))]}, r"stop\.hook: needs a teacher"),
        ({"hooks": [_Hook(signals=frozenset({"topk"}))]}, "topk: 0"),
        ({"hooks": [_Hook(signals=frozenset({"nothing"}))]}, r"stop\.hook\.signals.*'nothing'"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine.generate(requests, **demand)


def test_bad_settings_are_named(model: Transformer) -> None:
    for changes, message in (
        ({"num_slots": 0}, r"engine\.num_slots: 0"),
        ({"prefill_tokens": 0}, r"engine\.prefill_tokens: 0"),
        ({"max_context": 1}, r"engine\.max_context: 1"),
        ({"eos_ids": [VOCAB]}, str(VOCAB)),
        ({"pad_id": -1}, "-1"),
    ):
        with pytest.raises(ConfigError, match=message):
            _engine(model, **changes)
    window = _model(family="mistral", sliding_window=50)
    with pytest.raises(ConfigError, match=r"max_context: 51.*2\.\.50"):
        _engine(window, max_context=51)
    assert _engine(window, max_context=None).max_context == 50
    assert _engine(model, max_context=None).max_context == model.config.max_positions


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_gives_the_tokens_of_the_cpu(model: Transformer) -> None:
    requests = _requests()
    hooks: list[StopHook] = []
    for a, b in zip(
        _engine(model, device="cuda").generate(requests, hooks=hooks, **ALL_SIGNALS),
        _engine(model).generate(requests, hooks=hooks, **ALL_SIGNALS),
        strict=True,
    ):
        assert a.tokens.tolist() == b.tokens.tolist()
