"""The ledger: where each token goes, the identity under any decisions, and tokens that get lost being noticed."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.core.ledger import ImbalanceError, Ledger
from trimtab.core.records import Cost, DropReason, Prompt, Rollout, Source, StopReason, StopRecord

PROMPT = Prompt("0" * 16, "", ())
S, F, R, E, X, P = (int(source) for source in Source)


def rollout(
    name: str = "0-a-0",
    length: int = 10,
    *,
    source: list[int] | None = None,
    mask: list[int] | None = None,
    advantage: Any = 1.0,
    dropped: str = "",
    by: str = "",
    stopped_by: str = "",
    **fields: Any,
) -> Rollout:
    length = length if source is None else len(source)
    made = Rollout(
        id=name,
        prompt=PROMPT,
        sample=0,
        tokens=np.zeros(length, dtype=np.int64),
        logprobs=np.zeros(length, dtype=np.float32),
        stop=StopRecord(StopReason.PART if stopped_by else StopReason.EOS, length - 1, stopped_by),
        source=None if source is None else np.array(source, dtype=np.int64),
        token_mask=None if mask is None else np.array(mask, dtype=bool),
        advantage=advantage if advantage is None or np.ndim(advantage) == 0 else np.array(advantage, dtype=np.float32),
        **fields,
    )
    if dropped:
        made.drop(dropped, by)
    return made


def booked(*rollouts: Rollout, **how: Any) -> dict[str, float]:
    """The step record after these rollouts, without the zeros."""
    ledger = Ledger()
    ledger.book(rollouts, **how)
    ledger.balance()
    return nonzero(ledger)


def nonzero(ledger: Ledger) -> dict[str, float]:
    return {name.removeprefix("ledger/"): value for name, value in ledger.step_record().items() if value}


# ---------------------------------------------------------------- one fate after the other


def test_a_plain_rollout_is_trained() -> None:
    assert booked(rollout()) == {"sampled": 10, "trained": 10}


def test_a_dropped_rollout_goes_to_its_reason_whole() -> None:
    record = booked(rollout(source=[S, F, E, R], mask=[1, 0, 1, 1], dropped=DropReason.TRUNCATED, by="overlong"))
    assert record == {
        "sampled": 1,
        "forced": 1,
        "environment": 1,
        "reused": 1,
        "dropped": 4,
        "dropped/truncated": 4,
    }


def test_masked_tokens_leave_a_kept_rollout() -> None:
    record = booked(rollout(length=5, mask=[1, 1, 1, 0, 0]))
    assert record == {"sampled": 5, "trained": 3, "dropped": 2, "dropped/masked": 2}


def test_tokens_of_others_carry_no_gradient() -> None:
    record = booked(rollout(source=[S, F, F, R, E, X, P, P], mask=[1, 1, 0, 1, 1, 1, 1, 0]))
    assert record == {
        "sampled": 1,
        "forced": 2,
        "reused": 1,
        "environment": 1,
        "foreign": 1,
        "trained": 2,
        "dropped": 4,
        "dropped/masked": 1,
        "dropped/forced": 1,
        "dropped/environment": 1,
        "dropped/foreign": 1,
    }


def test_sources_in_the_loss_can_be_named() -> None:
    sources = {Source.SAMPLED, Source.REUSED, Source.FOREIGN}
    assert booked(rollout(source=[S, X, X]), gradient_sources=sources)["trained"] == 3


@pytest.mark.parametrize("advantage", [0.0, -0.0, None, [0.0] * 4])
def test_advantage_zero_is_no_gradient(advantage: Any) -> None:
    record = booked(rollout(length=4, advantage=advantage))
    assert record == {"sampled": 4, "dropped": 4, "dropped/zero_signal": 4}
    assert booked(rollout(length=4, advantage=advantage), distilled=True) == {"sampled": 4, "trained": 4}


def test_advantage_and_weight_zero_of_single_tokens() -> None:
    weights = np.array([1, 0, 1, 1], dtype=np.float32)
    record = booked(rollout(length=4, advantage=[1.0, 1.0, 0.0, -2.0], token_weight=weights))
    assert record == {"sampled": 4, "trained": 2, "dropped": 2, "dropped/zero_signal": 2}
    assert booked(rollout(length=4, advantage=0.0, token_weight=weights), distilled=True)["trained"] == 3
    assert booked(rollout(length=4, weight=0.0), distilled=True) == {
        "sampled": 4,
        "dropped": 4,
        "dropped/zero_signal": 4,
    }


def test_a_step_without_an_update_trains_nothing() -> None:
    record = booked(rollout("a", 4, mask=[1, 1, 1, 0]), rollout("b", 3, advantage=0.0), trained=False)
    assert record == {
        "sampled": 7,
        "dropped": 7,
        "dropped/skipped_step": 3,
        "dropped/masked": 1,
        "dropped/zero_signal": 3,
    }


def test_overrun_is_sampled_and_pruned_by_the_part_that_stopped() -> None:
    ledger = Ledger()
    ledger.book([rollout("a", 4, stopped_by="esr", cost=Cost(sampled=7))], overruns={"a": 3})
    ledger.balance()
    assert nonzero(ledger) == {"sampled": 7, "trained": 4, "dropped": 3, "dropped/pruned": 3}
    assert ledger.totals()["dropped"] == {"pruned": {"esr": 3}}


def test_costs_and_seconds() -> None:
    ledger = Ledger()
    ledger.book([rollout(cost=Cost(prefilled=5, sampled=10, scored=10, probed=2))])
    ledger.add_seconds("generate", 1.5)
    ledger.add_seconds("generate", 0.5)
    record = nonzero(ledger)
    assert (record["prefilled"], record["scored"], record["probed"]) == (5, 10, 2)
    assert record["seconds/generate"] == 2.0
    ledger.book([rollout("b")])
    assert "seconds/generate" not in nonzero(ledger)
    assert ledger.totals()["seconds"] == {"generate": 2.0}


def test_empty_steps_and_empty_rollouts() -> None:
    assert booked() == {}
    assert booked(rollout(length=0), rollout("b", 0, dropped="filtered", by="x"), rollout("c", source=[])) == {}


# ---------------------------------------------------------------- held back


def test_held_back_rollouts_come_in_once() -> None:
    ledger = Ledger()
    held = rollout("0-a-0", 6, cost=Cost(sampled=6, prefilled=3))
    ledger.book([held, rollout("0-a-1", 2)], buffered={"0-a-0"})
    ledger.balance()
    assert nonzero(ledger) == {"sampled": 8, "trained": 2, "buffered": 6, "held": 6, "prefilled": 3}
    ledger.book([held], buffered={"0-a-0"}, released={"0-a-0"})  # it came up and was held again
    ledger.balance()
    assert nonzero(ledger) == {"held": 6}
    ledger.book([held, rollout("2-a-0", 1)], released={"0-a-0"})
    ledger.balance()
    assert nonzero(ledger) == {"sampled": 1, "trained": 7, "buffered": -6}
    assert ledger.totals()["inflow"]["sampled"] == 9


def test_a_resumed_rollout_takes_its_prefix_out_of_the_buffer() -> None:
    ledger = Ledger()
    ledger.book([rollout("0-a-0", 6)], buffered={"0-a-0"})
    child = rollout("1-a-0", source=[R] * 4 + [S] * 3, parent="0-a-0", cost=Cost(sampled=3, reused=4))
    twin = replace(child, id="1-a-1")
    ledger.book([child, twin])
    ledger.balance()
    assert nonzero(ledger) == {
        "sampled": 6,
        "reused": 4,  # of the twin: the buffer held them once
        "trained": 14,
        "buffered": -6,
        "dropped": 2,
        "dropped/stale": 2,
    }


def test_a_rollout_resumed_under_its_own_id() -> None:
    ledger = Ledger()
    ledger.book([rollout("0-a-0", 4, cost=Cost(sampled=4, prefilled=9))], buffered={"0-a-0"})
    longer = rollout("0-a-0", source=[R] * 4 + [S] * 2, cost=Cost(sampled=2, prefilled=13))
    ledger.book([longer], released={"0-a-0"})
    ledger.balance()
    assert nonzero(ledger) == {"sampled": 2, "trained": 6, "buffered": -4, "prefilled": 13}


def test_a_replayed_rollout_comes_in_as_reused() -> None:
    ledger = Ledger()
    old = rollout("0-a-0", 4, cost=Cost(sampled=4, prefilled=2))
    ledger.book([old])
    ledger.book([old], released={"0-a-0"})
    ledger.balance()
    assert nonzero(ledger) == {"reused": 4, "trained": 4}


def test_discarded_rollouts_leave_the_buffer() -> None:
    ledger = Ledger()
    ledger.book([rollout("a", 3), rollout("b", 4)], buffered={"a", "b"})
    ledger.discard({"a", "unknown"}, DropReason.STALE, "window")
    ledger.balance()
    assert ledger.totals()["buffered"] == 4
    assert ledger.totals()["dropped"] == {"stale": {"window": 3}}


# ---------------------------------------------------------------- what must not happen


def test_a_rollout_booked_twice_is_refused() -> None:
    with pytest.raises(ImbalanceError, match=r"twice.*0-a-0"):
        Ledger().book([rollout(), rollout()])


def test_overrun_of_a_lost_rollout_is_refused() -> None:
    with pytest.raises(ImbalanceError, match=r"without a rollout.*gone"):
        Ledger().book([rollout()], overruns={"gone": 3})


def test_tokens_lost_between_engine_and_record_are_noticed() -> None:
    ledger = Ledger()
    ledger.book([rollout(cost=Cost(sampled=10)), rollout("0-a-1", 8, cost=Cost(sampled=9))])
    with pytest.raises(ImbalanceError, match="0-a-1: engine 9, record and overrun 8"):
        ledger.balance()


@pytest.mark.parametrize("key", [("trained", ""), ("dropped/masked", "x"), ("sampled", ""), ("buffered", "")])
def test_a_wrong_number_anywhere_breaks_the_balance(key: tuple[str, str]) -> None:
    ledger = Ledger()
    ledger.book([rollout()])
    ledger._total[key] += 1
    with pytest.raises(ImbalanceError, match="run: "):
        ledger.balance()


# ---------------------------------------------------------------- any groups, any decisions


@st.composite
def rollouts(draw: st.DrawFn, name: str, parents: tuple[str, ...] = ("",)) -> Rollout:
    length = draw(st.integers(0, 8))

    def array(values: st.SearchStrategy[Any]) -> list[Any] | None:
        return draw(st.none() | st.lists(values, min_size=length, max_size=length))

    weights = array(st.sampled_from([0.0, 0.5, 1.0]))
    made = rollout(
        name,
        length,
        source=array(st.integers(0, 5)),
        mask=array(st.integers(0, 1)),
        advantage=draw(st.none() | st.sampled_from([0.0, -1.0]) | st.just(array(st.sampled_from([0.0, 2.0])))),
        dropped=draw(st.sampled_from(["", "", "filtered", "constant_group"])),
        by="part",
        weight=draw(st.sampled_from([1.0, 0.0])),
        token_weight=None if weights is None else np.array(weights, dtype=np.float32),
        parent=draw(st.sampled_from(parents)),
    )
    made.cost.sampled = sum(kind == S for kind in (made.source if made.source is not None else [S] * length))
    return made


def plain_outflow(made: Rollout, trained: bool, distilled: bool) -> dict[str, int]:
    """The rules, token by token."""
    found: dict[str, int] = {}
    advantage = 0.0 if made.advantage is None else made.advantage
    for t in range(made.length):
        source = Source.SAMPLED if made.source is None else Source(int(made.source[t]))
        weight = made.weight * (1.0 if made.token_weight is None else float(made.token_weight[t]))
        own = advantage if np.ndim(advantage) == 0 else advantage[t]  # type: ignore[index]
        if source == Source.PADDING:
            continue
        if not made.keep:
            fate = f"dropped/{made.dropped}"
        elif made.token_mask is not None and not made.token_mask[t]:
            fate = "dropped/masked"
        elif source not in (Source.SAMPLED, Source.REUSED):
            fate = f"dropped/{source.name.lower()}"
        elif weight == 0 or (own == 0 and not distilled):
            fate = "dropped/zero_signal"
        else:
            fate = "trained" if trained else "dropped/skipped_step"
        found[fate] = found.get(fate, 0) + 1
    return found


@given(data=st.data(), trained=st.booleans(), distilled=st.booleans())
@settings(max_examples=120, deadline=None)
def test_outflow_agrees_with_the_rules_token_by_token(data: st.DataObject, trained: bool, distilled: bool) -> None:
    made = data.draw(rollouts("a"))
    record = booked(made, trained=trained, distilled=distilled)
    found = {name: value for name, value in record.items() if name == "trained" or name.startswith("dropped/")}
    assert found == plain_outflow(made, trained, distilled)


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_the_identity_holds_whatever_is_decided(data: st.DataObject) -> None:
    """Several steps with overruns, rollouts held back, brought in again, resumed, replayed and discarded."""
    ledger, old = Ledger(), {}
    for step in range(data.draw(st.integers(1, 4))):
        parents = ("", *old)
        fresh = [data.draw(rollouts(f"{step}-a-{i}", parents)) for i in range(data.draw(st.integers(0, 4)))]
        again = data.draw(st.lists(st.sampled_from(sorted(old)), unique=True)) if old else []
        everything = fresh + [old[name] for name in again]
        overruns = {r.id: data.draw(st.integers(1, 5)) for r in fresh if data.draw(st.booleans())}
        for r in fresh:
            r.cost.sampled += overruns.get(r.id, 0) if r.cost.sampled else 0
        ledger.book(
            everything,
            overruns={name: n for name, n in overruns.items() if name in {r.id for r in fresh if r.cost.sampled}},
            buffered={r.id for r in everything if data.draw(st.booleans())},
            released=set(again),
            trained=data.draw(st.booleans()),
            distilled=data.draw(st.booleans()),
        )
        ledger.balance()
        record = ledger.step_record()
        came_in = sum(record[f"ledger/{name}"] for name in ("sampled", "reused", "forced", "environment", "foreign"))
        assert came_in == record["ledger/trained"] + record["ledger/dropped"] + record["ledger/buffered"]
        assert record["ledger/held"] >= 0
        old |= {r.id: r for r in fresh}
        if data.draw(st.booleans()):
            ledger.discard(data.draw(st.lists(st.sampled_from(["", *old]))), "stale", "part")
            ledger.balance()
        saved = json.loads(json.dumps(ledger.state_dict()))
        totals = ledger.totals()
        ledger = Ledger()
        ledger.load_state_dict(saved)
        assert ledger.totals() == totals
    assert sum(row.tokens for row in ledger.table()) == sum(ledger.totals()["inflow"].values())


# ---------------------------------------------------------------- display, size


def test_the_table_shows_every_token_with_its_share() -> None:
    ledger = Ledger()
    ledger.book(
        [rollout("a", 4), rollout("b", 5, dropped="filtered", by="x"), rollout("c", 1, mask=[0]), rollout("d", 10)],
        buffered={"d"},
    )
    rows = [(row.cause, row.part, row.tokens, row.share) for row in ledger.table()]
    assert rows == [
        ("trained", "", 4, 0.2),
        ("filtered", "x", 5, 0.25),
        ("masked", "", 1, 0.05),
        ("buffered", "", 10, 0.5),
    ]
    assert Ledger().table()[0].share == 0.0


def test_many_long_rollouts_are_booked_quickly() -> None:
    source = np.zeros(4000, dtype=np.int64)
    made = [replace(rollout(f"{i}", 4000), source=source, advantage=np.ones(4000, np.float32)) for i in range(1000)]
    start = time.process_time()
    Ledger().book(made)
    assert time.process_time() - start < 1.0  # 4 million tokens, about 0.1 s on an idle core
