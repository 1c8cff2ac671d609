"""``trimtab doctor`` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from doctor.readers import files

from trimtab.cli import main


def test_json_is_the_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files.verl(tmp_path, loop=True)
    assert main(["doctor", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["rollouts"] == files.STEPS * files.ROWS
    assert found["top"][0] == 32
    row = next(row for row in found["rows"] if row["row"] == 32)
    assert row["since"] == 1
    assert row["low"] < row["value"] < row["high"]
    assert {"class", "action", "lines", "recipes"} <= row["remedies"][0].keys()
    assert len(found["rows"]) == 33


def test_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files.verl(tmp_path, loop=True)
    assert main(["doctor", str(tmp_path), "--format", "verl", "--all"]) == 0
    text = capsys.readouterr().out
    assert "Against repetition:" in text
    assert "truncation: unknown, no truncated in the log" in " ".join(text.split())


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files.verl(tmp_path)
    for arguments in (
        [str(tmp_path), "--map", "reward"],
        [str(tmp_path / "nowhere")],
        [str(tmp_path), "--format", "x"],
    ):
        assert main(["doctor", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("trimtab: ")
        assert error.count("\n") == 1


def test_torch_is_not_loaded_for_text_logs(tmp_path: Path) -> None:
    files.verl(tmp_path)
    code = f"import sys; from trimtab.cli import main; main(['doctor', {str(tmp_path)!r}]); "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
