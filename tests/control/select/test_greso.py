from __future__ import annotations

import time

import numpy as np
import pytest
from builders import context, group, prompt, record

from trimtab.control.select.greso import GRESO
from trimtab.core.errors import ConfigError
from trimtab.core.history import prompt_keys
from trimtab.core.recipe import resolve
from trimtab.core.records import Prompt
from trimtab.core.slots import PromptStream


def stream(count: int, seed: int = 0) -> PromptStream:
    return PromptStream([prompt(f"p{i}") for i in range(count)], seed=seed)


def set_runs(part: GRESO, keys: np.ndarray, run: int) -> None:
    rows = part.state.table.add(keys)
    part.state.table["run"][rows] = run


def run_of(part: GRESO, name: str) -> int:
    return int(part.state.table.values("run", prompt_keys([name]))[0])


def test_missing_and_graded_outcomes():
    part = GRESO()
    part.observe(
        record([group([1.0, None, 1.0], name="a"), group([None, None], name="b"), group([], name="c")]), context()
    )
    part.observe(record([group([0.1, 0.0, 0.1], name="d"), group([0.5, 0.5], name="e")]), context())
    assert [run_of(part, name) for name in "abcde"] == [1, 0, 0, -1, 0]
    part.observe(record([group([None], name="a")]), context(step=1))
    assert run_of(part, "a") == 1, "a visit without a verdict neither adds to a run nor ends it"
    assert part.metrics()["share_easy"] == 0


def test_a_prompt_that_comes_twice_in_a_step_was_visited_twice():
    part = GRESO()
    part.observe(record([group([1, 1], name="a"), group([1, 1], name="a")]), context())
    assert run_of(part, "a") == 2


def test_the_first_epoch_is_that_of_plain_sampling():
    part, own, plain = GRESO(oversample=1.5), stream(20), stream(20)
    ctx = context(prompts_per_step=4)
    found = part.select(own, 4, ctx)
    assert found.index == plain.take(6)
    assert found.inclusion == [1.0] * 6
    assert part.select(own, 3, ctx).index == plain.take(3)


def test_a_pool_smaller_than_the_batch_and_an_empty_pool():
    part = GRESO(oversample=1.0)
    assert part.select(stream(3), 7, context()).index == stream(3).take(7)
    assert GRESO().select(stream(0), 7, context()).index == []
    assert GRESO().refill(0, 7, 1, context()) == 0


def test_a_pool_of_nothing_but_long_runs_still_fills_the_batch():
    part, own = GRESO(oversample=1.0), stream(5)
    set_runs(part, own.keys, -50)
    found = part.select(own, 8, context())
    assert len(found.index) == 8
    assert part.metrics()["inclusion"] == pytest.approx(0.01)
    assert part.metrics()["skipped_probability"] == pytest.approx(0.99)
    assert part.metrics()["skipped_hard"] == part.state.read - 8


def test_a_changed_prompt_set_keeps_what_is_known_of_those_that_stay():
    part, own = GRESO(oversample=1.0, floor=1e-4), stream(6)
    set_runs(part, own.keys[:3], 60)
    own = PromptStream([prompt(f"p{i}") for i in (1, 2)] + [prompt(f"new{i}") for i in range(200)], seed=0)
    found = part.select(own, 150, context())
    assert all(own.pool[i].id.startswith("new") for i in found.index)
    assert set(found.inclusion) == {1.0}


def test_draws_of_a_step_are_bounded_when_nothing_is_informative():
    part, own, ctx = GRESO(), stream(50), context(prompts_per_step=8)
    part.select(own, 8, ctx)
    draws = 1
    while more := part.refill(0, 8, draws, ctx):
        assert more == 12
        part.select(own, more, ctx)
        draws += 1
    assert draws == 10


def test_the_same_seed_skips_the_same_prompts_and_another_does_not():
    def chosen(seed: int) -> list[int]:
        part, own = GRESO(oversample=1.0), stream(200)
        set_runs(part, own.keys, 2)
        return part.select(own, 40, context(seed=seed)).index

    assert chosen(0) == chosen(0) != chosen(1)


def test_a_million_prompts():
    rng = np.random.default_rng(0)
    own = PromptStream([Prompt(f"{x:016x}", "", (2,)) for x in rng.integers(0, 2**63, 10**6).tolist()], seed=0)
    part = GRESO()
    rows = part.state.table.add(own.keys)
    part.state.table["run"][rows] = rng.integers(-20, 20, 10**6)
    start = time.process_time()
    assert len(part.select(own, 4096, context()).index) == 6144
    part.observe(record([group([0, 1], name=own.pool[i].id) for i in range(512)]), context())
    assert time.process_time() - start < 1
    assert sum(column.nbytes for column in part.state_dict()["table"].values()) < 2**27


def test_it_needs_a_filter_and_thresholds_in_order():
    with pytest.raises(ConfigError, match=r"greso: no filter is set.*zero-variance"):
        resolve("greso", {"filter": "none"})
    with pytest.raises(ConfigError, match=r"hard_at \(0.9\) must lie below easy_at \(0.8\)"):
        resolve("greso", {"select.hard_at": 0.9, "select.easy_at": 0.8})
