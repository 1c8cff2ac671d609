from __future__ import annotations

import math
from statistics import median_low

import pytest
from builders import advantage_rows, context, group, run_chain
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.core.records import flatten
from trimtab.learn.advantage.mc_grpo import MCGRPO, compensated, two_valued

VALUES = st.lists(
    st.lists(st.one_of(st.none(), st.integers(-8, 8).map(lambda k: k / 4)), max_size=7), min_size=1, max_size=4
)


def loop(values: list[list[float | None]]) -> list[float]:
    """The rule with the MAD, written out."""
    out = []
    for members in values:
        scored = [v for v in members if v is not None]
        middle = median_low(scored) if scored else 0.0
        mad = median_low([abs(v - middle) for v in scored]) if scored else 0.0
        out += [0.0 if v is None or len(scored) < 3 else (v - middle) / (mad + 1e-3) for v in members]
    return out


@settings(max_examples=80, deadline=None)
@given(values=VALUES)
def test_equals_a_plain_loop_on_ragged_groups_with_missing_rewards(values):
    groups = [group(v, name=f"p{i}") for i, v in enumerate(values)]
    assert run_chain([MCGRPO(scale="mad")], groups).tolist() == pytest.approx(loop(values), rel=1e-5)


@settings(max_examples=60, deadline=None)
@given(values=VALUES, random=st.randoms())
def test_the_pivot_is_the_lowest_sample_at_the_median_in_whatever_order(values, random):
    groups = [group(v, name=f"p{i}") for i, v in enumerate(values)]
    for made in groups:
        for sample, rollout in enumerate(made.rollouts):
            rollout.sample = sample
        random.shuffle(made.rollouts)
    keep = MCGRPO().filter(groups, context()).keep_N
    gone = {r.id for r, kept in zip(flatten(groups), keep, strict=True) if not kept}
    expected = set()
    for i, members in enumerate(values):
        scored = [v for v in members if v is not None]
        if scored:
            expected.add(f"p{i}-{members.index(median_low(scored))}")
    assert gone == expected


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0, 0], True),
        ([1, 0.5, 0], False),
        ([1, None, 0], True),
        ([None], True),
        ([0.3, 0.3], True),
        ([], True),
    ],
)
def test_two_values(rewards, expected):
    rows = advantage_rows([group(rewards)])
    assert bool(two_valued(rows.reward_N, rows.scored_N)) is expected


def test_compensation_keeps_the_zeros_and_scales_each_group_by_itself():
    rows = advantage_rows([group([1, 2, 3], name="a"), group([1, 1, 5, 1, None], name="b")])
    advantage = (rows.reward_N - 1).nan_to_num()
    found = compensated(advantage, rows.group_N, 2, rows.scored_N)
    assert found.tolist() == pytest.approx([0, 1.5, 3, 0, 0, 16, 0, 0])
    assert not any(math.isnan(x) for x in found.tolist())
