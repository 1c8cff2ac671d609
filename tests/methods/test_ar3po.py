"""AR3PO: worked numbers, limits and invariants of its card."""

from __future__ import annotations

import math

import numpy as np
import pytest
from builders import advantage_rows, context, group, record, start
from hypothesis import given, settings
from hypothesis import strategies as st
from play import bernoulli, play, resumed, run, same_run, scripted
from world import tiny

from trimtab.control.allocate.ar3po import AR3PO, expected_rollouts
from trimtab.core.history import prompt_keys
from trimtab.core.recipe import resolve
from trimtab.core.records import Group, flatten
from trimtab.learn.advantage.baseline import Baseline
from trimtab.learn.advantage.scale import Scale

__all__ = ["tiny"]


def advantages(part, groups, ctx, ddof=0):
    """Advantages of the recipe's chain after reuse, and the rows that stay in the loss."""
    reward = np.array([np.nan if r.reward is None else r.reward for r in flatten(groups)], dtype=np.float32)
    rows = advantage_rows(groups)
    rows.reward_N[:] = rows.reward_N.new_tensor(part.shape(groups, reward, ctx))
    value = start(rows)
    for link in (Baseline(), Scale(ddof=ddof, eps=1e-9)):
        value = link.advantage(rows, value)
    return value.numpy(), part.filter(groups, ctx).keep_N


def knowing(*names):
    """A part that has seen successes of these prompts."""
    part = AR3PO()
    part.observe(record([group([0, 1], name=name) for name in names]), context())
    return part


@pytest.mark.parametrize(("ddof", "borrowed", "failure"), [(0, 2.6458, -0.3780), (1, 2.4749, -0.3536)])
def test_advantages_of_seven_failures_and_a_borrowed_success(ddof, borrowed, failure):
    value, keep = advantages(knowing("p"), [group([0] * 8)], context(step=1), ddof)
    assert keep.sum() == 7
    assert value[keep].tolist() == pytest.approx([failure] * 7, abs=1e-4)
    assert value[~keep].tolist() == pytest.approx([borrowed], abs=1e-4)
    assert value[keep].sum() == pytest.approx(-borrowed, abs=1e-4)
    if ddof == 0:
        assert failure == pytest.approx(-1 / math.sqrt(7), abs=1e-4)


@pytest.mark.parametrize(
    ("p", "rollouts", "none"),
    [(0.05, 7.258, 0.663), (0.2, 5.638, 0.168), (0.5, 4.25, 0.0039), (0.9, 4.0, 1e-8)],
)
def test_expected_rollouts_and_failures(p, rollouts, none):
    assert expected_rollouts(p, 4, 2) == pytest.approx(rollouts, abs=1e-3)
    assert (1 - p) ** 8 == pytest.approx(none, rel=5e-3)
    names = [f"p{i}" for i in range(1500)]
    groups, _ = play(AR3PO(), names, bernoulli(dict.fromkeys(names, p)), context())
    assert np.mean([len(g.rollouts) for g in groups]) == pytest.approx(rollouts, abs=0.2)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0, 0, 1, 0.5, None]), min_size=1, max_size=7), max_size=12),
    st.integers(1, 5),
    st.integers(1, 4),
)
def test_nobody_draws_on_after_a_success_and_all_others_do(outcomes, k, stages):
    values = {f"p{i}": row for i, row in enumerate(outcomes)}
    groups, rounds = play(AR3PO(k=k, stages=stages), list(values), scripted(values), context(group_size=3))
    for one in groups:
        success = [i for i, r in enumerate(one.rollouts) if r.verdict.correct == 1]
        expected = stages if not success else success[0] // k + 1
        assert len(one.rollouts) == k * expected
    assert all(set(counts) <= {0, k} for counts in rounds)
    assert sum(len(g.rollouts) for g in groups) == sum(map(sum, rounds))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.sampled_from([0, 0, 0.5, 1, None]), max_size=6)), max_size=6)
)
def test_exactly_one_failure_of_a_known_prompt_without_success_is_replaced(shape):
    part, ctx = knowing("a", "b"), context(step=3)
    groups = [Group(g.prompt, g.rollouts) for g in (group(row, name=name) for name, row in shape)]
    for number, one in enumerate(groups):
        for r in one.rollouts:
            r.id = f"{number}-{r.id}"
    replaced = part.replaced(groups, ctx)
    place = 0
    for one in groups:
        rows, place = replaced[place : place + len(one.rollouts)], place + len(one.rollouts)
        scored = [r.verdict.correct for r in one.rollouts if r.verdict.correct is not None]
        borrows = one.prompt.id in "ab" and len(scored) >= 2 and max(scored) < 1
        assert rows.sum() == borrows
        assert all(r.verdict.correct is not None for r, row in zip(one.rollouts, rows, strict=True) if row)


def test_without_a_known_success_nothing_is_borrowed():
    value, keep = advantages(AR3PO(), [group([0] * 8)], context(step=1))
    assert keep.all()
    assert (value == 0).all()


def test_only_successes_are_remembered_and_a_borrowed_one_is_not_entered_again():
    part = AR3PO()
    part.observe(record([group([0, 1], name="a"), group([0.9, 0], name="b"), group([None], name="c")]), context())
    assert (part.state.table.find(prompt_keys(["a", "b", "c"])) >= 0).tolist() == [True, False, False]
    failed = [group([0, 0, 0], name="a")]
    part.filter(failed, context(step=1))
    part.observe(record(failed), context(step=1))
    assert part.state.table["step"].tolist() == [0]
    assert part.metrics()["borrowed"] == 1


def test_the_replaced_failure_is_drawn_evenly_and_by_seed():
    part, groups = knowing("p"), [group([0] * 4)]
    drawn = [int(part.replaced(groups, context(seed=seed)).argmax()) for seed in range(400)]
    assert drawn[5] == int(part.replaced(groups, context(seed=5)).argmax())
    assert min(np.bincount(drawn, minlength=4)) > 60


def test_the_stopping_bias_of_one_a_stage():
    names = [f"p{i}" for i in range(4000)]
    groups, _ = play(AR3PO(k=1), names, bernoulli(dict.fromkeys(names, 0.4)), context())
    mean = np.mean([np.mean([r.verdict.correct for r in g.rollouts]) for g in groups])
    assert mean == pytest.approx(0.4 + 0.6 * 0.4 / 2, abs=0.03)


@pytest.mark.usefixtures("tiny")
def test_one_stage_without_reuse_is_plain_grpo(tmp_path):
    plain = run(tmp_path / "a", "grpo", {})
    same_run(plain, run(tmp_path / "b", "grpo", {"allocate": {"part": "ar3po", **AR3PO.inert}}))


@pytest.mark.usefixtures("tiny")
def test_a_run_stops_at_successes_borrows_and_resumes(tmp_path):
    overrides = {"steps": 8, "allocate.k": 1, "allocate.stages": 2, "group_size": 2}
    whole = run(tmp_path / "a", "ar3po", overrides)
    metrics = whole.run_dir.metrics()
    assert all(3 <= m["rollouts"] <= 6 for m in metrics)
    assert len({m["rollouts"] for m in metrics}) > 1
    assert any(m["ar3po/borrowed"] for m in metrics)
    same_run(whole, resumed(tmp_path / "b", "ar3po", overrides, stop_after=5))


def test_the_recipe():
    paper = resolve("ar3po", {"model": "smollm2-135m"})
    part = paper.one("allocate")
    assert part == AR3PO()
    assert paper.parts["reward"] == paper.parts["filter"] == [part]
    assert paper.parts["advantage"][1].ddof == 0
