from __future__ import annotations

import json
from pathlib import Path

import pytest
from compare_world import OVERRIDES, tiny_runs

from trimtab.cli import main
from trimtab.cli.compare import amount, split_items
from trimtab.core.errors import ConfigError

__all__ = ["tiny_runs"]


@pytest.mark.parametrize(
    ("text", "value"),
    [("2M", 2e6), ("200k", 2e5), ("1_000", 1000), ("1.5m", 1.5e6), ("2e6", 2e6), ("3B", 3e9), ("0.5", 0.5)],
)
def test_amounts(text: str, value: float) -> None:
    assert amount(text, "--tokens") == value


@pytest.mark.parametrize("text", ["", "0", "-3", "2 M", "2T", "many", "inf"])
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--tokens"):
        amount(text, "--tokens")


def test_recipes_may_have_settings_of_their_own() -> None:
    items = ["grpo", "prune-opd[stop.form=streaming]", "drop_layers=[1]", "a.yaml", "stop.threshold=0.5,0.7"]
    assert split_items(items) == (
        ["grpo", "prune-opd[stop.form=streaming]", "a.yaml"],
        ["drop_layers=[1]", "stop.threshold=0.5,0.7"],
    )


def test_a_budget_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["compare", "grpo", "rloo"])
    assert ended.value.code == 2
    assert "--tokens" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["compare", "grpo", "rloo", "--tokens", "1k", "--steps", "3"])


@pytest.mark.usefixtures("tiny_runs")
def test_the_command_ends_with_one_json_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--tokens", "100", "--seeds", "2", "--jobs", "1", "--allow-dirty", "--out", "c"]
    asked = ["compare", "grpo", "rloo", *options, *OVERRIDES, "eval.samples=2", "eval.temperature=1.0"]
    assert main([*asked, "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    found = json.loads(lines[0])
    assert list(found["results"]) == ["grpo", "rloo"]
    assert found["results"]["rloo"]["pass_at_k"].keys() == {"1", "2"}
    assert json.loads(Path(found["result_file"]).read_text())["results"] == found["results"]
    assert Path(found["page"]).stat().st_size > 100_000

    assert main(asked) == 0  # again: nothing to run, the same numbers
    said = capsys.readouterr().out
    assert "4 finished" in said
    for word in ("baseline", "final accuracy", "pass@2", "ratio", "Student t"):
        assert word in said


@pytest.mark.usefixtures("tiny_runs")
def test_a_refused_result_file_comes_after_what_was_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from trimtab.run import comparison

    here = comparison.environment()
    monkeypatch.setattr(comparison, "environment", lambda: here | {"git": None})
    monkeypatch.chdir(tmp_path)
    arguments = ["compare", "grpo[group_size=2]", "grpo[group_size=3]", "--steps", "1", "--seeds", "1", "--jobs", "1"]
    assert main([*arguments, "--json", "--out", "c", *(o for o in OVERRIDES if not o.startswith("group_size"))]) == 2
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["result_file"] is None
    assert found["results"]["grpo[group_size=3]"]["difference"]["verdict"] == "one seed: no interval"
    assert "commit is unknown" in said.err
    assert not Path("results").exists()
    assert len(list(Path("c/runs").glob("*/seed-0/summary.json"))) == 2
