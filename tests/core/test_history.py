"""Per-prompt history: against plain recomputation, with missing values, repeats, growth and a million prompts."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.core.errors import ConfigError, DataError
from trimtab.core.history import COLUMNS, History, KeyIndex, merge_moments, prompt_keys
from trimtab.core.records import Group, Prompt, Rollout, Status, StopReason, StopRecord, Verdict, prompt_id

IDS = [prompt_id(f"question {index}") for index in range(8)]
LONG_AGO = "f" * 16


def rollout(
    prompt: Prompt,
    *,
    correct: float | None = 1.0,
    reward: float | None = 1.0,
    length: int = 4,
    cut: bool = False,
    entropy: list[float] | None = None,
) -> Rollout:
    return Rollout(
        id="r",
        prompt=prompt,
        sample=0,
        tokens=np.zeros(length, dtype=np.int64),
        logprobs=np.zeros(length, dtype=np.float32),
        stop=StopRecord(StopReason.LIMIT if cut else StopReason.EOS, length - 1),
        verdict=Verdict() if correct is None else Verdict(correct, Status.OK),
        reward=reward,
        signals={} if entropy is None else {"entropy": np.array(entropy, dtype=np.float32)},
    )


def group(name: str, *rollouts: dict[str, Any]) -> Group:
    prompt = Prompt(name, "", ())
    return Group(prompt, [rollout(prompt, **fields) for fields in rollouts])


def observed(*groups: Group, **at: int) -> History:
    history = History()
    history.observe(groups, **({"step": 3, "version": 2, "epoch": 1} | at))
    return history


# ---------------------------------------------------------------- one prompt


def test_a_group_in_numbers() -> None:
    history = observed(
        group(
            IDS[0],
            {"correct": 1.0, "reward": 0.9, "length": 10, "entropy": [1.0] * 10},
            {"correct": 0.5, "reward": 0.1, "length": 20, "cut": True, "entropy": [3.0] * 20},
            {"correct": None, "reward": None, "length": 30, "cut": True},
        )
    )
    found = history.get(IDS[0])
    assert found is not None
    assert found.pop("recent") == [0.75]
    assert found == pytest.approx(
        {
            "times": 1,
            "rollouts": 3,
            "scored": 2,
            "rewarded": 2,
            "reward_sum": 1.0,
            "reward_sum_sq": 0.82,
            "reward_mean": 0.5,
            "reward_var": 0.16,
            "reward_m2": 0.32,
            "correct_sum": 1.5,
            "correct_mean": 0.75,
            "length_mean": 20.0,
            "length_last": 20.0,
            "truncated": 2,
            "truncated_share": 2 / 3,
            "zero_variance_run": 0,
            "entropy_mean": 2.0,
            "entropy_count": 2,
            "version": 2,
            "step": 3,
            "epoch": 1,
        }
    )
    assert {*found, "recent"} == set(COLUMNS)


def test_unknown_prompts() -> None:
    history = observed(group(IDS[0], {}))
    assert history.get(IDS[1]) is None
    assert IDS[0] in history
    assert IDS[1] not in history
    rows = history.rows([IDS[1], IDS[0], LONG_AGO])
    assert rows.tolist() == [-1, 0, -1]
    assert history.column("times", rows).tolist() == [0, 1, 0]
    assert history.column("step", rows).tolist() == [-1, 3, -1]
    np.testing.assert_array_equal(history.column("reward_mean", rows), [np.nan, 1.0, np.nan])
    assert history.column("recent", rows).shape == (3, 8)
    with pytest.raises(ConfigError, match="reward_mean"):
        history.column("reward_men")


def test_missing_values_enter_no_mean() -> None:
    """A verifier that failed, a reward that is NaN and tokens without entropy are missing, not 0."""
    history = observed(group(IDS[0], {"correct": None, "reward": None}, {"correct": None, "reward": float("nan")}))
    found = history.get(IDS[0])
    assert found is not None
    assert (found["rollouts"], found["scored"], found["rewarded"], found["recent"]) == (2, 0, 0, [])
    assert all(np.isnan(found[name]) for name in ("reward_mean", "reward_var", "correct_mean", "entropy_mean"))
    entropies = ({"entropy": [1.0, np.nan, 2.0, np.nan]}, {"entropy": [np.nan] * 4}, {"length": 0, "entropy": []})
    history.observe([group(IDS[0], {"reward": 4.0, "correct": 1.0}, *entropies)], step=4, version=3, epoch=1)
    found = history.get(IDS[0])
    assert found is not None
    assert (found["rewarded"], found["reward_mean"]) == (4, pytest.approx(7 / 4))
    assert (found["entropy_count"], found["entropy_mean"]) == (1, 1.5)


def test_zero_variance_runs_follow_correctness_and_skip_unjudged_groups() -> None:
    history = History()
    wrong, right, failed = {"correct": 0.0, "reward": 0.3}, {"correct": 1.0}, {"correct": None, "reward": None}
    runs = []
    for rollouts in ([wrong, wrong], [right, right], [failed, failed], [right, failed], [right, wrong], [right]):
        history.observe([group(IDS[0], *rollouts)], step=0, version=0, epoch=0)
        runs.append(history.column("zero_variance_run")[0].item())
    assert runs == [1, 2, 2, 3, 0, 1]
    assert history.column("recent")[0, -5:].tolist() == [0.0, 1.0, 1.0, 0.5, 1.0]


def test_the_last_outcomes_keep_their_order() -> None:
    history = History(recent=3)
    for number in range(5):
        history.observe([group(IDS[0], {"correct": number / 4})], step=number, version=0, epoch=0)
    assert history.column("recent").tolist() == [[0.5, 0.75, 1.0]]
    found = history.get(IDS[0])
    assert found is not None
    assert found["recent"] == [0.5, 0.75, 1.0]


def test_empty_groups_change_nothing() -> None:
    history = observed(group(IDS[0]))
    assert len(history) == 0
    history.observe([], step=0, version=0, epoch=0)
    assert history.rows([IDS[0]]).tolist() == [-1]
    assert history.column("times").tolist() == []


def test_ids_of_any_form_are_kept_apart() -> None:
    names = ["gsm8k-1", "gsm8k-2", "", "A" * 16, "a" * 16, "0" * 16, "0" * 15, " " + "0" * 15, IDS[0]]
    history = observed(*(group(name, {}) for name in names))
    assert history.rows(names).tolist() == list(range(len(names)))
    assert prompt_keys([IDS[0]])[0] == int(IDS[0], 16)


# ---------------------------------------------------------------- against plain recomputation


class PlainHistory:
    """All rollouts of each prompt in lists, everything recomputed from them."""

    def __init__(self) -> None:
        self.groups: dict[str, list[tuple[Group, int]]] = {}

    def observe(self, groups: list[Group], step: int) -> None:
        for item in groups:
            if item.rollouts:
                self.groups.setdefault(item.prompt.id, []).append((item, step))

    def get(self, name: str) -> dict[str, Any]:
        groups = [item for item, _ in self.groups[name]]
        rollouts = [r for item in groups for r in item.rollouts]
        rewards = [r.reward for r in rollouts if r.reward is not None]
        correct = [[r.verdict.correct for r in item.scored] for item in groups if item.scored]
        run = 0
        for item in groups:
            if item.scored:
                run = run + 1 if item.constant() else 0
        return {
            "times": len(groups),
            "rollouts": len(rollouts),
            "rewarded": len(rewards),
            "reward_sum": sum(rewards),
            "reward_mean": np.mean(rewards) if rewards else np.nan,
            "reward_var": np.var(rewards) if rewards else np.nan,
            "correct_sum": sum(map(sum, correct)),  # type: ignore[arg-type]
            "length_mean": np.mean([r.length for r in rollouts]),
            "length_last": np.mean([r.length for r in groups[-1].rollouts]),
            "truncated": sum(r.truncated for r in rollouts),
            "zero_variance_run": run,
            "recent": [np.mean(values) for values in correct][-8:],
            "step": self.groups[name][-1][1],
        }


rollout_fields = st.fixed_dictionaries(
    {
        "correct": st.one_of(st.none(), st.sampled_from([0.0, 0.25, 1.0])),
        "reward": st.one_of(st.none(), st.floats(-1e6, 1e6)),
        "length": st.integers(0, 9),
        "cut": st.booleans(),
    }
)
group_draws = st.tuples(st.sampled_from(IDS), st.lists(rollout_fields, max_size=5))


@given(steps=st.lists(st.lists(group_draws, max_size=6), max_size=6))
@settings(max_examples=80, deadline=None)
def test_any_sequence_agrees_with_recomputation(steps: list[list[tuple[str, list[dict[str, Any]]]]]) -> None:
    history, plain = History(), PlainHistory()
    for step, draws in enumerate(steps):
        groups = [group(name, *rollouts) for name, rollouts in draws]
        history.observe(groups, step=step, version=step, epoch=0)
        plain.observe(groups, step)
    assert len(history) == len(plain.groups)
    for name in plain.groups:
        found = history.get(name)
        assert found is not None
        for column, value in plain.get(name).items():
            np.testing.assert_allclose(found[column], value, rtol=1e-6, atol=1e-4, err_msg=column)


@given(values=st.lists(st.floats(-1e3, 1e3), max_size=20), cut=st.integers(0, 20))
@settings(max_examples=80, deadline=None)
def test_merged_moments_are_those_of_the_union(values: list[float], cut: int) -> None:
    def moments(part: list[float]) -> tuple[np.ndarray, ...]:
        x = np.array(part or [0.0])
        return np.array([len(part)]), x.mean()[None], ((x - x.mean()) ** 2).sum()[None] * (len(part) > 0)

    count, mean, m2 = merge_moments(*moments(values[:cut]), *moments(values[cut:]))
    assert count[0] == len(values)
    if values:
        np.testing.assert_allclose(mean[0], np.mean(values), atol=1e-9)
        np.testing.assert_allclose(m2[0], np.var(values) * len(values), atol=1e-5)


def test_variance_survives_a_large_offset() -> None:
    """Where a running sum of squares would have lost it."""
    history = History()
    for value in (1e8, 1e8 + 1, 1e8 + 2):
        history.observe([group(IDS[0], {"reward": value})], step=0, version=0, epoch=0)
    assert history.column("reward_var")[0] == pytest.approx(2 / 3)


def test_inputs_are_not_changed_and_columns_are_copies() -> None:
    history = observed(group(IDS[0], {}))
    history.column("times")[:] = 99
    history.column("recent")[:] = 99
    assert history.column("times").tolist() == [1]
    assert history.column("recent")[0, -1] == 1.0


# ---------------------------------------------------------------- state


def test_saved_and_loaded_history_goes_on_the_same() -> None:
    draw = np.random.default_rng(0)
    steps = [
        [
            group(prompt_id(str(i)), {"reward": draw.random(), "correct": draw.random()})
            for i in draw.integers(0, 90, 40)
        ]
        for _ in range(6)
    ]
    whole, first = History(recent=4), History(recent=4)
    for step, groups in enumerate(steps):
        whole.observe(groups, step, step, 0)
    for step, groups in enumerate(steps[:3]):
        first.observe(groups, step, step, 0)
    state = {name: values.copy() for name, values in first.state_dict().items()}
    second = History()
    second.load_state_dict(state)
    for step, groups in enumerate(steps[3:], start=3):
        second.observe(groups, step, step, 0)
    assert (second.keys == whole.keys).all()
    for name in COLUMNS:
        np.testing.assert_array_equal(second.column(name), whole.column(name), err_msg=name)
    assert all(values.dtype.kind in "iuf" for values in state.values())


def test_a_state_of_another_layout_is_refused() -> None:
    state = observed(group(IDS[0], {}), group(IDS[1], {})).state_dict()
    with pytest.raises(DataError, match="times"):
        History().load_state_dict({name: values for name, values in state.items() if name != "times"})
    with pytest.raises(DataError, match="epoch"):
        History().load_state_dict(state | {"epoch": state["epoch"][:1]})
    with pytest.raises(DataError, match="all different"):
        History().load_state_dict(state | {"keys": state["keys"][[0, 0]]})


# ---------------------------------------------------------------- size


@given(keys=st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 40) | st.integers(0, 40).map(lambda n: n << 32)))
@settings(max_examples=80, deadline=None)
def test_the_index_agrees_with_a_dictionary(keys: list[int]) -> None:
    """Also for keys that all fall on the same slots."""
    index, plain = KeyIndex(), {}
    for start in range(0, len(keys), 7):
        part = keys[start : start + 7]
        for key in part:
            plain.setdefault(key, len(plain))
        assert index.add(np.array(part, dtype=np.uint64)).tolist() == [plain[key] for key in part]
    asked = [*keys, 2**63 + 1, 77]
    assert index.find(np.array(asked, dtype=np.uint64)).tolist() == [plain.get(key, -1) for key in asked]


def test_a_million_prompts() -> None:
    keys = np.random.default_rng(0).integers(0, 2**64, 1_000_000, dtype=np.uint64)
    blank = History()
    state = {name: np.zeros(len(keys), values.dtype) for name, values in blank.state_dict().items() if name != "recent"}
    state |= {"keys": keys, "recent": np.full((len(keys), 8), np.nan, dtype=np.float32)}
    tracemalloc.start()
    history = History()
    history.load_state_dict(state)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 200e6
    ids = [f"{key:016x}" for key in keys[:500].tolist()] + [prompt_id(str(i)) for i in range(500)]
    groups = [group(name, *({"correct": float(i % 2)} for i in range(8))) for name in ids]
    history.observe(groups, step=0, version=0, epoch=0)  # grows
    best = min(_seconds(history, groups) for _ in range(3))
    assert best < 0.05  # about 6 ms on an idle core
    assert len(history) == 1_000_500
    start = time.process_time()
    rows = history.rows(keys)
    assert time.process_time() - start < 3  # about 0.2 s on an idle core
    assert (rows == np.arange(len(keys))).all()
    assert history.column("times", rows).sum() == 500 * 4


def _seconds(history: History, groups: list[Group]) -> float:
    start = time.process_time()
    history.observe(groups, step=0, version=0, epoch=0)
    return time.process_time() - start
