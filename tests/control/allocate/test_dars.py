from __future__ import annotations

import time

import numpy as np
from builders import context, record
from play import play, scripted

from trimtab.control.allocate.dars import Dars, further_rollouts
from trimtab.core.budget import largest_remainder
from trimtab.core.rng import generator


def test_missing_outcomes():
    outcome = scripted({"none": [None], "some": [None, 0.0, 1.0, 0.0, None, 0.0, 0.0, 0.0]})
    _, rounds = play(Dars(), ["none", "some"], outcome, context(group_size=8))
    assert rounds[1][0] == 0, "nothing is known about a prompt without a verdict"
    assert rounds[1][1] == further_rollouts(np.array([1 / 6]), np.array([6]), 8, "et", False)[0] > 0


def test_graded_outcomes_count_by_their_mean():
    outcome = scripted({"low": [0.25, 0.0], "high": [0.5, 0.75]})
    _, rounds = play(Dars(), ["low", "high"], outcome, context(group_size=8))
    assert rounds[1] == [11, 0]


def test_metrics_of_a_step():
    part, ctx = Dars(extra=2.0), context(group_size=8)
    outcome = scripted({"late": [0] * 8 + [1], "never": [0], "half": [0, 1]})
    groups, _ = play(part, ["late", "never", "half"], outcome, ctx)
    part.observe(record(groups), ctx)
    assert part.metrics() == {
        "second_round_prompts": 2,
        "second_round_rollouts": 6,
        "second_round_denied": 42,
        "unsolved": 2 / 3,
        "saved": 1 / 3,
    }
    part.observe(record([]), context(step=1, group_size=8))
    assert part.metrics()["second_round_rollouts"] == 0


def test_rollouts_of_all_draws_of_a_step_add_up():
    part, ctx = Dars(), context(group_size=8)
    drawn = [play(part, [name], scripted({name: [0]}), ctx)[0][0] for name in ("a", "b")]
    part.observe(record(drawn), ctx)
    assert part.metrics()["second_round_rollouts"] == 48


def test_a_million_prompts():
    rng = np.random.default_rng(0)
    start = time.process_time()
    wanted = np.minimum(further_rollouts(rng.integers(0, 9, 10**6) / 8, np.full(10**6, 8), 8, "hw", False), 24)
    counts = largest_remainder(wanted, 10**6, cap=wanted, rng=generator(0)).counts
    assert time.process_time() - start < 2
    assert counts.sum() == 10**6
