"""Steps, windows, groups and scores."""

from __future__ import annotations

import numpy as np
import pytest

from trimtab.doctor.log import Log
from trimtab.doctor.view import View, scale


def log(step: list[int], prompt: list[int], **values: list[float]) -> Log:
    """A small log."""
    key = np.array(prompt, np.uint64)
    return Log(np.array(step), key, key, {name: np.array(v, np.float32) for name, v in values.items()})


def test_a_failed_evaluation_is_not_a_reward_of_nought() -> None:
    view = View(log([1] * 4, [1] * 4, reward=[1, 1, 0, 0], failed=[0, 0, 0, 1]))
    assert view.outcomes is not None
    assert view.outcomes.mean_P == pytest.approx([2 / 3])
    assert view.outcomes.size_P.tolist() == [3]


def test_a_group_of_failures_is_no_group() -> None:
    view = View(log([1] * 4, [1, 1, 2, 2], reward=[0, 0, 1, 0], failed=[1, 1, 0, 0]))
    assert view.outcomes is not None
    assert len(view.outcomes.size_P) == 1


def test_windows_are_whole_steps_with_at_least_64_groups() -> None:
    step = np.repeat(np.arange(8), [30, 30, 30, 70, 1, 63, 64, 10])
    key = np.arange(len(step), dtype=np.uint64)
    view = View(Log(step, key, key))
    assert view.window_start_S.tolist() == [0, 0, 0, 3, 3, 4, 6, 6]


@pytest.mark.parametrize(
    ("rewards", "ends"),
    [
        ([0, 1, 1], (0, 1)),
        ([1, 1], (0, 1)),
        ([-1, 1], (-1, 1)),
        ([-1, -1], (-1, 1)),
        ([0.1, 1.1], (0.1, 1.1)),
        ([0, 0.5, 1], (0, 1)),
        ([0.1, 0.5, 0.7], None),
        ([-0.5, 0.2, 1], None),
        ([0.3, 0.3], None),
        ([], None),
    ],
)
def test_scale_is_known_or_unknown_never_guessed(rewards: list[float], ends: tuple[float, float] | None) -> None:
    found = scale(np.array(rewards, np.float32))
    assert found == (None if ends is None else pytest.approx(ends))


def test_correctness_comes_before_the_shaped_reward() -> None:
    view = View(log([1, 1], [1, 1], reward=[0.4, 0.9], correct=[0, 1]))
    assert view.score_N is not None
    assert view.score_N.tolist() == [0, 1]


def test_held_out_accuracy_decides_whether_it_rose() -> None:
    made = log([1, 2, 3, 4], [1, 2, 3, 4], reward=[0, 0, 0, 0])
    made.evals = [(0, 0.3), (3, 0.5)]
    assert View(made).accuracy_rose_S is not None
    assert View(made).accuracy_rose_S.tolist() == [False, False, True, True]  # type: ignore[union-attr]
