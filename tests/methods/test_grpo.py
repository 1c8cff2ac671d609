"""The GRPO family: worked numbers, limits and invariants of the shared card.

Numbers: from TRL's and verl's formulas, recomputed by hand, tolerance 1e-6 where seven digits are given.
"""

from __future__ import annotations

import math

import pytest
import torch
from builders import group, run_chain
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.core.recipe import resolve
from trimtab.core.slots import TokenView
from trimtab.filter.keep.zero_variance import ZeroVariance
from trimtab.filter.reward.soft_overlong import penalty
from trimtab.learn.advantage.baseline import Baseline
from trimtab.learn.advantage.scale import Scale
from trimtab.learn.advantage.whiten import Whiten
from trimtab.learn.aggregate import aggregate, token_coefficients
from trimtab.learn.objective.clip import Clip, dual_clip, kl_estimate, surrogate

REWARDS = [1, 0, 0, 0, 1, 0, 0, 0]
GRPO = [Baseline(), Scale(eps=1e-6)]
DR_GRPO = [Baseline()]
RLOO = [Baseline(kind="leave-one-out")]

ADVANTAGES = [  # chain, advantage of a right and of a wrong rollout in REWARDS
    ("grpo, eps 1e-6 (verl)", GRPO, 1.6201817, -0.5400606),
    ("grpo, eps 1e-4 (TRL)", [Baseline(), Scale(eps=1e-4)], 1.6198353, -0.5399451),
    ("grpo, ddof 0", [Baseline(), Scale(ddof=0, eps=1e-12)], 1.7320508, -0.5773503),
    ("dr-grpo", DR_GRPO, 0.75, -0.25),
    ("rloo", RLOO, 0.8571429, -0.2857143),
]


@pytest.mark.parametrize(("name", "chain", "right", "wrong"), ADVANTAGES, ids=[row[0] for row in ADVANTAGES])
def test_advantages_of_the_worked_group(name, chain, right, wrong):
    found = run_chain(chain, [group(REWARDS)])
    assert found.tolist() == pytest.approx([right if r else wrong for r in REWARDS], abs=2e-6)
    assert found.sum().item() == pytest.approx(0, abs=1e-5)


def test_reinforce_pp_whitens_over_tokens():
    found = run_chain([Whiten()], [group([1, 1, 0, 0, 0, 0, 0, 0], [1] * 8)])
    assert found.tolist() == pytest.approx([1.620185] * 2 + [-0.540062] * 6, abs=2e-6)


AGGREGATIONS = [  # two rows of 2 and 6 tokens with losses -1 and +1 a token
    ("seq-mean-token-mean", None, 0.0),
    ("token-mean", None, 0.5),
    ("seq-mean-token-sum", None, 2.0),
    ("constant", None, 0.25),  # TRL: rows times L_max = 8
    ("constant", 8.0, 0.5),  # verl: a constant alone
]


@pytest.mark.parametrize(("name", "constant", "expected"), AGGREGATIONS)
def test_aggregations(name, constant, expected):
    row_T = torch.tensor([0] * 2 + [1] * 6)
    logp = torch.zeros(8)
    view = TokenView(logp, logp, torch.where(row_T == 0, 1.0, -1.0), logp, row_T, 2, torch.ones(8, dtype=torch.bool))
    part = Clip(aggregate=name, constant=constant or 0.0)
    coefficient = token_coefficients(*part.aggregation()[:1], row_T, view.mask_T, 2, part.aggregation()[1], 8)
    assert aggregate(part.token_loss(view).loss_T, coefficient).item() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
    ("w", "advantage", "expected"), [(1.5, 1, -1.28), (1.5, -1, 1.5), (5, -1, 3), (0.5, -1, 0.8), (0.5, 1, -0.5)]
)
def test_token_losses_with_dapos_range_and_dual_clip(w, advantage, expected):
    ratio, a = torch.tensor([float(w)]), torch.tensor([float(advantage)])
    found = dual_clip(surrogate(ratio, a, 0.2, 0.28), a, 3.0)
    assert found.item() == pytest.approx(expected, abs=1e-6)
    view = TokenView(ratio.log(), torch.zeros(1), a, torch.zeros(1), torch.tensor([0]), 1, torch.tensor([True]))
    assert Clip(eps_high=0.28, dual_clip=3.0).token_loss(view).loss_T.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.1065307), ("k3+", 0.1065307)])
def test_kl_estimators_at_a_difference_of_one_half(estimator, expected):
    assert kl_estimate(torch.tensor([0.5]), torch.zeros(1), estimator).item() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.0851228), ("k3", 0.0851228), ("k2", 0.0800876)])
def test_expected_kl_estimates(estimator, expected):
    p, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    found = (p * kl_estimate(p.log(), reference.log(), estimator)).sum()
    assert found.item() == pytest.approx(expected, abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.floats(-15, 15, width=32))
def test_k3_is_never_negative(difference):
    assert kl_estimate(torch.tensor([difference]), torch.zeros(1), "k3").item() >= -1e-6


def test_gspo_ratio_and_its_clip():
    logp = torch.tensor([0.01, -0.02, 0.04])
    view = TokenView(
        logp, torch.zeros(3), torch.ones(3), logp, torch.zeros(3, dtype=torch.int64), 1, torch.ones(3, dtype=torch.bool)
    )
    found = Clip(ratio="sequence", eps_low=3e-4, eps_high=4e-4).token_loss(view)
    assert found.logged["ratio"].tolist() == pytest.approx([1.0100502] * 3, abs=1e-6)
    assert found.loss_T.tolist() == pytest.approx([-1.0004] * 3, abs=1e-6)


def test_overlong_penalty():
    assert penalty(torch.tensor([18432]).numpy(), 20480, 4096, 1.0).tolist() == [-0.5]


def test_rloo_tends_to_dr_grpo_for_large_groups():
    def gap(size):
        rewards = [float(i % 3 == 0) for i in range(size)]
        return (run_chain(RLOO, [group(rewards)]) - run_chain(DR_GRPO, [group(rewards)])).abs().max().item()

    assert gap(2000) < 4e-4 < gap(10)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1, width=32), min_size=2, max_size=8))
def test_rloo_is_dr_grpo_times_g_over_g_minus_one(rewards):
    size = len(rewards)
    left, right = run_chain(RLOO, [group(rewards)]), run_chain(DR_GRPO, [group(rewards)])
    assert left.tolist() == pytest.approx((right * size / (size - 1)).tolist(), abs=1e-6)


@pytest.mark.parametrize(("p", "expected"), [(0.5, 0.0078125), (0.1, 0.430467)])
def test_probability_of_a_constant_group(p, expected):
    total = 0.0
    for right in range(9):
        keep = ZeroVariance().filter([group([1] * right + [0] * (8 - right))], None)
        total += math.comb(8, right) * p**right * (1 - p) ** (8 - right) * (not keep.keep_N.any())
    assert total == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("right", range(1, 8))
def test_total_advantage_of_binary_rewards(right):
    rewards, p = [1] * right + [0] * (8 - right), right / 8
    assert run_chain(DR_GRPO, [group(rewards)]).abs().sum().item() == pytest.approx(16 * p * (1 - p), rel=1e-5)
    population = run_chain([Baseline(), Scale(ddof=0, eps=1e-12)], [group(rewards)])
    assert population.abs().sum().item() == pytest.approx(16 * math.sqrt(p * (1 - p)), rel=1e-5)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.125, 64), st.floats(-5, 5))
def test_grpo_does_not_see_scale_and_shift_of_the_rewards(factor, shift):
    rewards = [0.0, 0.25, 1.0, 0.5]
    moved = run_chain(GRPO, [group([factor * r + shift for r in rewards])])
    assert moved.tolist() == pytest.approx(run_chain(GRPO, [group(rewards)]).tolist(), rel=1e-2, abs=1e-2)


RECIPES = {  # advantage chain and what of the objective differs from plain clipping
    "grpo": (["baseline", "scale"], {"aggregate": "seq-mean-token-mean"}),
    "dr-grpo": (["baseline"], {"aggregate": "constant"}),
    "dapo": (["baseline", "scale"], {"eps_high": 0.28, "dual_clip": 10.0}),
    "rloo": (["baseline"], {"aggregate": "seq-mean-token-sum", "kl": "k2"}),
    "gspo": (
        ["baseline", "scale"],
        {"ratio": "sequence", "eps_low": 3e-4, "eps_high": 4e-4, "aggregate": "seq-mean-token-mean"},
    ),
    "reinforce-pp": (["whiten"], {"kl": "k2"}),
    "reinforce-pp-baseline": (["baseline", "whiten"], {"kl": "k2"}),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_chains_of_these_parts(name):
    chain, objective = RECIPES[name]
    resolved = resolve(name)
    assert [part.slug for part in resolved.parts["advantage"]] == chain
    assert resolved.one("objective") == Clip(**objective)
    assert resolve(name, {"model": "smollm2-135m"}).settings.learner.lr <= 1e-6


def test_the_recipe_of_rloo_leaves_one_out_and_dapo_refills():
    assert resolve("rloo").parts["advantage"][0].kind == "leave-one-out"
    assert [p.slug for p in resolve("dapo").all_parts()][:4] == [
        "minibatches",
        "dynamic-sampling",
        "soft-overlong",
        "zero-variance",
    ]
    assert resolve("gspo").one("schedule").minibatches == 4
    assert resolve("dr-grpo", {"model": "smollm2-135m"}).one("schedule").minibatches == 8
