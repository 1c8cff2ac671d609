"""VIGOR: worked numbers, theorems, limits and invariants of its card."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise, product

import numpy as np
import pytest
from builders import context, record
from hypothesis import given, settings
from hypothesis import strategies as st
from play import bernoulli, play, resumed, run, same_run, scripted
from world import tiny

from trimtab.control.allocate.vigor import Vigor, speed_up, total_advantage, variance_gain
from trimtab.core.recipe import resolve

__all__ = ["tiny"]


def names(count):
    return [f"p{i}" for i in range(count)]


def varied(count):
    return bernoulli({name: (i % 5) / 4 for i, name in enumerate(names(count))})


def test_rounds_of_eight_prompts():
    groups, rounds = play(Vigor(), names(8), varied(8), context(group_size=8))
    assert [(sum(n > 0 for n in counts), max(counts)) for counts in rounds] == [(8, 2), (4, 4), (2, 8), (1, 16)]
    assert [sum(counts) for counts in rounds] == [16] * 4
    assert Counter(len(group.rollouts) for group in groups) == {2: 4, 6: 2, 14: 1, 30: 1}


def test_the_first_cut_keeps_what_varied():
    outcome = scripted({"a": [1, 0], "b": [0, 0], "c": [1, 1], "d": [0, 1]})
    _, rounds = play(Vigor(), list("abcd"), outcome, context(group_size=8))
    assert [bool(n) for n in rounds[1]] == [True, False, False, True]


def test_total_advantage_is_g_sigma():
    assert total_advantage(0.25, 8) == pytest.approx(6.9282, abs=1e-4)
    signs, binary = np.array([1, 1] + [-1] * 6), np.array([1, 1] + [0] * 6)
    assert signs.std() == pytest.approx(0.8660, abs=1e-4)
    for reward, factor in ((signs, 1), (binary, 2)):
        total = abs((reward - reward.mean()) / reward.std()).sum()
        assert total == pytest.approx(total_advantage(0.25, 8)) == pytest.approx(8 * factor * reward.std())


@pytest.mark.parametrize(("k", "eta", "faster"), [(2, 1.8107, 1.2188), (4, 1.3213, 1.0973)])
def test_variance_gain_of_pareto_variances(k, eta, faster):
    found = variance_gain(k, 0.5, 2.0, 4)
    assert found == pytest.approx(eta, abs=1e-4)
    assert found == pytest.approx((0.5 ** (-4 / k) - 1) / (4 * (0.5 ** (-1 / k) - 1)))
    assert speed_up(found) == pytest.approx(faster, abs=1e-4)
    assert variance_gain(k, 0.5, 2.0, 5) > found


def test_variance_gain_vanishes_for_equal_prompts():
    assert variance_gain(1e9, 0.5, 2.0, 4) == pytest.approx(1)


@pytest.mark.parametrize(("p", "expected"), [(0.5, 0.5), (0.1, 0.82)])
def test_false_negatives_of_the_first_round(p, expected):
    count = 4000
    part = Vigor(rounds=2)
    groups, _ = play(part, names(count), bernoulli(dict.fromkeys(names(count), p)), context(group_size=4))
    constant = np.mean([len({r.verdict.correct for r in group.rollouts[:2]}) == 1 for group in groups])
    assert constant == pytest.approx(expected, abs=4 * math.sqrt(0.25 / count))


@given(st.integers(0, 30), st.integers(1, 6), st.sampled_from([(1, 1.0, 1.0), (4, 1.0, 1.0)]))
@settings(max_examples=30, deadline=None)
def test_one_round_or_no_cut_and_no_growth_is_grpo(count, m0, shape):
    rounds, keep, growth = shape
    part = Vigor(m0=m0, rounds=rounds, keep=keep, growth=growth)
    groups, _ = play(part, names(count), varied(count), context(group_size=m0 * rounds))
    assert {len(group.rollouts) for group in groups} <= {m0 * rounds}


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(0, 25),
    group_size=st.integers(1, 12),
    m0=st.integers(0, 4),
    rounds=st.integers(1, 5),
    keep=st.floats(0.1, 1),
    growth=st.floats(1, 3),
    drop_zero=st.booleans(),
    spend_rest=st.booleans(),
)
def test_the_budget_is_kept_and_spent(count, group_size, m0, rounds, keep, growth, drop_zero, spend_rest):
    part = Vigor(m0=m0, rounds=rounds, keep=keep, growth=growth, drop_zero=drop_zero, spend_rest=spend_rest)
    groups, drawn = play(part, names(count), varied(count), context(group_size=group_size))
    spent = sum(len(group.rollouts) for group in groups)
    assert len(drawn) <= rounds
    assert spent == count * group_size if spend_rest else spent <= count * group_size
    if group_size >= (m0 or max(1, group_size // rounds)):
        assert all(group.rollouts for group in groups)
    for earlier, later in pairwise(drawn):
        assert all(a > 0 for a, b in zip(earlier, later, strict=True) if b > 0), "who left does not return"


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(12)))
def test_permuting_the_prompts_permutes_the_allocation(order):
    ctx, plain = context(group_size=8), names(12)
    first = {g.prompt.id: len(g.rollouts) for g in play(Vigor(), plain, varied(12), ctx)[0]}
    second = {g.prompt.id: len(g.rollouts) for g in play(Vigor(), [plain[i] for i in order], varied(12), ctx)[0]}
    assert first == second


def test_ties_fall_by_seed_and_not_by_place():
    last = [
        play(Vigor(), names(8), lambda name, sample: 0.0, context(group_size=8, seed=seed))[1][-1].index(16)
        for seed in range(400)
    ]
    assert last[7] == play(Vigor(), names(8), lambda name, sample: 0.0, context(group_size=8, seed=7))[1][-1].index(16)
    counts = Counter(last)
    assert len(counts) == 8
    assert max(counts.values()) < 3 * min(counts.values())


def test_the_group_mean_lies_further_from_one_half_than_the_rate():
    """By enumeration: two outcomes, and 4 more where they differ."""
    for p in (0.2, 0.5, 0.8):
        found = 0.0
        for first in product([0, 1], repeat=2):
            chance = math.prod(p if x else 1 - p for x in first)
            found += chance * (sum(first) / 2 if sum(first) != 1 else (1 + 4 * p) / 6)
        assert (found - p) * (p - 0.5) >= -1e-12
        assert (abs(found - p) < 1e-12) == (p == 0.5)


def test_more_of_the_rollouts_vary_than_with_plain_sampling():
    rates = {name: [0.0, 1.0, 0.0, 0.5][i % 4] for i, name in enumerate(names(64))}
    part, ctx = Vigor(), context(group_size=8)
    groups, _ = play(part, names(64), bernoulli(rates), ctx)
    part.observe(record(groups), ctx)
    assert part.metrics()["variance"] > 1.8 * part.metrics()["variance_prompts"]


@pytest.mark.usefixtures("tiny")
def test_the_inert_setting_is_plain_grpo(tmp_path):
    plain = run(tmp_path / "a", "grpo", {})
    same_run(plain, run(tmp_path / "b", "grpo", {"allocate": {"part": "vigor", **Vigor.inert}}))


@pytest.mark.usefixtures("tiny")
def test_a_run_spends_the_budget_of_grpo_and_resumes(tmp_path):
    overrides = {"group_size": 5, "allocate.rounds": 2}
    whole = run(tmp_path / "a", "vigor", overrides)
    assert [m["rollouts"] for m in whole.run_dir.metrics()] == [15] * 4
    same_run(whole, resumed(tmp_path / "b", "vigor", overrides))


def test_the_recipe():
    paper = resolve("vigor", {"model": "smollm2-135m"})
    assert paper.one("allocate") == Vigor()
    assert paper.settings.group_size == 8
