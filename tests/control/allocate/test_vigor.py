from __future__ import annotations

import time

import numpy as np
import pytest
from builders import context, record
from play import play, scripted

from trimtab.control.allocate.vigor import Vigor, half_up, most_varying
from trimtab.core.errors import ConfigError
from trimtab.core.recipe import resolve
from trimtab.core.records import Prompt
from trimtab.core.rng import scrambled
from trimtab.core.slots import AllocationRequest


def test_missing_outcomes_are_in_no_variance():
    outcome = scripted({"none": [None], "one": [None, 1.0], "mixed": [0.0, 1.0], "same": [0.1]})
    _, rounds = play(Vigor(rounds=2, m0=3, keep=0.25), ["none", "one", "mixed", "same"], outcome, context(group_size=6))
    assert [bool(n) for n in rounds[1]] == [False, False, True, False]


def test_graded_outcomes_are_ranked_by_their_plain_variance():
    outcome = scripted({"a": [0.4, 0.6], "b": [0.0, 1.0], "c": [0.2, 0.8], "d": [0.5, 0.5]})
    _, rounds = play(Vigor(rounds=2), list("abcd"), outcome, context(group_size=4))
    assert [bool(n) for n in rounds[1]] == [False, True, True, False]


def test_all_rounds_count_and_not_only_the_last():
    outcome = scripted({"a": [0, 1, 1, 1, 1, 1], "b": [0, 1, 0, 1, 0, 1], "c": [0, 0], "d": [1, 1]})
    _, rounds = play(Vigor(rounds=3), list("abcd"), outcome, context(group_size=6))
    assert [bool(n) for n in rounds[2]] == [False, True, False, False]


def test_places_without_variance_are_filled_or_given_away():
    outcome = scripted({"a": [0, 1], "b": [0, 0], "c": [1, 1], "d": [0, 0]})
    parts = {drop: Vigor(rounds=2, drop_zero=drop) for drop in (False, True)}
    counts = {drop: play(part, list("abcd"), outcome, context(group_size=4))[1][1] for drop, part in parts.items()}
    assert sorted(counts[False]) == [0, 0, 4, 4]
    assert counts[True] == [8, 0, 0, 0]
    parts[False].observe(record([]), context())
    assert parts[False].metrics()["filled_constant"] == 1
    assert parts[False].metrics()["dropped_varying"] == 0


def test_a_budget_that_does_not_divide_is_spent_to_the_last_rollout():
    def spent(group_size: int, **knobs: bool) -> list[int]:
        rounds = play(Vigor(**knobs), list("abc"), lambda name, sample: sample % 2, context(group_size=group_size))[1]
        return [sum(counts) for counts in rounds]

    assert spent(13) == [6, 8, 8, 17]
    assert spent(13, spend_rest=False) == [6, 8, 8, 16]
    assert spent(11) == [6, 8, 8, 11]
    assert spent(1) == [3]


def test_rounding_and_ties():
    assert [half_up(x) for x in (0.5, 1.5, 2.4, 2.5)] == [1, 2, 2, 3]
    assert most_varying(np.array([0.1, 0.3, 0.2, 0.3]), np.array([0, 1, 2, 3]), 2).tolist() == [1, 3]
    assert most_varying(np.zeros(3), np.array([2, 0, 1]), 1).tolist() == [1]


def test_rounds_that_the_budget_cannot_pay_are_refused():
    with pytest.raises(ConfigError, match=r"group_size.*at least 8"):
        resolve("vigor", {"group_size": 4})
    resolve("vigor", {"group_size": 4, "allocate.m0": 0})


def test_a_million_prompts():
    ids = np.random.default_rng(0).integers(0, 2**63, 10**6)
    prompts = [Prompt(f"{x:016x}", "", (2,)) for x in ids.tolist()]
    start = time.process_time()
    counts = Vigor().plan(AllocationRequest(prompts, [], 0, 8 * 10**6), context(group_size=8))
    stay = most_varying((ids % 7).astype(float), scrambled(ids.astype(np.uint64), 0), 500_000)
    assert time.process_time() - start < 2
    assert counts.sum() == 2 * 10**6
    assert len(stay) == 500_000
