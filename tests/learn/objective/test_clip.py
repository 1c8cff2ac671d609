from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.core.errors import ConfigError
from trimtab.core.recipe import resolve
from trimtab.core.slots import TokenView
from trimtab.learn.objective.clip import Clip, kl_estimate, sequence_ratio, sequence_token_ratio, surrogate, token_ratio


def view(logp, old, advantage, mask=None, row=None, **fields) -> TokenView:
    logp, old, advantage = (torch.as_tensor(x, dtype=torch.float64) for x in (logp, old, advantage))
    count = len(logp)
    return TokenView(
        logp=logp.requires_grad_(),
        old=old,
        advantage=advantage,
        behaviour=old if old.ndim == 1 else old[:, 0],
        row_T=torch.as_tensor(row if row is not None else [0] * count),
        num_rows=(max(row) + 1) if row else 1,
        mask_T=torch.as_tensor(mask if mask is not None else [True] * count),
        **fields,
    )


def gradient(part: Clip, seen: TokenView) -> torch.Tensor:
    (found,) = torch.autograd.grad(part.token_loss(seen).loss_T.sum(), seen.logp)
    return found


NUMBERS = st.floats(-1, 1, width=32)


@settings(max_examples=50, deadline=None)
@given(
    logp=st.lists(NUMBERS, min_size=1, max_size=8),
    level=st.sampled_from(["token", "sequence", "sequence-token"]),
    eps=st.tuples(st.floats(0, 1, width=32), st.floats(0, 3, width=32)),
    c=st.sampled_from([0.0, 3.0]),
)
def test_at_the_old_policy_the_gradient_is_reinforce_for_every_clip_range(logp, level, eps, c):
    advantage = torch.linspace(-1, 1, len(logp), dtype=torch.float64)
    if level == "sequence":  # its gradient spreads over the row, so the advantage must not vary inside it
        advantage = torch.full_like(advantage, 0.7)
    part = Clip(ratio=level, eps_low=eps[0], eps_high=eps[1], dual_clip=c)
    found = gradient(part, view(logp, logp, advantage))
    assert torch.allclose(found, -advantage, rtol=1e-12)


def test_sequence_and_sequence_token_agree_in_value_and_in_the_gradient_of_a_constant_advantage():
    args = ([-1.0, -2.0, -0.5, -1.5], [-1.1, -1.9, -0.6, -1.5], [0.5, 0.5, -1.0, -1.0])
    rows = [0, 0, 1, 1]
    found = {}
    for level in ("sequence", "sequence-token"):
        part = Clip(ratio=level, eps_low=0.5, eps_high=0.5)
        seen = view(*args, row=rows)
        found[level] = part.token_loss(seen).loss_T.detach(), gradient(part, seen)
    assert torch.equal(found["sequence"][0], found["sequence-token"][0])
    # per row the loss of the sequence form is L copies of one number, each with 1 / L of the gradient of every token
    assert torch.allclose(found["sequence"][1], found["sequence-token"][1])


def test_a_masked_token_has_no_part_in_a_sequence_ratio_and_no_gradient_whatever_it_holds():
    seen = view([-1.0, math.nan, -2.0], [-1.5, -1.0, -2.5], [1.0, 1.0, 1.0], mask=[True, False, True])
    part = Clip(ratio="sequence", eps_high=1.0)
    loss = part.token_loss(seen).loss_T
    assert loss[0].item() == pytest.approx(-math.exp(0.5))
    assert gradient(part, seen)[1] == 0


@pytest.mark.parametrize("level", ["token", "sequence-token"])
def test_garbage_at_a_masked_token_reaches_neither_loss_nor_gradient(level):
    nan = math.nan
    seen = view(
        [-1.0, -1.0, -2.0],
        [-1.5, nan, -2.5],
        [1.0, 1.0, 1.0],
        mask=[True, False, True],
        reference=torch.tensor([-1.0, nan, -1.0], dtype=torch.float64),
    )
    part = Clip(ratio=level, eps_high=1.0, kl_coef=0.1)
    found = part.token_loss(seen)
    assert found.loss_T.isfinite().all()
    assert found.logged["kl"][1] == 0
    slope = gradient(part, seen)
    assert slope.isfinite().all()
    assert slope[1] == 0


def test_sequence_token_gives_each_token_its_own_gradient():
    difference = torch.tensor([0.1, -0.3, 0.2], dtype=torch.float64, requires_grad=True)
    row, mask = torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool)
    ratio = sequence_token_ratio(difference, row, 1, mask)
    assert torch.equal(ratio, sequence_ratio(difference, row, 1, mask))
    (found,) = torch.autograd.grad(ratio[1], difference)
    assert found.tolist() == [0.0, ratio[1].item(), 0.0]


@pytest.mark.parametrize(
    ("w", "advantage", "zero"),
    [(1.5, 1.0, True), (1.5, -1.0, False), (0.5, 1.0, False), (0.5, -1.0, True), (1.1, 1.0, False), (0.9, -1.0, False)],
)
def test_where_the_clip_cuts_the_gradient(w, advantage, zero):
    found = gradient(Clip(), view([math.log(w)], [0.0], [advantage]))
    assert (found.item() == 0) is zero
    if not zero:
        assert found.item() == pytest.approx(-advantage * w)


def test_dual_clip_and_delta_cut_the_gradient_of_very_large_ratios():
    assert gradient(Clip(), view([math.log(5)], [0.0], [-1.0])).item() == pytest.approx(5)
    assert gradient(Clip(dual_clip=3.0), view([math.log(5)], [0.0], [-1.0])).item() == 0
    assert gradient(Clip(delta=4.0), view([math.log(5)], [0.0], [-1.0])).item() == 0
    assert gradient(Clip(delta=4.0), view([math.log(2)], [0.0], [-1.0])).item() == pytest.approx(2)


def test_ratios_stay_finite_for_absurd_log_probs():
    assert token_ratio(torch.tensor([1e4, -1e4])).log().tolist() == pytest.approx([20.0, -20.0])
    row, mask = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
    assert sequence_ratio(torch.tensor([1e4, 1e4]), row, 1, mask).log().tolist() == pytest.approx([10.0, 10.0])
    assert kl_estimate(torch.tensor([-1e4]), torch.tensor([0.0]), "k3").tolist() == [10.0]


def test_candidates_have_their_own_ratio_and_are_summed():
    logp, old, advantage = [[-1.0, -2.0], [-0.5, -3.0]], [[-1.2, -2.0], [-0.5, -2.0]], [[1.0, -1.0], [0.0, 0.5]]
    loss = Clip().token_loss(view(logp, old, advantage)).loss_T
    flat = surrogate(
        token_ratio(torch.tensor(logp) - torch.tensor(old)).flatten(), torch.tensor(advantage).flatten(), 0.2, 0.2
    )
    assert loss.tolist() == pytest.approx(flat.view(2, 2).sum(-1).tolist(), rel=1e-6)


def test_one_candidate_is_the_sampled_form():
    logp, old, advantage = [-1.0, -2.0, -0.1], [-1.5, -1.9, -0.1], [1.0, -0.5, 0.3]
    plain = Clip(dual_clip=3.0).token_loss(view(logp, old, advantage))
    wide = Clip(dual_clip=3.0).token_loss(view(*(torch.tensor(x)[:, None] for x in (logp, old, advantage))))
    assert torch.allclose(plain.loss_T, wide.loss_T, rtol=1e-7)
    assert set(plain.logged) == set(wide.logged)


def test_the_kl_is_added_once_a_token_and_only_with_a_coefficient():
    logp, old, reference = [-1.0, -2.0], [-1.0, -2.0], torch.tensor([-1.5, -1.0], dtype=torch.float64)
    without = Clip().token_loss(view(logp, old, [1.0, 1.0], reference=reference))
    part = Clip(kl_coef=0.1, kl="k3")
    found = part.token_loss(view(logp, old, [1.0, 1.0], reference=reference))
    expected = kl_estimate(torch.tensor(logp, dtype=torch.float64), reference, "k3")
    assert torch.allclose(found.loss_T - without.loss_T, 0.1 * expected)
    assert torch.equal(found.logged["kl"], expected)
    assert "kl" not in without.logged
    assert part.needs().reference
    assert not Clip().needs().reference


def test_with_candidates_the_kl_reads_the_sampled_token():
    sampled = torch.tensor([-0.7], dtype=torch.float64, requires_grad=True)
    seen = view([[-1.0, -2.0]], [[-1.0, -2.0]], [[0.0, 0.0]], reference=torch.tensor([-0.2]), sampled_logp=sampled)
    loss = Clip(kl_coef=1.0, kl="k2").token_loss(seen).loss_T
    assert loss.item() == pytest.approx(0.125)
    assert torch.autograd.grad(loss.sum(), sampled)[0].item() == pytest.approx(-0.5)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"), [("k2", "k2", 0.5), ("k3", "k3", 1 - math.exp(-0.5)), ("k3+", "k3", 0.5)]
)
def test_k3_plus_has_the_value_of_k3_and_the_gradient_of_k2(estimator, value, slope):
    logp, reference = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True), torch.tensor([-1.5])
    found = kl_estimate(logp, reference, estimator)
    assert found.item() == pytest.approx(kl_estimate(logp, reference, value).item())
    assert torch.autograd.grad(found.sum(), logp)[0].item() == pytest.approx(slope)


def test_expected_gradient_of_k2_is_that_of_the_kl_and_of_k1_is_zero():
    logits = torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.0, 0.5, -0.5], dtype=torch.float64), -1)
    logp = torch.log_softmax(logits, -1)
    p = logp.exp().detach()
    (true,) = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits, retain_graph=True)
    for estimator, expected in (("k2", true), ("k3+", true), ("k1", torch.zeros(3, dtype=torch.float64))):
        loss = (p * kl_estimate(logp, reference, estimator)).sum()
        (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
        assert torch.allclose(found, expected, atol=1e-12), estimator


def test_logged_shares():
    w = [0.5, 0.5, 1.0, 1.5, 1.5]
    advantage = [1.0, -1.0, 1.0, 1.0, -1.0]
    logged = Clip().token_loss(view([math.log(x) for x in w], [0.0] * 5, advantage)).logged
    assert logged["clip_low"].tolist() == [0, 1, 0, 0, 0]
    assert logged["clip_high"].tolist() == [0, 0, 0, 1, 0]
    assert logged["ratio"].tolist() == pytest.approx(w)
    assert not any(value.requires_grad for value in logged.values())


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"dual_clip": 0.5}, "objective.dual_clip: 0.5 .* above 1"),
        ({"delta": 1.1}, "objective.delta: 1.1 .* above 1 \\+ eps_high"),
        ({"constant": 8.0}, "objective.constant: 8.0"),
        ({"eps_low": 1.5}, "eps_low: 1.5 .* <= 1"),
        ({"ratio": "sequenc"}, "'sequenc'.*Did you mean 'sequence'"),
    ],
)
def test_bad_knobs_are_named(knobs, message):
    with pytest.raises(ConfigError, match=message):
        Clip(**knobs)


def test_a_sequence_ratio_with_candidates_is_refused():
    with pytest.raises(ConfigError, match=r"objective.ratio: 'sequence'.*'opd'.*token"):
        resolve("opd", {"objective.ratio": "sequence"})
    resolve("opd", {"objective.ratio": "sequence", "distill.variant": "sampled"})


def test_the_constant_of_the_aggregation():
    assert Clip().aggregation() == ("token-mean", None)
    assert Clip(aggregate="constant").aggregation() == ("constant", None)
    assert Clip(aggregate="constant", constant=8.0).aggregation() == ("constant", 8.0)
