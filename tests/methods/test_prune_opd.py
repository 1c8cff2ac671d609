"""Prune-OPD: worked numbers, limits and invariants of its card (all from the authors' release, recomputed by hand)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from builders import context, prompt, record, rollout
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import random_prompt, tiny_model

from trimtab.control.stop.prune_opd import PruneOPD, effective_length, outside_nucleus
from trimtab.core.recipe import resolve
from trimtab.core.records import Group, Rollout, StopReason
from trimtab.generate.protocol import Request, Sampling
from trimtab.generate.torch_engine import TorchEngine
from trimtab.learn.distill.opd import OPD
from trimtab.learn.teacher import Teacher, TeacherStream


def step(*overlaps: list[float]) -> list[Group]:
    return [
        Group(prompt(f"p{i}"), [rollout(len(o), name=f"r{i}", signals={"overlap": np.array(o, dtype=np.float32)})])
        for i, o in enumerate(overlaps)
    ]


WORKED = [  # overlaps, threshold, w_drop, w_base -> w, lambda, E
    ([1, 0.5, 0], 0.75, 0.1, 0.5, [1, 0.9, 0.8], [1.5, 1.4, 1.3], 3),
    (
        [1, 0.5, 0.75, 0.25, 1, 0, 1],
        0.7,
        0.4,
        0.5,
        [1, 0.6, 0.6, 0.2, 0.2, 0, 0],
        [1.5, 1.1, 1.1, 0.7, 0.7, 0.5, 0.5],
        5,
    ),
]


@pytest.mark.parametrize(("overlap", "threshold", "w_drop", "w_base", "w", "weight", "effective"), WORKED)
def test_weights_of_worked_responses(overlap, threshold, w_drop, w_base, w, weight, effective):
    part = PruneOPD(threshold=threshold, w_drop=w_drop, w_base=w_base)
    groups = step(overlap)
    found = part.weights(groups[0].rollouts[0])
    assert found.tolist() == pytest.approx(w, abs=1e-12)
    assert part.filter(groups, context()).token_weight[0].tolist() == pytest.approx(weight, abs=1e-6)
    assert int(effective_length(found)) == effective


def test_an_event_at_every_fourth_of_1024_tokens():
    overlap = [0.0 if t % 4 == 0 else 1.0 for t in range(1, 1025)]
    part = PruneOPD(w_drop=0.01, w_base=0.5)
    groups = step(overlap)
    w = part.weights(groups[0].rollouts[0])
    assert int(effective_length(w)) == 399
    assert w[398].item() == pytest.approx(0.01, abs=1e-12)
    assert w[399].item() == 0
    assert part.filter(groups, context()).token_weight[0][-1] == 0.5


def effective(*lengths: int) -> list[Group]:
    """Responses reliable on exactly these lengths, one drift event ending each."""
    return step(*([1.0] * n + [0.0] for n in lengths))


RELEASE = {"min_len": 1024, "max_len": 12288, "step": 100, "margin": 100, "hit_ratio": 0.1, "shrink_patience": 3}
CONTROLLER = [  # start, then (effective lengths of ten responses, limit after the step)
    (
        1200,
        [([1100] + [5] * 9, 1300)]
        + [([5] * 10, limit) for limit in (1300, 1300, 1200, 1200, 1200, 1100)]
        + [([1024] * 10, 1200)],
    ),
    (1024, [([1023] * 10, 1024), ([1024] + [1023] * 9, 1124)]),
    (12288, [([12188] * 10, 12288)]),
]


@pytest.mark.parametrize(("start", "steps"), CONTROLLER)
def test_the_controller(start, steps):
    part = PruneOPD(init_len=start, w_drop=1.0, **RELEASE)
    ctx = context(max_new_tokens=12288)
    assert part.limit(ctx) == start
    for lengths, limit in steps:
        part.observe(record(effective(*lengths)), ctx)
        assert part.limit(ctx) == limit


def test_top_p_accept():
    logp = torch.tensor([0.55, 0.25, 0.12, 0.05]).log().expand(4, 4)
    ids = torch.tensor([10, 11, 12, 13]).expand(4, 4)
    assert outside_nucleus(torch.tensor([10, 11, 12, 13]), ids, logp, 0.7).tolist() == [False, False, True, True]


def test_without_a_drop_nothing_differs_from_plain_distillation():
    keep = PruneOPD(w_drop=0.0, w_base=0.0).filter(step([0.0, 0.2, 1.0]), context())
    assert keep.keep_N.all()
    assert keep.token_weight is None
    assert keep.token_mask is None


def test_teacher_equal_to_student_never_drifts_and_the_limit_grows_every_step():
    part = PruneOPD(init_len=64, min_len=32, max_len=256, step=8, margin=8, k=4)
    ctx = context(max_new_tokens=256)
    for number in range(1, 30):
        limit = part.limit(ctx)
        groups = step(*[[1.0] * limit] * 10)
        assert (part.weights(groups[0].rollouts[0]) == 1).all()
        part.observe(record(groups), ctx)
        assert part.limit(ctx) == min(64 + 8 * number, 256)


@settings(max_examples=40, deadline=None)
@given(length=st.integers(0, 30), events=st.integers(1, 12))
def test_an_event_at_every_token_leaves_k_minus_one(length, events):
    part = PruneOPD(w_drop=1 / events)
    found = effective_length(part.weights(step([0.0] * length)[0].rollouts[0]))
    assert int(found) == min(length, events - 1)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=20), min_size=1, max_size=6), st.randoms())
def test_the_order_of_the_batch_leaves_the_limit_alone(overlaps, random):
    limits = []
    for _ in range(2):
        part = PruneOPD(init_len=16, min_len=8, step=4, margin=2, w_drop=0.5, shrink_patience=1)
        part.observe(record(step(*overlaps)), context())
        limits.append(part.limit(context()))
        random.shuffle(overlaps)
    assert limits[0] == limits[1]


def generate(part: PruneOPD, *, stopping: bool) -> Group:
    """Nine rollouts of a tiny student with a tiny teacher's signals, with or without the stopper."""
    owner, student, teacher = random_prompt("p", 4, seed=0), tiny_model(0), Teacher(tiny_model(1))
    engine = TorchEngine(student, eos_ids={1}, pad_id=1, num_slots=4, max_context=64, prefill_tokens=64)
    asked = [Request(f"p-{i}", owner, i, key=i, max_new_tokens=24, sampling=Sampling()) for i in range(9)]
    hook = part.hook(context())
    assert hook is not None
    scorer = TeacherStream(teacher, num_slots=4, topk=part.k)
    found = engine.generate(asked, topk=part.k, hooks=[hook] if stopping else [], scorer=scorer if stopping else None)
    rollouts = [
        Rollout(r.id, owner, r.sample, c.tokens, c.logprobs, c.stop, signals=c.signals)
        for r, c in zip(asked, found, strict=True)
    ]
    teacher.score(rollouts, topk=part.k)
    return Group(owner, rollouts)


@pytest.mark.parametrize("chunk", [1, 3, 7, 50])
@pytest.mark.parametrize("metric", ["overlap_ratio", "teacher_top_p_accept"])
def test_stopping_in_the_engine_trains_the_same_tokens_as_masking_full_responses(metric, chunk):
    part = PruneOPD(metric=metric, k=4, w_drop=0.25, w_base=0.0, form="streaming", chunk=chunk)
    groups = {name: generate(part, stopping=name == "stopped") for name in ("stopped", "full")}
    keep = {name: part.filter([group], context()) for name, group in groups.items()}
    trained = {
        name: [
            (rollout.tokens[mask].tolist(), weight[mask].tolist())
            for rollout, mask, weight in zip(
                group.rollouts, keep[name].token_mask, keep[name].token_weight, strict=True
            )
        ]
        for name, group in groups.items()
    }
    assert trained["stopped"] == trained["full"]
    assert any(r.stop.reason == StopReason.PART for r in groups["stopped"].rollouts)
    for stopped, mask in zip(groups["stopped"].rollouts, keep["stopped"].token_mask, strict=True):
        if stopped.stop.reason == StopReason.PART:  # all but the event's own token
            assert (stopped.stop.part, stopped.length) == ("prune-opd", mask.sum() + 1)
    assert sum(r.length for r in groups["stopped"].rollouts) < sum(r.length for r in groups["full"].rollouts)


def test_the_recipe():
    paper = resolve("prune-opd", {"model": "smollm2-135m", "teacher": "some/teacher"})
    assert paper.one("stop") == PruneOPD()
    assert paper.parts["filter"][0] is paper.one("stop")
    assert paper.one("distill") == OPD()
    assert paper.needs().topk == paper.needs().teacher_topk == 16
    resolve("prune-opd", {"stop.form": "streaming"})
