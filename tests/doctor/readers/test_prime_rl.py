"""prime-rl's dumps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from doctor.readers import files

from trimtab.core.errors import DataError
from trimtab.doctor import diagnose, read_log


def test_episodes_are_read(tmp_path: Path) -> None:
    log = read_log(files.prime_rl(tmp_path))
    assert len(log) == files.STEPS * files.ROWS
    assert np.array_equal(log.values["reward"], files.rewards().ravel().astype(np.float32))
    assert log.values["length"][:3].tolist() == [30, 31, 32]
    assert log.values["lag"].max() == 0
    assert diagnose(log).at("critical") == []


def test_unscored_traces_and_cuts(tmp_path: Path) -> None:
    unscored = diagnose(read_log(files.prime_rl(tmp_path / "a", reward=None)))
    assert unscored.top[0].symptom.row == 13
    cut = diagnose(read_log(files.prime_rl(tmp_path / "b", finish="length")))
    assert cut.top[0].symptom.row == 9


def test_stale_episodes(tmp_path: Path) -> None:
    found = diagnose(read_log(files.prime_rl(tmp_path, start=-40))).findings[18]
    assert found.level == "critical"
    assert found.value == pytest.approx(40 + files.STEPS - 1, abs=3 * files.STEPS / 4)


def test_evaluations_are_left_out(tmp_path: Path) -> None:
    files.prime_rl(tmp_path)
    files.jsonl(tmp_path / "rollouts" / "step_3" / "eval" / "all" / "traces.jsonl", [files.episode(3, 0, 1.0)] * 50)
    assert len(read_log(tmp_path)) == files.STEPS * files.ROWS


def test_the_earlier_format(tmp_path: Path) -> None:
    for step in range(files.STEPS):
        records = [
            {
                "example_id": row // files.GROUP,
                "prompt": [{"role": "user", "content": "x"}],
                "completion": [{"role": "assistant", "content": files.text(step, row)}],
                "reward": float(row % 2),
                "error": {"error": "TimeoutError", "message": "late"} if row % 5 == 0 and step > 11 else None,
                "is_truncated": False,
                "metrics": {"a": 1.0},
                "token_usage": {"input_tokens": 4.0, "output_tokens": 30.0 + row},
            }
            for row in range(files.ROWS)
        ]
        files.jsonl(tmp_path / "rollouts" / f"step_{step}" / "train_rollouts.jsonl", records)
    log = read_log(tmp_path)
    assert log.values["length"][:2].tolist() == [30, 31]
    assert np.array_equal(np.unique(log.step_N), np.arange(files.STEPS))
    found = diagnose(log)
    assert found.top[0].symptom.row == 13
    assert found.top[0].since == 12
    assert "carry a reward all the same" in found.top[0].detail


def test_token_exports(tmp_path: Path) -> None:
    for step in range(files.STEPS):
        late = step >= 12
        records = [
            {
                "schema_version": 1,
                "step": step,
                "rank": 0,
                "token_ids": [1, 2, 3, 4],
                "loss_mask": [False, True, True, True],
                "advantages": [0.0, 0.5, 0.5, 0.5],
                "inference_logprobs": [0.0, -0.5, -0.5, -0.5],
                "trainer_logprobs": [-9.0, -0.5, -0.5, None],
                "entropy": [9.0, 0.6, 0.6, 0.6],
                "is_masked": [None, late, late, False],
            }
            for _ in range(files.ROWS)
        ]
        files.jsonl(tmp_path / "token_exports" / f"step_{step}" / "rank_0.jsonl", records)
    log = read_log(tmp_path)
    assert log.values["length"][0] == 3
    assert log.values["gap"] == pytest.approx(0)
    assert log.values["entropy"] == pytest.approx(0.6)
    found = diagnose(log)
    assert found.top[0].symptom.row == 18
    assert found.findings[1].level == "unknown"


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    place = tmp_path / "rollouts" / "step_0" / "train" / "all" / "traces.jsonl"
    files.jsonl(place, [files.episode(0, 0, 1.0), {"id": "no traces"}])
    with pytest.raises(DataError, match=r"traces\.jsonl, line 2: not an episode"):
        read_log(tmp_path)
