"""Checkpoints: whole or absent, exact, and readable without pickled code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from trimtab.core.errors import DataError
from trimtab.run import checkpoint

STATE = {
    "ints": np.arange(3, dtype=np.int32),
    "keys": np.array([2**64 - 1, 5], dtype=np.uint64),
    "flags": np.array([True, False]),
    "nested": {"list": [1, 2.5, None, "text"], "tensor": torch.ones(2), "pair": (1, np.float32(0.5))},
    "empty": np.zeros((0, 4), dtype=np.float32),
}


def test_round_trip_is_exact(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 3, STATE, lambda folder: (folder / "model.bin").write_bytes(b"x") and None)
    loaded = checkpoint.load_state(tmp_path, 3)
    for name in ("ints", "keys", "flags", "empty"):
        assert loaded[name].dtype == STATE[name].dtype
        np.testing.assert_array_equal(loaded[name], STATE[name])
    assert loaded["nested"]["list"] == [1, 2.5, None, "text"]
    assert loaded["nested"]["pair"] == (1, 0.5)
    assert (checkpoint.folder_of(tmp_path, 3) / "model.bin").read_bytes() == b"x"


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        checkpoint.save(tmp_path, step, {}, lambda folder: None)
    assert checkpoint.steps(tmp_path) == [2, 10]


def test_a_half_written_checkpoint_does_not_count(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {}, lambda folder: None)

    def dies(folder: Path) -> None:
        (folder / "model.bin").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 2, {}, dies)
    assert checkpoint.steps(tmp_path) == [1]
    checkpoint.save(tmp_path, 2, {"a": 1}, lambda folder: None)
    assert checkpoint.load_state(tmp_path, 2) == {"a": 1}


def test_what_a_killed_save_left_is_removed_and_a_copy_made_by_hand_is_ignored(tmp_path: Path) -> None:
    for name in (".step-000001-999999", "step-000001-copy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.pt").write_bytes(b"half")
    assert checkpoint.steps(tmp_path) == []
    checkpoint.save(tmp_path, 2, {}, lambda folder: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001-copy", "step-000002"]


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path, 1, {"a": 1}, lambda folder: None)
    (folder / "state.pt").write_bytes(b"garbage")
    with pytest.raises(DataError, match=r"state\.pt"):
        checkpoint.load_state(tmp_path, 1)
