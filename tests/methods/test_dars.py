"""DARS and DARS-Breadth: worked numbers, limits and invariants of their card (the authors' released plan)."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest
from builders import context, group, run_chain
from hypothesis import given, settings
from hypothesis import strategies as st
from play import bernoulli, play, resumed, run, same_run, scripted
from world import tiny

from trimtab.control.allocate.dars import Dars, further_rollouts, spread
from trimtab.core.recipe import resolve
from trimtab.core.records import flatten
from trimtab.filter.keep.zero_variance import ZeroVariance
from trimtab.learn.advantage.baseline import Baseline
from trimtab.learn.objective.clip import Clip

__all__ = ["tiny"]


def second_round(part, right, size=8):
    """dN of prompts that got these numbers right in the first round of ``size``."""
    outcome = scripted({str(n): [1] * n + [0] * (size - n) for n in right})
    rounds = play(part, [str(n) for n in right], outcome, context(group_size=size))[1]
    return rounds[1] if len(rounds) > 1 else [0] * len(right)


PLANS = [  # dN for 0, 1, 2, 3, 4, 8 right of 8
    (Dars(goal="et", n_max=32), [24, 11, 3, 1, 0, 0]),
    (Dars(goal="hw", n_max=64), [56, 24, 8, 3, 0, 0]),
    (Dars(goal="et", n_max=32, std=True), [9, 5, 2, 1, 0, 0]),
    (Dars(goal="hw", n_max=64, std=True), [23, 14, 6, 3, 0, 0]),
]


@pytest.mark.parametrize(("part", "expected"), PLANS)
def test_further_rollouts(part, expected):
    assert second_round(part, [0, 1, 2, 3, 4, 8]) == expected


def test_one_right_of_eight_in_detail():
    s = spread(np.array([1 / 8, 1 / 16]), std=False)
    assert s.tolist() == [0.21875, 0.1171875]
    assert 8 * s[0] == 1.75
    assert (8 + 11) * s[0] == 4.15625
    assert (8 + 10) * s[0] == 3.9375 < 4
    assert further_rollouts(np.array([0.0]), np.array([8]), 8, "et", False).tolist() == [27]


@given(st.integers(2, 64), st.booleans())
def test_the_harder_the_more_and_hardness_weighted_at_least_as_much(base, std):
    p = np.arange(base + 1) / base
    size = np.full(base + 1, base)
    et, hw = (further_rollouts(p, size, base, goal, std) for goal in ("et", "hw"))
    assert (np.diff(et[1:]) <= 0).all()
    assert (np.diff(hw) <= 0).all()
    assert (hw >= et).all()
    assert (et[p >= 0.5] == 0).all()
    assert (hw[p >= 0.5] == 0).all()
    lifted = (base + et) * spread(np.clip(p, 1 / (2 * base), 1), std)
    assert (lifted[p < 0.5] >= (base if std else base / 2) - 1e-9).all()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0, 0, 0, 1, 0.25, None]), min_size=4, max_size=4), max_size=12),
    st.sampled_from(["et", "hw"]),
    st.integers(1, 20),
    st.sampled_from([None, 0.0, 0.5, 1.7, 6.0]),
)
def test_bounds_and_budget(outcomes, goal, n_max, extra):
    part, ctx = Dars(goal=goal, n_max=n_max, extra=extra), context(group_size=4)
    values = {f"p{i}": row for i, row in enumerate(outcomes)}
    groups, rounds = play(part, list(values), scripted(values), ctx)
    assert [len(g.rollouts) >= 4 for g in groups] == [True] * len(groups)
    assert all(len(g.rollouts) <= max(n_max, 4) for g in groups)
    free = play(Dars(goal=goal, n_max=n_max), list(values), scripted(values), ctx)[1]
    wanted = sum(free[1]) if len(free) > 1 else 0
    spent = sum(rounds[1]) if len(rounds) > 1 else 0
    limit = wanted if extra is None else min(wanted, int(extra * len(values) + 1e-9))
    assert spent == limit, "neither overspent nor underspent"
    if len(rounds) > 1:
        assert all(a <= b for a, b in zip(rounds[1], free[1], strict=True))


def test_a_bounded_second_round_keeps_its_proportions():
    assert second_round(Dars(extra=5.0), [0, 1, 4, 4]) == [14, 6, 0, 0]  # 20 of 24 + 11


def test_advantages_of_a_combined_group_of_nineteen():
    found = run_chain([Baseline()], [group([1] + [0] * 18)])
    assert found.tolist() == pytest.approx([18 / 19] + [-1 / 19] * 18, abs=1e-6)
    assert found.sum().item() == pytest.approx(0, abs=1e-5)
    assert found.abs().sum().item() == pytest.approx(1.894737, abs=1e-5)
    assert run_chain([Baseline()], [group([1] + [0] * 7)]).abs().sum().item() == pytest.approx(1.75, abs=1e-6)


def test_a_rare_success_is_found_more_often():
    names = [f"p{i}" for i in range(1500)]
    groups, _ = play(Dars(), names, bernoulli(dict.fromkeys(names, 0.05)), context(group_size=8))
    for rollouts, expected in ((8, 0.3366), (32, 0.8063)):
        solved = np.mean([any(r.verdict.correct for r in group.rollouts[:rollouts]) for group in groups])
        assert solved == pytest.approx(expected, abs=0.05)


def test_constant_groups_leave_after_both_rounds():
    outcome = scripted({"never": [0], "late": [0] * 8 + [1], "always": [1]})
    groups, _ = play(Dars(), ["never", "late", "always"], outcome, context(group_size=8))
    keep = ZeroVariance().filter(groups, context()).keep_N
    assert {r.prompt.id for r, kept in zip(flatten(groups), keep, strict=True) if kept} == {"late"}


@pytest.mark.parametrize("p", [0.1, 0.3, 0.45])
def test_the_expected_group_mean_lies_above_the_rate(p):
    right = np.arange(9)
    chance = np.array([comb(8, k) * p**k * (1 - p) ** (8 - k) for k in right])
    more = np.minimum(further_rollouts(right / 8, np.full(9, 8), 8, "et", False), 24)
    assert (chance * (right + more * p) / (8 + more)).sum() > p + 0.005


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("inert", [Dars.inert, {"n_max": 2}])
def test_without_further_rollouts_it_is_plain_grpo(tmp_path, inert):
    plain = run(tmp_path / "a", "grpo", {})
    same_run(plain, run(tmp_path / "b", "grpo", {"allocate": {"part": "dars", **inert}}))


@pytest.mark.usefixtures("tiny")
def test_a_run_reports_its_second_round_and_resumes(tmp_path):
    overrides = {"allocate.n_max": 6}
    whole = run(tmp_path / "a", "dars", overrides)
    metrics = whole.run_dir.metrics()
    assert any(m["dars/second_round_rollouts"] for m in metrics)
    assert [m["rollouts"] for m in metrics] == [6 + m["dars/second_round_rollouts"] for m in metrics]
    same_run(whole, resumed(tmp_path / "b", "dars", overrides))


def test_the_recipes():
    depth = resolve("dars", {"model": "smollm2-135m"})
    assert depth.one("allocate") == Dars()
    breadth = resolve("dars-b", {"model": "smollm2-135m"})
    assert breadth.one("allocate") == Dars(goal="hw", n_max=64)
    assert (breadth.one("schedule").epochs, breadth.one("schedule").minibatches) == (2, 1)
    assert breadth.settings.prompts_per_step == 3072
    for resolved in (depth, breadth):
        assert [part.slug for part in resolved.parts["advantage"]] == ["baseline"]
        assert resolved.one("objective") == Clip()
