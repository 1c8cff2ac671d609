"""GRESO: worked numbers, limits and invariants of its card (constants of the authors' release)."""

from __future__ import annotations

import numpy as np
import pytest
from builders import context, group, prompt, record
from hypothesis import given, settings
from hypothesis import strategies as st
from play import resumed, run, same_run
from world import tiny

from trimtab.control.select.greso import GRESO, further, skip_probability, steered
from trimtab.core.history import prompt_keys
from trimtab.core.recipe import resolve
from trimtab.core.slots import PromptStream

__all__ = ["tiny"]
PROBABILITIES = st.floats(0, 1)


@pytest.mark.parametrize(
    ("z", "expected"), [(0, 0), (1, 0.5), (2, 0.75), (3, 0.875), (6, 0.984375), (7, 0.99), (10, 0.99)]
)
@pytest.mark.parametrize("sign", [1, -1])
def test_skip_probabilities_at_one_half(z, expected, sign):
    assert skip_probability(np.array([sign * z]), 0.5, 0.5, 0.01).tolist() == [pytest.approx(expected, abs=1e-12)]


@given(st.integers(-200, 200), PROBABILITIES, PROBABILITIES)
def test_skipping_grows_with_the_run_and_falls_with_p(z, p, q):
    def of(run, p_both):
        return skip_probability(np.array([run]), p_both, p_both, 0.01)[0]

    longer = z + (1 if z >= 0 else -1)
    assert of(longer, p) >= of(z, p)
    assert of(z, max(p, q)) <= of(z, min(p, q))
    assert 0 <= of(z, p) <= 0.99 + 1e-12
    assert of(z, 1.0) == 0


def runs_after(*traces):
    """z of prompts (positive easy, negative hard) after visits with these mean correctness values."""
    part = GRESO()
    for step in range(max(map(len, traces))):
        visited = [(i, trace[step]) for i, trace in enumerate(traces) if step < len(trace)]
        part.observe(record([group([value] * 4, name=f"p{i}") for i, value in visited]), context(step=step))
    return part.state.table.values("run", prompt_keys([f"p{i}" for i in range(len(traces))])).tolist()


def test_only_the_tail_of_a_trace_counts():
    assert runs_after([1, 1, 0.5, 1], [1, 1, 0.5], [0, 1, 1], [1, 0, 0, 0], [], [0.1, 0, 0.11]) == [1, 0, 2, -3, 0, -3]


@pytest.mark.parametrize(
    ("p", "share", "target", "expected"),
    [(0.5, 0.2, 1 / 6, 0.49), (0.5, 0.05, 1 / 12, 0.51), (0.95, 0.05, 1 / 12, 0.95), (0.05, 0.9, 1 / 6, 0.05)],
)
def test_the_controller(p, share, target, expected):
    assert steered(p, share, target, 0.01) == pytest.approx(expected, abs=1e-12)


def test_the_controller_starts_in_the_second_epoch_and_counts_constant_groups_of_a_step():
    groups = [group([1] * 4, name=f"e{i}") for i in range(1)] + [group([0] * 4, name=f"h{i}") for i in range(4)]
    groups += [group([0, 1, 0, 0], name=f"m{i}") for i in range(15)]  # 1/20 easy, 4/20 hard
    part = GRESO()
    part.observe(record(groups), context())
    assert part.exploration() == (0.5, 0.5)
    part.state.epoch = 1
    part.observe(record(groups), context(step=1))
    assert part.exploration() == (pytest.approx(0.51), pytest.approx(0.49))
    assert part.metrics()["share_easy"] == pytest.approx(0.05)
    assert part.metrics()["share_hard"] == pytest.approx(0.2)


def test_the_size_of_a_further_draw():
    assert further(256 - 160, 0.4, 384, 64, 1.25) == (200, True)
    assert further(96, 1.0, 384, 64, 1.25) == (384, False)
    assert further(10, 0.0, 384, 64, 1.25) == (64, True)
    assert further(200, 0.9, 384, 64, 1.25) == (384, False)


def test_a_step_of_the_paper():
    part, ctx = GRESO(), context(prompts_per_step=256)
    stream = PromptStream([prompt(f"p{i}") for i in range(2000)], seed=0)
    assert len(part.select(stream, 256, ctx).index) == 384
    assert part.refill(153, 256, 1, ctx) == 323  # floor(1.25 * 103 / (153 / 384)), at most 384, so the last draw
    assert len(part.select(stream, 323, ctx).index) == 323
    assert part.refill(200, 256, 2, ctx) == 0
    assert len(part.select(stream, 256, context(step=1, prompts_per_step=256)).index) == 384


def test_the_share_of_a_run_that_is_visited_again():
    names = [f"p{i}" for i in range(20000)]
    keys = prompt_keys(names)
    for z in (1, 2, 3, 8):
        part, stream = GRESO(oversample=1.0), PromptStream([prompt(name) for name in names], seed=0)
        rows = part.state.table.add(keys)
        part.state.table["run"][rows] = z
        wanted = int(len(names) * max(0.5**z, 0.01) * 0.8)  # so that the epoch does not end first
        found = part.select(stream, wanted, context())
        assert stream.epoch == 0
        kept = wanted / part.state.read
        assert kept == pytest.approx(max(0.5**z, 0.01), abs=4 * (0.25 / part.state.read) ** 0.5)
        assert found.inclusion == [pytest.approx(max(0.5**z, 0.01))] * wanted
        assert found.skipped == {"easy": part.state.read - wanted, "hard": 0}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-12, 12), min_size=1, max_size=40), st.integers(1, 30), st.integers(0, 5))
def test_a_draw_is_full_and_prompts_without_a_run_are_never_skipped(runs, num, seed):
    names = [f"p{i}" for i in range(len(runs))]
    part, stream = GRESO(oversample=1.0), PromptStream([prompt(name) for name in names], seed=seed)
    rows = part.state.table.add(prompt_keys(names))
    part.state.table["run"][rows] = runs
    found = part.select(stream, num, context(seed=seed))
    assert len(found.index) == len(found.inclusion) == num
    assert all(0.01 - 1e-12 <= q <= 1 for q in found.inclusion)
    assert all(q == 1 for i, q in zip(found.index, found.inclusion, strict=True) if runs[i] == 0)
    assert part.state.read == num + sum(found.skipped.values())


INERT = {"select": {"part": "greso", **GRESO.inert}}


@pytest.mark.usefixtures("tiny")
def test_the_inert_setting_is_plain_grpo(tmp_path):
    plain = run(tmp_path / "a", "grpo", {"filter": "zero-variance"})
    same_run(plain, run(tmp_path / "b", "grpo", {"filter": "zero-variance", **INERT}))


@pytest.mark.usefixtures("tiny")
def test_a_run_skips_and_resumes(tmp_path):
    overrides = {"steps": 6, "select.oversample": 1.0, "group_size": 3}
    whole = run(tmp_path / "a", "greso", overrides)
    assert any(m["greso/skipped_easy"] + m["greso/skipped_hard"] for m in whole.run_dir.metrics())
    same_run(whole, resumed(tmp_path / "b", "greso", overrides, stop_after=4))


def test_the_recipe():
    paper = resolve("greso", {"model": "smollm2-135m"})
    assert paper.one("select") == GRESO()
    assert paper.settings.prompts_per_step == 256
    assert resolve("greso").one("select").max_draws == 3
