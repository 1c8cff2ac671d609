"""Divergence masks: worked numbers, limits and invariants of their card (arithmetic recomputed by hand)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from builders import context
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import VOCAB, distributions, random_groups, tiny_model

from trimtab.core.config import LearnerConfig
from trimtab.core.errors import ConfigError, DataError
from trimtab.core.recipe import resolve
from trimtab.core.records import flatten
from trimtab.core.slots import TokenView, TopK
from trimtab.learn.learner import Learner
from trimtab.learn.objective.divergence_mask import (
    DivergenceMask,
    binary_divergence,
    predicted_change,
    states,
    topk_divergence,
)

MU, PI = [0.5, 0.3, 0.15, 0.05], [0.30, 0.45, 0.20, 0.05]
MU_TAIL, PI_TAIL = [0.60, 0.20, 0.15, 0.05], [0.35, 0.40, 0.17, 0.08]


def scores(mu, pi, sampled, k) -> TopK:
    """One state, seen at each of the ``sampled`` tokens."""
    mu_V, pi_V = torch.tensor(mu).log(), torch.tensor(pi).log()
    value, ids = mu_V.topk(k)
    n = len(sampled)
    return TopK(ids.expand(n, k), value.expand(n, k), pi_V[ids].expand(n, k), torch.tensor(sampled), len(mu))


def state_of(mu, pi, sampled, k):
    topk = scores(mu, pi, sampled, k)
    return states(topk, k, torch.tensor(mu).log()[topk.token_T], torch.tensor(pi).log()[topk.token_T])


def view_of(mu, pi, sampled, advantage, k=20) -> TokenView:
    topk = scores(mu, pi, sampled, min(k, len(mu)))
    logp = torch.tensor(pi).log()[topk.token_T].requires_grad_()
    n = len(sampled)
    return TokenView(
        logp=logp,
        old=logp.detach(),
        advantage=torch.tensor(advantage, dtype=torch.float32),
        behaviour=torch.tensor(mu).log()[topk.token_T],
        row_T=torch.zeros(n, dtype=torch.int64),
        num_rows=1,
        mask_T=torch.ones(n, dtype=torch.bool),
        topk=topk,
    )


def masked(part, view) -> list[int]:
    return part.token_loss(view).logged["divergence_masked"].int().tolist()


def gradient(part, view) -> list[float]:
    return torch.autograd.grad(part.token_loss(view).loss_T.sum(), view.logp)[0].tolist()


def test_the_worked_state_over_the_full_vocabulary():
    s = state_of(MU, PI, [0, 1, 2, 3], 4)
    assert topk_divergence(s, "topk-kl").tolist() == pytest.approx([0.0906210] * 4, abs=1e-6)
    assert topk_divergence(s, "topk-tv").tolist() == pytest.approx([0.2] * 4, abs=1e-6)
    for how in ("aggregated", "uniform"):
        assert predicted_change(s, how).tolist() == pytest.approx([-0.2175, 0.1325, 0.0325, -0.0175], abs=1e-6)


def test_the_predicted_change_is_the_derivative_along_the_tokens_own_step():
    mu, pi = torch.tensor(MU, dtype=torch.float64), torch.tensor(PI, dtype=torch.float64)

    def divergence(z):
        return (mu * (mu.log() - torch.log_softmax(z, -1))).sum()

    found = [
        (divergence(pi.log() + 1e-4 * (torch.eye(4, dtype=torch.float64)[k] - pi)) - divergence(pi.log())).item() / 1e-4
        for k in range(4)
    ]
    assert found == pytest.approx([-0.217488, 0.132508, 0.032511, -0.017495], abs=1e-6)
    assert predicted_change(state_of(MU, PI, [0, 1, 2, 3], 4), "uniform").tolist() == pytest.approx(found, abs=2e-5)


def test_where_the_directions_disagree():
    predictive = DivergenceMask(delta_low=0.05, delta_high=0.05)
    dppo = DivergenceMask(delta_low=0.05, delta_high=0.05, direction="ratio")
    view = view_of(MU, PI, [3, 3], [-1, 1])
    assert masked(predictive, view) == [1, 0]
    assert masked(dppo, view) == [0, 0]


TAILS = [  # K, sampled -> side term, aggregated and uniform
    (2, 0, -0.0050, 0.00125),
    (2, 1, -0.0050, 0.00125),
    (3, 0, 0.0017, 0.0017),
    (2, 2, 0.0017, 0.0017),  # the sampled token joins the top 2
    (4, 3, 0.0017, 0.0017),
]


@pytest.mark.parametrize(("k", "sampled", "aggregated", "uniform"), TAILS)
def test_the_tail_of_the_top_k(k, sampled, aggregated, uniform):
    s = state_of(MU_TAIL, PI_TAIL, [sampled], k)
    local = PI_TAIL[sampled] - MU_TAIL[sampled]
    assert predicted_change(s, "aggregated").item() - local == pytest.approx(aggregated, abs=1e-6)
    assert predicted_change(s, "uniform").item() - local == pytest.approx(uniform, abs=1e-6)


@pytest.mark.parametrize(("k", "expected"), [(2, 0.140140), (4, 0.142494)])
def test_the_tail_bucket_never_raises_the_divergence(k, expected):
    found = topk_divergence(state_of(MU_TAIL, PI_TAIL, [0], k), "topk-kl")
    assert found.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("mu", "pi", "tv", "kl", "ratio"), [(0.001, 0.003, 0.002, 0.000903, 3), (0.9, 0.7, 0.2, 0.1163, 0.778)]
)
@pytest.mark.parametrize("advantage", [1, -1])
def test_binary_divergences(mu, pi, tv, kl, ratio, advantage):
    assert binary_divergence(torch.tensor(mu), torch.tensor(pi), "binary-tv").item() == pytest.approx(tv, abs=1e-6)
    assert binary_divergence(torch.tensor(mu), torch.tensor(pi), "binary-kl").item() == pytest.approx(kl, abs=5e-5)
    view = view_of([mu, 1 - mu], [pi, 1 - pi], [0], [advantage])
    for part in (
        DivergenceMask(divergence="binary-tv", direction="ratio"),
        DivergenceMask(divergence="binary-kl", direction="ratio", delta_low=0.05, delta_high=0.05),
    ):
        assert masked(part, view) == [int(mu == 0.9 and advantage < 0)]
        assert part.token_loss(view).logged["ratio"].item() == pytest.approx(ratio, abs=1e-3)


def test_the_bounds_hold_for_their_own_sign():
    view = view_of(MU, PI, [1, 0], [1, -1])
    tv = {"divergence": "topk-tv", "direction": "ratio"}
    assert masked(DivergenceMask(**tv, delta_high=0.1, delta_low=0.3), view) == [1, 0]
    assert masked(DivergenceMask(**tv, delta_high=0.3, delta_low=0.1), view) == [0, 1]


def test_gradient_flows_through_the_log_prob_alone_and_not_at_masked_tokens():
    part = DivergenceMask(delta_low=0.05, delta_high=0.05, cap=1.2)
    view = view_of(MU, PI, [0, 1, 2, 3], [1, 1, -2, 1])
    assert masked(part, view) == [0, 1, 0, 0]
    assert gradient(part, view) == pytest.approx([-0.6, 0, 2 * 1.2, -1], abs=1e-6)  # ratios 0.6, 1.5, 1.333, 1


def test_the_other_sign_masks_the_other_tokens():
    part = DivergenceMask(delta_low=0.05, delta_high=0.05)
    plus, minus = (masked(part, view_of(MU, PI, [0, 1, 2, 3], [a] * 4)) for a in (1, -1))
    assert [p + m for p, m in zip(plus, minus, strict=True)] == [1] * 4


def test_without_a_bound_and_on_policy_it_is_the_plain_policy_gradient():
    view = view_of(MU, PI, [0, 1, 2], [1, -1, 1])
    assert gradient(DivergenceMask(delta_low=math.inf, delta_high=math.inf), view) == pytest.approx(
        [-0.6, 1.5, -4 / 3], abs=1e-6
    )
    view = view_of(MU, MU, [0, 1, 2], [1, -1, 0])
    part = DivergenceMask(delta_low=0.0, delta_high=0.0, direction="ratio")
    assert masked(part, view) == [0] * 3
    assert gradient(part, view) == [-1, 1, 0]


def test_masked_or_infinite_places_do_not_reach_the_gradient():
    view = view_of(MU, PI, [0, 1], [1, 1])
    view.mask_T = torch.tensor([True, False])
    view.behaviour = torch.tensor([view.behaviour[0], math.nan])
    assert gradient(DivergenceMask(), view) == pytest.approx([-0.6, 0.0])


SIMPLEX = st.lists(st.floats(0.01, 1), min_size=6, max_size=6).map(lambda x: [v / sum(x) for v in x])


@settings(max_examples=80, deadline=None)
@given(SIMPLEX, SIMPLEX, st.integers(1, 6))
def test_the_expected_step_leaves_the_divergence_alone(mu, pi, k):
    s = state_of(mu, pi, list(range(6)), 6)
    assert (torch.tensor(pi) * predicted_change(s, "aggregated")).sum().item() == pytest.approx(0, abs=1e-6)
    partial = state_of(mu, pi, list(range(6)), k)
    for kind in ("topk-kl", "topk-tv"):
        assert (topk_divergence(partial, kind) <= topk_divergence(s, kind) + 1e-5).all()


# ------------------------------------------------------------ in the learner


def learner_of(part, model=None, budget=64):
    config = LearnerConfig(lr=1e-3, micro_batch_tokens=budget)
    return Learner(model or tiny_model(), config, objective=part, max_new_tokens=8)


def recorded(k=3, other=1):
    """Groups sampled (as far as log-probs go) by another model than the learner's."""
    groups, engine = random_groups(), tiny_model(other)
    with torch.no_grad():
        for rollout in flatten(groups):
            full = distributions(engine, rollout)
            value, ids = full.topk(k)
            rollout.logprobs = full.gather(1, torch.from_numpy(rollout.tokens)[:, None])[:, 0].numpy()
            rollout.signals = {"topk_ids": ids.numpy(), "topk_logprobs": value.numpy()}
    return groups


@pytest.mark.parametrize("budget", [8, 1000])
@pytest.mark.parametrize("epochs", [1, 2])
def test_the_learner_shows_the_current_log_probs_of_the_rollouts_top_k(budget, epochs):
    seen: list[TokenView] = []

    class Spy(DivergenceMask):
        def token_loss(self, view):
            seen.append(view)
            return super().token_loss(view)

    model, groups = tiny_model(), recorded()
    with torch.no_grad():
        expected = {
            r.tokens.tobytes(): distributions(model, r).gather(1, torch.from_numpy(r.signals["topk_ids"]))
            for r in flatten(groups)
        }
    learner_of(Spy(k=3), model, budget).update(groups, epochs=epochs, ctx=context())
    checked = 0
    for view in seen[: len(seen) // epochs]:
        assert view.topk is not None
        assert view.topk.vocab_size == VOCAB
        assert not view.topk.logp.requires_grad
        for row in range(view.num_rows):
            at = view.row_T == row
            want = expected[view.topk.token_T[at].numpy().astype(np.int64).tobytes()]
            assert torch.allclose(view.topk.logp[at], want, atol=1e-5)
            checked += 1
    assert checked == len(expected)


def test_a_full_top_k_gives_the_exact_rule():
    exact = learner_of(DivergenceMask(k=VOCAB)).update(recorded(VOCAB), ctx=context()).metrics
    assert 0 < exact["divergence_masked"] < 1
    groups, model, total = recorded(VOCAB), tiny_model(), []
    with torch.no_grad():
        for rollout in flatten(groups):
            mu = distributions(tiny_model(1), rollout)
            total.append((mu.exp() * (mu - distributions(model, rollout))).sum(-1))
    assert exact["divergence"] == pytest.approx(torch.cat(total).mean().item(), rel=1e-4)


def test_rollouts_without_top_k_are_refused():
    with pytest.raises(DataError, match="signal 'topk_ids' is missing"):
        learner_of(DivergenceMask()).update(random_groups(), ctx=context())
    binary = DivergenceMask(divergence="binary-kl", direction="ratio")
    assert learner_of(binary).update(random_groups(), ctx=context()).outcome == "updated"


def test_the_recipes():
    paper = resolve("divergence-mask", {"model": "smollm2-135m"})
    assert paper.one("objective") == DivergenceMask()
    assert paper.needs().topk == 20
    dppo = resolve("dppo")
    assert dppo.one("objective") == DivergenceMask(divergence="binary-tv", direction="ratio")
    assert dppo.needs().topk == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"objective.divergence": "binary-tv"}, "topk-kl with direction 'predictive'"),
        ({"distill": "opd", "teacher": "pocket:teacher"}, "trains on several candidates"),
    ],
)
def test_what_does_not_fit_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        resolve("divergence-mask", overrides)
