from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trimtab.core.errors import ConfigError
from trimtab.core.slots import AggregationName
from trimtab.learn.aggregate import aggregate, token_coefficients

NAMES: tuple[AggregationName, ...] = get_args(AggregationName)


def flat(lengths: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))


def coefficients(name: Any, lengths: list[int], mask_T: Tensor | None = None, **options: Any) -> Tensor:
    row_T = flat(lengths)
    mask_T = torch.ones_like(row_T, dtype=torch.bool) if mask_T is None else mask_T
    return token_coefficients(name, row_T, mask_T, len(lengths), **{"max_new_tokens": 8, **options})


# Two sequences of 2 and 6 tokens, advantages +1 and -1, ratio 1: token losses -1 and +1 (GRPO family, TRL and verl).
@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("seq-mean-token-mean", {}, 0.0),
        ("token-mean", {}, 0.5),
        ("seq-mean-token-sum", {}, 2.0),
        ("constant", {}, 0.25),
        ("constant", {"constant": 8.0}, 0.5),
    ],
)
def test_two_and_six_tokens(name: str, options: dict[str, float], expected: float) -> None:
    loss_T = torch.tensor([-1.0] * 2 + [1.0] * 6)
    assert aggregate(loss_T, coefficients(name, [2, 6], **options)).item() == pytest.approx(expected, abs=1e-7)


# On-policy distillation: two responses of losses (-.1, -.2) and four times -.4.
@pytest.mark.parametrize(("name", "expected"), [("token-mean", -0.316667), ("seq-mean-token-mean", -0.275)])
def test_two_and_four_tokens(name: str, expected: float) -> None:
    loss_T = torch.tensor([-0.1, -0.2, -0.4, -0.4, -0.4, -0.4])
    assert aggregate(loss_T, coefficients(name, [2, 4])).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_kept_is_exactly_zero_finite_and_attached(name: AggregationName) -> None:
    coef_T = coefficients(name, [2, 3], torch.zeros(5, dtype=torch.bool))
    assert coef_T.tolist() == [0.0] * 5
    loss_T = torch.tensor([1.0, math.nan, math.inf, 2.0, -math.inf], requires_grad=True)
    total = aggregate(loss_T, coef_T)
    assert total.item() == 0.0
    total.backward()
    assert loss_T.grad is not None
    assert loss_T.grad.tolist() == [0.0] * 5
    assert coefficients(name, []).shape == (0,)


@pytest.mark.parametrize("name", NAMES)
def test_a_masked_row_leaves_numerator_and_divisor(name: AggregationName) -> None:
    alone = coefficients(name, [2, 3])
    mask_T = torch.tensor([True] * 2 + [False] * 4 + [True] * 3)
    beside = coefficients(name, [2, 4, 3], mask_T)
    assert torch.equal(beside[mask_T], alone)
    assert not beside[~mask_T].any()


@pytest.mark.parametrize("name", NAMES)
def test_a_masked_token_leaves_numerator_and_divisor(name: AggregationName) -> None:
    mask_T = torch.tensor([True, False, True, True, True, False])
    assert torch.equal(coefficients(name, [3, 3], mask_T)[mask_T], coefficients(name, [2, 2]))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_row_order_does_not_matter(name: AggregationName, lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask_T = torch.rand(sum(lengths), generator=generator) < 0.7
    loss_T = torch.randn(sum(lengths), generator=generator)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    rows = list(zip(loss_T.split(lengths), mask_T.split(lengths), strict=True))
    shuffled_loss = torch.cat([rows[i][0] for i in order])
    shuffled_mask = torch.cat([rows[i][1] for i in order])
    total = aggregate(loss_T, coefficients(name, lengths, mask_T))
    shuffled = aggregate(shuffled_loss, coefficients(name, [lengths[i] for i in order], shuffled_mask))
    assert shuffled.item() == pytest.approx(total.item(), abs=1e-6)


def test_equal_weight_per_row_and_per_token() -> None:
    by_row = coefficients("seq-mean-token-mean", [1, 4])
    assert by_row.tolist() == pytest.approx([0.5] + [0.125] * 4)
    assert coefficients("token-mean", [1, 4]).tolist() == pytest.approx([0.2] * 5)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="token-mean"):
        coefficients("token-mea", [1])
