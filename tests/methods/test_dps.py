"""DPS: worked numbers, limits and invariants of its card (the authors' released sampler)."""

from __future__ import annotations

import numpy as np
import pytest
from builders import context, group, prompt, record
from hypothesis import given, settings
from hypothesis import strategies as st
from play import resumed, run, same_run
from world import tiny

from trimtab.control.select.dps import DPS, PARTLY, PRIORS, SOLVED, WRONG, joint, transitions
from trimtab.core.history import prompt_keys
from trimtab.core.recipe import resolve
from trimtab.core.slots import PromptStream

__all__ = ["tiny"]
STATES = {WRONG: [0, 0], PARTLY: [0, 1], SOLVED: [1, 1]}


def step(part, states, number=0):
    """One step in which these prompts showed these states."""
    groups = [group(STATES[state], name=name) for name, state in states.items()]
    part.observe(record(groups), context(step=number))


def belief(part, name="p"):
    return part.table.values("pi", prompt_keys([name]))[0].tolist()


def alpha(part, name="p"):
    return part.table.values("alpha", prompt_keys([name]))[0]


DRIFTED = [0.309278, 0.381443, 0.309278]


def test_observed_partly_solved_then_not_rolled_out():
    part = DPS()
    step(part, {"p": PARTLY})
    np.testing.assert_allclose(alpha(part), [[1] * 3, [4 / 3] * 3, [1] * 3], atol=1e-12)
    assert belief(part) == pytest.approx([0.3, 0.4, 0.3], abs=1e-12)
    step(part, {}, 1)
    np.testing.assert_allclose(alpha(part)[1], [1.2333333333] * 3, atol=1e-9)
    assert belief(part) == pytest.approx(DRIFTED, abs=1e-6)


def test_observed_partly_solved_then_solved():
    part = DPS()
    step(part, {"p": PARTLY})
    step(part, {"p": SOLVED}, 1)
    assert alpha(part)[2, 1] == pytest.approx(2)
    np.testing.assert_allclose(alpha(part)[1], [1.2333333333] * 3, atol=1e-9)
    assert belief(part) == pytest.approx(DRIFTED, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([WRONG, PARTLY, SOLVED, None]), max_size=12),
    st.sampled_from(list(PRIORS)),
    st.sampled_from(["uniform", "wrong", "partly", "solved"]),
    st.sampled_from([0.0, 0.5, 0.7, 1.0]),
)
def test_beliefs_stay_on_the_simplex_and_counts_follow_their_sum(history, prior, start, decay):
    part = DPS(prior=prior, start=start, decay=decay)
    part.table.add(prompt_keys(["p"]))
    prior_sum = np.sum(PRIORS[prior])
    for number, state in enumerate(history):
        before = alpha(part).sum()
        possible = joint(np.eye(3)[state or 0], part.table["previous"][0], alpha(part)).sum()
        step(part, {} if state is None else {"p": state}, number)
        added = 0 if state is None else possible
        assert added in (0, pytest.approx(1))
        assert alpha(part).sum() == pytest.approx(decay * before + (1 - decay) * prior_sum + added)
        np.testing.assert_allclose(transitions(alpha(part)).sum(0), 1)
        assert sum(belief(part)) == pytest.approx(1)
        assert min(belief(part)) >= 0
        if decay < 1:
            assert alpha(part).sum() <= prior_sum + 1 / (1 - decay) + 1e-9


def test_a_prompt_never_seen_keeps_its_uniform_belief():
    part = DPS()
    part.table.add(prompt_keys(["p"]))
    for number in range(20):
        step(part, {}, number)
    np.testing.assert_allclose(alpha(part), 1)
    assert belief(part) == pytest.approx([1 / 3] * 3)


def test_without_memory_only_the_last_observation_matters():
    found = []
    for history in ([WRONG, WRONG, PARTLY, SOLVED], [SOLVED, PARTLY, PARTLY, SOLVED]):
        part = DPS(decay=0.0)
        for number, state in enumerate(history):
            step(part, {"p": state}, number)
        found.append(belief(part))
    assert found[0] == pytest.approx(found[1])


def test_a_jump_that_the_prior_excludes_changes_no_count():
    part = DPS(prior="local", start="wrong", decay=1.0)
    step(part, {"p": SOLVED})
    np.testing.assert_allclose(alpha(part), PRIORS["local"])
    assert belief(part) == pytest.approx([0, 0.5, 0.5])


def test_a_prompt_that_stays_solved_falls_behind_a_fresh_one():
    part = DPS()
    for number in range(15):
        step(part, {"p": SOLVED}, number)
    assert belief(part)[PARTLY] < 1 / 3
    stream = PromptStream([prompt("p"), prompt("fresh")], seed=0)
    assert [stream.pool[i].id for i in part.select(stream, 1, context(step=20)).index] == ["fresh"]


def test_it_finds_the_partly_solved_third():
    names = [f"{kind}{i}" for kind in "abc" for i in range(40)]
    shows = dict(zip("abc", (WRONG, PARTLY, SOLVED), strict=True))
    part, stream = DPS(candidates=12.0), PromptStream([prompt(name) for name in names], seed=0)
    shares = []
    for number in range(40):
        chosen = [names[i] for i in part.select(stream, 10, context(step=number)).index]
        assert len(set(chosen)) == 10
        step(part, {name: shows[name[0]] for name in chosen}, number)
        shares.append(part.metrics()["partly"])
    assert np.mean(shares[:3]) < 0.6
    assert np.mean(shares[-10:]) > 0.9
    assert part.metrics()["hit"] > 0.9


@pytest.mark.usefixtures("tiny")
def test_one_candidate_a_place_is_plain_grpo(tmp_path):
    plain = run(tmp_path / "a", "grpo", {})
    same_run(plain, run(tmp_path / "b", "grpo", {"select": {"part": "dps", **DPS.inert}}))


@pytest.mark.usefixtures("tiny")
def test_a_run_spends_b_times_g_every_step_and_resumes(tmp_path):
    overrides = {"steps": 5, "select.candidates": 2.0}
    whole = run(tmp_path / "a", "dps", overrides)
    assert [m["rollouts"] for m in whole.run_dir.metrics()] == [3 * 2] * 5
    same_run(whole, resumed(tmp_path / "b", "dps", overrides, stop_after=3))


def test_the_recipe():
    assert resolve("dps", {"model": "smollm2-135m"}).one("select") == DPS()
    assert resolve("dps").one("select").candidates == 8
