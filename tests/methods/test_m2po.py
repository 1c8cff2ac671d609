"""M2PO: worked numbers, limits and invariants of its card (arithmetic recomputed by hand)."""

from __future__ import annotations

import math

import pytest
import torch
from builders import context
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import plain_logprobs, random_groups, tiny_model

from trimtab.core.config import LearnerConfig
from trimtab.core.errors import ConfigError
from trimtab.core.recipe import resolve
from trimtab.core.records import flatten
from trimtab.core.slots import Correction, TokenView
from trimtab.learn.aggregate import aggregate, token_coefficients
from trimtab.learn.correct.m2po import M2PO, budget_mask, cap_threshold
from trimtab.learn.learner import Learner
from trimtab.learn.objective.clip import Clip

D = [0.05, -0.10, 0.30, 0.60, -0.90]
A = [1.0, 1.0, 1.0, -1.0, -1.0]


def view_of(d, advantage, old=None) -> TokenView:
    logp = torch.tensor(d, dtype=torch.float32).requires_grad_()
    n = len(d)
    return TokenView(
        logp=logp,
        old=torch.zeros(n) if old is None else torch.tensor(old),
        advantage=torch.tensor(advantage, dtype=torch.float32),
        behaviour=torch.zeros(n),
        row_T=torch.zeros(n, dtype=torch.int64),
        num_rows=1,
        mask_T=torch.ones(n, dtype=torch.bool),
    )


def kept(part, view) -> list[int]:
    return part.correct(view, Correction(torch.ones(len(view.logp)), view.mask_T)).mask_T.int().tolist()


def loss(part, view) -> torch.Tensor:
    correction = part.correct(view, Correction(torch.ones(len(view.logp)), view.mask_T))
    coefficient = token_coefficients("token-mean", view.row_T, view.mask_T, 1)
    return aggregate(part.token_loss(view).loss_T, torch.where(correction.mask_T, coefficient, 0.0))


MASKS = [
    ({"tau": 0.04}, [1, 1, 0, 1, 0]),
    ({"tau": 0.04, "candidates": "all", "ratio": "theta"}, [1, 1, 1, 0, 0]),
    ({"tau": math.inf}, [1, 1, 1, 1, 1]),
    ({"tau": 0.0}, [0, 1, 0, 1, 0]),
    ({"tau": 0.0463}, [1, 1, 1, 1, 0]),  # the mean of .0025 and .09 is .04625
    ({"tau": 0.301}, [1, 1, 1, 1, 1]),
    ({"tau": 0.3008}, [1, 1, 1, 1, 0]),
    ({"tau": 0.0, "candidates": "all"}, [1, 0, 0, 0, 0]),  # the last candidate stays
    ({"tau": 0.04, "mode": "cap"}, [1, 1, 0, 1, 0]),
]


@pytest.mark.parametrize(("knobs", "expected"), MASKS)
def test_masks_of_the_worked_batch(knobs, expected):
    assert kept(M2PO(**knobs), view_of(D, A)) == expected


def test_the_objective_of_the_worked_batch_and_its_gradient():
    view = view_of(D, A)
    found = loss(M2PO(), view)
    assert -found.item() == pytest.approx(0.0267979, abs=1e-7)
    (gradient,) = torch.autograd.grad(found, view.logp)
    expected = [-a * math.exp(d) / 5 * m for d, a, m in zip(D, A, [1, 1, 0, 1, 0], strict=True)]
    assert gradient.tolist() == pytest.approx(expected, rel=1e-6)
    assert gradient[2] == gradient[4] == 0


def test_mask_and_cap_differ():
    moment, everyone = torch.tensor([0.0, 0.0, 0.1, 0.5]), torch.ones(4, dtype=torch.bool)
    assert budget_mask(moment, everyone, 0.04).tolist() == [True, True, True, False]
    assert cap_threshold(moment, everyone, 0.04) == 0
    view = view_of(moment.sqrt().tolist(), [1.0] * 4)
    assert kept(M2PO(mode="cap"), view) == [1, 1, 0, 0]


def test_a_lone_candidate_above_the_budget_falls_and_nothing_else():
    assert kept(M2PO(), view_of([0.5, -0.5, 0.5, 0.0], [1.0, 1.0, 0.0, -1.0])) == [0, 1, 1, 1]


def test_ties_fall_in_the_order_of_the_tokens():
    assert kept(M2PO(tau=0.06), view_of([0.3, 0.3, 0.1], [1.0, 1.0, 1.0])) == [0, 1, 1]


def test_on_policy_and_without_advantage_there_is_no_mask():
    assert kept(M2PO(tau=0.0), view_of([0.0] * 4, [1.0, -1.0, 1.0, 0.0])) == [1] * 4
    assert kept(M2PO(tau=0.0), view_of([0.7, -2.0], [0.0, 0.0])) == [1, 1]


def test_miniclip_widens_the_cap_on_its_side_only():
    view = view_of([0.3, 0.2, -0.3, -0.2, 0.01], [1.0, 1.0, -1.0, -1.0, 1.0])
    assert kept(M2PO(mode="cap", tau=0.001), view) == [0, 0, 0, 0, 1]
    assert kept(M2PO(mode="cap", tau=0.001, miniclip_high=0.25), view) == [0, 1, 0, 0, 1]
    assert kept(M2PO(mode="cap", tau=0.001, miniclip_low=0.26), view) == [0, 0, 1, 1, 1]


def test_prox_measures_the_gap_from_behaviour_to_the_proximal_policy():
    view = view_of([0.0] * 5, A, old=D)
    assert kept(M2PO(ratio="prox"), view) == [1, 1, 0, 1, 0]
    assert kept(M2PO(), view) == [1] * 5


NUMBERS = st.floats(-2, 2, width=32)
TOKENS = st.lists(st.tuples(NUMBERS, st.sampled_from([-1.0, 0.0, 1.0])), min_size=1, max_size=24)


@settings(max_examples=150, deadline=None)
@given(TOKENS, st.floats(0, 1))
def test_cap_keeps_a_part_of_mask_and_mask_meets_the_budget(tokens, tau):
    view = view_of(*map(list, zip(*tokens, strict=True)))
    mask, cap = kept(M2PO(tau=tau), view), kept(M2PO(tau=tau, mode="cap"), view)
    assert all(m >= c for m, c in zip(mask, cap, strict=True))
    left = [d * d for (d, a), m in zip(tokens, mask, strict=True) if d * a > 0 and m]
    assert not left or sum(left) / len(left) <= tau * (1 + 1e-9)
    assert all(m for (d, a), m in zip(tokens, mask, strict=True) if d * a <= 0)


@settings(max_examples=80, deadline=None)
@given(TOKENS, st.floats(0, 1), st.floats(0, 1))
def test_a_larger_budget_never_masks_more(tokens, first, second):
    view = view_of(*map(list, zip(*tokens, strict=True)))
    small, large = (kept(M2PO(tau=tau), view) for tau in sorted((first, second)))
    assert all(b >= a for a, b in zip(small, large, strict=True))


@settings(max_examples=80, deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=16, unique_by=abs), st.randoms())
def test_the_order_of_the_tokens_does_not_matter(d, random):
    order = list(range(len(d)))
    random.shuffle(order)
    straight = kept(M2PO(tau=0.2), view_of(d, [1.0] * len(d)))
    assert kept(M2PO(tau=0.2), view_of([d[i] for i in order], [1.0] * len(d))) == [straight[i] for i in order]


# ------------------------------------------------------------ in the learner


def stale(spread: float):
    """Groups whose behaviour log-probs are off from the policy's by turns."""
    model, groups = tiny_model(), random_groups()
    with torch.no_grad():
        for i, rollout in enumerate(flatten(groups)):
            gap = spread * torch.sin(torch.arange(rollout.length) + i)
            rollout.logprobs = (plain_logprobs(model, rollout) - gap).numpy()
    return model, groups


def gradient_norm(part, spread, budget=64, objective=None, correct=None):
    model, groups = stale(spread)
    learner = Learner(
        model,
        LearnerConfig(lr=1e-3, micro_batch_tokens=budget, grad_clip=0.0),
        objective=objective or part,
        correct=[part] if correct is None else correct,
        max_new_tokens=8,
    )
    result = learner.update(groups, ctx=context())
    return result, torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_mask_does_not_depend_on_micro_batches():
    found = [gradient_norm(M2PO(tau=0.2), 1.0, budget)[0].metrics for budget in (8, 1000)]
    assert found[0]["m2_masked"] > 0
    assert found[0]["m2_masked"] == found[1]["m2_masked"]
    assert found[0]["grad_norm"] == pytest.approx(found[1]["grad_norm"], rel=1e-4)


def test_on_policy_the_update_is_that_of_plain_clipping():
    ours, weights = gradient_norm(M2PO(), 0.0)
    plain, plain_weights = gradient_norm(None, 0.0, objective=Clip(), correct=[])
    assert ours.metrics["grad_norm"] == pytest.approx(plain.metrics["grad_norm"], rel=1e-5)
    assert torch.allclose(weights, plain_weights, atol=1e-5)


def test_without_a_budget_the_update_is_importance_weighted():
    with_budget = gradient_norm(M2PO(), 1.0)[0].metrics["grad_norm"]
    free = gradient_norm(M2PO(tau=math.inf), 1.0)[0].metrics
    assert free["m2_masked"] == 0
    assert free["grad_norm"] != pytest.approx(with_budget, rel=1e-3)


def test_the_recipe():
    paper = resolve("m2po", {"model": "smollm2-135m"})
    assert paper.one("objective") == M2PO()
    assert paper.parts["correct"][0] is paper.one("objective")
    assert paper.one("schedule").minibatches == 4
    areal = {"objective": "clip", "correct": {"part": "m2po", "ratio": "prox", "candidates": "all"}}
    assert resolve("m2po", areal).one("objective") == Clip()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"correct": []}, "must also stand in the slot 'correct'"),
        ({"objective": "clip"}, "must also stand in the slot 'objective'"),
        ({"objective.ratio": "prox"}, "only masks"),
        ({"objective.mode": "cap", "objective.candidates": "all"}, "outward with mode 'cap'"),
        ({"objective.miniclip_low": 0.3}, "0 unless mode is 'cap'"),
        ({"distill": "opd", "teacher": "pocket:teacher"}, "judges the sampled token"),
    ],
)
def test_what_does_not_fit_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        resolve("m2po", overrides)
