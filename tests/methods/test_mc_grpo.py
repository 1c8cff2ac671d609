"""MC-GRPO: worked numbers, limits and invariants of its card (arithmetic recomputed by hand)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from builders import advantage_rows, context, group, run_chain
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.core.errors import ConfigError
from trimtab.core.recipe import resolve
from trimtab.learn.advantage.baseline import Baseline
from trimtab.learn.advantage.mc_grpo import MCGRPO, median_centred
from trimtab.learn.advantage.scale import Scale

GRPO = [Baseline(), Scale(eps=1e-4)]
MAD = [MCGRPO(scale="mad")]
SPREAD = [0.9, 0.8, 0.1, 0.7, 0.75]

WORKED = [  # rewards, chain, advantages, dropped row
    ([0.1, 0.2, 0.9], MAD, [-0.9901, 0, 6.9307], 1),
    ([0.1, 0.2, 0.9], GRPO, [-0.6881, -0.4587, 1.1468], None),
    ([0.1, 0.2, 0.9], [MCGRPO(scale="mad", zero_compensation=True)], [-1.4851, 0, 10.3960], 1),
    (SPREAD, MAD, [2.9412, 0.9804, -12.7451, -0.9804, 0], 4),
    ([2.0, 1.5, 0.0], MAD, [0.998, 0, -2.994], 1),
    ([1, 0, 0], MAD, [1000, 0, 0], 1),
    ([1, 0, 0], [MCGRPO(scale="std")], [1.7318, 0, 0], 1),
    ([1, 0, 0], [MCGRPO(scale="none")], [1, 0, 0], 1),
    ([1, 0, 0], [MCGRPO()], [1.7318, 0, 0], 1),
    ([1, 1, 0], MAD, [0, 0, -1000], 0),
    ([0.5, 0.5, 0.5], [MCGRPO()], [0, 0, 0], 0),
    ([0.5, 0.5, 0.5], [MCGRPO(zero_compensation=True)], [0, 0, 0], 0),
    ([0.1, 0.9], MAD, [0, 0], 0),
    ([0.1, 0.9, None], MAD, [0, 0, 0], 0),
    ([0.1, 0.2, None, 0.6, 0.9], MAD, [-0.9901, 0, 0, 3.9604, 6.9307], 1),  # even: lower medians 0.2 and 0.1
]


def dropped(rewards):
    keep = MCGRPO().filter(one_group(rewards), context()).keep_N
    return np.flatnonzero(~keep).tolist()


def one_group(rewards, name="p"):
    made = group(rewards, name=name)
    for sample, rollout in enumerate(made.rollouts):
        rollout.sample = sample
    return [made]


@pytest.mark.parametrize(("rewards", "chain", "expected", "pivot"), WORKED)
def test_worked_groups(rewards, chain, expected, pivot):
    found = run_chain(chain, one_group(rewards))
    assert found.tolist() == pytest.approx(expected, rel=1e-4, abs=5e-5)
    if pivot is not None:
        assert dropped(rewards) == [pivot]
        assert found[pivot] == 0


def test_the_sign_of_a_rollout_below_the_median_and_above_the_mean_flips():
    assert run_chain(GRPO, [group(SPREAD)])[3].item() == pytest.approx(0.1581, abs=1e-4)
    assert run_chain(MAD, [group(SPREAD)])[3] < 0


ODD = st.integers(1, 4).map(lambda half: 2 * half + 1)
GRADED = ODD.flatmap(lambda n: st.lists(st.integers(0, 8).map(lambda k: k / 8), min_size=n, max_size=n))


@settings(max_examples=60, deadline=None)
@given(minority=st.integers(1, 4), extra=st.integers(1, 5), swap=st.booleans())
def test_of_two_valued_rewards_exactly_the_minority_moves(minority, extra, swap):
    majority = minority + 2 * extra - 1
    rewards = [float(swap)] * minority + [float(not swap)] * majority
    found = run_chain(MAD, [group(rewards)])
    assert found[:minority].abs().tolist() == pytest.approx([1000] * minority)
    assert (found[minority:] == 0).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(GRADED, min_size=1, max_size=4))
def test_one_row_of_every_group_leaves_and_signs_are_balanced(rewards):
    groups = [one_group(r, name=f"p{i}")[0] for i, r in enumerate(rewards)]
    keep = MCGRPO().filter(groups, context()).keep_N
    advantage = run_chain(MAD, groups)
    start = 0
    for members in rewards:
        rows = slice(start, start + len(members))
        start += len(members)
        assert keep[rows].sum() == len(members) - 1
        assert (advantage[rows][torch.from_numpy(~keep[rows])] == 0).all()
        assert (advantage[rows] > 0).sum() <= len(members) // 2
        assert (advantage[rows] < 0).sum() <= len(members) // 2


@settings(max_examples=40, deadline=None)
@given(GRADED, st.integers(-4, 4))
def test_a_shift_of_the_rewards_changes_nothing(rewards, shift):
    moved = run_chain(MAD, [group([r + shift for r in rewards])])
    assert moved.tolist() == run_chain(MAD, [group(rewards)]).tolist()


@settings(max_examples=40, deadline=None)
@given(GRADED, st.sampled_from([0.5, 2.0, 8.0]))
def test_scaled_by_the_deviation_the_unit_of_the_reward_does_not_matter(rewards, factor):
    chain = [MCGRPO(scale="std")]
    moved = run_chain(chain, [group([factor * r for r in rewards])])
    assert moved.tolist() == pytest.approx(run_chain(chain, [group(rewards)]).tolist(), rel=5e-3)


def test_raising_the_best_reward_moves_no_other_sign():
    before, after = ([0.1, 0.2, 0.3, 0.4, best] for best in (0.5, 50.0))
    signs = [run_chain(MAD, [group(r)]).sign().tolist() for r in (before, after)]
    assert signs[0] == signs[1] == [-1, -1, 0, 1, 1]
    assert run_chain(GRPO, [group(before)]).sign()[3] != run_chain(GRPO, [group(after)]).sign()[3]


def test_auto_looks_at_the_whole_step():
    binary, graded = group([1, 0, 0], name="a"), group([0.1, 0.2, 0.9], name="b")
    assert run_chain([MCGRPO()], [binary, graded])[0].item() == pytest.approx(1000)
    assert run_chain([MCGRPO()], [binary, group([1, 1, 0], name="c")])[0].item() == pytest.approx(1.7318, abs=1e-4)


def test_the_pivot_still_counts_and_the_statistics_carry_the_gradient_of_no_missing_reward():
    rows = advantage_rows([group([0.1, 0.2, None, 0.9])])
    reward = rows.reward_N.requires_grad_()
    found = median_centred(reward, rows.group_N, 1, rows.scored_N, "mad", 1e-3)
    (gradient,) = torch.autograd.grad(found.sum(), reward)
    assert gradient[2] == 0
    assert gradient.isfinite().all()


def test_the_budget_is_g_plus_one_sampled_and_g_trained():
    groups = [one_group([0.0, 0.5, 1.0], name=f"p{i}")[0] for i in range(7)]
    assert MCGRPO().filter(groups, context()).keep_N.sum() == 7 * 2


def test_the_recipe():
    paper = resolve("mc-grpo", {"model": "smollm2-135m"})
    assert paper.settings.group_size == 3
    assert paper.one("schedule").epochs == 2
    assert paper.one("objective").kl_coef == 0.04
    assert paper.parts["advantage"] == paper.parts["filter"] == [MCGRPO()]
    assert paper.parts["advantage"][0] is paper.parts["filter"][0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"group_size": 4}, "group_size: 4 is not valid"),
        ({"advantage": ["baseline", "mc-grpo"]}, "stands behind 'baseline'"),
        ({"advantage": ["baseline"]}, "must also stand in the slot 'advantage'"),
    ],
)
def test_what_does_not_fit_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        resolve("mc-grpo", overrides)
