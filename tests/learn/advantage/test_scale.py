from __future__ import annotations

import statistics

import pytest
from builders import advantage_rows, group, run_chain, start

from trimtab.learn.advantage.baseline import Baseline
from trimtab.learn.advantage.scale import Scale


@pytest.mark.parametrize(("ddof", "spread"), [(1, statistics.stdev), (0, statistics.pstdev)])
def test_group_deviation(ddof, spread):
    values = [[0.0, 0.5, 1.0, 0.25], [1.0, 0.0]]
    found = run_chain([Baseline(), Scale(ddof=ddof, eps=1e-6)], [group(v) for v in values])
    expected = [(v - statistics.fmean(g)) / (spread(g) + 1e-6) for g in values for v in g]
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


def test_batch_deviation_is_that_of_all_scored_rewards():
    values = [[0.0, 1.0, None], [1.0, 1.0]]
    found = run_chain([Baseline(), Scale(by="batch-std", eps=1e-6)], [group(v) for v in values])
    std = statistics.stdev([0.0, 1.0, 1.0, 1.0])
    assert found.tolist() == pytest.approx([-0.5 / (std + 1e-6), 0.5 / (std + 1e-6), 0, 0, 0], rel=1e-5)


def test_the_deviation_is_of_rewards_not_of_what_came_before_in_the_chain():
    groups = [group([0.0, 1.0, 1.0, 0.0])]
    rows = advantage_rows(groups)
    once, twice = start(rows), 2 * start(rows)
    assert (2 * Scale().advantage(rows, once)).tolist() == Scale().advantage(rows, twice).tolist()


@pytest.mark.parametrize("values", [[1.0], [0.3] * 5, [None, None], [0.7, None]])
def test_without_a_deviation_the_advantage_is_exactly_zero(values):
    # leave-one-out gives a group of one A = r, which 1 / eps would blow up
    assert run_chain([Baseline(kind="leave-one-out"), Scale()], [group(values)]).tolist() == [0.0] * len(values)
