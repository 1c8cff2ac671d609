"""On-policy distillation: worked numbers and gradient identities of its card, checked by autograd.

p = (.5, .3, .15, .05) is the student, q = (.6, .1, .25, .05) the teacher, on one position with four words.
"""

from __future__ import annotations

import pytest
import torch

from trimtab.core.recipe import resolve
from trimtab.core.slots import DistillView, TokenView
from trimtab.learn.aggregate import aggregate, token_coefficients
from trimtab.learn.distill.opd import OPD, forward_kl, kl, supervised
from trimtab.learn.objective.clip import Clip

P = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64)
Q = torch.tensor([[0.6, 0.1, 0.25, 0.05]], dtype=torch.float64)
FULL_GRADIENT = [-0.172060, 0.281044, -0.100894, -0.008090]
TOLERANCE = 1e-6


def view(k: int, token: int = 0) -> DistillView:
    """The position, with ``token`` sampled."""
    student, teacher = P.log(), Q.log()
    student_logp, student_ids = student.topk(k)
    teacher_logp, teacher_ids = teacher.topk(k)
    return DistillView(
        token_T=torch.tensor([token]),
        row_T=torch.tensor([0]),
        num_rows=1,
        old_T=student[:, token],
        teacher_T=teacher[:, token],
        student_ids=student_ids,
        student_logp=student_logp,
        teacher_on_student=teacher.gather(1, student_ids),
        teacher_ids=teacher_ids,
        teacher_logp=teacher_logp,
    )


def logits() -> torch.Tensor:
    return P.log().requires_grad_()


def candidate_gradient(part: OPD, k: int) -> torch.Tensor:
    """Gradient on the logits of a ``topk`` update at p_theta = p_old, through the objective."""
    seen, leaf = view(k), logits()
    ids = part.candidates(seen)
    logp = torch.log_softmax(leaf, -1).gather(1, ids)
    advantage = part.candidate_advantage(seen, ids, logp.detach())
    assert advantage is not None
    mask = torch.tensor([True])
    loss = (
        Clip(dual_clip=3.0)
        .token_loss(TokenView(logp, logp.detach(), advantage, seen.old_T, seen.row_T, 1, mask))
        .loss_T.sum()
    )
    return torch.autograd.grad(loss, leaf)[0][0]


def expected_gradient(loss_of) -> torch.Tensor:
    """Gradient of sum_y p(y) loss(y) with p(y) held fixed: the mean sampled update."""
    leaf = logits()
    logp = torch.log_softmax(leaf, -1)
    loss = sum(P[0, y] * loss_of(y, logp[:, y]) for y in range(4))
    return torch.autograd.grad(loss.sum(), leaf)[0][0]


def test_the_two_divergences():
    assert kl(P.log(), Q.log()).item() == pytest.approx(0.161799, abs=TOLERANCE)
    assert kl(Q.log(), P.log()).item() == pytest.approx(0.127238, abs=TOLERANCE)
    assert OPD(variant="full").full_loss(P.log(), Q.log()).item() == pytest.approx(0.161799, abs=TOLERANCE)
    assert OPD(variant="full", jsd_beta=0.0).full_loss(P.log(), Q.log()).item() == pytest.approx(
        0.127238, abs=TOLERANCE
    )


def test_sampled_rewards():
    found = [OPD(variant="sampled").token_advantage(view(1, token)).item() for token in range(4)]
    assert found == pytest.approx([0.182322, -1.098612, 0.510826, 0.0], abs=TOLERANCE)
    doubled = [OPD(variant="sampled", beta_kl=2.0).token_advantage(view(1, token)).item() for token in range(4)]
    assert doubled == pytest.approx([2 * x for x in found])


def test_topk_of_two():
    part, seen = OPD(k=2), view(2)
    ids = part.candidates(seen)
    assert ids.tolist() == [[0, 1]]
    found = part.candidate_advantage(seen, ids, P.log().gather(1, ids))
    assert found.tolist()[0] == pytest.approx([0.113951, -0.411980], abs=TOLERANCE)
    expected = [-0.262965, 0.322571, -0.044704, -0.014901]
    assert candidate_gradient(part, 2).tolist() == pytest.approx(expected, abs=TOLERANCE)


def test_full_gradient_and_topk_over_the_whole_vocabulary_equals_it():
    leaf = logits()
    loss = OPD(variant="full").full_loss(torch.log_softmax(leaf, -1), Q.log())
    found = torch.autograd.grad(loss.sum(), leaf)[0][0]
    assert found.tolist() == pytest.approx(FULL_GRADIENT, abs=TOLERANCE)
    for strategy in ("only_stu", "only_tch", "intersection", "union"):
        assert torch.allclose(candidate_gradient(OPD(k=4, strategy=strategy), 4), found, atol=1e-12), strategy


def test_expected_gradients_of_the_sampled_estimators():
    part = OPD(variant="sampled")
    found = {
        "k1 as reward": expected_gradient(lambda y, logp: -part.token_advantage(view(1, y)) * logp),
        "k2": expected_gradient(lambda y, logp: supervised(logp, Q.log()[:, y], "k2")),
        "k3": expected_gradient(lambda y, logp: supervised(logp, Q.log()[:, y], "k3")),
        "k1 supervised": expected_gradient(lambda y, logp: logp - Q.log()[:, y]),
    }
    assert found["k1 as reward"].tolist() == pytest.approx(FULL_GRADIENT, abs=TOLERANCE)
    assert found["k2"].tolist() == pytest.approx(FULL_GRADIENT, abs=TOLERANCE)
    assert found["k3"].tolist() == pytest.approx((P - Q)[0].tolist(), abs=TOLERANCE)
    assert found["k1 supervised"].abs().max() < 1e-12  # why k1 must never be a loss


def test_the_supervised_variants_are_these_losses_on_the_sampled_token():
    for variant, expected in (("k2", 0.5 * 1.098612**2), ("k3", 1 / 3 + 1.098612 - 1)):
        part, seen = OPD(variant=variant), view(1, token=1)
        ids = part.candidates(seen)
        assert ids.tolist() == [[1]]
        assert part.candidate_advantage(seen, ids, P.log().gather(1, ids)) is None
        assert part.candidate_loss(seen, ids, P.log().gather(1, ids)).item() == pytest.approx(expected, abs=TOLERANCE)


def test_tail_with_the_students_top_two():
    part, seen = OPD(variant="tail", k=2), view(2)
    ids = part.candidates(seen)
    found = part.candidate_loss(seen, ids, P.log().gather(1, ids)).item()
    assert found == pytest.approx(0.157330, abs=TOLERANCE)
    assert found <= 0.161799


def test_forward_kl_over_the_teachers_top_two():
    part, seen = OPD(variant="forward_kl_topk", k=2), view(2)
    ids = part.candidates(seen)
    assert ids.tolist() == [[0, 2]]
    assert part.candidate_loss(seen, ids, P.log().gather(1, ids)).item() == pytest.approx(0.237099, abs=TOLERANCE)
    assert forward_kl(Q.log(), P.log().minimum(Q.log())).item() == 0.0  # clamped: a part of a sum may be negative


def test_discounted_advantages():
    reward = torch.tensor([-0.1, 0.2, -0.3], dtype=torch.float64)
    seen = view(1)
    seen.old_T, seen.teacher_T, seen.row_T = torch.zeros(3, dtype=torch.float64), reward, torch.tensor([0, 0, 0])
    found = OPD(variant="sampled", gamma=0.5).token_advantage(seen)
    assert found.tolist() == pytest.approx([-0.075, 0.05, -0.3], abs=TOLERANCE)
    assert torch.equal(OPD(variant="sampled").token_advantage(seen), reward)


@pytest.mark.parametrize(("name", "expected"), [("token-mean", -0.316667), ("seq-mean-token-mean", -0.275)])
def test_aggregation_of_two_responses(name, expected):
    loss, row = torch.tensor([-0.1, -0.2] + [-0.4] * 4), torch.tensor([0] * 2 + [1] * 4)
    coefficient = token_coefficients(name, row, torch.ones(6, dtype=torch.bool), 2)
    assert aggregate(loss, coefficient).item() == pytest.approx(expected, abs=TOLERANCE)


def test_masked_tokens_have_exactly_no_gradient():
    leaf = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    loss = OPD(variant="full").full_loss(torch.log_softmax(leaf, -1), Q.log().expand(3, 4))
    mask = torch.tensor([True, False, True])
    aggregate(loss, token_coefficients("token-mean", torch.zeros(3, dtype=torch.int64), mask, 1)).backward()
    assert leaf.grad[1].abs().max() == 0
    assert leaf.grad[0].abs().max() > 0


def test_the_recipe():
    paper = resolve("opd", {"model": "smollm2-135m", "teacher": "some/teacher"})
    assert paper.one("distill") == OPD()
    assert (paper.settings.prompts_per_step, paper.settings.group_size, paper.settings.learner.lr) == (64, 4, 1e-6)
    assert paper.one("objective") == Clip(dual_clip=3.0)
    assert resolve("opd").one("distill") == OPD()
