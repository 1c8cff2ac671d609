from __future__ import annotations

import numpy as np
import pytest
import torch
from builders import context
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import plain_logprobs, random_groups, tiny_model

from trimtab.core.config import LearnerConfig
from trimtab.core.errors import ConfigError
from trimtab.core.part import Needs
from trimtab.core.recipe import resolve
from trimtab.core.slots import DistillView
from trimtab.learn.distill.opd import OPD, candidate_weights, discounted, jsd, kl, member_mask, tail_kl
from trimtab.learn.learner import Learner
from trimtab.learn.objective.clip import Clip

STRATEGIES = ["only_stu", "only_tch", "intersection", "union", "union-intersection"]
MEMBERS = {  # of student {0, 1} and teacher {2, 0}, in the order student, then teacher
    "only_stu": [0, 1],
    "only_tch": [2, 0],
    "intersection": [0],
    "union": [0, 1, 2],
    "union-intersection": [1, 2],
}


def distributions(count: int = 3, vocabulary: int = 7, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs (T, V) of student and teacher."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, count, vocabulary, generator=g, dtype=torch.float64)
    return tuple(torch.log_softmax(logits, -1))  # type: ignore[return-value]


def view(student: torch.Tensor, teacher: torch.Tensor, k: int, token: torch.Tensor | None = None) -> DistillView:
    token = torch.zeros(len(student), dtype=torch.int64) if token is None else token
    student_logp, student_ids = student.topk(k)
    teacher_logp, teacher_ids = teacher.topk(k)
    return DistillView(
        token_T=token,
        row_T=torch.zeros(len(student), dtype=torch.int64),
        num_rows=1,
        old_T=student.gather(1, token[:, None])[:, 0],
        teacher_T=teacher.gather(1, token[:, None])[:, 0],
        student_ids=student_ids,
        student_logp=student_logp,
        teacher_on_student=teacher.gather(1, student_ids),
        teacher_ids=teacher_ids,
        teacher_logp=teacher_logp,
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_members_of_each_strategy_each_once(strategy):
    student, teacher = torch.tensor([[0, 1]]), torch.tensor([[2, 0]])
    part = OPD(k=2, strategy=strategy)
    seen = view(*distributions(1), 2)
    seen.student_ids, seen.teacher_ids = student, teacher
    ids = part.candidates(seen)
    member = member_mask(strategy, student, teacher, ids)
    assert ids[member].tolist() == MEMBERS[strategy]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("weight", ["student_p", "teacher_p", "none"])
def test_rewards_equal_the_rule_written_out(strategy, weight):
    student, teacher = distributions()
    part = OPD(k=3, strategy=strategy, weight=weight, beta_kl=2.0)
    seen = view(student, teacher, 3)
    ids = part.candidates(seen)
    found = part.candidate_advantage(seen, ids, student.gather(1, ids))
    for t in range(3):
        s, q = set(seen.student_ids[t].tolist()), set(seen.teacher_ids[t].tolist())
        chosen = {"only_stu": s, "only_tch": q, "intersection": s & q, "union": s | q, "union-intersection": s ^ q}
        members = chosen[strategy]
        mass = {"student_p": student[t].exp(), "teacher_p": teacher[t].exp(), "none": torch.ones(7)}[weight]
        total = 1.0 if strategy == "union-intersection" else sum(mass[v].item() for v in members)
        expected = {v: -2.0 * mass[v].item() / total * (student[t, v] - teacher[t, v]).item() for v in members}
        got: dict[int, float] = {}
        for v, reward in zip(ids[t].tolist(), found[t].tolist(), strict=True):
            got[v] = got.get(v, 0.0) + reward
        assert {v: r for v, r in got.items() if v in members} == pytest.approx(expected)
        assert all(r == 0 for v, r in got.items() if v not in members)


def test_an_empty_intersection_gives_exactly_nothing():
    seen = view(*distributions(1), 2)
    seen.student_ids, seen.teacher_ids = torch.tensor([[0, 1]]), torch.tensor([[2, 3]])
    part = OPD(k=2, strategy="intersection")
    ids = part.candidates(seen)
    assert part.candidate_advantage(seen, ids, torch.full((1, 2), -1.0)).tolist() == [[0.0, 0.0]]


def test_more_ranked_columns_than_k_change_nothing():
    student, teacher = distributions()
    for strategy in STRATEGIES:
        part = OPD(k=2, strategy=strategy)
        narrow, wide = view(student, teacher, 2), view(student, teacher, 5)
        ids = part.candidates(narrow)
        assert torch.equal(ids, part.candidates(wide))
        old = student.gather(1, ids)
        assert torch.equal(part.candidate_advantage(narrow, ids, old), part.candidate_advantage(wide, ids, old))


@settings(max_examples=60, deadline=None)
@given(
    rewards=st.lists(st.floats(-2, 2, width=32), max_size=20),
    cuts=st.lists(st.integers(1, 6), min_size=20, max_size=20),
    gamma=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
)
def test_discounted_sums_stay_within_their_row(rewards, cuts, gamma):
    rows = [row for row, length in enumerate(cuts) for _ in range(length)][: len(rewards)]
    found = discounted(torch.tensor(rewards, dtype=torch.float64), torch.tensor(rows, dtype=torch.int64), gamma)
    expected = [
        sum(gamma ** (u - t) * rewards[u] for u in range(t, len(rewards)) if rows[u] == rows[t])
        for t in range(len(rewards))
    ]
    assert found.tolist() == pytest.approx(expected, abs=1e-9)


def test_a_masked_token_does_not_leak_into_earlier_ones():
    seen = view(*distributions(3), 2)
    seen.old_T, seen.teacher_T = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-0.5, float("nan"), -2.0])
    seen.mask_T = torch.tensor([True, False, True])
    found = OPD(variant="sampled", gamma=0.5).token_advantage(seen)
    assert found.tolist() == pytest.approx([0.5 - 0.25, -0.5, -1.0])


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_generalised_jsd_equals_its_definition(beta):
    p, q = (x.exp() for x in distributions())
    m = (1 - beta) * p + beta * q
    expected = beta * (q * (q / m).log()).sum(-1) + (1 - beta) * (p * (p / m).log()).sum(-1)
    if beta in (0.0, 1.0):  # the weighted sum vanishes at the ends, where the two divergences are meant
        expected = (p * (p / q).log()).sum(-1) if beta else (q * (q / p).log()).sum(-1)
    assert torch.allclose(jsd(p.log(), q.log(), beta), expected)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 7), strategy=st.sampled_from(STRATEGIES))
def test_tail_is_between_zero_and_the_full_divergence(seed, k, strategy):
    student, teacher = distributions(seed=seed)
    seen, part = view(student, teacher, k), OPD(variant="tail", k=k, strategy=strategy)
    ids = part.candidates(seen)
    loss = part.candidate_loss(seen, ids, student.gather(1, ids))
    assert (loss >= -1e-5).all()
    assert (loss <= kl(student, teacher) + 1e-5).all()


def test_tail_over_the_whole_vocabulary_is_the_full_divergence():
    student, teacher = distributions()
    member = torch.ones(3, 7, dtype=torch.bool)
    assert torch.allclose(tail_kl(student, teacher, member), kl(student, teacher), atol=1e-6)


@pytest.mark.parametrize("variant", ["sampled", "topk", "full", "tail", "forward_kl_topk", "k2", "k3"])
def test_teacher_equal_to_student_gives_exactly_no_signal_and_no_gradient(variant):
    student, _ = distributions()
    part = OPD(variant=variant, k=3)
    seen = view(student, student, 3)
    logits = student.clone().requires_grad_()
    logp = torch.log_softmax(logits, -1)
    if part.signal() == "sampled":
        assert part.token_advantage(seen).abs().max() == 0
        return
    if part.signal() == "full":
        loss = part.full_loss(logp, student)
    else:
        ids = part.candidates(seen)
        advantage = part.candidate_advantage(seen, ids, student.gather(1, ids))
        if advantage is not None:
            assert advantage.abs().max() == 0
            return
        loss = part.candidate_loss(seen, ids, logp.gather(1, ids))
    assert loss.abs().max() < 1e-12
    if variant != "forward_kl_topk":  # part of a distribution only: sum q log(q / p) has slope -q + p sum(q) at p = q
        assert torch.autograd.grad(loss.sum(), logits)[0].abs().max() < 1e-12


def test_weights_are_a_distribution_over_the_members():
    student, teacher = distributions()
    member = torch.tensor([[True] * 7, [True, False] + [False] * 5, [False] * 7])
    for mode in ("student_p", "teacher_p", "none"):
        weight = candidate_weights(student, teacher, member, mode, normalise=True)
        assert weight.sum(-1).tolist() == pytest.approx([1.0, 1.0, 0.0])
        assert weight[~member].abs().max() == 0


@pytest.mark.parametrize(
    ("knobs", "needs"),
    [
        ({"variant": "sampled"}, Needs(teacher=True)),
        ({"variant": "full"}, Needs(teacher=True)),
        ({"variant": "topk", "k": 4}, Needs(teacher=True, topk=4, teacher_topk=4)),
        ({"variant": "topk", "k": 4, "strategy": "only_tch"}, Needs(teacher=True, teacher_topk=4)),
        ({"variant": "forward_kl_topk", "k": 4}, Needs(teacher=True, teacher_topk=4)),
        ({"variant": "k2", "task_coef": 0.5}, Needs(teacher=True, verdicts=True)),
    ],
)
def test_needs_follow_the_variant(knobs, needs):
    assert OPD(**knobs).needs() == needs


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"distill.gamma": 0.5}, "distill.gamma: 0.5 has no effect with variant=topk. Set variant=sampled"),
        ({"distill.variant": "full", "distill.strategy": "union"}, "distill.strategy: 'union' has no effect"),
        ({"distill.jsd_beta": 0.5}, "distill.jsd_beta: 0.5 .* variant=full"),
        ({"objective": "none"}, "distill.variant: 'topk' .* objective=clip"),
        ({"distill.variant": "topkk"}, "Did you mean 'topk'"),
    ],
)
def test_contradictions_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        resolve("opd", overrides)


def test_full_distillation_needs_no_objective():
    resolve("opd", {"objective": "none", "distill.variant": "full"})


def test_a_discounted_signal_reads_the_weightless_tail_of_its_row() -> None:
    seen = []

    class Spy(Clip):
        def token_loss(self, view):
            seen.append(view.advantage)
            return super().token_loss(view)

    for gamma, expected in ((0.5, [1.75, 1.5, 1.0]), (0.0, [1.0])):
        groups = random_groups(lengths=((3,),))
        (rollout,) = groups[0].rollouts
        model = tiny_model()
        with torch.no_grad():
            rollout.signals = {"teacher_logprob": (plain_logprobs(model, rollout) + 1).numpy()}
        rollout.token_weight = np.array([1, 0, 0], dtype=np.float32)
        learner = Learner(
            model, LearnerConfig(), objective=Spy(), distill=OPD(variant="sampled", gamma=gamma), max_new_tokens=8
        )
        learner.update(groups, ctx=context())
        assert seen.pop().tolist() == pytest.approx(expected, abs=1e-4)
