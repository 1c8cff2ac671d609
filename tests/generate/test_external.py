from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from trimtab.core.errors import ConfigError, DataError, EngineError
from trimtab.core.records import Prompt, StopReason
from trimtab.generate.external import Asked, ExternalRollouts, Piece, check_request, check_signals
from trimtab.generate.protocol import Request, Sampling

EOS = frozenset({0})


def rollouts(requests: list[Request], **changes: Any) -> ExternalRollouts:
    options: dict[str, Any] = {
        "hooks": [],
        "asked": Asked(),
        "scorer": None,
        "eos_ids": EOS,
        "max_context": 50,
        "num_slots": 2,
        "version": 7,
        "device": torch.device("cpu"),
    }
    return ExternalRollouts(requests, **{**options, **changes})


def ask(name: str = "a", limit: int = 4, **changes: Any) -> Request:
    return Request(name, Prompt(id=name, text="", tokens=(5, 6)), 0, 1, limit, **changes)


def piece(*tokens: int) -> Piece:
    return Piece(np.array(tokens, dtype=np.int64), np.full(len(tokens), -0.5, dtype=np.float32))


def test_tokens_past_the_end_are_overrun() -> None:
    run = rollouts([ask("eos"), ask("limit")])
    assert run.admit() == [0, 1]
    assert run.add({0: piece(3, 0, 8, 9), 1: piece(1, 2, 3, 4, 5, 6)}) == [0, 1]
    eos, limit = run.completions()
    assert (eos.tokens.tolist(), eos.stop.reason, eos.overrun, eos.cost.sampled) == ([3, 0], StopReason.EOS, 2, 4)
    assert (limit.tokens.tolist(), limit.stop.reason, limit.overrun) == ([1, 2, 3, 4], StopReason.LIMIT, 2)
    assert (eos.version, limit.version) == (7, 7)


def test_slots_are_reused_in_the_order_of_prompts() -> None:
    run = rollouts([ask("a"), ask("b"), ask("a2")], num_slots=1)
    assert run.admit() == [0]
    assert run.context(0) == [5, 6]
    assert run.add({0: piece(1, 2)}) == []
    assert (run.context(0), run.room(0)) == ([5, 6, 1, 2], 2)
    assert run.admit() == []
    assert run.add({0: piece(0)}) == [0]
    assert run.admit() == [1]


def test_rows_that_need_nothing_are_answered_at_once() -> None:
    requests = [ask("none", limit=0), ask("full", prefix=(1, 2, 3, 4, 5)), ask("over", prefix=(1, 0)), ask("runs")]
    run = rollouts(requests, num_slots=1)
    assert run.admit() == [3]
    run.abort()
    reasons = [(c.stop.reason, c.tokens.tolist(), c.overrun) for c in run.completions()]
    assert reasons == [
        (StopReason.LIMIT, [], 0),
        (StopReason.LIMIT, [1, 2, 3, 4], 0),
        (StopReason.EOS, [1, 0], 0),
        (StopReason.ABORT, [], 0),
    ]


def test_salvage_says_error_and_keeps_tokens() -> None:
    run = rollouts([ask("done"), ask("half"), ask("waits", prefix=(9,))], asked=Asked(topk=1))
    run.admit()
    full = piece(1, 0)
    full.top_ids, full.top_logprobs = np.array([[1], [0]]), np.zeros((2, 1), dtype=np.float32)
    half = piece(4)
    half.top_ids, half.top_logprobs = np.array([[4]]), np.zeros((1, 1), dtype=np.float32)
    run.add({0: full, 1: half})
    done = run.salvage()
    assert [c.stop.reason for c in done] == [StopReason.EOS, StopReason.ERROR, StopReason.ERROR]
    assert [c.tokens.tolist() for c in done] == [[1, 0], [4], [9]]
    assert done[2].signals["topk_ids"].tolist() == [[-1]], "unknown, not zero"
    assert np.isnan(done[2].signals["topk_logprobs"]).all()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (piece(), "without a token"),
        (piece(3, 30), "token id 30; ids are 0..19"),
        (piece(-1), "token id -1"),
        (Piece(np.array([1, 2]), np.zeros(1, dtype=np.float32)), "1 log-probs for 2 tokens"),
        (Piece(np.array([1]), np.array([0.7], dtype=np.float32)), "log-prob 0.69"),
        (Piece(np.array([1]), np.array([-np.inf], dtype=np.float32)), "log-prob -inf"),
    ],
)
def test_impossible_pieces_are_refused(bad: Piece, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        bad.check("r", 20, 0)


def test_a_piece_without_the_signals_asked_for_is_refused() -> None:
    with pytest.raises(EngineError, match="top 2 of 1 tokens asked for, got None"):
        piece(1).check("r", 20, 2)


def test_requests_are_checked() -> None:
    check_request(ask(prefix=(1,), prefix_logprobs=(-1.0,)), 20)
    with pytest.raises(DataError, match="2 prefix_logprobs for 1 tokens"):
        check_request(ask(prefix=(1,), prefix_logprobs=(-1.0, -2.0)), 20)
    with pytest.raises(DataError, match="prefix holds token id 20"):
        check_request(ask(prefix=(20,)), 20)
    with pytest.raises(DataError, match="has no tokens"):
        check_request(Request("a", Prompt(id="p", text="", tokens=()), 0, 1, 3), 20)
    with pytest.raises(ConfigError, match="temperature"):
        check_request(ask(sampling=Sampling(temperature=-1.0)), 20)


def test_signals_are_checked() -> None:
    assert check_signals("http", frozenset({"margin"}), 0) == Asked(0, True)
    assert Asked(0, True).width == 2
    assert Asked(5, True).width == 5
    assert not Asked().any
    with pytest.raises(ConfigError, match="topk"):
        check_signals("http", frozenset({"topk"}), 0)
    with pytest.raises(ConfigError, match="unknown name 'surprise'"):
        check_signals("http", frozenset({"surprise"}), 0)
