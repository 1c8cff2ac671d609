"""TRL's completion tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from doctor.readers import files

from trimtab.core.errors import DataError
from trimtab.doctor import diagnose, read_log


def test_columns_are_read(tmp_path: Path) -> None:
    log = read_log(files.trl(tmp_path))
    assert len(log) == files.STEPS * files.ROWS
    assert np.array_equal(log.values["reward"], files.rewards().ravel().astype(np.float32))
    assert log.length_unit == "characters"
    assert len(np.unique(log.prompt_N)) == 16  # type: ignore[arg-type]
    assert diagnose(log).at("critical") == []


def test_no_reward_at_all_is_a_failed_evaluation(tmp_path: Path) -> None:
    """pandas writes NaN as null."""
    missing = files.rewards()
    missing[10:, ::3] = np.nan
    found = diagnose(read_log(files.trl(tmp_path, accuracy_reward=missing)))
    assert found.top[0].symptom.name == "evaluator failures"
    assert found.top[0].since == 11


def test_a_missing_advantage_was_nan(tmp_path: Path) -> None:
    advantage = np.ones((files.STEPS, files.ROWS))
    advantage[15:, 0] = np.nan
    found = diagnose(read_log(files.trl(tmp_path, advantage=advantage)))
    assert found.findings[33].since == 16


def test_several_reward_functions_need_a_choice(tmp_path: Path) -> None:
    path = files.trl(tmp_path, format_reward=np.ones((files.STEPS, files.ROWS)))
    log = read_log(path)
    assert "reward" not in log.values
    assert "--map reward=accuracy_reward" in log.notes[0]
    assert diagnose(log).findings[1].level == "unknown"
    chosen = read_log(path, mapping={"reward": "accuracy_reward"})
    assert diagnose(chosen).findings[1].level == "ok"


def test_truncation_is_unknown_unless_it_was_logged(tmp_path: Path) -> None:
    path = files.trl(tmp_path, cut=np.full((files.STEPS, files.ROWS), 1.0))
    assert diagnose(read_log(path)).findings[9].level == "unknown"
    found = diagnose(read_log(path, mapping={"truncated": "cut", "reward": "accuracy_reward"}))
    assert found.findings[9].level == "critical"


def test_a_mapped_column_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--map reward=acuracy_reward: .* Did you mean 'accuracy_reward'\?"):
        read_log(files.trl(tmp_path), mapping={"reward": "acuracy_reward"})
