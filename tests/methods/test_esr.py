"""Early Stopping Rollout: worked numbers and limits of its card."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from builders import context, group
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.control.stop.esr import ESR
from trimtab.core.recipe import resolve
from trimtab.learn.aggregate import aggregate, token_coefficients
from trimtab.learn.distill.opd import OPD

LENGTHS = (40, 100, 7000)


def masks(cutoff: int, lengths: tuple[int, ...]) -> list[np.ndarray]:
    found = ESR(cutoff=cutoff, form="mask").filter([group([0.0] * len(lengths), list(lengths))], context())
    return found.token_mask or [np.ones(n, dtype=bool) for n in lengths]


def loss(values: list[list[float]], cutoff: int) -> float:
    """Token mean of these per-token losses under the mask form."""
    lengths = tuple(len(v) for v in values)
    mask = torch.from_numpy(np.concatenate(masks(cutoff, lengths)))
    row = torch.repeat_interleave(torch.arange(len(values)), torch.tensor(lengths))
    flat = torch.tensor([x for v in values for x in v])
    return aggregate(flat, token_coefficients("token-mean", row, mask, len(values))).item()


def test_trained_tokens():
    assert sum(mask.sum() for mask in masks(100, LENGTHS)) == 240
    assert sum(min(n, 100) for n in LENGTHS) == 240  # what the stopping form generates, of 7140
    assert ESR().limit(context(max_new_tokens=8192)) == 100


def test_saving_on_a_student_that_always_fills_its_limit():
    ratio = ESR().limit(context(max_new_tokens=8192)) / 8192
    assert 100 * ratio == pytest.approx(1.22, abs=0.005)
    assert 100 * (1 - ratio) == pytest.approx(98.78, abs=0.005)


@pytest.mark.parametrize(("cutoff", "expected"), [(2, 1.5), (4, 1.6667), (100, 1.6667)])
def test_token_mean(cutoff, expected):
    assert loss([[1, 1], [2, 2, 2, 2]], cutoff) == pytest.approx(expected, abs=1e-4)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(1, 20))
def test_no_response_has_more_trained_tokens_and_more_cutoff_never_trains_less(lengths, cutoff):
    few, more = masks(cutoff, tuple(lengths)), masks(cutoff + 1, tuple(lengths))
    assert all(mask.sum() <= cutoff for mask in few)
    assert sum(m.sum() for m in few) <= sum(m.sum() for m in more)


def test_a_cutoff_at_the_limit_is_plain_distillation():
    ctx = context(max_new_tokens=128)
    for form in ("stop", "mask"):
        part = ESR(cutoff=128, form=form)
        assert part.limit(ctx) is None
        keep = part.filter([group([0.0, 1.0], [128, 3])], ctx)
        assert keep.keep_N.all()
        assert keep.token_mask is None


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), lengths=st.lists(st.integers(1, 8), min_size=1, max_size=4), cutoff=st.integers(1, 8))
def test_stopping_and_masking_give_the_same_loss_and_gradient(seed, lengths, cutoff):
    g = torch.Generator().manual_seed(seed)
    total, part = sum(lengths), OPD(variant="full")
    teacher = torch.log_softmax(torch.randn(total, 6, generator=g, dtype=torch.float64), -1)
    masked = torch.randn(total, 6, generator=g, dtype=torch.float64, requires_grad=True)
    mask = torch.from_numpy(np.concatenate(masks(cutoff, tuple(lengths))))
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    full = part.full_loss(torch.log_softmax(masked, -1), teacher)
    in_full = aggregate(full, token_coefficients("token-mean", row, mask, len(lengths)))
    in_full.backward()
    stopped = masked.detach()[mask].requires_grad_()
    short = part.full_loss(torch.log_softmax(stopped, -1), teacher[mask])
    in_short = aggregate(short, token_coefficients("token-mean", row[mask], mask[mask], len(lengths)))
    in_short.backward()
    assert in_full.item() == pytest.approx(in_short.item(), rel=1e-12)
    assert torch.allclose(masked.grad[mask], stopped.grad, rtol=1e-12)
    assert (masked.grad[~mask] == 0).all()


def test_the_recipe():
    paper = resolve("esr", {"model": "smollm2-135m", "teacher": "some/teacher"})
    assert paper.one("stop") == ESR()
    assert paper.one("distill") == OPD(variant="full")
    assert paper.parts["filter"][0] is paper.one("stop")
    assert resolve("esr", {"stop.form": "mask"}).one("stop").form == "mask"
