"""Rounds: budgets are kept, plans are checked, limits combine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from builders import context, prompt

from trimtab.core.errors import ConfigError
from trimtab.core.records import Status, StopReason, StopRecord, Verdict
from trimtab.core.slots import Allocate, AllocationRequest, Stop
from trimtab.generate.protocol import Completion, Request
from trimtab.run.rounds import Rounds


class Fake:
    """An engine of uniform length that notes what it was asked."""

    name, version = "fake", 0

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def generate(self, requests: Sequence[Request], **options: Any) -> list[Completion]:
        self.requests += requests
        length = 3
        return [
            Completion(
                r.id,
                np.arange(length),
                np.zeros(length, dtype=np.float32),
                StopRecord(StopReason.LIMIT, length - 1, "", r.max_new_tokens),
                0,
            )
            for r in requests
        ]

    def sync(self, model: Any, version: int) -> None:
        self.version = version


@dataclass(kw_only=True)
class Halves(Allocate):
    """Half of what is left to the first prompt, until nothing is."""

    def plan(self, request: AllocationRequest, ctx: Any) -> Any:
        counts = np.zeros(len(request.prompts), dtype=np.int64)
        counts[0] = (request.remaining + 1) // 2
        return counts


@dataclass(kw_only=True)
class Greedy(Allocate):
    """Plans more than there is."""

    def plan(self, request: AllocationRequest, ctx: Any) -> Any:
        return np.full(len(request.prompts), request.remaining)


@dataclass(kw_only=True)
class Short(Stop):
    """A limit."""

    tokens: int = 5

    def limit(self, ctx: Any) -> int | None:
        return self.tokens


def rounds(**fields: Any) -> Rounds:
    base: dict[str, Any] = {
        "engine": Fake(),
        "verify": lambda items: [Verdict(1.0, Status.OK) for _ in items],
        "decode": lambda ids: "",
        "allocate": None,
        "generate": None,
        "replay": None,
        "stop": [],
        "signals": frozenset(),
        "topk": 0,
    }
    return Rounds(**{**base, **fields})


PROMPTS = [prompt("a"), prompt("b")]


def test_without_an_allocator_everyone_gets_the_group_size() -> None:
    groups = rounds().run(PROMPTS, [1.0, 0.5], context(group_size=3), Counter())
    assert [len(g.rollouts) for g in groups] == [3, 3]
    assert [g.inclusion for g in groups] == [1.0, 0.5]


def test_rounds_spend_exactly_the_budget() -> None:
    driver = rounds(allocate=Halves())
    groups = driver.run(PROMPTS, [1.0, 1.0], context(group_size=4), Counter())
    assert [len(g.rollouts) for g in groups] == [8, 0]
    assert len({r.id for r in groups[0].rollouts}) == 8
    assert len({r.key for r in driver.engine.requests}) == 8  # type: ignore[attr-defined]


def test_a_plan_beyond_the_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="within 8 rollouts"):
        rounds(allocate=Greedy()).run(PROMPTS, [1.0, 1.0], context(group_size=4), Counter())


def test_the_smallest_limit_is_in_force_and_named() -> None:
    driver = rounds(stop=[Short(tokens=9), Short(tokens=5)])
    groups = driver.run(PROMPTS[:1], [1.0], context(group_size=1, max_new_tokens=7), Counter())
    assert driver.limit(context(max_new_tokens=7)) == (5, Short.slug)
    assert groups[0].rollouts[0].stop.part == Short.slug
    assert driver.limit(context(max_new_tokens=4)) == (4, "")


def test_no_prompts_is_no_work() -> None:
    assert rounds().run([], [], context(), Counter()) == []


@dataclass(kw_only=True)
class Generous(Halves):
    """Spends three rollouts a prompt whatever the group size."""

    def budget(self, num_prompts: int, ctx: Any) -> int:
        return 3 * num_prompts


def test_an_allocator_may_have_its_own_budget() -> None:
    groups = rounds(allocate=Generous()).run(PROMPTS, [1.0, 1.0], context(group_size=1), Counter())
    assert [len(g.rollouts) for g in groups] == [6, 0]
