"""NAT: worked numbers, limits and invariants of its card (arithmetic recomputed by hand)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from builders import context, group, record
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import plain_logprobs, random_groups, tiny_model

from trimtab.core.config import LearnerConfig
from trimtab.core.recipe import resolve
from trimtab.core.records import flatten
from trimtab.filter.keep.nat import NAT, cutoff, prefix_probability
from trimtab.learn.batch import Batch
from trimtab.learn.learner import Learner
from trimtab.learn.objective.clip import Clip
from trimtab.run.trainer import apply_keep

C = torch.tensor([1.0, 2, 3, 4], dtype=torch.float64)
POSITION, LENGTH = torch.arange(1, 5), torch.full((4,), 4)

PREFIXES = [  # Lmin, p, estimates for every cutoff, variance, expected tokens
    (1, [1, 0.75, 0.5, 0.25], [1, 3.666667, 9.666667, 25.666667], 91.666667, 2.5),
    (2, [1, 1, 2 / 3, 1 / 3], [3, 7.5, 19.5], 48.5, 3.0),
]


@pytest.mark.parametrize(("least", "p", "estimates", "variance", "expected"), PREFIXES)
def test_every_cutoff_of_the_worked_response(least, p, estimates, variance, expected):
    probability = prefix_probability(POSITION, LENGTH, least)
    assert probability.tolist() == pytest.approx(p)
    found = torch.stack([(C / probability)[:cut].sum() for cut in range(least, 5)])
    assert found.tolist() == pytest.approx(estimates, abs=1e-6)
    assert found.mean().item() == pytest.approx(10, abs=1e-9)
    assert found.var(correction=0).item() == pytest.approx(variance, abs=1e-5)
    assert probability.sum().item() == pytest.approx(expected)


def test_independent_tokens_of_the_worked_response():
    draws = torch.tensor(list(itertools.product([0.0, 1.0], repeat=4)), dtype=torch.float64)
    found = (draws * C / 0.5).sum(-1)
    assert found.mean().item() == pytest.approx(10)
    assert found.var(correction=0).item() == pytest.approx(30) == C.square().sum().item()


def test_without_the_weights_the_estimate_is_biased():
    prefixes = [C[:cut] for cut in range(1, 5)]
    assert np.mean([p.sum() for p in prefixes]) == 5
    assert np.mean([p.mean() for p in prefixes]) == 1.75


def test_cutoffs_are_uniform():
    uniform = (torch.arange(400) + 0.5) / 400
    found = cutoff(uniform, torch.full((400,), 4), 1)
    assert found.bincount().tolist() == [0, 100, 100, 100, 100]
    assert cutoff(uniform, torch.full((400,), 4), 3).bincount().tolist() == [0, 0, 0, 200, 200]
    assert cutoff(uniform[:4], torch.tensor([0, 1, 2, 3]), 3).tolist() == [0, 1, 2, 3]


# ------------------------------------------------------------ the gradient


def gradient(groups, objective, budget=1000):
    """Gradient of the learner's loss, as the optimiser is given it."""
    model = tiny_model()
    learner = Learner(
        model,
        LearnerConfig(micro_batch_tokens=budget, grad_clip=0.0),
        objective=objective,
        max_new_tokens=8,
    )
    collected: list[torch.Tensor] = []
    plain = learner.optimiser.step

    def step():
        collected.extend(p.grad.flatten().clone() for p in model.parameters() if p.grad is not None)
        return plain()

    learner.optimiser.step = step
    result = learner.update(groups, ctx=context())
    return torch.cat(collected), result


class OffPolicy(Clip):
    """Clips against the behaviour policy, so that clipping is active on the first step."""

    def token_loss(self, view):
        view.old = view.behaviour
        return super().token_loss(view)


def clipped_groups():
    groups, model = random_groups(lengths=((3, 4),)), tiny_model()
    with torch.no_grad():
        for r in flatten(groups):
            r.logprobs = (plain_logprobs(model, r) - 0.6 * torch.sin(torch.arange(r.length) + 1)).numpy()
    return groups


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("how", ["seq-mean-token-mean", "token-mean"])
def test_the_average_over_all_cutoffs_is_the_full_gradient(least, how):
    objective = OffPolicy(aggregate=how)
    full, result = gradient(clipped_groups(), objective)
    assert 0 < result.metrics["clip_low"] + result.metrics["clip_high"] < 1
    total, draws = torch.zeros_like(full), list(itertools.product(range(least, 4), range(least, 5)))
    for cuts in draws:
        groups = clipped_groups()
        for r, cut in zip(flatten(groups), cuts, strict=True):
            position, length = torch.arange(1, r.length + 1), torch.full((r.length,), r.length)
            weight = (position <= cut) / prefix_probability(position, length, least)
            r.token_weight = weight.float().numpy()
        total += gradient(groups, objective)[0]
    assert torch.allclose(total / len(draws), full, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("part", [NAT(scheme="urs", q=1.0), NAT(min_prefix=64)])
def test_the_limits_are_full_training_to_the_bit(part):
    plain, cut = random_groups(), random_groups()
    apply_keep(flatten(cut), part.filter(cut, context()), "nat")
    assert torch.equal(gradient(plain, Clip())[0], gradient(cut, Clip())[0])


@pytest.mark.parametrize("scheme", ["rpc", "urs"])
@pytest.mark.parametrize("budget", [8, 1000])
def test_tails_are_not_computed_and_the_gradient_is_that_of_computing_them(scheme, budget):
    def whole_rows(self):
        return True

    groups = random_groups(lengths=((8, 7, 8), (6, 8, 5)))
    apply_keep(flatten(groups), NAT(scheme=scheme).filter(groups, context(seed=3)), "nat")
    reading = type("Reading", (Clip,), {"whole_rows": whole_rows})()
    short, result = gradient(groups, Clip(), budget)
    long, plain = gradient(groups, reading, budget)
    assert torch.allclose(short, long, atol=1e-6, rtol=1e-4)
    assert result.metrics["loss"] == pytest.approx(plain.metrics["loss"], abs=1e-6)
    assert result.forwarded_tokens < plain.forwarded_tokens
    kept = sum(int((r.token_weight != 0).sum()) for r in flatten(groups))
    assert result.trained_tokens == plain.trained_tokens == kept


def test_a_sequence_ratio_still_sees_all_tokens():
    groups = random_groups()
    apply_keep(flatten(groups), NAT().filter(groups, context()), "nat")
    seen = []

    class Spy(Clip):
        def token_loss(self, view):
            seen.append(len(view.logp))
            return super().token_loss(view)

    gradient(groups, Spy(ratio="sequence"))
    assert seen == [sum(r.length for r in flatten(groups))]


def test_kept_tokens_have_the_same_log_probs_on_the_cut_rows():
    groups, model = random_groups(lengths=((8, 6), (7,))), tiny_model()
    for r in flatten(groups):
        r.token_weight = np.concatenate([np.ones(3), np.zeros(r.length - 3)])
    learner = Learner(model, LearnerConfig(), objective=Clip(), max_new_tokens=8)
    batch = Batch.from_groups(groups)
    found = learner.sampled_logprobs(model, batch.without_tails().rows, np.arange(3))
    with torch.no_grad():
        full = torch.cat([plain_logprobs(model, r) for r in flatten(groups)])
    live = batch.weight_T != 0
    assert torch.allclose(found[live], full[live], atol=1e-5)
    assert (found[~live] == 0).all()


# ------------------------------------------------------------ the draw


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.integers(1, 12), st.integers(0, 99))
def test_prefixes_have_weights_within_their_bounds(lengths, least, seed):
    groups = [group([1.0] * len(lengths), lengths)]
    weights = NAT(min_prefix=least).filter(groups, context(seed=seed)).token_weight
    for length, weight in zip(lengths, weights, strict=True):
        kept = weight != 0
        cut = int(kept.sum())
        assert kept[:cut].all()
        assert cut >= min(length, least)
        assert (weight[:cut] >= 1).all()
        assert (weight <= max(1, length - least + 1) * (1 + 1e-6)).all()


def test_independent_tokens_have_equal_weights_and_a_response_may_keep_none():
    groups = [group([1.0] * 400, [3] * 400)]
    for i, r in enumerate(groups[0].rollouts):
        r.sample = i
    weights = NAT(scheme="urs", q=0.25).filter(groups, context()).token_weight
    assert set(np.concatenate(weights).tolist()) == {0.0, 4.0}
    assert 0.30 < np.mean([not w.any() for w in weights]) < 0.54  # 0.75 ** 3 = 0.42


@pytest.mark.parametrize("part", [NAT(), NAT(min_prefix=20), NAT(scheme="urs", q=0.3)])
def test_the_reported_budget_is_the_mean_of_the_draw(part):
    groups = [group([1.0] * 600, [10 + i % 50 for i in range(600)])]
    for i, r in enumerate(groups[0].rollouts):
        r.sample = i
    keep = part.filter(groups, context())
    part.observe(record(groups), context())
    metrics = part.metrics()
    weights = np.concatenate(keep.token_weight)
    assert metrics["kept_share"] == pytest.approx((weights != 0).mean())
    assert metrics["kept_share"] == pytest.approx(metrics["expected_share"], abs=0.04)
    assert weights.mean() == pytest.approx(1, abs=0.12)


@pytest.mark.parametrize("scheme", ["rpc", "urs"])
def test_a_draw_depends_on_seed_step_and_rollout_alone(scheme):
    part, groups = NAT(scheme=scheme), [group([1.0, 0.0], [5000, 5000], name=n) for n in "ab"]
    for made in groups:
        for i, r in enumerate(made.rollouts):
            r.sample = i
    together = part.filter(groups, context()).token_weight
    alone = part.filter(groups[1:], context()).token_weight
    assert [w.tolist() for w in together[2:]] == [w.tolist() for w in alone]
    assert len({tuple(w.tolist()) for w in together}) == 4
    for other in (context(seed=1), context(step=1)):
        assert part.filter(groups, other).token_weight[0].tolist() != together[0].tolist()


def test_the_recipe():
    paper = resolve("nat", {"model": "smollm2-135m"})
    assert paper.parts["filter"] == [NAT()]
    assert resolve("nat", {"filter.scheme": "urs"}).parts["filter"][0].q == 0.5
