from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.learn.correct.m2po import M2PO, budget_mask, cap_threshold, outward

MOMENTS = st.lists(st.tuples(st.integers(0, 20).map(lambda k: k / 16), st.booleans()), max_size=16)


def tensors(tokens):
    return (
        torch.tensor([m for m, _ in tokens], dtype=torch.float64),
        torch.tensor([c for _, c in tokens], dtype=torch.bool),
    )


def drop_one_by_one(tokens, tau, strict):
    """The algorithm as the paper writes it: argmax out until the mean fits."""
    kept, left = [True] * len(tokens), [i for i, (_, c) in enumerate(tokens) if c]
    while left:
        mean = sum(tokens[i][0] for i in left) / len(left)
        if (mean < tau or len(left) == 1) if strict else mean <= tau:
            break
        worst = max(left, key=lambda i: (tokens[i][0], -i))
        left.remove(worst)
        kept[worst] = False
    return kept


@settings(max_examples=200, deadline=None)
@given(MOMENTS, st.integers(0, 20).map(lambda k: k / 16), st.booleans())
def test_equals_dropping_one_by_one(tokens, tau, strict):
    assert budget_mask(*tensors(tokens), tau, strict).tolist() == drop_one_by_one(tokens, tau, strict)


@settings(max_examples=200, deadline=None)
@given(MOMENTS, st.integers(0, 20).map(lambda k: k / 16))
def test_the_cap_equals_its_search(tokens, tau):
    m = sorted(value for value, candidate in tokens if candidate)
    n, expected = len(m), float("inf")
    if sum(m) > n * tau:
        k = next(k for k in range(1, n + 1) if sum(m[:k]) + (n - k) * m[k - 1] >= n * tau)
        expected = m[k - 2] if k > 1 else 0.0
    assert cap_threshold(*tensors(tokens), tau).item() == expected


def test_outward():
    d, a = torch.tensor([0.1, -0.1, 0.1, -0.1, 0.0, 0.1]), torch.tensor([2.0, 2.0, -2.0, -2.0, 1.0, 0.0])
    assert outward(d, a).tolist() == [True, False, False, True, False, False]


def test_the_cap_keeps_the_token_it_is_named_after():
    d = torch.linspace(0.001, 0.3, 200)
    for tau in (0.001, 0.01, 0.02):
        kept = M2PO(mode="cap", tau=tau).kept(d, torch.ones(200, dtype=torch.bool))
        bound = cap_threshold(d.double().square(), torch.ones(200, dtype=torch.bool), tau)
        assert kept.tolist() == (d.double().square() <= bound).tolist()
        assert 0 < kept.sum() < 200
