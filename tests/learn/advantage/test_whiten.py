from __future__ import annotations

import statistics

import pytest
import torch
from builders import group, run_chain
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.learn.advantage.baseline import Baseline
from trimtab.learn.advantage.whiten import Whiten, whitened


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.one_of(st.none(), st.floats(-1, 1, width=32)), st.integers(0, 5)), min_size=1, max_size=8
    )
)
def test_every_token_of_a_scored_rollout_counts_once(rows):
    values, lengths = [r[0] for r in rows], [r[1] for r in rows]
    found = run_chain([Whiten()], [group(values, lengths)]).tolist()
    spread = [v for v, n in zip(values, lengths, strict=True) if v is not None for _ in range(n)]
    mean = statistics.fmean(spread) if spread else 0.0
    std = ((statistics.variance(spread) if len(spread) > 1 else 0.0) + 1e-8) ** 0.5
    expected = [0.0 if v is None else (v - mean) / std for v, n in zip(values, lengths, strict=True) for _ in range(n)]
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_equal_rewards_are_exactly_zero():
    assert run_chain([Whiten()], [group([0.1] * 5, [1, 2, 3, 4, 5])]).abs().max() == 0


def test_the_result_has_mean_zero_and_deviation_one_over_tokens():
    found = run_chain([Baseline(), Whiten()], [group([0, 1, 1, 0, 0.5], [2, 7, 1, 3, 5]), group([1, 0], [4, 4])])
    assert found.mean().item() == pytest.approx(0, abs=1e-6)
    assert found.std().item() == pytest.approx(1, rel=1e-5)


def test_values_outside_the_mask_are_not_read():
    value = torch.tensor([1.0, float("nan"), 3.0])
    found = whitened(value, torch.tensor([True, False, True]), 1e-8)
    assert found.tolist() == pytest.approx([-(0.5**0.5), 0.0, 0.5**0.5], rel=1e-5)
