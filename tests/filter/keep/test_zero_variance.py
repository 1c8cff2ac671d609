from __future__ import annotations

import pytest
from builders import context, group
from hypothesis import given
from hypothesis import strategies as st

from trimtab.core.records import DropReason
from trimtab.filter.keep.zero_variance import ZeroVariance


@pytest.mark.parametrize(
    ("corrects", "kept"),
    [
        ([1, 0], True),
        ([1, 1, 1], False),
        ([0, 0], False),
        ([0.5, 0.25, 0.5], True),  # graded
        ([1], False),
        ([], False),
        ([1, None, 0], True),
        ([1, None], False),
        ([None, None], False),
    ],
)
def test_which_groups_stay(corrects, kept):
    found = ZeroVariance().filter([group(corrects)], context())
    assert found.keep_N.tolist() == [kept] * len(corrects)
    assert found.reason == DropReason.CONSTANT_GROUP


def test_correctness_decides_not_the_shaped_reward():
    one = group([0, 0])
    one.rollouts[0].reward = -0.5
    assert not ZeroVariance().filter([one], context()).keep_N.any()


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, None]), max_size=5), max_size=5))
def test_a_group_is_kept_or_dropped_as_a_whole(values):
    groups = [group(v, name=f"p{i}") for i, v in enumerate(values)]
    keep = ZeroVariance().filter(groups, context()).keep_N.tolist()
    for members in values:
        rows, keep = keep[: len(members)], keep[len(members) :]
        assert rows == [{0.0, 1.0} <= set(members)] * len(members)
