from __future__ import annotations

import numpy as np
import torch

from trimtab.generate.tape import Tape

CPU = torch.device("cpu")


def _fill(tape: Tape, steps: int, oldest: int = 0) -> None:
    for _ in range(steps):
        step = torch.arange(tape.num_slots) + 10 * tape.time
        tape.append({"a": step, "b": torch.stack([step, -step], -1).float()}, oldest)


def test_columns_survive_growth_and_dropped_rows() -> None:
    tape = Tape(3, CPU, rows=4)
    _fill(tape, 5)
    assert tape.column("a", 1, 0, 5).tolist() == [1, 11, 21, 31, 41]
    _fill(tape, 40, oldest=5)
    assert tape.column("a", 2, 5, 40).tolist() == [10 * t + 2 for t in range(5, 45)]
    _fill(tape, 200, oldest=44)
    assert tape.column("b", 0, 230, 2).tolist() == [[2300, -2300], [2310, -2310]]


def test_rows_stay_bounded_when_rollouts_are_short() -> None:
    tape = Tape(2, CPU, rows=16)
    for time in range(500):
        _fill(tape, 1, oldest=max(0, time - 7))
    assert tape.rows == 16
    assert tape.column("a", 1, 493, 7).tolist() == [10 * t + 1 for t in range(493, 500)]


def test_newest_of_equal_and_of_unequal_counts() -> None:
    tape = Tape(3, CPU)
    _fill(tape, 6)
    even = tape.newest(["a"], slice(0, 2), np.array([2, 2]))["a"]
    assert even.tolist() == [[40, 50], [41, 51]]
    ragged = tape.newest(["a", "b"], np.array([2, 0]), np.array([3, 1]))
    assert ragged["a"][0].tolist() == [32, 42, 52]
    assert ragged["a"][1, 0].item() == 50
    assert ragged["b"].shape == (2, 3, 2)


def test_put_writes_beside_the_newest_tokens_only() -> None:
    tape = Tape(3, CPU)
    _fill(tape, 4)
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 99.0, 99.0]])
    tape.put({"t": values}, np.array([2, 0]), np.array([3, 1]))
    assert tape.column("t", 2, 0, 4).tolist() == [0, 1, 2, 3]
    assert tape.column("t", 0, 0, 4).tolist() == [0, 0, 0, 4]
    assert tape.column("t", 1, 0, 4).tolist() == [0, 0, 0, 0]


def test_column_is_a_copy_and_move_copies_whole_columns() -> None:
    tape = Tape(3, CPU)
    _fill(tape, 2)
    before = tape.column("a", 0, 0, 2)
    tape.move(torch.tensor([2]), torch.tensor([0]))
    assert tape.column("a", 0, 0, 2).tolist() == [2, 12]
    assert before.tolist() == [0, 10]
