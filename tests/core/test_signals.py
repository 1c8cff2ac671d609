from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.core import signals as sig
from trimtab.core.signals import SoftmaxRows


def _logits(rows: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("shift", [0.0, 100.0, -1e4])
def test_entropy_and_margin_ignore_a_constant(shift: float) -> None:
    logits = _logits(6, 33)
    expected = torch.distributions.Categorical(logits=logits.double())
    assert torch.allclose(sig.entropy(logits + shift).double(), expected.entropy(), atol=1e-3 if shift else 1e-5)
    best = expected.logits.sort(descending=True).values
    assert torch.allclose(sig.margin(logits + shift).double(), best[:, 0] - best[:, 1], atol=2e-3 if shift else 1e-5)


def test_worked_entropies() -> None:
    assert sig.entropy(torch.zeros(1, 8)).item() == pytest.approx(math.log(8), abs=1e-6)
    assert sig.entropy(torch.tensor([[0.0, -torch.inf, -torch.inf]])).item() == 0.0
    half = torch.tensor([[0.5, 0.25, 0.25]]).log()
    assert sig.entropy(half).item() == pytest.approx(1.5 * math.log(2), abs=1e-6)


def test_margin_of_a_certain_token_is_infinite_not_nan() -> None:
    assert sig.margin(torch.tensor([[0.0, -torch.inf]])).item() == math.inf


def test_shared_rows_give_the_same_as_logits() -> None:
    logits = _logits(4, 640).to(torch.bfloat16)
    rows = SoftmaxRows.of(logits)
    assert torch.equal(sig.entropy(rows), sig.entropy(logits))
    assert torch.equal(sig.topk(rows, 5)[0], sig.topk(logits, 5)[0])
    assert torch.allclose(sig.margin(rows), sig.margin(logits), atol=1e-5)
    assert torch.allclose(rows.logprobs(), logits.float().log_softmax(-1), atol=1e-5)


def test_entropy_carries_the_gradient() -> None:
    logits = _logits(3, 20).double().requires_grad_()
    sig.entropy(logits).sum().backward()
    with torch.no_grad():
        logp = logits.log_softmax(-1)
        expected = -logp.exp() * (logp + torch.distributions.Categorical(logits=logits).entropy()[:, None])
    assert torch.allclose(logits.grad, expected, atol=1e-6)


@pytest.mark.parametrize("size", [40, 64, 640, 641, 4096])
@pytest.mark.parametrize("k", [1, 2, 10, 33])
def test_topk_is_exact(size: int, k: int) -> None:
    logits = torch.stack([torch.randperm(size, generator=torch.Generator().manual_seed(s)) for s in range(3)]).float()
    ids, logprobs = sig.topk(logits / 7, k)
    expected = (logits / 7).log_softmax(-1).topk(k)
    assert torch.equal(ids, expected.indices)
    assert torch.allclose(logprobs, expected.values, atol=1e-5)


def test_top_values_with_the_largest_all_in_one_block_and_ties() -> None:
    values = torch.zeros(1, 1024)
    values[0, 70:80] = torch.arange(10.0) + 1
    best, index = sig.top_values(values, 12)
    assert best[0].tolist() == [*range(10, 0, -1), 0, 0]
    assert torch.equal(values.gather(1, index), best)
    assert len(set(index[0].tolist())) == 12


def test_topk_keeps_leading_axes() -> None:
    ids, logprobs = sig.topk(_logits(6, 1024).view(2, 3, 1024), 4)
    assert ids.shape == logprobs.shape == (2, 3, 4)


def test_overlap() -> None:
    student = torch.tensor([[[1, 2, 3, 4], [5, 6, 7, 8]]])
    teacher = torch.tensor([[[4, 3, 2, 1], [8, 0, 1, 2]]])
    assert sig.overlap(student, teacher).tolist() == [[1.0, 0.25]]
    assert sig.overlap(student, teacher[..., :3]).tolist() == [[pytest.approx(2 / 3), 0.0]]


def test_worked_repetition() -> None:
    tokens = torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2], [1, 2, 3, 4, 5, 6, 7, 8], [9, 9, 9, 9, 9, 9, 9, 9]])
    count = torch.tensor([8, 8, 8])
    # Bigrams (1,2) (2,3) (3,1) recur from token 4 on: 4 of the last 5, 3 of the last 3.
    assert sig.repetition(tokens, count, ngram=2, window=5).tolist() == pytest.approx([4 / 5, 0, 1])
    assert sig.repetition(tokens, count, ngram=2, window=3).tolist() == pytest.approx([1, 0, 1])
    assert sig.repetition(tokens, torch.tensor([1, 0, 8]), ngram=4).tolist() == pytest.approx([0, 0, 4 / 8])


def test_repetition_of_no_tokens() -> None:
    assert sig.repetition(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)).tolist() == [0, 0]


def _repetition(tokens: list[int], ngram: int, window: int) -> float:
    grams = [tuple(tokens[i - ngram + 1 : i + 1]) if i >= ngram - 1 else None for i in range(len(tokens))]
    repeated = [gram is not None and gram in grams[:i] for i, gram in enumerate(grams)]
    last = repeated[-window:]
    return sum(last) / len(last) if last else 0.0


@given(st.lists(st.lists(st.integers(0, 2), max_size=14), min_size=1, max_size=4), st.integers(1, 5), st.integers(1, 8))
def test_repetition_equals_the_definition(rows: list[list[int]], ngram: int, window: int) -> None:
    width = max(map(len, rows)) + 2
    padded = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    count = torch.tensor([len(row) for row in rows])
    expected = [_repetition(row, ngram, window) for row in rows]
    assert sig.repetition(padded, count, ngram=ngram, window=window).tolist() == pytest.approx(expected)
