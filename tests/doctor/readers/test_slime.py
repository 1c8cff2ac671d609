"""slime's dumps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from doctor.readers import files

from trimtab.core.errors import DataError
from trimtab.doctor import diagnose, read_log


def test_samples_are_read(tmp_path: Path) -> None:
    log = read_log(files.slime(tmp_path / "dump"))
    assert np.array_equal(log.values["reward"], files.rewards().ravel().astype(np.float32))
    assert log.values["length"][:4].tolist() == [20, 21, 22, 23]
    assert log.values["surprise"] == pytest.approx(0.5)
    assert len(np.unique(log.group_N)) == files.STEPS * files.PROMPTS  # type: ignore[arg-type]
    assert diagnose(log).at("critical") == []


def test_everything_truncated(tmp_path: Path) -> None:
    status = [["truncated"] * files.ROWS for _ in range(files.STEPS)]
    found = diagnose(read_log(files.slime(tmp_path / "dump", status=status)))
    assert found.top[0].symptom.row == 9
    assert found.top[0].since == 0


def test_finished_without_a_reward_is_a_failed_evaluation(tmp_path: Path) -> None:
    reward = [[None if row % 4 == 0 else float(row % 2) for row in range(files.ROWS)] for _ in range(files.STEPS)]
    assert diagnose(read_log(files.slime(tmp_path / "dump", reward=reward))).findings[13].level == "critical"


def test_positive_log_probs_are_invalid(tmp_path: Path) -> None:
    wrong = [[[0.5] * 20] * files.ROWS for _ in range(files.STEPS)]
    found = diagnose(read_log(files.slime(tmp_path / "dump", rollout_log_probs=wrong)))
    assert found.top[0].symptom.row == 33


def test_training_dumps_hold_both_log_probs(tmp_path: Path) -> None:
    found = diagnose(read_log(files.slime_training(tmp_path / "train", gap=0.2)))
    assert found.top[0].symptom.row == 19
    assert found.top[0].value == pytest.approx(0.2, abs=1e-5)
    assert "below on nearly every token" in found.top[0].detail


def test_rollouts_come_before_training_dumps(tmp_path: Path) -> None:
    files.slime(tmp_path / "rollout_data")
    files.slime_training(tmp_path / "train_data", gap=0.2)
    log = read_log(tmp_path)
    assert len(log) == files.STEPS * files.ROWS
    assert "left out" in log.notes[0]


def test_no_code_from_a_dump_is_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    torch.save({"rollout_id": 0, "samples": [Evil(str(marker))]}, tmp_path / "0.pt")
    with pytest.raises(DataError, match="without running code"):
        read_log(tmp_path / "0.pt")
    assert not marker.exists()


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.path, "w")
