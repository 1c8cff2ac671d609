"""JSON lines with a mapping, and the errors of finding a format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from doctor.readers import files

from trimtab.core.errors import ConfigError, DataError
from trimtab.doctor import diagnose, read_log
from trimtab.doctor.readers import common

MAP = {"step": "iter", "prompt": "q.id", "reward": "out.score", "text": "out.text", "truncated": "finish_reason"}


def records(**out: Any) -> list[dict[str, Any]]:
    """A log in nobody's format."""
    return [
        {
            "iter": step,
            "q": {"id": row // 8, "text": "?"},
            "out": {"score": row % 2, "text": files.text(step, row)} | out,
            "finish_reason": "length" if step >= 12 else "stop",
            "length": 40,
        }
        for step in range(24)
        for row in range(64)
    ]


def test_nested_names_words_and_own_names(tmp_path: Path) -> None:
    log = read_log(files.jsonl(tmp_path / "log.jsonl", records()), mapping=MAP)
    assert log.length_unit == "tokens"
    found = diagnose(log)
    assert found.top[0].symptom.row == 9
    assert found.top[0].since == 12
    assert "sampling.max_new_tokens=80" in [line for remedy in found.top[0].remedies for line in remedy.lines]


def test_small_blocks_give_the_same_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = files.jsonl(tmp_path / "log.jsonl", records())
    whole = diagnose(read_log(path, mapping=MAP)).to_dict()
    monkeypatch.setattr(common, "BLOCK", 1000)
    assert repr(diagnose(read_log(path, mapping=MAP)).to_dict()) == repr(whole)


def test_slow_lines_give_the_same_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = files.jsonl(tmp_path / "log.jsonl", records())
    whole = diagnose(read_log(path, mapping=MAP)).to_dict()
    monkeypatch.setattr(common, "_fast", lambda block, schema: None)
    assert repr(diagnose(read_log(path, mapping=MAP)).to_dict()) == repr(whole)


def test_a_half_written_last_line_is_named(tmp_path: Path) -> None:
    path = files.jsonl(tmp_path / "log.jsonl", records())
    path.write_text(path.read_text() + '{"iter": 3, "q"')
    with pytest.raises(DataError, match=r"log\.jsonl, line 1537: not valid JSON"):
        read_log(path, mapping=MAP)


def test_json_lines_without_mapping_ask_for_one(tmp_path: Path) -> None:
    path = files.jsonl(tmp_path / "log.jsonl", records())
    with pytest.raises(ConfigError, match="--map step=iteration"):
        read_log(path)
    assert len(read_log(path, "jsonl")) == 1536


def test_unknown_field_and_format(tmp_path: Path) -> None:
    path = files.jsonl(tmp_path / "log.jsonl", records())
    with pytest.raises(ConfigError, match="Did you mean 'reward'"):
        read_log(path, mapping={"rewards": "out.score"})
    with pytest.raises(ConfigError, match="Did you mean 'verl'"):
        read_log(path, "verll")


def test_missing_path_names_the_nearest(tmp_path: Path) -> None:
    files.jsonl(tmp_path / "rollouts.jsonl", records())
    with pytest.raises(DataError, match=r"does not exist\. Did you mean '.*rollouts\.jsonl'"):
        read_log(tmp_path / "rollout.jsonl")


def test_a_folder_without_a_log_says_what_was_tried(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(DataError, match=r"Tried trimtab: .*; trl: .*; verl: .*; slime: .*; prime-rl: .*'notes\.txt'"):
        read_log(tmp_path)
    with pytest.raises(DataError, match=r"Tried verl: <step>\.jsonl with input, output, score, step\. The first"):
        read_log(tmp_path, "verl")


def test_an_empty_log(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no rollout log found"):
        read_log(tmp_path, "jsonl")
