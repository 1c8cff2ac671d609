from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from builders import context
from tiny import VOCAB, distributions, plain_logprobs, random_groups, random_prompt, random_rollout, tiny_model
from torch import Tensor

from trimtab.core.errors import ConfigError, DataError
from trimtab.core.part import Needs
from trimtab.core.records import Group, Rollout, Source, flatten
from trimtab.core.slots import (
    AggregationName,
    Correct,
    Correction,
    Distill,
    DistillView,
    Objective,
    TokenLoss,
    TokenView,
)
from trimtab.learn.distill.opd import OPD
from trimtab.learn.learner import Learner, LearnerConfig, UpdateResult
from trimtab.learn.objective.clip import Clip
from trimtab.learn.teacher import Teacher
from trimtab.model.transformer import Transformer

LIMIT = 8


@dataclass(kw_only=True)
class Reinforce(Objective):
    """-A exp(logp - old), summed over candidates, plus a squared pull to the reference."""

    slug: ClassVar[str] = "reinforce"
    how: AggregationName = "token-mean"
    pull: float = 0.0
    seen: list[TokenView] = field(default_factory=list)

    def needs(self) -> Needs:
        return Needs(reference=self.pull > 0)

    def aggregation(self) -> tuple[AggregationName, float | None]:
        return self.how, None

    def token_loss(self, view: TokenView) -> TokenLoss:
        self.seen.append(view)
        ratio = (view.logp - view.old).exp()
        loss, logp_T = -view.advantage * ratio, view.logp
        if loss.ndim == 2:
            assert view.sampled_logp is not None
            loss, logp_T = loss.sum(-1), view.sampled_logp
        if self.pull:
            assert view.reference is not None
            loss = loss + self.pull * (logp_T - view.reference).square()
        return TokenLoss(loss, {"loss_before_weights": loss.detach()})


@dataclass(kw_only=True)
class Scale(Correct):
    """Weights every token by a number and masks those of odd id."""

    slug: ClassVar[str] = "scale"
    factor: float = 0.5
    mask: bool = False

    def correct(self, view: TokenView, correction: Correction) -> Correction:
        keep_T = torch.ones_like(view.mask_T)
        if self.mask:
            keep_T = torch.arange(len(view.mask_T)) % 2 == 0
        return Correction(correction.weight_T * self.factor, correction.mask_T & keep_T)


@dataclass(kw_only=True)
class Normalise(Correct):
    """Behaviour ratio over its mean: a rule that needs the whole optimiser batch."""

    slug: ClassVar[str] = "normalise"
    sizes: list[int] = field(default_factory=list)
    drift: list[float] = field(default_factory=list)

    def whole_batch(self) -> bool:
        return True

    def correct(self, view: TokenView, correction: Correction) -> Correction:
        self.sizes.append(view.num_rows)
        self.drift.append((view.logp - view.old).abs().max().item())
        ratio_T = (view.old - view.behaviour).exp()
        return Correction(correction.weight_T * ratio_T / ratio_T[view.mask_T].mean(), correction.mask_T)


@dataclass(kw_only=True)
class Recipe(Distill):
    """Every mode of distillation in its simplest form."""

    slug: ClassVar[str] = "recipe"
    mode: Literal["sampled", "candidates", "loss", "full"] = "sampled"
    task: float = 0.0

    def needs(self) -> Needs:
        wide = self.mode in ("candidates", "loss")
        return Needs(teacher=True, topk=3 if wide else 0, teacher_topk=3 if wide else 0)

    def signal(self) -> Literal["sampled", "candidates", "full"]:
        return "candidates" if self.mode == "loss" else self.mode

    def task_weight(self) -> float:
        return self.task

    def token_advantage(self, view: DistillView) -> Tensor:
        return view.teacher_T - view.old_T

    def candidates(self, view: DistillView) -> Tensor:
        assert view.student_ids is not None
        return view.student_ids

    def candidate_advantage(self, view: DistillView, ids: Tensor, old: Tensor) -> Tensor | None:
        assert view.teacher_on_student is not None
        return None if self.mode == "loss" else -old.exp() * (old - view.teacher_on_student)

    def candidate_loss(self, view: DistillView, ids: Tensor, logp: Tensor) -> Tensor:
        assert view.teacher_on_student is not None
        return (logp.exp() * (logp - view.teacher_on_student)).sum(-1)

    def full_loss(self, student_logp: Tensor, teacher_logp: Tensor) -> Tensor:
        return (student_logp.exp() * (student_logp - teacher_logp)).sum(-1)


def learner_of(model: Transformer | None = None, **options: Any) -> Learner:
    config = LearnerConfig(**{"lr": 1e-3, "logprob_chunk": 4, **options.pop("config", {})})
    options.setdefault("objective", Reinforce())
    return Learner(model or tiny_model(), config, max_new_tokens=LIMIT, **options)


def gradients(learner: Learner, groups: Sequence[Group], **options: Any) -> tuple[list[Tensor], UpdateResult]:
    """Gradients of a single-step update, which is not taken."""
    found: list[Tensor] = []

    def step() -> tuple[float, bool]:
        found.extend(master.grad.clone() for master in learner.optimiser.masters if master.grad is not None)
        learner.optimiser.clear()
        return 1.0, True

    learner.optimiser.step = step  # type: ignore[method-assign]
    result = learner.update(groups, ctx=context(), **options)
    return found, result


def plain_gradients(model: Transformer, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def assert_same(a: Sequence[Tensor], b: Sequence[Tensor], rtol: float = 1e-5) -> None:
    """Equal up to rounding, relative to the largest gradient."""
    assert len(a) == len(b) > 0
    largest = max(x.abs().max().item() for x in b)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=rtol * largest)


# ---------------------------------------------------------------- the loss itself


@pytest.mark.parametrize(
    ("how", "expected"),
    [("seq-mean-token-mean", 0.0), ("token-mean", 0.5), ("seq-mean-token-sum", 2.0), ("constant", 0.25)],
)
def test_two_and_six_tokens_give_the_published_numbers(how: AggregationName, expected: float) -> None:
    (group,) = random_groups([[2, 6]])
    group.rollouts[0].advantage, group.rollouts[1].advantage = 1.0, -1.0
    result = learner_of(objective=Reinforce(how=how)).update([group], ctx=context())
    assert result.metrics["loss"] == pytest.approx(expected, abs=1e-6)
    assert (result.outcome, result.trained_rows, result.trained_tokens) == ("updated", 2, 8)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tie", [True, False])
def test_gradient_equals_that_of_plain_passes_without_shared_prompts(temperature: float, tie: bool) -> None:
    model, groups = tiny_model(tie=tie), random_groups()
    got, result = gradients(learner_of(model, temperature=temperature), groups)
    rollouts = flatten(groups)
    total = sum(r.length for r in rollouts)
    surrogate = sum(-r.advantage * plain_logprobs(model, r, temperature).sum() for r in rollouts) / total
    assert_same(got, plain_gradients(model, surrogate))
    assert result.metrics["loss"] == pytest.approx(sum(-r.advantage * r.length for r in rollouts) / total, abs=1e-6)


@pytest.mark.parametrize("how", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"])
@pytest.mark.parametrize("budget", [1, 9, 14, 10_000])
def test_micro_batch_split_does_not_matter(how: AggregationName, budget: int) -> None:
    groups = random_groups([[3, 5, 1, 2], [4, 2], [6]])
    whole, first = gradients(learner_of(objective=Reinforce(how=how)), groups)
    split, second = gradients(
        learner_of(objective=Reinforce(how=how), config={"micro_batch_tokens": budget, "logprob_chunk": 3}), groups
    )
    assert_same(split, whole, rtol=1e-6)
    assert second.metrics["loss"] == pytest.approx(first.metrics["loss"], rel=1e-6)


def shuffled(groups: list[Group]) -> list[Group]:
    return [Group(g.prompt, g.rollouts[::-1]) for g in groups[::-1]]


def with_dropped_rows(groups: list[Group]) -> list[Group]:
    extra = random_rollout(groups[0].prompt, 4, "dropped", seed=5, advantage=3.0)
    extra.drop("filtered", by="test")
    empty = random_rollout(groups[0].prompt, 0, "empty", seed=6, advantage=3.0)
    masked = random_rollout(groups[1].prompt, 3, "masked", seed=7, advantage=3.0, token_mask=np.zeros(3, dtype=bool))
    return [*groups, Group(groups[0].prompt, [extra, empty, masked]), Group(random_prompt("x", 2, 9), [])]


def with_padding(groups: list[Group]) -> list[Group]:
    """End-of-sequence tokens as padding behind every response, marked as what they are."""
    for rollout in flatten(groups):
        own = rollout.length
        rollout.tokens = np.concatenate([rollout.tokens, np.ones(3, dtype=np.int64)])
        rollout.logprobs = np.full(own + 3, np.nan, dtype=np.float32)
        rollout.source = np.array([Source.SAMPLED] * own + [Source.PADDING] * 3)
        rollout.advantage = np.array([rollout.advantage] * own + [math.nan] * 3, dtype=np.float32)
    return groups


@pytest.mark.parametrize("change", [shuffled, with_dropped_rows, with_padding])
@pytest.mark.parametrize("how", ["token-mean", "seq-mean-token-mean", "constant"])
def test_row_order_and_rows_outside_the_loss_do_not_matter(
    change: Callable[[list[Group]], list[Group]], how: AggregationName
) -> None:
    plain, first = gradients(learner_of(objective=Reinforce(how=how)), random_groups())
    changed, second = gradients(learner_of(objective=Reinforce(how=how)), change(random_groups()))
    assert_same(changed, plain, rtol=1e-6)
    assert second.metrics["loss"] == pytest.approx(first.metrics["loss"], rel=1e-6)
    assert second.trained_tokens == first.trained_tokens


def test_only_chosen_tokens_give_a_gradient() -> None:
    model, groups = tiny_model(), random_groups([[4]])
    (rollout,) = flatten(groups)
    rollout.source = np.array([Source.SAMPLED, Source.FORCED, Source.REUSED, Source.SAMPLED])
    rollout.token_mask = np.array([True, True, True, False])
    got, result = gradients(learner_of(model), groups)
    logp = plain_logprobs(model, rollout)
    assert_same(got, plain_gradients(model, -rollout.advantage * (logp[0] + logp[2]) / 2))
    assert result.trained_tokens == 2


def test_weights_scale_the_loss_and_leave_the_divisor() -> None:
    model, groups = tiny_model(), random_groups([[3]])
    (rollout,) = flatten(groups)
    rollout.weight, rollout.token_weight = 2.0, np.array([1.0, 0.0, 0.5], dtype=np.float32)
    got, _ = gradients(learner_of(model), groups)
    logp = plain_logprobs(model, rollout)
    assert_same(got, plain_gradients(model, -rollout.advantage * (2 * logp[0] + logp[2]) / 3))


def test_advantage_per_token() -> None:
    model, groups = tiny_model(), random_groups([[3]])
    (rollout,) = flatten(groups)
    rollout.advantage = np.array([1.0, -2.0, 0.5], dtype=np.float32)
    got, _ = gradients(learner_of(model), groups)
    assert_same(got, plain_gradients(model, -(torch.tensor(rollout.advantage) * plain_logprobs(model, rollout)).mean()))


def test_a_missing_reward_has_no_gradient_and_counts_until_it_is_dropped() -> None:
    model, groups = tiny_model(), random_groups([[3, 4]])
    known, missing = flatten(groups)
    missing.reward = missing.advantage = None
    got, _ = gradients(learner_of(model), groups)
    loss = -known.advantage * plain_logprobs(model, known).sum()
    assert_same(got, plain_gradients(model, loss / 7))
    missing.drop("unscored", by="verify")
    got, _ = gradients(learner_of(model), groups)
    loss = -known.advantage * plain_logprobs(model, known).sum()
    assert_same(got, plain_gradients(model, loss / 3))


def test_rows_without_advantage_are_not_computed_but_count() -> None:
    model, groups = tiny_model(), random_groups([[3, 4], [5]])
    groups[1].rollouts[0].advantage = 0.0
    groups[0].rollouts[1].advantage = np.zeros(4, dtype=np.float32)
    got, result = gradients(learner_of(model), groups)
    rollout = groups[0].rollouts[0]
    assert_same(got, plain_gradients(model, -rollout.advantage * plain_logprobs(model, rollout).sum() / 12))
    assert result.forwarded_tokens == len(groups[0].prompt.tokens) + 3
    assert (result.trained_rows, result.trained_tokens) == (1, 3)


# ---------------------------------------------------------------- outcomes


def snapshot(learner: Learner) -> dict[str, Any]:
    return copy.deepcopy(learner.state_dict())


def assert_equal_state(a: Any, b: Any) -> None:
    if isinstance(a, Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal_state(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal_state(x, y)
    else:
        assert a == b


def all_masked() -> list[Group]:
    groups = random_groups()
    for rollout in flatten(groups):
        rollout.token_mask = np.zeros(rollout.length, dtype=bool)
    return groups


def all_zero() -> list[Group]:
    groups = random_groups()
    for rollout in flatten(groups):
        rollout.advantage = 0.0
    return groups


def all_dropped() -> list[Group]:
    groups = random_groups()
    for rollout in flatten(groups):
        rollout.drop("filtered", by="test")
    return groups


@pytest.mark.parametrize("make", [all_masked, all_zero, all_dropped, list])
def test_nothing_to_train_leaves_weights_and_optimiser_alone(make: Callable[[], list[Group]]) -> None:
    learner = learner_of(config={"weight_decay": 0.1})
    learner.update(random_groups(seed=1), ctx=context())  # from here on momentum alone would move the weights
    before = snapshot(learner)
    result = learner.update(make(), epochs=2, minibatches=2, ctx=context())
    assert result == UpdateResult("nothing_to_train")
    assert_equal_state(learner.state_dict(), before)


def test_a_correction_that_masks_everything_leaves_weights_and_optimiser_alone() -> None:
    learner = learner_of(config={"weight_decay": 0.1})
    learner.update(random_groups(seed=1), ctx=context())
    before = snapshot(learner)
    learner.correct = [Scale(factor=0.0)]
    result = learner.update(random_groups(), ctx=context())
    assert (result.outcome, result.trained_tokens) == ("nothing_to_train", 0)
    assert result.metrics["loss"] == 0.0
    assert_equal_state(learner.state_dict(), before)


def test_a_nonfinite_gradient_skips_the_step_and_touches_nothing() -> None:
    learner = learner_of()
    learner.update(random_groups(seed=1), ctx=context())
    before = snapshot(learner)
    groups = random_groups()
    groups[0].rollouts[0].advantage = math.inf
    result = learner.update(groups, ctx=context())
    assert result.outcome == "nonfinite"
    assert (result.trained_tokens, result.trained_rows, result.metrics["nonfinite_steps"]) == (0, 0, 1)
    assert_equal_state(learner.state_dict(), before)
    assert learner.update(random_groups(), ctx=context()).outcome == "updated"
    assert learner.optimiser.step_count == 2
    assert all(p.isfinite().all() for p in learner.model.parameters())


def test_a_bad_rollout_raises_before_anything_moves() -> None:
    learner, groups = learner_of(), random_groups()
    before = snapshot(learner)
    groups[0].rollouts[0].logprobs = np.zeros(1, dtype=np.float32)
    with pytest.raises(DataError, match="p0-0"):
        learner.update(groups, ctx=context())
    assert_equal_state(learner.state_dict(), before)


def test_state_round_trip_continues_exactly() -> None:
    first = learner_of(config={"warmup_steps": 3})
    first.update(random_groups(), ctx=context())
    second = learner_of(tiny_model(seed=5), config={"warmup_steps": 3})
    second.load_state_dict(snapshot(first))
    for seed in (1, 2, 3):
        a = first.update(random_groups(seed=seed), ctx=context())
        b = second.update(random_groups(seed=seed), ctx=context())
        assert a == b
    assert_equal_state(first.state_dict(), second.state_dict())


def test_warm_up_rises_to_the_learning_rate() -> None:
    learner = learner_of(config={"lr": 1.0e-3, "warmup_steps": 4})
    rates = [learner.update(random_groups(), ctx=context()).metrics["lr"] for _ in range(6)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


def test_gradient_clipping_bounds_the_norm_that_is_used() -> None:
    groups = random_groups()
    for rollout in flatten(groups):
        rollout.weight = 1e3
    learner = learner_of(config={"grad_clip": 0.5})
    used: list[float] = []
    take = learner.optimiser.adamw.step

    def step() -> None:
        used.append(
            torch.cat([p.grad.flatten() for p in learner.model.parameters() if p.grad is not None]).norm().item()
        )
        take()

    learner.optimiser.adamw.step = step  # type: ignore[method-assign,assignment]
    result = learner.update(groups, ctx=context())
    assert used == [pytest.approx(0.5, rel=1e-4)]
    assert result.metrics["grad_norm"] > 0.5


def test_low_precision_models_learn_through_float32_masters() -> None:
    model = tiny_model().to(torch.bfloat16)
    start = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    learner = learner_of(model, config={"lr": 1e-5, "grad_clip": 0.0})
    for _ in range(50):
        assert learner.update(random_groups(), ctx=context()).outcome == "updated"
    moved = learner.optimiser.masters[0] - start["embed.weight"]
    assert moved.abs().max() == pytest.approx(50e-5, rel=0.2)  # fifty steps of one learning rate each
    assert torch.equal(model.embed.weight, learner.optimiser.masters[0].to(torch.bfloat16))
    other = learner_of(tiny_model(seed=3).to(torch.bfloat16), config={"lr": 1e-5, "grad_clip": 0.0})
    other.load_state_dict(snapshot(learner))
    for each in (learner, other):
        each.update(random_groups(seed=2), ctx=context())
    assert_equal_state(learner.state_dict(), other.state_dict())


def test_low_precision_gradients_of_micro_batches_add_up_in_float32() -> None:
    model, groups = tiny_model().to(torch.bfloat16), random_groups()
    split, _ = gradients(learner_of(model, config={"micro_batch_tokens": 1}), groups)
    exact, _ = gradients(learner_of(copy.deepcopy(model).float()), groups)
    assert all(g.dtype == torch.float32 for g in split)
    assert_same(split, exact, rtol=0.05)


# ---------------------------------------------------------------- proximal policy, behaviour, corrections


def test_a_single_update_has_ratio_exactly_one_and_no_extra_pass() -> None:
    objective = Reinforce()
    groups = random_groups()
    result = learner_of(objective=objective).update(groups, ctx=context())
    (view,) = objective.seen
    assert torch.equal(view.old, view.logp)
    assert not view.old.requires_grad
    assert result.metrics["ratio_mean"] == 1.0
    packed = sum(len(g.prompt.tokens) + sum(r.length for r in g.rollouts) for g in groups)
    assert result.forwarded_tokens == packed


def test_several_steps_keep_the_proximal_policy_of_the_call() -> None:
    objective, model, groups = Reinforce(), tiny_model(), random_groups()
    expected = [plain_logprobs(model, r).detach() for r in flatten(groups)]
    learner = learner_of(model, objective=objective, config={"lr": 1e-2})
    result = learner.update(groups, epochs=2, ctx=context())
    first, second = objective.seen
    by_length = sorted(torch.cat(expected).tolist())
    for view in (first, second):
        assert sorted(view.old.tolist()) == pytest.approx(by_length, abs=1e-5)
    torch.testing.assert_close(first.logp, first.old, rtol=0, atol=1e-5)
    assert (second.logp - second.old).abs().max() > 1e-3
    assert result.metrics["steps"] == 2
    assert learner.optimiser.step_count == 2


def test_minibatches_train_every_row_once_an_epoch() -> None:
    groups = random_groups([[3, 2], [4], [5], [1, 1]])
    objective = Reinforce()
    result = learner_of(objective=objective).update(groups, epochs=2, minibatches=3, ctx=context())
    assert [view.num_rows for view in objective.seen] == [2, 2, 2, 2, 2, 2]
    assert sum(len(view.logp) for view in objective.seen) == 2 * 16
    assert (result.trained_rows, result.trained_tokens) == (6, 16)
    assert result.metrics["steps"] == 6


def test_each_minibatch_has_its_own_divisor() -> None:
    groups = random_groups([[2], [6]])
    result = learner_of().update(groups, minibatches=2, ctx=context())
    expected = -(flatten(groups)[0].advantage + flatten(groups)[1].advantage) / 2
    assert result.metrics["loss"] == pytest.approx(expected, abs=0.02)


def test_a_minibatch_without_gradient_is_skipped() -> None:
    groups = random_groups([[2], [6]])
    groups[1].rollouts[0].advantage = 0.0
    learner = learner_of()
    result = learner.update(groups, minibatches=2, ctx=context())
    assert (result.metrics["steps"], learner.optimiser.step_count, result.trained_rows) == (1, 1, 1)


def test_unscored_tokens_count_as_on_policy() -> None:
    groups = random_groups([[4]])
    (rollout,) = flatten(groups)
    rollout.logprobs = np.array([-1.0, math.nan, -2.0, math.nan], dtype=np.float32)
    objective = Reinforce()
    result = learner_of(objective=objective).update(groups, ctx=context())
    (view,) = objective.seen
    assert torch.equal(view.behaviour[[1, 3]], view.old[[1, 3]])
    assert view.behaviour[[0, 2]].tolist() == [-1.0, -2.0]
    assert result.metrics["unscored_tokens"] == 2
    gap = (view.old - view.behaviour).double()
    assert result.metrics["behaviour_log_ratio"] == pytest.approx(gap.abs().mean().item(), rel=1e-5)
    assert result.metrics["behaviour_kl"] == pytest.approx((gap.exp() - gap - 1).mean().item(), rel=1e-5)


def test_corrections_weigh_the_numerator_only() -> None:
    model, groups = tiny_model(), random_groups([[4]])
    (rollout,) = flatten(groups)
    got, _ = gradients(learner_of(model, correct=[Scale(factor=3.0), Scale(factor=0.5, mask=True)]), groups)
    logp = plain_logprobs(model, rollout)
    assert_same(got, plain_gradients(model, -rollout.advantage * 1.5 * (logp[0] + logp[2]) / 4))


@pytest.mark.parametrize("budget", [1, 10_000])
def test_a_correction_over_the_whole_batch_does_not_see_micro_batches(budget: int) -> None:
    model, groups = tiny_model(), random_groups([[3, 2], [4]])
    groups[0].rollouts[1].advantage = 0.0  # not trained on, but part of the statistics
    rng = np.random.default_rng(0)
    for rollout in flatten(groups):
        rollout.logprobs = rng.normal(-2, 0.5, rollout.length).astype(np.float32)
    part = Normalise()
    got, _ = gradients(learner_of(model, correct=[part], config={"micro_batch_tokens": budget}), groups)
    assert part.sizes == [3]
    logp = [plain_logprobs(model, r) for r in flatten(groups)]
    ratio = [(x.detach() - torch.from_numpy(r.logprobs)).exp() for x, r in zip(logp, flatten(groups), strict=True)]
    mean = torch.cat(ratio).mean()
    terms = [-r.advantage * (w / mean * x).sum() for r, w, x in zip(flatten(groups), ratio, logp, strict=True)]
    assert_same(got, plain_gradients(model, sum(terms) / 9))


def test_a_correction_over_the_whole_batch_sees_each_minibatch_at_its_own_weights() -> None:
    part = Normalise()
    learner_of(correct=[part], config={"lr": 1e-2}).update(random_groups(), epochs=1, minibatches=2, ctx=context())
    assert sorted(part.sizes) == [2, 3]
    assert part.drift[0] == 0.0
    assert part.drift[1] > 1e-3  # the first step has been taken


# ---------------------------------------------------------------- distillation


def scored(model: Transformer, teacher: Teacher, lengths: Sequence[Sequence[int]] = ((3, 2), (4,))) -> list[Group]:
    """Groups with all signals of three candidates, and no task advantage."""
    groups = random_groups(lengths)
    for rollout in flatten(groups):
        rollout.advantage = None
        top = distributions(model, rollout).detach().topk(3, -1)
        rollout.signals = {"topk_ids": top.indices.numpy(), "topk_logprobs": top.values.numpy()}
    teacher.score(flatten(groups), topk=3)
    return groups


def teacher_logps(teacher: Teacher, rollout: Rollout) -> Tensor:
    return distributions(teacher.model, rollout, teacher.temperature).detach()


@pytest.fixture
def teacher() -> Teacher:
    return Teacher(tiny_model(seed=7).requires_grad_(False), temperature=1.3)


def test_sampled_distillation_mixes_the_task_in(teacher: Teacher) -> None:
    model = tiny_model()
    groups = scored(model, teacher)
    for rollout in flatten(groups):
        rollout.advantage = 0.7
    got, _ = gradients(learner_of(model, distill=Recipe(mode="sampled", task=0.5)), groups)
    loss: Any = 0
    for rollout in flatten(groups):
        logp = plain_logprobs(model, rollout)
        signal = torch.from_numpy(rollout.signals["teacher_logprob"]) - logp.detach()
        loss = loss - ((signal + 0.35) * logp).sum() / 9
    assert_same(got, plain_gradients(model, loss))


@pytest.mark.parametrize("budget", [1, 10_000])
@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("task", [0.0, 0.5])
def test_candidates_with_an_advantage(teacher: Teacher, budget: int, epochs: int, task: float) -> None:
    model = tiny_model()
    groups = scored(model, teacher)
    for rollout in flatten(groups):
        rollout.advantage = 0.7
    learner = learner_of(
        model,
        objective=Reinforce(pull=0.1),
        reference=tiny_model(seed=9).requires_grad_(False),
        distill=Recipe(mode="candidates", task=task),
        config={"micro_batch_tokens": budget},
    )
    found, _ = gradients(learner, groups, epochs=epochs)
    got = found[: len(found) // epochs]
    loss: Any = 0
    for rollout in flatten(groups):
        full = distributions(model, rollout)
        logp = full.gather(1, torch.from_numpy(rollout.signals["topk_ids"]))
        q = torch.from_numpy(rollout.signals["teacher_on_student"])
        advantage = (-logp.exp() * (logp - q)).detach()
        own = plain_logprobs(model, rollout)
        reference = plain_logprobs(learner.reference, rollout).detach()  # type: ignore[arg-type]
        loss = loss - (advantage * logp).sum() / 9 - task * 0.7 * own.sum() / 9
        loss = loss + 0.1 * (own - reference).square().sum() / 9
    assert_same(got, plain_gradients(model, loss))


def test_candidates_with_a_loss_of_their_own_and_no_objective(teacher: Teacher) -> None:
    model = tiny_model()
    groups = scored(model, teacher)
    got, result = gradients(learner_of(model, objective=None, distill=Recipe(mode="loss")), groups)
    loss: Any = 0
    for rollout in flatten(groups):
        logp = distributions(model, rollout).gather(1, torch.from_numpy(rollout.signals["topk_ids"]))
        loss = loss + (logp.exp() * (logp - torch.from_numpy(rollout.signals["teacher_on_student"]))).sum() / 9
    assert_same(got, plain_gradients(model, loss))
    assert result.metrics["distill_loss"] == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("vocab_size", [VOCAB, VOCAB + 5])
def test_full_vocabulary_distillation(vocab_size: int) -> None:
    model = tiny_model()
    teacher = Teacher(tiny_model(seed=7, vocab_size=vocab_size), temperature=1.3)
    groups = random_groups()
    got, result = gradients(
        learner_of(model, objective=None, distill=Recipe(mode="full"), teacher=teacher, temperature=0.8), groups
    )
    loss: Any = 0
    total = sum(r.length for r in flatten(groups))
    for rollout in flatten(groups):
        p = distributions(model, rollout, 0.8)
        q = torch.log_softmax(teacher_logps(teacher, rollout)[:, :VOCAB], -1)
        loss = loss + (p.exp() * (p - q)).sum() / total
    assert_same(got, plain_gradients(model, loss))
    assert result.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert all(p.grad is None for p in teacher.model.parameters())


@pytest.mark.parametrize("mode", ["sampled", "candidates", "loss"])
def test_token_weight_scales_the_teachers_signal_in_every_mode(
    teacher: Teacher, mode: Literal["sampled", "candidates", "loss"]
) -> None:
    model = tiny_model()
    groups = scored(model, teacher, [[2]])
    (rollout,) = flatten(groups)
    full, _ = gradients(learner_of(model, distill=Recipe(mode=mode)), groups)
    parts = []
    for weight in ([2.0, 0.0], [0.0, 2.0]):
        rollout.token_weight = np.array(weight, dtype=np.float32)
        parts.append(gradients(learner_of(model, distill=Recipe(mode=mode)), groups)[0])
    assert_same([(a + b) / 2 for a, b in zip(*parts, strict=True)], full)


@pytest.mark.parametrize("mode", ["sampled", "candidates", "loss"])
def test_garbage_in_masked_teacher_scores_reaches_nothing(
    teacher: Teacher, mode: Literal["sampled", "candidates", "loss"]
) -> None:
    model = tiny_model()
    groups = scored(model, teacher, [[4]])
    (rollout,) = flatten(groups)
    rollout.token_mask = np.array([True, False, True, False])
    clean, _ = gradients(learner_of(model, distill=Recipe(mode=mode)), groups)
    for name in ("teacher_logprob", "teacher_on_student", "topk_logprobs"):
        rollout.signals[name] = rollout.signals[name].copy()
        rollout.signals[name][[1, 3]] = math.nan
    dirty, result = gradients(learner_of(model, distill=Recipe(mode=mode)), groups)
    assert_same(dirty, clean)
    assert math.isfinite(result.metrics["loss"])


def test_all_candidates_give_the_gradient_of_the_full_vocabulary(teacher: Teacher) -> None:
    model, groups = tiny_model(), random_groups()
    for rollout in flatten(groups):
        top = distributions(model, rollout).detach().topk(VOCAB, -1)
        rollout.signals = {"topk_ids": top.indices.numpy(), "topk_logprobs": top.values.numpy()}
    teacher.score(flatten(groups), topk=VOCAB)
    full, _ = gradients(learner_of(model, objective=None, distill=OPD(variant="full"), teacher=teacher), groups)
    topk, _ = gradients(learner_of(model, objective=Clip(), distill=OPD(variant="topk", k=VOCAB)), groups)
    assert_same(topk, full, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"eps_high": 0.28, "dual_clip": 3.0}, {"ratio": "sequence-token"}])
def test_at_the_proximal_policy_every_clipped_objective_is_reinforce(options: dict[str, Any]) -> None:
    model, groups = tiny_model(), random_groups()
    clipped, _ = gradients(learner_of(model, objective=Clip(**options)), groups)
    plain, _ = gradients(learner_of(model), groups)
    assert_same(clipped, plain)


@dataclass(kw_only=True)
class Undefined(Recipe):
    """Its advantages are NaN outside the loss, as a rule that normalises there may give."""

    slug: ClassVar[str] = "undefined"

    def token_advantage(self, view: DistillView) -> Tensor:
        assert view.mask_T is not None
        return torch.where(view.mask_T, super().token_advantage(view), math.nan)

    def candidate_advantage(self, view: DistillView, ids: Tensor, old: Tensor) -> Tensor | None:
        advantage = super().candidate_advantage(view, ids, old)
        assert advantage is not None
        assert view.mask_T is not None
        return torch.where(view.mask_T[:, None], advantage, math.nan)


@pytest.mark.parametrize("mode", ["sampled", "candidates"])
def test_advantages_a_part_leaves_undefined_outside_the_loss(
    teacher: Teacher, mode: Literal["sampled", "candidates"]
) -> None:
    model = tiny_model()
    groups = scored(model, teacher, [[4]])
    groups[0].rollouts[0].token_mask = np.array([True, False, True, False])
    clean, _ = gradients(learner_of(model, distill=Recipe(mode=mode)), groups)
    dirty, _ = gradients(learner_of(model, distill=Undefined(mode=mode)), groups)
    assert_same(dirty, clean)


def test_missing_teacher_scores_are_named() -> None:
    with pytest.raises(DataError, match=r"rollout p0-0: signal 'teacher_logprob' is missing"):
        learner_of(distill=Recipe(mode="sampled")).update(random_groups(), ctx=context())


# ---------------------------------------------------------------- reference, and what is missing


def test_the_reference_gives_a_gradient_where_the_advantage_is_zero() -> None:
    model, reference = tiny_model(), tiny_model(seed=4).requires_grad_(False)
    groups = random_groups([[3, 2]])
    groups[0].rollouts[1].advantage = 0.0
    learner = learner_of(model, objective=Reinforce(pull=0.1), reference=reference, config={"micro_batch_tokens": 1})
    got, _ = gradients(learner, groups)
    loss: Any = 0
    for rollout in flatten(groups):
        logp, ref = plain_logprobs(model, rollout), plain_logprobs(reference, rollout)
        loss = loss + (0.1 * (logp - ref).square() - rollout.advantage * logp).sum() / 5
    assert_same(got, plain_gradients(model, loss))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": Reinforce(pull=0.1)}, "needs a reference"),
        ({"distill": Recipe(mode="full")}, "needs the teacher"),
        ({"objective": None}, "objective"),
        ({"objective": None, "distill": Recipe(mode="sampled")}, "objective"),
        ({"objective": None, "distill": Recipe(mode="loss", task=1.0)}, "objective"),
    ],
)
def test_missing_models_and_parts_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        learner_of(**options)


def test_nothing_but_the_policys_log_probs_carries_a_gradient() -> None:
    objective = Reinforce(pull=0.1)
    learner = learner_of(objective=objective, reference=tiny_model(seed=4), correct=[Scale()])
    learner.update(random_groups(), ctx=context())
    (view,) = objective.seen
    assert view.logp.requires_grad
    for tensor in (view.old, view.advantage, view.behaviour, view.reference):
        assert tensor is not None
        assert not tensor.requires_grad
    assert learner.reference is not None
    assert all(p.grad is None for p in learner.reference.parameters())


# ---------------------------------------------------------------- log-probs and metrics


def test_logprobs_of_rollouts_in_order() -> None:
    model = tiny_model()
    rollouts = flatten(random_groups())
    rollouts.insert(1, random_rollout(rollouts[0].prompt, 0, "empty", seed=1))
    learner = learner_of(model, temperature=0.7, config={"micro_batch_tokens": 12})
    got = learner.logprobs(rollouts)
    assert [len(x) for x in got] == [r.length for r in rollouts]
    for logp, rollout in zip(got, rollouts, strict=True):
        np.testing.assert_allclose(logp, plain_logprobs(model, rollout, 0.7).detach().numpy(), rtol=1e-4, atol=1e-5)
    assert learner.logprobs([]) == []


def test_entropy_on_request() -> None:
    model, groups = tiny_model(), random_groups()
    expected = torch.cat([distributions(model, r).detach() for r in flatten(groups)])
    result = learner_of(model).update(groups, ctx=context(), entropy=True)
    assert result.metrics["entropy"] == pytest.approx(-(expected.exp() * expected).sum(-1).mean().item(), rel=1e-4)
    assert "entropy" not in learner_of(tiny_model()).update(groups, ctx=context()).metrics


def test_logged_means_leave_masked_tokens_out() -> None:
    groups = random_groups([[3]])
    groups[0].rollouts[0].advantage = np.array([1.0, 5.0, 3.0], dtype=np.float32)
    groups[0].rollouts[0].token_mask = np.array([True, False, True])
    result = learner_of().update(groups, ctx=context())
    assert result.metrics["loss_before_weights"] == pytest.approx(-2.0)


def test_greedy_sampling_means_temperature_one() -> None:
    model, groups = tiny_model(), random_groups()
    np.testing.assert_allclose(
        learner_of(model, temperature=0.0).logprobs(flatten(groups))[0],
        plain_logprobs(model, flatten(groups)[0]).detach().numpy(),
        rtol=1e-4,
    )


def test_learning_raises_the_log_probs_of_what_was_good() -> None:
    groups = random_groups([[4, 4]])
    good, bad = flatten(groups)
    good.advantage, bad.advantage = 1.0, -1.0
    learner = learner_of(config={"lr": 1e-2})
    before = [x.sum() for x in learner.logprobs([good, bad])]
    for _ in range(5):
        learner.update(groups, ctx=context())
    after = [x.sum() for x in learner.logprobs([good, bad])]
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_groups_are_not_changed() -> None:
    groups = random_groups()
    before = copy.deepcopy(groups)
    learner_of().update(groups, epochs=2, minibatches=2, ctx=context())
    for a, b in zip(flatten(groups), flatten(before), strict=True):
        assert a.advantage == b.advantage
        np.testing.assert_array_equal(a.tokens, b.tokens)
        assert replace(a, tokens=b.tokens, logprobs=b.logprobs, prompt=b.prompt) == b
