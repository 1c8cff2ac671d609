from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.core.errors import ConfigError, EngineError
from trimtab.core.records import StopReason, StopRecord
from trimtab.generate.hooks import HookChain, cut_applies, replay_hooks
from trimtab.generate.protocol import ChunkView, Completion, StopHook

CPU = torch.device("cpu")


@dataclass
class CountHook:
    """Stops at the ``limit``-th token whose signal is above ``above``: state sums over tokens."""

    limit: int
    above: float
    part: str = "count"
    every: int = 1
    signals: frozenset[str] = frozenset({"entropy"})
    name: str = "entropy"

    def start(self, num_slots: int, device: torch.device) -> dict[str, torch.Tensor]:
        return {"events": torch.zeros(num_slots, dtype=torch.int64, device=device)}

    def step(self, state: dict[str, torch.Tensor], view: ChunkView) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        valid = torch.arange(view.token_BC.shape[1], device=view.token_BC.device) < view.count_B[:, None]
        event = (view.signals[self.name] > self.above) & valid
        count = state["events"][:, None] + event.cumsum(-1)
        hit = (count >= self.limit) & valid
        column = torch.where(hit.any(-1), hit.int().argmax(-1), -1)
        return {"events": state["events"] + event.sum(-1)}, column


@dataclass
class AverageHook:
    """Stops where a running average of the signal exceeds ``above``: state depends on the order of tokens."""

    above: float
    part: str = "average"
    every: int = 1
    signals: frozenset[str] = frozenset({"entropy"})

    def start(self, num_slots: int, device: torch.device) -> dict[str, torch.Tensor]:
        return {"mean": torch.zeros(num_slots, device=device), "pair": torch.zeros(num_slots, 2, device=device)}

    def step(self, state: dict[str, torch.Tensor], view: ChunkView) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        mean, column = state["mean"], torch.full_like(view.count_B, -1)
        for c in range(view.token_BC.shape[1]):
            valid = c < view.count_B
            mean = torch.where(valid, 0.7 * mean + 0.3 * view.signals["entropy"][:, c], mean)
            column = torch.where((column < 0) & valid & (mean > self.above), c, column)
        return {"mean": mean, "pair": state["pair"] + 1}, column


@dataclass
class RowHook:
    """Stops row r at response index ``at[r]`` (-1: never) and notes every token it sees."""

    at: Sequence[int]
    part: str = "row"
    every: int = 1
    signals: frozenset[str] = frozenset()
    seen: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def start(self, num_slots: int, device: torch.device) -> dict[str, torch.Tensor]:
        return {"total": torch.zeros(num_slots, dtype=torch.int64, device=device)}

    def step(self, state: dict[str, torch.Tensor], view: ChunkView) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        assert torch.equal(state["total"], view.index_B)  # the slot's own state, counted up by what it has seen
        rows = zip(
            view.row_B.tolist(), view.index_B.tolist(), view.count_B.tolist(), view.token_BC.tolist(), strict=True
        )
        for row, index, count, tokens in rows:
            self.seen.setdefault(row, []).extend((index + c, tokens[c]) for c in range(count))
        column = torch.tensor(self.at, device=view.row_B.device)[view.row_B] - view.index_B
        hit = (column >= 0) & (column < view.count_B)
        return {"total": state["total"] + view.count_B}, torch.where(hit, column, -1)


def _completion(
    tokens: Sequence[int], entropy: Sequence[float] | None = None, reason: StopReason = StopReason.LIMIT, **extra: Any
) -> Completion:
    arrays = {} if entropy is None else {"entropy": np.array(entropy, dtype=np.float32)}
    logprobs = -np.arange(len(tokens), dtype=np.float32)
    stop = StopRecord(reason, len(tokens) - 1, limit=99)
    return Completion("c", np.array(tokens, dtype=np.int64), logprobs, stop, version=3, signals=arrays, **extra)


def _first_average(entropy: Sequence[float], above: float) -> int:
    mean = np.float32(0)
    for i, value in enumerate(np.array(entropy, dtype=np.float32)):
        mean = np.float32(0.7) * mean + np.float32(0.3) * value
        if mean > above:
            return i
    return -1


def _first_count(entropy: Sequence[float], above: float, limit: int) -> int:
    count = 0
    for i, value in enumerate(np.array(entropy, dtype=np.float32)):
        count += value > above
        if count >= limit:
            return i
    return -1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 8), max_size=20), min_size=1, max_size=5),
    st.integers(1, 4),
    st.sampled_from([1.03, 2.51, 4.02]),
    st.booleans(),
)
def test_any_chunk_size_keeps_what_the_rules_say(
    rows: list[list[int]], limit: int, above: float, count_first: bool
) -> None:
    """Two stateful rules over random signals, ragged and empty rows: the definition token by token is the reference."""
    completions = [_completion(row, row) for row in rows]
    hooks: list[StopHook] = [CountHook(limit, above), AverageHook(above)]
    firsts: list[Callable[[list[int]], int]] = [
        lambda row: _first_count(row, above, limit),
        lambda row: _first_average(row, above),
    ]
    if not count_first:
        hooks, firsts = hooks[::-1], firsts[::-1]
    for chunk in (1, 3, 7, 64):
        for row, completion in zip(rows, replay_hooks(hooks, completions, chunk), strict=True):
            cuts = [(first(row), h) for h, first in enumerate(firsts) if first(row) >= 0]
            position, h = min(cuts) if cuts else (len(row) - 1, -1)
            if position == len(row) - 1:  # nothing is cut: the rollout keeps its own reason
                h = -1
            assert completion.tokens.tolist() == row[: position + 1]
            assert completion.stop.index == len(completion.tokens) - 1
            assert completion.stop.part == ("" if h < 0 else hooks[h].part)
            assert completion.overrun == len(row) - len(completion.tokens)
            assert len(completion.signals["entropy"]) == len(completion.logprobs) == len(completion.tokens)


def test_replay_shows_every_token_once_in_order() -> None:
    completions = [_completion([1, 2, 3, 4, 5]), _completion([]), _completion([7]), _completion(list(range(9)))]
    hook = RowHook([-1, -1, -1, 4])
    replay_hooks([hook], completions, chunk=3)
    assert hook.seen[0] == list(enumerate([1, 2, 3, 4, 5]))
    assert hook.seen[2] == [(0, 7)]
    assert hook.seen[3] == list(enumerate(range(6)))  # cut in the second chunk; the third is not shown
    assert 1 not in hook.seen


def test_replay_does_not_change_its_input_and_counts_overrun_on_top() -> None:
    before = _completion([1, 2, 3, 4], overrun=2)
    (after,) = replay_hooks([RowHook([1])], [before])
    assert (after.tokens.tolist(), after.overrun) == ([1, 2], 4)
    assert after.stop == StopRecord(StopReason.PART, 1, "row", 99)
    assert (before.tokens.tolist(), before.overrun, before.stop.reason) == ([1, 2, 3, 4], 2, StopReason.LIMIT)


def test_replay_of_nothing() -> None:
    assert replay_hooks([RowHook([])], []) == []
    empty = [_completion([])]
    assert replay_hooks([RowHook([0])], empty) == empty
    full = [_completion([1, 2])]
    assert replay_hooks([], full) == full


@pytest.mark.parametrize(
    ("reason", "at", "expected"),
    [
        (StopReason.EOS, 2, StopReason.EOS),
        (StopReason.LIMIT, 2, StopReason.LIMIT),
        (StopReason.CONTEXT, 2, StopReason.CONTEXT),
        (StopReason.ABORT, 2, StopReason.PART),  # the rule had ended it; the abort came too late
        (StopReason.EOS, 1, StopReason.PART),
    ],
)
def test_a_cut_at_the_last_token_of_a_response_that_ended_by_itself_is_none(
    reason: StopReason, at: int, expected: StopReason
) -> None:
    (after,) = replay_hooks([RowHook([at])], [_completion([1, 2, 3], reason=reason)])
    assert after.stop.reason is expected
    assert cut_applies(-1, 3, reason) is False


def test_earliest_cut_wins_and_chain_order_breaks_ties() -> None:
    completions = [_completion([0] * 9) for _ in range(4)]
    hooks = [RowHook([5, 3, 4, -1], part="a"), RowHook([3, 5, 4, -1], part="b")]
    after = replay_hooks(hooks, completions, chunk=2)
    assert [(c.stop.part, c.stop.index) for c in after] == [("b", 3), ("a", 3), ("a", 4), ("", 8)]


def test_a_missing_signal_is_named() -> None:
    completion = _completion([1, 2])
    completion.signals["margin"] = np.zeros(2, dtype=np.float32)
    with pytest.raises(ConfigError, match=r"stop\.count: needs the signal array 'entropy'.*margin"):
        replay_hooks([CountHook(1, 0.0)], [completion])


def test_teacher_hooks_get_what_the_scorer_left() -> None:
    completion = _completion([1, 2, 3], [0.0, 0.0, 0.0])
    completion.signals["overlap"] = np.array([0.1, 0.9, 0.2], dtype=np.float32)
    hook = CountHook(1, 0.5, signals=frozenset({"teacher"}), name="overlap")
    assert replay_hooks([hook], [completion])[0].tokens.tolist() == [1, 2]


@pytest.mark.parametrize("every", [0, -3])
def test_cadence_below_one_is_refused(every: int) -> None:
    with pytest.raises(ConfigError, match=r"stop\.row\.every"):
        HookChain([RowHook([0], every=every)], 2, CPU)
    with pytest.raises(ConfigError, match="chunk"):
        replay_hooks([RowHook([0])], [_completion([1])], chunk=0)


def test_a_column_beyond_the_row_is_an_error_not_a_longer_response() -> None:
    @dataclass
    class Beyond(RowHook):
        def step(self, state: Any, view: ChunkView) -> Any:
            return state, view.count_B

    with pytest.raises(EngineError, match=r"stop\.row: named response index 2 of a response with 2 tokens"):
        replay_hooks([Beyond([])], [_completion([1, 2])])


def test_a_hook_that_loses_its_state_is_an_error() -> None:
    @dataclass
    class Forgetful(RowHook):
        def step(self, state: Any, view: ChunkView) -> Any:
            return {}, torch.full_like(view.count_B, -1)

    with pytest.raises(EngineError, match=r"stop\.row: step returned the state \[\]"):
        replay_hooks([Forgetful([])], [_completion([1, 2])])


def test_reset_and_move_of_slots() -> None:
    """State, request and what was seen travel together; a reset slot starts afresh."""
    hook = AverageHook(0.5)
    chain = HookChain([hook], 3, CPU)
    chain.reset(np.arange(3), np.array([7, 8, 9]))

    def read(slots: Any, count_B: Any, _: StopHook) -> Any:
        signal = torch.tensor([[0.1], [0.2], [0.3]])[slots]
        return torch.zeros(len(signal), 1, dtype=torch.int64), {"entropy": signal}

    chain.feed(0, slice(0, 3), np.array([1, 1, 1]), read)
    chain.move(np.array([2]), np.array([0]))
    chain.reset(np.array([1]), np.array([4]))
    assert chain.seen_HS.tolist() == [[1, 0, 1]]
    seen: list[ChunkView] = []
    states: list[dict[str, torch.Tensor]] = []

    def step(state: dict[str, torch.Tensor], view: ChunkView) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        seen.append(view)
        states.append({name: value.clone() for name, value in state.items()})
        return AverageHook.step(hook, state, view)

    hook.step = step  # type: ignore[method-assign]
    chain.feed(0, slice(0, 2), np.array([2, 1]), read)
    assert seen[0].row_B.tolist() == [9, 4]
    assert seen[0].index_B.tolist() == [1, 0]
    assert states[0]["mean"].tolist() == pytest.approx([0.09, 0.0])
    assert states[0]["pair"].tolist() == [[1, 1], [0, 0]]
