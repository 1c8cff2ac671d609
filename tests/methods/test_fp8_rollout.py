"""The correction between engine and learner: worked numbers, limits and invariants of its card."""

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
from trimtab.core.slots import Correct, Correction, TokenView
from trimtab.learn.correct.fp8_rollout import FP8Rollout, k_statistic
from trimtab.learn.learner import Learner
from trimtab.learn.objective.clip import Clip

OLD, MU = [0.5, 0.4, 0.02, 0.9], [0.45, 0.5, 0.005, 0.9]


def view_of(old, behaviour, row_T=None, mask=None) -> TokenView:
    old, behaviour = torch.tensor(old), torch.tensor(behaviour)
    row_T = torch.zeros(len(old), dtype=torch.int64) if row_T is None else torch.tensor(row_T)
    mask_T = torch.ones(len(old), dtype=torch.bool) if mask is None else torch.tensor(mask)
    return TokenView(old, old, torch.ones(len(old)), behaviour, row_T, int(row_T.max()) + 1, mask_T)


def of(part, view) -> Correction:
    return part.correct(view, Correction(torch.ones(len(view.old)), torch.ones_like(view.mask_T)))


def worked(**knobs) -> Correction:
    return of(FP8Rollout(**knobs), view_of([math.log(p) for p in OLD], [math.log(p) for p in MU]))


WEIGHTS = [
    ({"cap": math.inf}, [1.111111, 0.8, 4, 1]),
    ({"cap": 2.0}, [1.111111, 0.8, 2, 1]),
    ({"form": "band", "low": 0.5, "high": 5.0}, [1.111111, 0.8, 4, 1]),
    ({"form": "band", "low": 0.5, "high": 2.0}, [1.111111, 0.8, 0, 1]),
    ({"level": "sequence", "cap": math.inf}, [3.555556] * 4),
    ({"level": "sequence"}, [2.0] * 4),
    ({"level": "sequence", "form": "band", "high": 2.0}, [0.0] * 4),
    ({"batch_normalize": True}, [0.904977, 0.651584, 1.628959, 0.814480]),
    ({"level": "sequence", "batch_normalize": True}, [1.0] * 4),
    ({"level": "sequence", "form": "band", "high": 2.0, "batch_normalize": True}, [0.0] * 4),
    ({"level": "none"}, [1.0] * 4),
]


@pytest.mark.parametrize(("knobs", "expected"), WEIGHTS)
def test_weights_of_the_worked_row(knobs, expected):
    found = worked(**knobs)
    assert found.weight_T.tolist() == pytest.approx(expected, abs=2e-6)
    assert found.mask_T.all()
    assert found.divisor_T is None


REJECTIONS = [
    ({"token_k1": [0.5, 2.0]}, [1, 1, 0, 1]),
    ({"token_k1": 2}, [1, 1, 0, 1]),
    ({"token_k1": 5.0}, [1, 1, 1, 1]),
    ({"token_k1": [0.9, 5.0]}, [1, 0, 1, 1]),
    ({"seq_sum_k1": [0.5, 2.0]}, [0] * 4),
    ({"seq_sum_k1": 3.6}, [1] * 4),
    ({"seq_mean_k1": [0.999, 1.001]}, [0] * 4),
    ({"seq_mean_k1": [1.37, 1.374]}, [1] * 4),
    ({"seq_mean_k2": 0.2479}, [1] * 4),
    ({"seq_mean_k2": 0.2478}, [0] * 4),
    ({"seq_mean_k3": 0.4107}, [1] * 4),
    ({"seq_mean_k3": 0.4106}, [0] * 4),
    ({"seq_max_k2": 0.9610}, [1] * 4),
    ({"seq_max_k2": 0.9608}, [0] * 4),  # log(4) ** 2 / 2 = 0.960906
    ({"seq_sum_k3": 1.643}, [1] * 4),
    ({"seq_sum_k3": 1.642}, [0] * 4),
    ({"token_k3": 0.1}, [1, 1, 0, 1]),
    ({"token_k1": 2, "token_k2": 0.01}, [1, 0, 0, 1]),
]


@pytest.mark.parametrize(("reject", "expected"), REJECTIONS)
def test_rejections_of_the_worked_row(reject, expected):
    found = worked(reject=reject)
    assert found.divisor_T.int().tolist() == expected
    assert found.mask_T.all()


def test_statistics_of_the_worked_row():
    log_T = torch.tensor(OLD).log() - torch.tensor(MU).log()
    assert log_T.sum().exp().item() == pytest.approx(3.555556, abs=1e-5)
    assert log_T.mean().exp().item() == pytest.approx(1.373178, abs=1e-6)
    assert k_statistic(log_T, "k2").mean().item() == pytest.approx(0.247838, abs=1e-6)
    assert k_statistic(log_T, "k3").mean().item() == pytest.approx(0.410650, abs=1e-6)
    assert -k_statistic(log_T, "k1").mean().item() == pytest.approx(-0.317128, abs=1e-6)
    logged = worked(cap=math.inf).logged
    assert logged["is_weight_square"].mean().item() - 1 == pytest.approx(3.718642, abs=1e-5)  # chi2


ENUMERABLE = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.3, 0.3, 0.15, 0.25]), torch.tensor([4.0, 3, 2, 1])


def estimate(mu, pi, f, **knobs):
    found = of(FP8Rollout(**knobs), view_of(pi.log().tolist(), mu.log().tolist()))
    return (mu * found.weight_T * f).sum().item()


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({"level": "none"}, 3.25),
        ({"cap": 2.0}, 2.50),
        ({"form": "band", "low": 0.5, "high": 2.0}, 2.40),
        ({"cap": math.inf}, 2.65),
    ],
)
def test_the_bias_on_an_enumerable_policy(knobs, expected):
    mu, pi, f = ENUMERABLE
    assert estimate(mu, pi, f, **knobs) == pytest.approx(expected, abs=1e-6)


def test_the_mean_truncated_weight():
    mu, pi, _ = ENUMERABLE
    assert estimate(mu, pi, torch.ones(4)) == pytest.approx(0.85, abs=1e-6)


SIMPLEX = st.lists(st.floats(0.02, 1), min_size=4, max_size=4).map(lambda x: torch.tensor(x) / sum(x))


@settings(max_examples=60, deadline=None)
@given(SIMPLEX, SIMPLEX, st.lists(st.floats(0, 5, width=32), min_size=4, max_size=4))
def test_masking_is_below_truncation_is_below_the_exact_mean(mu, pi, f):
    f = torch.tensor(f)
    exact = (pi * f).sum().item()
    assert estimate(mu, pi, f, cap=math.inf) == pytest.approx(exact, rel=1e-4, abs=1e-6)
    mis, tis = estimate(mu, pi, f, form="band", low=0.0, high=2.0), estimate(mu, pi, f, cap=2.0)
    assert mis <= tis + 1e-5
    assert tis <= exact + 1e-4


@settings(max_examples=60, deadline=None)
@given(SIMPLEX, SIMPLEX)
def test_the_mean_of_k3_is_the_divergence(mu, pi):
    log = (pi / mu).log()
    assert (k_statistic(log, "k3") >= 0).all()
    assert (k_statistic(log, "k2") >= 0).all()
    assert (mu * k_statistic(log, "k3")).sum().item() == pytest.approx((-mu * log).sum().item(), abs=1e-5)


@pytest.mark.parametrize(("length", "product"), [(10, 2.594), (100, 13780.6)])
def test_a_product_grows_with_the_length_and_a_geometric_mean_does_not(length, product):
    view = view_of([math.log(1.1)] * length, [0.0] * length)
    found = of(FP8Rollout(level="sequence", cap=math.inf), view)
    assert found.weight_T[0].item() == pytest.approx(product, rel=2e-4)
    geometric = of(FP8Rollout(reject={"seq_mean_k1": [1.0999, 1.1001]}), view)
    assert geometric.divisor_T.all()


def test_log_ratios_are_clamped_and_masked_tokens_are_not_read():
    view = view_of([0.0, 0.0, math.nan], [-300.0, 300.0, 0.0], mask=[True, True, False])
    assert of(FP8Rollout(cap=math.inf), view).weight_T.tolist() == pytest.approx([math.exp(20), math.exp(-20), 1])
    assert of(FP8Rollout(level="sequence", cap=math.inf), view).weight_T.tolist() == [1, 1, 1]


def test_rows_are_kept_apart_and_links_multiply():
    view = view_of([0.0, 0.0, 0.0], [-math.log(1.2), -math.log(1.2), math.log(4)], row_T=[0, 0, 1])
    start = Correction(torch.full((3,), 2.0), torch.ones(3, dtype=torch.bool), {"seen": torch.ones(3)})
    start.divisor_T = torch.tensor([True, False, True])
    found = FP8Rollout(level="sequence", reject={"seq_sum_k1": 2}).correct(view, start)
    assert found.weight_T.tolist() == pytest.approx([2.88, 2.88, 0.5])
    assert found.divisor_T.tolist() == [True, False, False]
    assert set(found.logged) == {"seen", "is_weight", "is_weight_square", "is_rejected"}
    normal = of(FP8Rollout(level="sequence", cap=math.inf, batch_normalize=True), view).weight_T
    assert normal.tolist() == pytest.approx([1.44 / 0.845, 1.44 / 0.845, 0.25 / 0.845])  # every row once


# ------------------------------------------------------------ in the learner


def engine_groups(spread, seed=0):
    groups, model = random_groups(seed=seed), tiny_model()
    with torch.no_grad():
        for i, r in enumerate(flatten(groups)):
            r.logprobs = (plain_logprobs(model, r) - spread * torch.sin(torch.arange(r.length) + i)).numpy()
    return groups


def updated(groups, correct: list[Correct], budget=1000, **clip):
    model = tiny_model()
    config = LearnerConfig(lr=1e-3, micro_batch_tokens=budget, grad_clip=0.0)
    learner = Learner(model, config, objective=Clip(**clip), correct=correct, max_new_tokens=8)
    result = learner.update(groups, ctx=context())
    return result, torch.cat([p.detach().flatten() for p in model.parameters()])


ALL = {"token_k1": 2, "seq_sum_k1": 2, "seq_mean_k1": [0.999, 1.001], "seq_mean_k3": 0.01, "token_k2": 0.1}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("reject", [{}, ALL])
def test_without_a_mismatch_the_update_is_plain_to_the_bit(level, reject):
    groups = random_groups()  # log-probs that were not scored count as the learner's own
    plain, weights = updated(groups, [])
    ours, ours_weights = updated(groups, [FP8Rollout(level=level, reject=reject)])
    assert torch.equal(weights, ours_weights)
    assert ours.metrics["grad_norm"] == plain.metrics["grad_norm"]


@pytest.mark.parametrize("how", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"])
@pytest.mark.parametrize("budget", [8, 1000])
def test_a_rejected_row_is_as_good_as_a_dropped_one(how, budget):
    groups = engine_groups(0.0)
    bad = flatten(groups)[1]
    bad.logprobs = bad.logprobs - 1
    ours, weights = updated(groups, [FP8Rollout(level="none", reject={"seq_mean_k1": 1.5})], budget, aggregate=how)
    assert ours.metrics["is_rejected"] == pytest.approx(5 / 15)
    groups = engine_groups(0.0)
    flatten(groups)[1].drop("filtered", "test")
    plain, plain_weights = updated(groups, [], budget, aggregate=how)
    assert ours.metrics["grad_norm"] == pytest.approx(plain.metrics["grad_norm"], rel=1e-5)
    assert (ours.trained_rows, ours.trained_tokens) == (plain.trained_rows, plain.trained_tokens) == (4, 10)
    assert torch.allclose(weights, plain_weights, atol=1e-5)


def test_a_band_leaves_the_divisor_and_a_rejection_does_not():
    groups = engine_groups(0.0)
    bad = flatten(groups)[1]
    bad.logprobs = bad.logprobs - 1
    rejected = updated(groups, [FP8Rollout(level="none", reject={"token_k1": 1.5})])[0]
    banded = updated(groups, [FP8Rollout(form="band", low=0.5, high=1.5)])[0]
    assert rejected.metrics["grad_norm"] == pytest.approx(banded.metrics["grad_norm"] * 15 / 10, rel=1e-5)


@pytest.mark.parametrize("budget", [8, 1000])
def test_the_split_does_not_change_normalised_weights(budget):
    part = FP8Rollout(batch_normalize=True, reject={"token_k1": 2.5})
    whole = updated(engine_groups(1.0), [part])[0]
    found = updated(engine_groups(1.0), [part], budget)[0]
    assert 0 < found.metrics["is_rejected"] < 1
    assert found.metrics["is_weight"] == pytest.approx(1, abs=1e-5)
    assert found.metrics["grad_norm"] == pytest.approx(whole.metrics["grad_norm"], rel=1e-4)


def test_a_batch_of_which_nothing_is_left_makes_no_update():
    groups = engine_groups(0.0)
    for r in flatten(groups):
        r.logprobs = r.logprobs - 3
    before = torch.cat([p.detach().flatten() for p in tiny_model().parameters()])
    result, weights = updated(groups, [FP8Rollout(reject={"token_k1": 2})])
    assert (result.outcome, result.trained_tokens, result.trained_rows) == ("nothing_to_train", 0, 0)
    assert result.forwarded_tokens > 0
    assert torch.equal(weights, before)


def test_a_rejection_without_the_whole_batch_is_refused():
    class Wrong(FP8Rollout):
        def whole_batch(self):
            return False

    with pytest.raises(ConfigError, match="rejects tokens, so its whole_batch"):
        updated(engine_groups(0.0), [Wrong(reject={"token_k1": 2})])


def test_the_recipe():
    paper = resolve("fp8-rollout", {"model": "smollm2-135m"})
    assert paper.parts["correct"] == [FP8Rollout()]
    assert not paper.parts["correct"][0].whole_batch()
    strict = resolve("fp8-rollout", {"correct.level": "none", "correct.reject": {"seq_mean_k1": [0.999, 1.001]}})
    assert strict.parts["correct"][0].whole_batch()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"correct.reject": {"seq_mean_k4": 1}}, "seq_mean_k"),
        ({"correct.reject": {"token_k1": 0.5}}, "one number >= 1"),
        ({"correct.reject": {"token_k1": 0}}, "one number >= 1"),
        ({"correct.reject": {"token_k1": [2.0, 0.5]}}, "0 <= low <= high"),
        ({"correct.reject": {"token_k1": [0.5]}}, r"0 <= low <= high"),
        ({"correct.reject": {"token_k1": [0.5, 2, 3]}}, "0 <= low <= high"),
        ({"correct.reject": {"token_k3": [0.1, 0.2]}}, "one number >= 0"),
        ({"correct.reject": {"token_k3": -1}}, "one number >= 0"),
        ({"correct.reject": {"token_k3": "x"}}, "one number >= 0"),
        ({"correct.reject": {"token_k1": True}}, "one number >= 1"),
        ({"correct.low": 6.0}, "a value below high"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        resolve("fp8-rollout", overrides)
