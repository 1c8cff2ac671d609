from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trimtab.core.errors import DataError
from trimtab.model.attention import MAX_PADDING, AttentionPlan, attend, plan_sequences, plan_shared_prompts

HEADS, KV_HEADS, DIM = 4, 2, 8


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal grouped attention of one sequence, (n, heads, DIM), written out; queries are the last of the keys."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
    shift = len(k) - len(q)
    later = torch.arange(len(k))[None] > torch.arange(len(q))[:, None] + shift
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)


def random_qkv(num_tokens: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [torch.randn(num_tokens, n, DIM, generator=generator, requires_grad=True) for n in heads]


def values_and_gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    return [out, *torch.autograd.grad((out * weight).sum(), inputs)]


def assert_same(plan: AttentionPlan, expected: list[Tensor], inputs: list[Tensor]) -> None:
    for got, want in zip(values_and_gradients(plan.attend(*inputs), inputs), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


ragged = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any)


@settings(max_examples=40, deadline=None)
@given(lengths=ragged)
def test_packed_sequences_equal_each_alone_in_value_and_gradient(lengths: list[int]) -> None:
    inputs = random_qkv(sum(lengths))
    pieces = [reference(q, k, v) for q, k, v in zip(*(x.split(lengths) for x in inputs), strict=True)]
    assert_same(plan_sequences(lengths), values_and_gradients(torch.cat(pieces), inputs), inputs)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), prompts=st.lists(st.integers(1, 20), min_size=1, max_size=5))
def test_shared_prompts_equal_full_sequences_in_value_and_gradient(data: st.DataObject, prompts: list[int]) -> None:
    rows = data.draw(st.lists(st.integers(0, len(prompts) - 1), max_size=8))
    responses = data.draw(st.lists(st.integers(0, 30), min_size=len(rows), max_size=len(rows)))
    inputs = random_qkv(sum(prompts) + sum(responses))
    prompt_parts, response_parts = [], []
    for x in inputs:
        head, tail = x.split([sum(prompts), sum(responses)])
        prompt_parts.append(head.split(prompts))
        response_parts.append(tail.split(responses) if responses else ())
    pieces = [reference(*(part[p] for part in prompt_parts)) for p in range(len(prompts))]
    for row, prompt in enumerate(rows):
        keys, values = (
            torch.cat([heads[prompt], tails[row]])
            for heads, tails in zip(prompt_parts[1:], response_parts[1:], strict=True)
        )
        pieces.append(reference(response_parts[0][row], keys, values))
    plan = plan_shared_prompts(prompts, rows, responses)
    assert_same(plan, values_and_gradients(torch.cat(pieces), inputs), inputs)


def test_shared_prompts_indices_worked_example() -> None:
    # packed: prompt 0 = 0..2, prompt 1 = 3..4, row 0 (prompt 1) = 5..6, row 1 (prompt 0) empty, row 2 (prompt 0) = 7..9
    plan = plan_shared_prompts([3, 2], [1, 0, 0], [2, 0, 3])
    assert plan.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 3, 4, 5]
    assert plan.target_index.tolist() == [5, 6, 7, 8, 9]
    assert plan.predict_index.tolist() == [4, 5, 2, 7, 8]
    assert plan.num_tokens == 10
    assert plan.max_length == 6


def test_sequences_indices_worked_example() -> None:
    plan = plan_sequences([3, 0, 1, 2])
    assert plan.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert plan.target_index.tolist() == [1, 2, 5]
    assert plan.predict_index.tolist() == [0, 1, 4]
    assert plan.max_length == 3


@pytest.mark.parametrize("seed", range(4))
def test_long_tailed_lengths_waste_little_attention(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    responses = (8 * torch.rand(128, generator=generator).reciprocal()).long().clamp(1, 1024).tolist()
    prompts = torch.randint(20, 300, (16,), generator=generator).tolist()
    plan = plan_shared_prompts(prompts, [row // 8 for row in range(128)], responses)
    assert plan.padding <= MAX_PADDING
    assert len(plan.buckets) < 60  # far fewer rectangles than rows
    longest = max(responses)
    assert sum(bucket.q_index.numel() for bucket in plan.buckets[1:]) < 0.5 * 128 * longest


def test_every_token_is_a_query_once() -> None:
    plan = plan_shared_prompts([4, 9, 1], [0, 1, 1, 2, 0], [3, 17, 0, 8, 5])
    cells = torch.cat([bucket.q_index.flatten() for bucket in plan.buckets])
    assert cells[plan.out_index].tolist() == list(range(plan.num_tokens))
    assert len(set(plan.out_index.tolist())) == plan.num_tokens


def test_plain_sequences_need_no_mask_and_responses_do() -> None:
    assert all(bucket.mask is None for bucket in plan_sequences([5, 9, 200]).buckets)
    plan = plan_shared_prompts([5, 6], [0, 1], [7, 7])
    shapes = [None if b.mask is None else (b.mask.dtype, b.mask.shape) for b in plan.buckets]
    assert shapes == [None, (torch.bool, (2, 1, 7, 13))]


def test_nothing_is_a_defined_result() -> None:
    for plan in (plan_sequences([]), plan_sequences([0, 0]), plan_shared_prompts([], [], [])):
        assert plan.num_tokens == plan.max_length == len(plan.target_index) == 0
        assert plan.attend(*random_qkv(0)).shape == (0, HEADS, DIM)
    only_prompts = plan_shared_prompts([3], [0, 0], [0, 0])
    assert only_prompts.num_tokens == 3
    assert len(only_prompts.predict_index) == 0


def test_padding_cells_reach_no_result() -> None:
    # A bucket padded by hand to twice its size must give what the unpadded one gives, even with wild padding tokens.
    q, k, v = (x.detach() for x in random_qkv(6))
    wild = [torch.cat([x, torch.full((1, *x.shape[1:]), 1e4)]) for x in (q, k, v)]
    index = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 6, 6]])
    seen = torch.arange(9)[None] <= torch.arange(9)[:, None]
    rectangles = [x[index].transpose(1, 2) for x in wild]
    for mask in (None, seen[None, None]):
        out = attend(*rectangles, mask)[0].transpose(0, 1)[:6]
        torch.testing.assert_close(out, reference(q, k, v), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([3, 0], [0], [1]), r"prompt_lengths_P\[1\] = 0 must be at least 1"),
        (([3], [0, 1], [1, 1]), r"prompt_of_row_N\[1\] = 1 must lie in 0..0"),
        (([3], [-1], [1]), r"prompt_of_row_N\[0\] = -1"),
        (([3], [0], [-2]), r"response_lengths_N\[0\] = -2 must be at least 0"),
        (([3], [0, 0], [1]), "prompt_of_row_N has 2 entries but response_lengths_N has 1"),
    ],
)
def test_bad_lengths_are_named(arguments: tuple[list[int], list[int], list[int]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        plan_shared_prompts(*arguments)


def test_negative_sequence_length_is_refused() -> None:
    with pytest.raises(DataError, match=r"lengths\[1\] = -1"):
        plan_sequences([2, -1])
