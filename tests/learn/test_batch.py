from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import random_groups

from trimtab.core.errors import DataError
from trimtab.core.records import Group, Prompt, Rollout, Source, StopReason, StopRecord, flatten
from trimtab.learn.batch import Batch, Rows


def prompt(name: str, *tokens: int) -> Prompt:
    return Prompt(id=name, text=name, tokens=tokens)


def rollout(of: Prompt, tokens: list[int], name: str = "r", **fields: Any) -> Rollout:
    stop = StopRecord(reason=StopReason.EOS, index=len(tokens) - 1)
    fields.setdefault("logprobs", np.full(len(tokens), -1.0, dtype=np.float32))
    return Rollout(id=name, prompt=of, sample=0, tokens=np.array(tokens, dtype=np.int64), stop=stop, **fields)


P, Q = prompt("p", 1, 2, 3), prompt("q", 9)


def test_rows_are_the_kept_rollouts_with_tokens_in_order() -> None:
    dropped = rollout(P, [4, 4], "dropped")
    dropped.drop("filtered", by="test")
    groups = [
        Group(P, [rollout(P, [5, 6], "a", advantage=0.5), dropped, rollout(P, [], "empty")]),
        Group(Q, []),
        Group(Q, [rollout(Q, [7, 8, 9], "b", advantage=np.array([1, 2, 3], dtype=np.float32), weight=2.0)]),
    ]
    batch = Batch.from_groups(groups)
    assert batch.ids == ["a", "b"]
    assert [p.tolist() for p in batch.rows.prompts] == [[1, 2, 3], [9]]
    assert batch.rows.token_T.tolist() == [5, 6, 7, 8, 9]
    assert batch.rows.row_T.tolist() == [0, 0, 1, 1, 1]
    assert batch.advantage_T.tolist() == [0.5, 0.5, 1, 2, 3]
    assert batch.weight_T.tolist() == [1, 1, 2, 2, 2]
    assert batch.mask_T.all()


def test_only_sampled_and_reused_unmasked_tokens_are_in_the_loss() -> None:
    source = np.array([s.value for s in Source])
    tokens = rollout(P, [1] * 6, source=source, token_mask=np.array([True] * 2 + [False] + [True] * 3))
    assert Batch.from_groups([Group(P, [tokens])]).mask_T.tolist() == [True, False, False, False, False, False]
    tokens.token_mask = None
    assert Batch.from_groups([Group(P, [tokens])]).mask_T.tolist() == [True, False, True, False, False, False]


def test_no_groups_and_no_kept_rollouts_give_an_empty_batch() -> None:
    for groups in ([], [Group(P, [])], [Group(P, [rollout(P, [])])]):
        batch = Batch.from_groups(groups, signals=["teacher_logprob"])
        assert batch.rows.num_rows == 0
        assert batch.mask_T.shape == (0,)
        assert batch.rows.micro_batches(8) == []
        assert batch.minibatches(2, np.random.default_rng(0)) == []


def test_a_missing_advantage_is_zero_and_stays_in_the_loss() -> None:
    batch = Batch.from_groups([Group(P, [rollout(P, [4, 5], advantage=None)])])
    assert batch.advantage_T.tolist() == [0, 0]
    assert batch.mask_T.all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprobs": np.zeros(1, dtype=np.float32)}, "logprobs has 1 entries for 2 tokens"),
        ({"advantage": np.zeros(3, dtype=np.float32)}, "advantage has 3 entries for 2 tokens"),
        ({"advantage": math.nan}, "advantage of token 0 is not a number"),
        ({"token_weight": np.array([1, math.nan], dtype=np.float32)}, "weight of token 1 is not a number"),
        ({}, "signal 'teacher_logprob' is missing"),
        ({"signals": {"teacher_logprob": np.array([0, math.nan])}}, "teacher_logprob of token 1 is not a number"),
    ],
)
def test_bad_rollouts_raise_an_error_naming_them(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"rollout culprit: {message}"):
        Batch.from_groups([Group(P, [rollout(P, [4, 5], "culprit", **fields)])], signals=["teacher_logprob"])


def test_garbage_outside_the_loss_becomes_zero() -> None:
    fields: dict[str, Any] = {
        "token_mask": np.array([False, True]),
        "advantage": np.array([math.nan, 1], dtype=np.float32),
        "signals": {"teacher_topk_logprobs": np.array([[math.nan, 0], [-1, -2]], dtype=np.float32)},
    }
    batch = Batch.from_groups([Group(P, [rollout(P, [4, 5], **fields)])], signals=["teacher_topk_logprobs"])
    assert batch.advantage_T.tolist() == [0, 1]
    assert batch.signals["teacher_topk_logprobs"].tolist() == [[0, 0], [-1, -2]]


def test_signals_keep_integer_ids_and_refuse_mixed_widths() -> None:
    first = rollout(P, [4], signals={"topk_ids": np.array([[1, 2]], dtype=np.int32)})
    second = rollout(P, [4, 5], signals={"topk_ids": np.array([[1], [2]], dtype=np.int32)})
    batch = Batch.from_groups([Group(P, [first])], signals=["topk_ids"])
    assert batch.signals["topk_ids"].dtype == torch.int64
    with pytest.raises(DataError, match="different widths"):
        Batch.from_groups([Group(P, [first, second])], signals=["topk_ids"])


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(DataError, match="has no tokens"):
        Rows.from_rollouts([rollout(prompt("empty"), [1])])


@st.composite
def rollouts(draw: st.DrawFn) -> list[Rollout]:
    prompts = [prompt(str(i), *range(i + 1)) for i in range(4)]
    lengths = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=16))
    return [rollout(prompts[of], list(range(row, row + length))) for row, (of, length) in enumerate(lengths)]


@settings(max_examples=80, deadline=None)
@given(items=rollouts(), budget=st.integers(1, 40))
def test_micro_batches_hold_every_row_once_within_the_budget(items: list[Rollout], budget: int) -> None:
    rows = Rows.from_rollouts(items)
    micros = rows.micro_batches(budget)
    assert sorted(row for micro in micros for row in micro.row_N.tolist()) == list(range(len(items)))
    for micro in micros:
        assert len(micro.tokens) <= budget or len(micro.row_N) == 1
        assert len(micro.tokens) == sum(micro.prompt_lengths) + sum(micro.lengths)
        prompts, response = micro.tokens.split([sum(micro.prompt_lengths), sum(micro.lengths)])
        starts = np.cumsum([0, *micro.prompt_lengths])
        for row, of, part, index in zip(
            micro.row_N,
            micro.prompt_of_row,
            response.split(micro.lengths),
            micro.index_T.split(micro.lengths),
            strict=True,
        ):
            assert part.tolist() == items[row].tokens.tolist()
            assert rows.token_T[index].tolist() == items[row].tokens.tolist()
            assert tuple(prompts[starts[of] : starts[of + 1]].tolist()) == items[row].prompt.tokens
    again = rows.micro_batches(budget)
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(micros, again, strict=True))


def test_a_prompt_is_packed_once_where_its_rows_fit() -> None:
    long = prompt("long", *range(50))
    rows = Rows.from_rollouts([rollout(long, [1] * 5) for _ in range(8)] + [rollout(Q, [1] * 5)])
    (micro,) = rows.micro_batches(1000)
    assert len(micro.tokens) == 50 + 1 + 9 * 5
    assert [len(m.tokens) for m in rows.micro_batches(70)] == [70, 70, 6]


def test_chosen_rows_only() -> None:
    rows = Rows.from_rollouts([rollout(P, [row]) for row in range(4)])
    (micro,) = rows.micro_batches(100, np.array([3, 1]))
    assert micro.row_N.tolist() == [1, 3]
    assert micro.index_T.tolist() == [1, 3]


@pytest.mark.parametrize("num", [1, 2, 3, 20])
def test_minibatches_are_even_complete_and_reproducible(num: int) -> None:
    items = [rollout(prompt(str(i // 4), i // 4), [i]) for i in range(10)]
    batch = Batch.from_groups([Group(P, items)])
    parts = batch.minibatches(num, np.random.default_rng(3))
    assert sorted(np.concatenate(parts).tolist()) == list(range(10))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert all(
        a.tolist() == b.tolist() for a, b in zip(parts, batch.minibatches(num, np.random.default_rng(3)), strict=True)
    )


def test_without_tails_micro_batches_end_at_the_last_token_of_weight_and_the_axis_stays() -> None:
    groups = random_groups(lengths=((6, 5), (4,)))
    first, second, third = flatten(groups)
    first.token_weight = np.array([1, 0, 2, 0, 0, 0], dtype=np.float32)
    second.token_mask = np.array([True, True, True, True, False])
    third.token_weight = np.zeros(4, dtype=np.float32)
    batch = Batch.from_groups(groups)
    cut = batch.without_tails()
    assert cut.rows.computed_N.tolist() == [3, 4, 1]
    assert batch.rows.computed_N.tolist() == cut.rows.length_N.tolist() == [6, 5, 4]
    (micro,) = cut.rows.micro_batches(1000)
    assert sorted(micro.index_T.tolist()) == [0, 1, 2, 6, 7, 8, 9, 11]
    assert sorted(micro.lengths) == [1, 3, 4]
    packed = sum(len(group.prompt.tokens) for group in groups) + 8
    assert len(micro.tokens) == packed
    assert cut.rows.micro_batches(packed - 1)[0].tokens.shape[0] < packed
