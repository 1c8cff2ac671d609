from __future__ import annotations

import math

import pytest
import torch
from builders import advantage_rows, group, run_chain, start
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.learn.advantage.baseline import Baseline, centred

GROUPS = st.lists(
    st.lists(st.one_of(st.none(), st.floats(-2, 2, width=32)), min_size=0, max_size=6), min_size=0, max_size=5
)


def loop(values: list[list[float | None]], kind: str) -> list[float]:
    """Baseline-subtracted rewards, written out."""
    out = []
    for members in values:
        scored = [v for v in members if v is not None]
        for v in members:
            others = scored if kind == "mean" else [*scored]
            if v is None:
                out.append(0.0)
                continue
            if kind == "leave-one-out":
                others.remove(v)
            out.append(v - (sum(others) / len(others) if others else 0.0))
    return out


@pytest.mark.parametrize("kind", ["mean", "leave-one-out"])
@settings(max_examples=80, deadline=None)
@given(values=GROUPS)
def test_equals_a_plain_loop_on_ragged_groups_with_missing_rewards(kind, values):
    groups = [group(v, name=f"p{i}") for i, v in enumerate(values)]
    rows = advantage_rows(groups)
    found = Baseline(kind=kind).advantage(rows, start(rows))
    assert found.tolist() == pytest.approx(loop(values, kind), abs=1e-5)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e7 + 0.5])
def test_a_constant_group_is_exactly_zero(value):
    assert run_chain([Baseline()], [group([value] * 7)]).tolist() == [0.0] * 7


@pytest.mark.parametrize(("kind", "expected"), [("mean", 0.0), ("leave-one-out", 0.75)])
def test_a_group_of_one(kind, expected):
    assert run_chain([Baseline(kind=kind)], [group([0.75])]).tolist() == [expected]


def test_a_dropped_rollout_still_informs_the_baseline():
    one = group([1.0, 0.0])
    one.rollouts[0].drop("truncated", "overlong")
    assert run_chain([Baseline()], [one]).tolist() == [0.5, -0.5]


def test_a_missing_reward_neither_counts_nor_gets_an_advantage():
    assert run_chain([Baseline()], [group([1.0, None, 0.0])]).tolist() == [0.5, 0.0, -0.5]


def test_nothing_that_stands_at_a_missing_row_is_read():
    value = torch.tensor([1.0, math.nan, 3.0])
    scored = torch.tensor([True, False, True])
    found = centred(value, torch.zeros(3, dtype=torch.int64), 1, scored, "leave-one-out")
    assert found.tolist() == [-2.0, 0.0, 2.0]
