from __future__ import annotations

import time

import numpy as np
import pytest
from builders import context, group, record
from play import play, scripted

from trimtab.control.allocate.ar3po import AR3PO
from trimtab.core.errors import ConfigError
from trimtab.core.recipe import resolve
from trimtab.core.records import Prompt
from trimtab.core.slots import AllocationRequest


def test_missing_outcomes_are_no_success_and_are_never_replaced():
    outcome = scripted({"none": [None], "late": [None, None, 1.0]})
    _, rounds = play(AR3PO(k=2, stages=3), ["none", "late"], outcome, context())
    assert rounds == [[2, 2], [2, 2], [2, 0]]
    part = AR3PO()
    part.observe(record([group([1.0], name="p")]), context())
    assert part.replaced([group([None, 0.0, None, 0.0])], context()).nonzero()[0].tolist() in ([1], [3])
    assert not part.replaced([group([None, 0.0])], context()).any(), "one scored rollout is too few"


def test_missing_rewards_stay_missing():
    part = AR3PO()
    part.observe(record([group([1.0], name="p")]), context())
    found = part.shape([group([None, 0.0, 0.0])], np.array([np.nan, 0, 0], dtype=np.float32), context())
    assert np.isnan(found[0])
    assert sorted(found[1:].tolist()) == [0, 1]
    assert found.dtype == np.float32


def test_a_pool_that_is_used_up_is_shared_evenly():
    prompts = [group([], name=name).prompt for name in "abc"]
    counts = AR3PO(k=4).plan(AllocationRequest(prompts, [], 0, 7), context())
    assert sorted(counts.tolist()) == [2, 2, 3]


def test_k_from_the_group_size():
    assert AR3PO(k=0, stages=2).budget(3, context(group_size=8)) == 24
    assert AR3PO(k=0, stages=3).budget(3, context(group_size=2)) == 9
    assert AR3PO(k=4, stages=2).budget(3, context(group_size=99)) == 24


def test_metrics_of_a_step():
    part, ctx = AR3PO(k=2, stages=2), context()
    groups, _ = play(part, ["a", "b"], scripted({"a": [0, 1], "b": [0]}), ctx)
    part.observe(record(groups), ctx)
    assert part.metrics() == {
        "rollouts_per_prompt": 3,
        "unsolved": 0.5,
        "borrowed": 0,
        "known_successes": 1,
        "reached_stage_2": 0.5,
    }


def test_combinations_that_contradict_it_are_refused():
    with pytest.raises(ConfigError, match="must also stand in the slot 'filter'"):
        resolve("ar3po", {"filter": "none"})
    with pytest.raises(ConfigError, match="zero-variance' drops the all-wrong groups"):
        resolve("ar3po", {"filter": ["ar3po", "zero-variance"]})
    with pytest.raises(ConfigError, match=r"reward.soft-overlong: stands behind ar3po"):
        resolve("ar3po", {"reward": ["ar3po", "soft-overlong"]})
    resolve("ar3po", {"reward": "none", "filter": "zero-variance", "allocate.reuse": False})


def test_a_million_prompts():
    ids = np.random.default_rng(0).integers(0, 2**63, 10**6).tolist()
    prompts = [Prompt(f"{x:016x}", "", (2,)) for x in ids]
    start = time.process_time()
    counts = AR3PO().plan(AllocationRequest(prompts, [], 0, 8 * 10**6), context())
    assert time.process_time() - start < 2
    assert counts.sum() == 4 * 10**6
