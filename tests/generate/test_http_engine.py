from __future__ import annotations

import asyncio
import copy
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from generate import toy_server
from torch import Tensor

from trimtab.core.config import EngineConfig
from trimtab.core.errors import ConfigError, DataError, EngineError, MissingExtraError
from trimtab.core.records import Prompt, StopReason
from trimtab.core.rng import key
from trimtab.generate.dialects import LlamaCpp
from trimtab.generate.hooks import replay_hooks
from trimtab.generate.http_engine import HttpEngine
from trimtab.generate.protocol import ChunkView, Completion, Request, Sampling
from trimtab.generate.torch_engine import TorchEngine
from trimtab.model.load import load_pretrained
from trimtab.model.transformer import Transformer

EOS = frozenset({0})
DIALECTS = ("vllm", "sglang", "llamacpp")
GREEDY = Sampling(temperature=0.0)


@pytest.fixture
def serve() -> Iterator[Callable[..., toy_server.ToyServer]]:
    servers: list[toy_server.ToyServer] = []

    def start(dialect: str = "vllm", **changes: Any) -> toy_server.ToyServer:
        servers.append(toy_server.ToyServer(toy_server.Toy(tiny.tiny_model(scale=8.0), dialect, **changes)))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def connect(server: toy_server.ToyServer, **changes: Any) -> HttpEngine:
    defaults: dict[str, Any] = {"slots": 8, "timeout_s": 5.0, "connect_timeout_s": 1.0, "retries": 2}
    config = EngineConfig(name="http", url=server.url, **{**defaults, **changes})
    return HttpEngine(
        config, tokenizer=None, eos_ids=EOS, vocab_size=tiny.VOCAB, max_context=200, backoff_s=0.01, device="cpu"
    )


def ask(num_prompts: int = 3, group: int = 2, limit: int = 12, **changes: Any) -> list[Request]:
    prompts = [
        Prompt(id=f"p{i}", text="", tokens=tuple((5 * i + 3 * j) % 17 + 1 for j in range(3 + i)))
        for i in range(num_prompts)
    ]
    return [Request(f"{p.id}-{n}", p, n, key(p.id, n), limit, **changes) for p in prompts for n in range(group)]


def scores(model: Transformer, asked: Sequence[Request], done: Sequence[Completion], temperature: float = 1.0) -> Any:
    judge = TorchEngine(model, eos_ids=EOS, pad_id=0)
    return judge.score([r.prompt.tokens for r in asked], [c.tokens.tolist() for c in done], temperature)


def assert_scored(
    model: Transformer, asked: Sequence[Request], done: Sequence[Completion], temperature: float = 1.0
) -> None:
    for ours, c in zip(scores(model, asked, done, temperature), done, strict=True):
        assert np.allclose(ours, c.logprobs, atol=1e-4), c.id


@dataclass
class StopAt:
    """Ends a response at the first token out of ``ids`` at response index 2 or later."""

    ids: frozenset[int] = frozenset(range(1, 19, 4))
    part: str = "stop-at"
    every: int = 1
    signals: frozenset[str] = frozenset()

    def start(self, num_slots: int, device: torch.device) -> dict[str, Tensor]:
        return {"seen": torch.zeros(num_slots, dtype=torch.int64)}

    def step(self, state: dict[str, Tensor], view: ChunkView) -> tuple[dict[str, Tensor], Tensor]:
        column = torch.arange(view.token_BC.shape[1])
        assert (state["seen"] == view.index_B).all()
        place = view.index_B[:, None] + column
        hit = (
            torch.isin(view.token_BC, torch.tensor(sorted(self.ids))) & (column < view.count_B[:, None]) & (place >= 2)
        )
        return {"seen": state["seen"] + view.count_B}, torch.where(hit.any(1), hit.int().argmax(1), -1)


# ---------------------------------------------------------------- tokens, log-probs, stops


@pytest.mark.parametrize("dialect", DIALECTS)
def test_ids_and_logprobs_come_through_unchanged(serve: Any, dialect: str) -> None:
    server = serve(dialect)
    engine, asked = connect(server), ask()
    assert engine.dialect.name == dialect
    assert engine.max_context == 64, "the server's context counts"
    done = engine.generate(asked)
    assert [c.id for c in done] == [r.id for r in asked]
    field_name = "input_ids" if dialect == "sglang" else "prompt"
    sent = sorted(tuple(body[field_name]) for body in server.toy.seen)
    assert sent == sorted(r.prompt.tokens for r in asked), "one request a rollout, with its prompt's ids"
    assert_scored(server.toy.model, asked, done)
    for c in done:
        assert len(c.tokens) == 12 or c.tokens[-1] == 0
        assert c.stop.reason == (StopReason.EOS if c.tokens[-1] == 0 else StopReason.LIMIT)
        assert 0 not in c.tokens[:-1]
        assert (c.stop.index, c.stop.limit, c.version, c.overrun) == (len(c.tokens) - 1, 12, 0, 0)
        assert c.cost.sampled == len(c.tokens)
    assert {c.stop.reason for c in done} == {StopReason.EOS, StopReason.LIMIT}, "the test must see both ends"
    again = connect(server).generate(asked)
    assert [c.tokens.tolist() for c in again] == [c.tokens.tolist() for c in done], "seeds follow from the keys"
    assert len({c.tokens.tobytes() for c in done}) > 3, "samples of a prompt differ"


def test_requests_of_a_prompt_are_sent_together(serve: Any) -> None:
    server = serve()
    asked = ask(num_prompts=3, group=4)
    mixed = [asked[i] for i in (0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11)]
    done = connect(server, slots=1).generate(mixed)
    assert [c.id for c in done] == [r.id for r in mixed]
    sent = [tuple(body["prompt"]) for body in server.toy.seen]
    assert sent == [r.prompt.tokens for r in asked]


def test_no_more_requests_at_once_than_slots(serve: Any) -> None:
    server = serve(fault=lambda number: "slow")
    connect(server, slots=3).generate(ask(num_prompts=5))
    assert server.toy.most_in_flight == 3


def test_context_limit_and_empty_list(serve: Any) -> None:
    engine = connect(serve())
    assert engine.generate([]) == []
    long = Prompt(id="long", text="", tokens=(5,) * 60)
    (done,) = engine.generate([Request("a", long, 0, 1, 30, GREEDY)])
    assert len(done.tokens) <= 4
    full = replace(long, tokens=(5,) * 64)
    (done,) = engine.generate([Request("a", full, 0, 1, 30)])
    assert (len(done.tokens), done.stop.reason, done.stop.index) == (0, StopReason.CONTEXT, -1)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_top_log_probs_are_the_models(serve: Any, dialect: str) -> None:
    server = serve(dialect)
    asked = ask()
    done = connect(server).generate(asked, signals=frozenset({"margin"}), topk=3)
    torch_engine = TorchEngine(server.toy.model, eos_ids=EOS, pad_id=0)
    prefixed = [replace(r, prefix=tuple(c.tokens.tolist())) for r, c in zip(asked, done, strict=True)]
    expected = torch_engine.generate(prefixed, signals=frozenset({"margin"}), topk=3)
    for c, e in zip(done, expected, strict=True):
        assert c.tokens.tolist() == e.tokens.tolist()
        assert set(c.signals) == {"margin", "topk_ids", "topk_logprobs"}
        assert c.signals["topk_ids"].tolist() == e.signals["topk_ids"].tolist()
        assert np.allclose(c.signals["topk_logprobs"], e.signals["topk_logprobs"], atol=1e-4)
        assert np.allclose(c.signals["margin"], e.signals["margin"], atol=1e-4)


def test_signals_that_no_server_gives_are_refused(serve: Any) -> None:
    engine = connect(serve())
    with pytest.raises(ConfigError, match=r"'entropy'.*whole vocabulary.*engine.name=torch"):
        engine.generate(ask(), signals=frozenset({"entropy"}))
    with pytest.raises(ConfigError, match="needs a teacher"):
        engine.generate(ask(), hooks=[StopAt(signals=frozenset({"teacher"}))])
    with pytest.raises(DataError, match="token id 19"):
        engine.generate([Request("a", Prompt(id="p", text="", tokens=(19,)), 0, 1, 3)])


# ---------------------------------------------------------------- hooks, prefixes, aborts


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("every", [1, 5])
def test_stops_at_chunks_equal_replay(serve: Any, dialect: str, every: int) -> None:
    server = serve(dialect)
    asked = ask(num_prompts=6, group=1, limit=20, sampling=GREEDY)
    whole = connect(server).generate(asked)
    server.toy.seen.clear()
    stopped = connect(server, chunk=6, slots=4).generate(asked, hooks=[StopAt(every=every)])
    expected = replay_hooks([StopAt(every=every)], whole)
    for c, e in zip(stopped, expected, strict=True):
        assert c.tokens.tolist() == e.tokens.tolist()
        assert c.stop == e.stop
        assert np.allclose(c.logprobs, e.logprobs, atol=1e-5)
        assert c.cost.sampled == len(c.tokens) + c.overrun
        assert c.overrun < 6 + every
    cut = [c for c in stopped if c.stop.reason is StopReason.PART]
    assert cut
    assert {c.stop.part for c in cut} == {"stop-at"}
    assert any(c.overrun for c in cut)
    seeds = [
        body["sampling_params"]["sampling_seed"] if dialect == "sglang" else body["seed"] for body in server.toy.seen
    ]
    assert len(set(seeds)) == len(seeds), "a chunk must not draw with the numbers of the chunk before it"
    assert sum(c.cost.sampled for c in stopped) < sum(c.cost.sampled for c in whole)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_prefix_is_resumed(serve: Any, dialect: str) -> None:
    server = serve(dialect)
    asked = ask(group=1, limit=10, sampling=GREEDY)
    whole = connect(server).generate(asked)
    resumed = [
        replace(r, prefix=tuple(c.tokens[:3].tolist()), prefix_logprobs=(-1.0, -2.0, -3.0))
        for r, c in zip(asked, whole, strict=True)
    ]
    server.toy.seen.clear()
    for c, e in zip(connect(server).generate(resumed), whole, strict=True):
        assert c.tokens.tolist() == e.tokens.tolist()
        assert c.logprobs[:3].tolist() == [-1.0, -2.0, -3.0]
        assert np.allclose(c.logprobs[3:], e.logprobs[3:], atol=1e-5)
        assert c.cost.sampled == len(c.tokens) - 3
        assert c.stop.reason == e.stop.reason
    ended = replace(asked[0], prefix=(4, 0), prefix_logprobs=())
    (c,) = connect(server).generate([ended])
    assert (c.stop.reason, c.tokens.tolist()) == (StopReason.EOS, [4, 0])
    assert np.isnan(c.logprobs).all(), "unknown, not invented"
    full = replace(asked[0], prefix=tuple(range(1, 12)))
    (c,) = connect(server).generate([full])
    assert (c.stop.reason, len(c.tokens)) == (StopReason.LIMIT, 10)


def test_the_earliest_cut_of_a_chain_wins_whatever_each_hook_has_seen(serve: Any) -> None:
    """The slow hook has not been shown the last tokens when the fast one, or the response itself, ends."""
    server = serve()
    asked = ask(num_prompts=6, group=1, limit=20, sampling=GREEDY)
    whole = connect(server).generate(asked)
    third = {int(c.tokens[3]) for c in whole if len(c.tokens) > 4}
    for chain in (
        [StopAt(part="fast", ids=frozenset({int(c.tokens[4]) for c in whole if len(c.tokens) > 4}))],
        [],
    ):
        hooks = [StopAt(part="slow", every=50, ids=frozenset(third)), *chain]
        stopped = connect(server, chunk=2).generate(asked, hooks=hooks)
        for c, e in zip(stopped, replay_hooks(hooks, whole), strict=True):
            assert c.tokens.tolist() == e.tokens.tolist()
            assert c.stop == e.stop
        assert any(c.stop.part == "slow" for c in stopped)


def test_hooks_read_a_prefix_first_and_may_cut_in_it(serve: Any) -> None:
    engine = connect(serve())
    request = replace(ask(group=1)[0], prefix=(2, 3, 5, 7))
    (done,) = engine.generate([request], hooks=[StopAt()])
    assert done.tokens.tolist() == [2, 3, 5]
    assert (done.stop.part, done.overrun, done.cost.sampled) == ("stop-at", 0, 0)
    with pytest.raises(ConfigError, match="along reused prefixes"):
        engine.generate([request], hooks=[StopAt(signals=frozenset({"margin"}))])


@dataclass
class Scorer:
    """Notes what it reads; its signal is the token itself."""

    prompts: dict[int, list[Any]] = field(default_factory=dict)
    read: list[tuple[int, int]] = field(default_factory=list)

    def admit(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        for slot, prompt in zip(slots, prompts, strict=True):
            self.prompts.setdefault(slot, []).append(tuple(prompt))

    def extend(
        self, slot_B: Tensor, token_BC: Tensor, count_B: Tensor, signals: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        assert signals["topk_ids"].shape == (*token_BC.shape, 2)
        for slot, count in zip(slot_B.tolist(), count_B.tolist(), strict=True):
            self.read.append((slot, count))
        return {"teacher_logprob": -token_BC.float(), "teacher_topk_ids": token_BC[..., None]}

    def move(self, src: Sequence[int], dst: Sequence[int]) -> None:
        raise AssertionError("slots of an external engine do not move")


@dataclass
class StopOnTeacher(StopAt):
    """Ends a response where the teacher's signal says token 9 or more, from response index 2 on."""

    part: str = "teacher-stop"
    signals: frozenset[str] = frozenset({"teacher"})

    def step(self, state: dict[str, Tensor], view: ChunkView) -> tuple[dict[str, Tensor], Tensor]:
        column = torch.arange(view.token_BC.shape[1])
        valid = column < view.count_B[:, None]
        assert torch.equal((-view.signals["teacher_logprob"]).long()[valid], view.token_BC[valid])
        hit = (view.signals["teacher_logprob"] <= -9) & valid & (view.index_B[:, None] + column >= 2)
        return {"seen": state["seen"] + view.count_B}, torch.where(hit.any(1), hit.int().argmax(1), -1)


def test_a_teacher_reads_along(serve: Any) -> None:
    scorer = Scorer()
    asked = ask(num_prompts=4, limit=16)
    done = connect(serve(), chunk=3, slots=3).generate(asked, hooks=[StopOnTeacher()], topk=2, scorer=scorer)
    assert any(c.stop.part == "teacher-stop" for c in done)
    for c in done:
        assert (c.tokens[2:-1] < 9).all()
        assert np.array_equal(-c.signals["teacher_logprob"], c.tokens), "scores belong to their tokens"
        assert c.signals["teacher_topk_ids"].shape == (len(c.tokens), 1)
    assert sorted(scorer.prompts) == [0, 1, 2]
    assert sum(len(p) for p in scorer.prompts.values()) == len(asked)
    assert sum(count for _, count in scorer.read) == sum(c.cost.scored for c in done)


def test_abort_keeps_what_there_is(serve: Any) -> None:
    server = serve(fault=lambda number: "slow")
    polls = iter([False] * 4)
    asked = ask(num_prompts=6, limit=40)
    start = time.perf_counter()
    done = connect(server, chunk=2, slots=4).generate(asked, should_abort=lambda: next(polls, True))
    assert time.perf_counter() - start < 3
    assert [c.id for c in done] == [r.id for r in asked]
    aborted = [c for c in done if c.stop.reason is StopReason.ABORT]
    assert any(0 < len(c.tokens) < 40 for c in aborted), "partial results are kept"
    assert any(len(c.tokens) == 0 for c in aborted), "waiting requests are answered too"
    for c in aborted:
        assert len(c.logprobs) == len(c.tokens)


def test_progress_is_told(serve: Any) -> None:
    told: list[tuple[int, int]] = []
    done = connect(serve()).generate(ask(), progress=lambda n, tokens: told.append((n, tokens)))
    assert told[-1] == (6, sum(len(c.tokens) for c in done))
    assert told == sorted(told)


def test_it_works_inside_a_running_event_loop(serve: Any) -> None:
    engine = connect(serve())

    async def cell() -> list[Completion]:
        return engine.generate(ask())

    assert len(asyncio.run(cell())) == 6


# ---------------------------------------------------------------- log-prob conventions


def test_vllm_with_raw_log_probs_is_refused_where_they_would_be_wrong(serve: Any) -> None:
    engine = connect(serve("vllm", processed_logprobs=False))
    engine.generate(ask())
    engine.generate(ask(sampling=GREEDY))
    with pytest.raises(EngineError, match=r"without the temperature.*--logprobs-mode processed_logprobs"):
        engine.generate(ask(sampling=Sampling(temperature=0.7)))
    with pytest.raises(EngineError, match="without the truncation"):
        engine.generate(ask(sampling=Sampling(top_p=0.8)))


def test_vllm_with_processed_log_probs_gives_those_of_the_distribution_sampled_from(serve: Any) -> None:
    server = serve("vllm", processed_logprobs=True)
    engine = connect(server)
    asked = ask(sampling=Sampling(temperature=0.7))
    assert_scored(server.toy.model, asked, engine.generate(asked), 0.7)
    engine.generate(ask(sampling=Sampling(temperature=0.7, top_k=4)))
    with pytest.raises(ConfigError, match=r"0.01"):
        engine.generate(ask(sampling=Sampling(temperature=0.005)))
    with pytest.raises(ConfigError, match="with signals"):
        engine.generate(ask(sampling=Sampling(top_k=4)), topk=2)


def test_sglang_scales_by_the_temperature_but_does_not_truncate(serve: Any) -> None:
    server = serve("sglang")
    engine = connect(server)
    asked = ask(sampling=Sampling(temperature=0.7))
    assert_scored(server.toy.model, asked, engine.generate(asked), 0.7)
    with pytest.raises(EngineError, match="before top_p and top_k"):
        engine.generate(ask(sampling=Sampling(top_k=4)))


def test_llamacpp_is_asked_for_the_probabilities_after_its_samplers(serve: Any) -> None:
    server = serve("llamacpp")
    engine = connect(server)
    asked = ask(sampling=Sampling(temperature=0.7))
    assert_scored(server.toy.model, asked, engine.generate(asked), 0.7)
    for c in engine.generate(ask(sampling=Sampling(top_k=1))):
        assert np.allclose(c.logprobs, 0.0, atol=1e-5)
    assert_scored(server.toy.model, asked, engine.generate([replace(r, sampling=GREEDY) for r in asked]))


def test_llamacpp_entries_that_are_missing_leave_unknown_log_probs() -> None:
    """Tokens that end inside a character have no entry; an entry whose place is not certain is not used."""

    def read(tokens: list[int], ids: list[int]) -> list[float]:
        entries = [{"id": i, "logprob": -float(n + 1), "top_logprobs": []} for n, i in enumerate(ids)]
        answer = {"tokens": tokens, "completion_probabilities": entries, "stop_type": "limit"}
        return LlamaCpp().read(answer, _plain_ask()).piece.logprobs.tolist()

    assert read([4, 5, 6], [4, 5, 6]) == [-1.0, -2.0, -3.0]
    assert np.array_equal(read([4, 5, 6, 7], [4, 7]), [-1.0, np.nan, np.nan, -2.0], equal_nan=True)
    assert np.array_equal(read([4, 5, 5, 7], [4, 5, 7]), [-1.0, np.nan, np.nan, -3.0], equal_nan=True)
    with pytest.raises(ValueError, match="not in tokens"):
        read([4, 5], [6])


def _plain_ask() -> Any:
    from trimtab.generate.dialects import Ask

    return Ask((1,), 5, Sampling(), 1, 0, EOS, "")


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_passing_error_is_survived(serve: Any, dialect: str) -> None:
    server = serve(dialect)
    expected = connect(server).generate(ask())
    first = next(server.toy.number) + 1
    server.toy.fault = lambda number: "500" if number in (first, first + 2) else ""
    done = connect(server).generate(ask())
    assert [c.tokens.tolist() for c in done] == [c.tokens.tolist() for c in expected]


def test_500_for_good_names_the_request_and_keeps_the_rest(serve: Any) -> None:
    server = serve(fault=lambda number: "500" if number >= 4 else "")
    with pytest.raises(
        EngineError, match=r"request p2-0: .*answered 500.*out of memory.*tried 3 times.*4 of 6"
    ) as caught:
        connect(server, slots=1).generate(ask())
    kept = caught.value.completions
    assert [c.id for c in kept] == [r.id for r in ask()]
    assert [c.stop.reason is StopReason.ERROR for c in kept] == [False] * 4 + [True] * 2
    assert_scored(server.toy.model, ask()[:4], kept[:4])


def test_a_refused_request_is_not_repeated(serve: Any) -> None:
    server = serve(fault=lambda number: "400")
    with pytest.raises(EngineError, match=r"answered 400.*prompt too long.*tried 1 times"):
        connect(server, slots=1).generate(ask(num_prompts=1, group=1))
    assert len(server.toy.seen) == 1


def test_a_hanging_server_is_given_up_in_time(serve: Any) -> None:
    server = serve(fault=lambda number: "hang" if number else "")
    start = time.perf_counter()
    with pytest.raises(EngineError, match=r"no answer .* in 0.4 s \(engine.timeout_s\)") as caught:
        connect(server, timeout_s=0.4, connect_timeout_s=0.3).generate(ask())
    assert time.perf_counter() - start < 2
    assert sum(c.stop.reason is not StopReason.ERROR for c in caught.value.completions) == 1


def test_a_stalled_server_that_is_not_healthy_is_given_up_before_the_timeout(serve: Any) -> None:
    server = serve(fault=lambda number: "hang")
    server.toy.healthy = False
    start = time.perf_counter()
    with pytest.raises(EngineError, match="health check failed"):
        connect(server, stall_s=0.2, connect_timeout_s=0.2).generate(ask())
    assert time.perf_counter() - start < 2


def test_a_busy_server_that_is_healthy_is_waited_for(serve: Any) -> None:
    server = serve(fault=lambda number: "slow")
    assert len(connect(server, stall_s=0.03).generate(ask())) == 6


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_server_that_dies_leaves_what_was_done(serve: Any, dialect: str) -> None:
    server = serve(dialect, fault=lambda number: "die" if number == 9 else "")
    start = time.perf_counter()
    asked = ask(limit=40, sampling=GREEDY, group=1)
    with pytest.raises(EngineError, match=r"connection to http://127.0.0.1:.* failed") as caught:
        connect(server, chunk=2, slots=3).generate(asked, hooks=[StopAt(ids=frozenset())])
    assert time.perf_counter() - start < 3
    kept = caught.value.completions
    assert [c.id for c in kept] == [r.id for r in asked]
    assert sum(len(c.tokens) for c in kept) >= 14, "the chunks before are kept"
    assert any(c.stop.reason is StopReason.ERROR for c in kept)
    assert_scored(server.toy.model, asked, kept)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("fault", ["text", "other"])
def test_nonsense_is_refused(serve: Any, dialect: str, fault: str) -> None:
    with pytest.raises(EngineError, match=f"not that of a {dialect} server"):
        connect(serve(dialect, fault=lambda number: fault)).generate(ask())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_stop_token_that_was_left_out_is_never_guessed(serve: Any, dialect: str) -> None:
    server = serve(dialect)
    asked = ask(num_prompts=6, limit=40)
    whole = connect(server).generate(asked)
    ended = next(r for r, c in zip(asked, whole, strict=True) if c.stop.reason is StopReason.EOS and len(c.tokens) > 2)
    server.toy.fault = lambda number: "unstopped"
    with pytest.raises(EngineError, match="left out the stop token"):
        connect(server).generate([ended])


def test_answers_on_their_way_are_waited_for_when_one_fails(serve: Any) -> None:
    server = serve(fault=lambda number: "400" if number == 0 else "slow")
    with pytest.raises(EngineError, match="5 of 6 rollouts were finished") as caught:
        connect(server).generate(ask())
    assert sum(c.stop.reason is StopReason.ERROR for c in caught.value.completions) == 1


def test_a_server_that_is_not_there(serve: Any) -> None:
    server = serve()
    server.stop()
    with pytest.raises(EngineError, match=r"engine.url: http.* does not answer"):
        connect(server)


def test_settings_are_checked(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"tokenizer": None, "eos_ids": EOS, "vocab_size": 19, "max_context": 64}
    with pytest.raises(ConfigError, match=r"engine.url: ''"):
        HttpEngine(EngineConfig(name="http"), **options)
    server = serve()
    with pytest.raises(ConfigError, match=r"engine.served_model.*'toi'.*Did you mean 'toy'"):
        connect(server, served_model="toi")
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(MissingExtraError, match=r"trimtab\[http\]"):
        connect(server)


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
@pytest.mark.parametrize("safeguard", ["reset", "salt"])
def test_three_updates_in_a_row_leave_no_stale_prefix(serve: Any, dialect: str, safeguard: str) -> None:
    server = serve(dialect, reset_works=safeguard == "reset", honours_salt=safeguard == "salt")
    engine, asked = connect(server), ask()
    engine.check_updates()
    for version in (1, 2, 3):
        fresh = tiny.tiny_model(seed=version, scale=8.0)
        engine.sync(fresh, version)
        done = engine.generate(asked)
        assert {c.version for c in done} == {version} == {engine.version}
        assert_scored(fresh, asked, done)


def test_the_toy_server_can_be_stale(serve: Any) -> None:
    """Without both safeguards the test above fails: the server under test is able to show the fault."""
    server = serve("vllm", reset_works=False, honours_salt=False)
    engine, asked = connect(server), ask()
    engine.generate(asked)
    fresh = tiny.tiny_model(seed=1, scale=8.0)
    engine.sync(fresh, 1)
    with pytest.raises(AssertionError):
        assert_scored(fresh, asked, engine.generate(asked))


def test_a_failed_update_stops_generation_until_one_succeeds(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve("vllm")
    engine = connect(server)
    fine = toy_server.control
    monkeypatch.setattr(toy_server, "control", lambda toy, path, body: (500, {"error": "no such file"}))
    with pytest.raises(EngineError, match=r"weights of version .*-1 were not loaded.*500.*engine.weights_dir"):
        engine.sync(server.toy.model, 1)
    with pytest.raises(EngineError, match="the server's weights are unknown"):
        engine.generate(ask())
    monkeypatch.setattr(
        toy_server, "control", lambda t, path, b: (200, {"success": False}) if "reset" in path else fine(t, path, b)
    )
    with pytest.raises(EngineError, match=r"prefix cache .* was not dropped"):
        engine.sync(server.toy.model, 1)
    monkeypatch.setattr(toy_server, "control", fine)
    engine.sync(server.toy.model, 1)
    assert engine.generate(ask())[0].version == 1


@pytest.mark.parametrize("left_out", ["head", "embed"])
def test_an_update_that_arrives_in_part_is_noticed(serve: Any, monkeypatch: pytest.MonkeyPatch, left_out: str) -> None:
    server = serve("vllm")
    engine = connect(server)
    engine.sync(server.toy.model, 0)

    def load_in_part(toy: toy_server.Toy, folder: str) -> None:
        fresh = load_pretrained(Path(folder))
        with torch.no_grad():
            if left_out == "head":
                fresh.head_weight.copy_(toy.model.head_weight)
            else:
                fresh.embed.weight.copy_(toy.model.embed.weight)
        toy.model = fresh

    monkeypatch.setattr(toy_server.Toy, "load", load_in_part)
    moved = copy.deepcopy(server.toy.model)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.02)
    with pytest.raises(EngineError, match="weights of version 1 did not arrive whole"):
        engine.sync(moved, 1)
    with pytest.raises(EngineError, match="weights are unknown"):
        engine.generate(ask())


def test_another_model_at_the_server_is_noticed_at_the_first_update(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy_server.Toy, "load", lambda toy, folder: None)
    with pytest.raises(EngineError, match="has other weights than the policy"):
        connect(serve("vllm")).sync(tiny.tiny_model(seed=9, scale=8.0), 0)


def test_weights_of_another_run_are_noticed(serve: Any) -> None:
    server = serve("sglang")
    engine = connect(server)
    engine.sync(server.toy.model, 1)
    engine.generate(ask())
    server.toy.version = "someone-else-7"
    with pytest.raises(EngineError, match="does another run update it too"):
        engine.generate(ask())


def test_servers_that_take_no_weights_are_refused_with_what_to_do(serve: Any) -> None:
    with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
        connect(serve("vllm", dev_mode=False)).check_updates()
    with pytest.raises(EngineError, match="update_weights_from_disk"):
        connect(serve("sglang", dev_mode=False)).check_updates()
    with pytest.raises(EngineError, match=r"llama.cpp's server cannot take new weights.*steps=0"):
        connect(serve("llamacpp")).check_updates()


def test_only_the_newest_weights_stay_on_disk(serve: Any, tmp_path: Any) -> None:
    server = serve("vllm")
    engine = connect(server, weights_dir=str(tmp_path))
    for version in (1, 2):
        engine.sync(server.toy.model, version)
    assert [p.name.rpartition("-")[2] for p in tmp_path.iterdir()] == ["2"]


def test_no_thread_or_server_is_left_waiting(serve: Any) -> None:
    before = threading.active_count()
    engine = connect(serve())
    for _ in range(3):
        engine.generate(ask())
    time.sleep(0.1)
    assert threading.active_count() <= before + 10, "connections are closed after each call"
