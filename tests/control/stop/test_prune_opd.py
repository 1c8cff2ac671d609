from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from builders import context, group, prompt, record, rollout
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.control.stop.prune_opd import (
    PruneOPD,
    effective_length,
    hit_share,
    next_limit,
    outside_nucleus,
    reliability,
    severe,
)
from trimtab.core.errors import ConfigError, DataError
from trimtab.core.recipe import resolve
from trimtab.core.records import DropReason, Group, Source, StopReason
from trimtab.generate.protocol import ChunkView

OVERLAPS = st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), max_size=40)
DROPS = st.sampled_from([0.0, 0.01, 0.1, 1 / 3, 0.3, 0.4, 0.5, 1.0])


def step(overlaps: list[list[float]], **fields) -> list[Group]:
    rollouts = [rollout(len(o), signals={"overlap": np.array(o, dtype=np.float32)}, **fields) for o in overlaps]
    return [Group(prompt(), rollouts)]


def run_hook(part: PruneOPD, overlap: list[float], chunk: int) -> int:
    """Response index at which the hook stops one rollout read in chunks, -1 if it never does."""
    hook = part.hook(context())
    assert hook is not None
    state = hook.start(1, torch.device("cpu"))
    for first in range(0, len(overlap), chunk):
        seen = overlap[first : first + chunk]
        padded = torch.zeros(1, chunk)  # padding columns look like events
        padded[0, : len(seen)] = torch.tensor(seen)
        view = ChunkView(
            token_BC=torch.zeros(1, chunk, dtype=torch.int64),
            count_B=torch.tensor([len(seen)]),
            index_B=torch.tensor([first]),
            row_B=torch.tensor([0]),
            signals={"overlap": padded},
        )
        state, column = hook.step(state, view)
        if column >= 0:
            return first + int(column)
    return -1


@given(overlap=OVERLAPS, w_drop=DROPS, w_base=st.sampled_from([0.0, 0.5]))
def test_weights_never_rise_and_stay_in_bounds(overlap, w_drop, w_base):
    keep = PruneOPD(w_drop=w_drop, w_base=w_base).filter(step([overlap]), context())
    w = PruneOPD(w_drop=w_drop).weights(step([overlap])[0].rollouts[0])
    assert ((w >= 0) & (w <= 1)).all()
    assert (w.diff() <= 0).all()
    assert keep.keep_N.all()
    if keep.token_weight is not None:
        assert keep.token_weight[0] == pytest.approx(w.numpy() + w_base)
        assert keep.token_weight[0].dtype == np.float32


@given(overlap=OVERLAPS, w_drop=DROPS)
def test_effective_length_is_the_position_before_the_event_that_ends_it(overlap, w_drop):
    event = [o < 0.7 for o in overlap]
    kth = [t for t in range(len(event)) if sum(event[: t + 1]) == severe(w_drop)]
    expected = kth[0] if kth else len(overlap)
    assert int(effective_length(PruneOPD(w_drop=w_drop).weights(step([overlap])[0].rollouts[0]))) == expected


@pytest.mark.parametrize(
    ("w_drop", "events"),
    [(0.01, 100), (0.02, 50), (0.1, 10), (0.4, 3), (0.5, 2), (1.0, 1), (0.07, 15), (0.0, math.inf)],
)
def test_events_that_end_a_response(w_drop, events):
    assert severe(w_drop) == events
    if events != math.inf:
        assert reliability(torch.tensor(events), w_drop) <= 1e-8 < reliability(torch.tensor(events - 1), w_drop)


@settings(deadline=None)
@given(overlap=OVERLAPS, w_drop=DROPS.filter(bool), chunk=st.integers(1, 41))
def test_streaming_stops_at_the_same_token_for_every_chunk_and_equals_masking(overlap, w_drop, chunk):
    part = PruneOPD(w_drop=w_drop, w_base=0.0, form="streaming")
    last = run_hook(part, overlap, chunk)
    assert last == run_hook(part, overlap, 1)
    full = part.filter(step([overlap]), context())
    cut = part.filter(step([overlap[: last + 1]] if last >= 0 else [overlap]), context())
    trained = [w[m].tolist() for w, m in zip(full.token_weight, full.token_mask, strict=True)]
    assert trained == [w[m].tolist() for w, m in zip(cut.token_weight, cut.token_mask, strict=True)]
    released = PruneOPD(w_drop=w_drop, w_base=0.0).filter(step([overlap]), context())
    assert released.token_mask is None
    assert trained[0] == [x for x in released.token_weight[0].tolist() if x > 0]


def test_the_hook_counts_each_slot_by_itself():
    part = PruneOPD(w_drop=0.5, form="streaming")
    hook = part.hook(context())
    state = {"events": torch.tensor([1, 0, 0])}
    view = ChunkView(
        token_BC=torch.zeros(3, 2, dtype=torch.int64),
        count_B=torch.tensor([2, 2, 1]),
        index_B=torch.tensor([4, 0, 9]),
        row_B=torch.arange(3),
        signals={"overlap": torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])},
    )
    new, column = hook.step(state, view)
    assert column.tolist() == [1, 1, -1]
    assert new["events"].tolist() == [2, 2, 1]
    assert state["events"].tolist() == [1, 0, 0]
    assert hook.signals == {"teacher"}
    assert (hook.every, hook.part) == (32, "prune-opd")


@pytest.mark.parametrize(("count", "k", "threshold"), [(7, 10, 0.7), (3, 4, 0.75), (9, 10, 0.9), (16, 16, 1.0)])
def test_an_overlap_of_exactly_the_threshold_is_no_event(count, k, threshold):
    seen = torch.tensor([count / k, (count - 1) / k])
    assert PruneOPD(threshold=threshold).events(torch.zeros(2), {"overlap": seen}).tolist() == [False, True]


def test_without_streaming_or_without_a_drop_there_is_no_hook():
    assert PruneOPD().hook(context()) is None
    assert PruneOPD(form="streaming", w_drop=0.0).hook(context()) is None


def test_only_tokens_the_student_chose_are_events():
    source = np.array([Source.FORCED, Source.SAMPLED, Source.ENVIRONMENT, Source.REUSED])
    groups = step([[0.0, 0.0, 0.0, 0.0]], source=source)
    assert PruneOPD(w_drop=0.1).weights(groups[0].rollouts[0]).tolist() == pytest.approx([1.0, 0.9, 0.9, 0.8])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), threshold=st.sampled_from([0.1, 0.5, 0.7, 0.95, 1.0]))
def test_the_accepted_set_is_the_shortest_prefix_that_reaches_the_threshold(seed, threshold):
    g = torch.Generator().manual_seed(seed)
    logp, ids = torch.log_softmax(torch.randn(5, 9, generator=g), -1).topk(4)
    token = torch.randint(9, (5,), generator=g)
    found = outside_nucleus(token, ids, logp, threshold)
    for t in range(5):
        mass, accepted = 0.0, []
        for v, p in zip(ids[t].tolist(), logp[t].exp().tolist(), strict=True):
            if mass < threshold:
                accepted.append(v)
            mass += p
        assert found[t].item() is (token[t].item() not in accepted)


def test_the_other_metric_reads_the_teachers_ranked_ids():
    signals = {
        "teacher_topk_ids": np.array([[2, 9, 8, 7], [9, 3, 8, 7]]),
        "teacher_topk_logprobs": np.log([[0.55, 0.25, 0.12, 0.05]] * 2).astype(np.float32),
    }
    part = PruneOPD(metric="teacher_top_p_accept", k=3, w_drop=0.5)
    one = rollout(2, reason=StopReason.LIMIT, signals=signals)
    assert part.weights(one).tolist() == [1.0, 1.0]
    one.tokens[:] = [8, 9]
    assert part.weights(one).tolist() == [0.5, 0.5]
    assert part.needs().topk == 0
    assert part.needs().teacher_topk == 3


# ---------------------------------------------------------------- controller


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=5), max_size=30),
    patience=st.integers(1, 4),
    ratio=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_the_limit_stays_in_range_moves_by_one_step_and_shrinks_no_faster_than_patience(steps, patience, ratio):
    limit, misses, since = 64, 0, patience
    for effective in steps:
        share = hit_share(effective, limit, 32, 8)
        new, misses = next_limit(
            limit, misses, share, lowest=32, highest=256, step=24, hit_ratio=ratio, patience=patience
        )
        assert 32 <= new <= 256
        assert abs(new - limit) <= 24
        since += 1
        if new < limit:
            assert since >= patience
            since = 0
        limit = new


def test_the_limit_acts_from_the_next_step_on_and_survives_a_checkpoint():
    part = PruneOPD(init_len=64, min_len=32, max_len=96, step=8, margin=8, w_drop=1.0)
    ctx = context(max_new_tokens=80)
    assert part.limit(ctx) == 64
    part.observe(record(step([[1.0] * 60])), ctx)
    assert part.limit(ctx) == 72
    for _ in range(3):
        part.observe(record(step([[1.0] * 80])), ctx)
    assert part.limit(ctx) == 80  # the static limit caps max_len
    for _ in range(2):
        part.observe(record(step([[0.0] * 80])), ctx)
    assert (part.limit(ctx), part.state.misses) == (80, 2)
    other = PruneOPD(init_len=64, min_len=32, max_len=96, step=8, margin=8, w_drop=1.0)
    other.load_state_dict(part.state_dict())
    for each in (part, other):
        each.observe(record(step([[0.0] * 80])), ctx)
        assert each.limit(ctx) == 72
    assert other.metrics() == {"effective_length": 0.0, "hit_ratio": 0.0, "next_limit": 72.0, "misses": 0.0}


def test_a_step_without_readable_rollouts_moves_nothing():
    part = PruneOPD(init_len=64, min_len=32)
    part.observe(record([group([])]), context())
    lost = rollout(5)
    lost.drop(DropReason.QUARANTINED, "engine")
    part.observe(record([Group(prompt(), [lost])]), context())
    assert part.limit(context()) == 64
    assert part.metrics() == {"next_limit": 0.0, "misses": 0.0}
    assert part.filter([Group(prompt(), [lost])], context()).keep_N.all()


def test_the_start_is_clipped_into_the_range():
    assert PruneOPD(init_len=8, min_len=32).limit(context()) == 32
    assert PruneOPD(init_len=2048, min_len=32).limit(context(max_new_tokens=256)) == 256
    assert PruneOPD(controller=False).limit(context()) is None


def test_a_rollout_without_the_signal_is_an_error_not_a_reliable_one():
    with pytest.raises(DataError, match="rollout r: prune-opd needs the signal 'overlap'"):
        PruneOPD().filter([Group(prompt(), [rollout()])], context())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"stop.min_len": 300}, "stop.prune-opd.min_len: 300.*at most 256"),
        (
            {"stop.metric": "overlap_ratio", "stop.k": 4, "distill.k": 8},
            "stop.prune-opd.k: 4, but 'opd' asks for a top k of 8",
        ),
        ({"filter": "none"}, "prune-opd: must also stand in the slot 'filter'"),
        ({"stop.w_drop": 1.5}, "w_drop: 1.5 .*<= 1"),
        ({"teacher": ""}, "needs a teacher"),
    ],
)
def test_contradictions_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        resolve("prune-opd", overrides)
