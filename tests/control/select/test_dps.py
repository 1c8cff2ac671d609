from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
from builders import context, group, prompt, record
from hypothesis import given
from hypothesis import strategies as st

from trimtab.control.select.dps import DPS, PARTLY, SOLVED, WRONG, chosen_best, distinct, entropy, shown
from trimtab.core.errors import DataError
from trimtab.core.history import prompt_keys
from trimtab.core.records import Prompt
from trimtab.core.slots import PromptStream


def stream(count: int) -> PromptStream:
    return PromptStream([prompt(f"p{i}") for i in range(count)], seed=0)


def test_states_of_graded_missing_ragged_and_repeated_groups():
    groups = [
        group([0.3, 0.3], name="low"),
        group([0.7, 0.7, 0.7], name="high"),
        group([0.3, 0.4], name="graded"),
        group([None, 1.0], name="one"),
        group([None, None], name="none"),
        group([], name="empty"),
        group([1, 1], name="twice"),
        group([0, 0], name="twice"),
    ]
    ids, states = shown(groups)
    assert dict(zip(ids, states.tolist(), strict=True)) == {
        "low": WRONG,
        "high": SOLVED,
        "graded": PARTLY,
        "one": SOLVED,
        "twice": PARTLY,
    }


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.data())
def test_the_best_are_chosen_and_ties_share_the_places(scores, data):
    num = data.draw(st.integers(1, len(scores)))
    score = np.array(scores, dtype=float)
    best, inclusion = chosen_best(score, np.random.default_rng(0).permutation(len(scores)), num)
    assert best.tolist() == sorted(set(best.tolist()))
    assert len(best) == num
    assert score[best].min() >= np.sort(score)[::-1][num - 1]
    tied = (score == score[best].min()).sum()
    expected = (score > score[best].min()).sum() + tied * inclusion.min()
    assert expected == pytest.approx(num), "inclusion probabilities add up to the places"


def test_ties_are_settled_by_seed_and_evenly():
    def chosen(seed: int) -> list[int]:
        return DPS(candidates=10.0).select(stream(20), 2, context(seed=seed)).index

    assert chosen(3) == chosen(3)
    counts = Counter(i for seed in range(600) for i in chosen(seed))
    assert len(counts) == 20
    assert max(counts.values()) < 3 * min(counts.values())


def test_candidates_are_distinct_across_the_end_of_an_epoch():
    own = stream(10)
    for size in (7, 7, 10, 3, 10):
        found = distinct(own, size).tolist()
        assert len(set(found)) == len(found) == size


def test_a_pool_smaller_than_the_batch_is_plain_sampling():
    part = DPS()
    found = part.select(stream(3), 8, context())
    assert found.index == stream(3).take(8)
    assert found.inclusion == [1.0] * 8
    part.observe(record([group([0, 1], name="p0"), group([1, 1], name="p0")]), context())
    assert DPS().select(stream(0), 8, context()).index == []


def test_a_changed_prompt_set_keeps_beliefs_and_gives_new_prompts_the_prior():
    part, own = DPS(candidates=50.0), stream(4)
    part.select(own, 2, context())
    part.observe(record([group([0, 1], name="p1")]), context())
    own = PromptStream([prompt("new"), prompt("p1"), prompt("other")], seed=0)
    found = part.select(own, 1, context(step=1))
    assert own.pool[found.index[0]].id == "p1"
    assert found.inclusion == [1.0]
    assert found.skipped == {"score": 2}
    assert part.metrics()["predicted"] == pytest.approx(0.4)
    assert len(part.table) == 6


def test_a_rolled_out_prompt_that_was_no_candidate_is_tracked():
    part = DPS()
    part.observe(record([group([0, 1], name="x")]), context())
    assert part.table.values("pi", prompt_keys(["x"]))[0, PARTLY] == pytest.approx(0.4)


def test_the_entropy_bonus_prefers_the_unknown():
    pi = np.array([[1 / 3, 1 / 3, 1 / 3], [0.0, 0.4, 0.6]])
    assert entropy(pi) == pytest.approx([np.log(3), 0.6730117])
    assert DPS().scores(pi).argmax() == 1
    assert DPS(strategy="topk+entropy", entropy_weight=1.0).scores(pi).argmax() == 0
    assert len(set(DPS(strategy="uniform").scores(pi))) == 1


def test_a_million_prompts_all_of_them_candidates():
    ids = np.random.default_rng(0).integers(0, 2**63, 10**6).tolist()
    own = PromptStream([Prompt(f"{x:016x}", "", (2,)) for x in ids], seed=0)
    part = DPS(candidates=10**6)
    part.select(own, 256, context())  # enters every prompt
    seconds = []
    for step in (1, 2):
        start = time.process_time()
        found = part.select(own, 256, context(step=step))
        part.observe(record([group([0, 1], name=own.pool[i].id) for i in found.index]), context(step=step))
        seconds.append(time.process_time() - start)
    assert min(seconds) < 1
    assert sum(column.nbytes for column in part.state_dict()["table"].values()) < 2**28


def test_a_table_of_another_layout_is_refused():
    state = DPS().state_dict()
    del state["table"]["pi"]
    with pytest.raises(DataError, match="prompt table has"):
        DPS().load_state_dict(state)
