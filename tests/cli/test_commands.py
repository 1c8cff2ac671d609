"""Commands as a user types them: output, exit codes, what is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trimtab.cli import commands, main
from trimtab.cli.new import skeleton
from trimtab.cli.train import DEFAULT_RECIPE, split_items
from trimtab.core.errors import ConfigError
from trimtab.core.recipe import shipped
from trimtab.core.slots import SLOTS


def test_methods_as_json_lists_every_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["methods"]
    assert [row["slug"] for row in rows] == list(shipped())
    assert all(row.keys() >= {"slug", "slots", "paper", "arxiv", "maturity"} for row in rows)
    assert next(row for row in rows if row["slug"] == "prune-opd")["slots"] == [
        "stop",
        "filter",
        "objective",
        "distill",
    ]


@pytest.mark.parametrize("arguments", [["methods"], ["methods", "prune-opd"], ["check", "grpo", "steps=3"]])
def test_listing_and_checking_need_no_torch(arguments: list[str]) -> None:
    code = f"import sys; from trimtab.cli import main; main({arguments!r}); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "Did you mean 'train'?"),
        (["check", "prune-opb"], "Did you mean 'prune-opd'?"),
        (["check", "prune-opd", "stop.treshold=0.6"], "stop.treshold: unknown name 'treshold'. Did you mean 'thre"),
        (["check", "prune-opd", "stop.threshold=high"], "stop.prune-opd.threshold: 'high' is not valid."),
        (["check", "grpo", "steps"], "override: 'steps' is not valid. Allowed: key=value"),
        (["train", "--resume", "somewhere", "steps=3"], "--resume: takes no settings"),
        (["train", "grpo", "recipe=rloo"], "Name one recipe"),
        (["report", "no/such/run"], "no/such/run"),
        (["pocket", "show", "sumz"], "Did you mean 'sums'?"),
        (["new", "Bad Name", "--slot", "stop"], "lower-case"),
        (["new", "my-method", "--slot", "stpo"], "Did you mean 'stop'?"),
        (["new", "esr", "--slot", "stop"], "already taken"),
    ],
)  # fmt: skip
def test_mistakes_are_one_clear_line_and_exit_code_two(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("trimtab: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in commands())


def test_a_recipe_is_positional_or_named() -> None:
    assert split_items([]) == (DEFAULT_RECIPE, [])
    assert split_items(["grpo", "steps=3"]) == ("grpo", ["steps=3"])
    assert split_items(["steps=3", "recipe=grpo"]) == ("grpo", ["steps=3"])
    with pytest.raises(ConfigError, match="Name one recipe"):
        split_items(["grpo", "rloo"])


@pytest.mark.parametrize("slot", SLOTS)
def test_skeletons_of_every_slot_compile_and_name_each_other(slot: str) -> None:
    files = skeleton("two-words", slot)
    assert [Path(path).stem for path in files] == ["two_words", "two-words", "test_two_words"]
    for path, text in files.items():
        if path.endswith(".py"):
            compile(text, path, "exec")


def test_new_writes_a_method_that_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "src/trimtab/core").mkdir(parents=True)
    assert main(["new", "my-method", "--slot", "stop", "--root", str(tmp_path)]) == 0
    module = tmp_path / "src/trimtab/control/stop/my_method.py"
    assert module.exists()
    module.write_text("mine")
    assert main(["new", "my-method", "--slot", "stop", "--root", str(tmp_path)]) == 2
    assert module.read_text() == "mine"
    assert "nothing was overwritten" in capsys.readouterr().err


def test_new_writes_nothing_when_one_of_its_files_exists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "src/trimtab/core").mkdir(parents=True)
    recipe = tmp_path / "src/trimtab/recipes/my-method.yaml"
    recipe.parent.mkdir()
    recipe.write_text("mine")
    assert main(["new", "my-method", "--slot", "stop", "--root", str(tmp_path)]) == 2
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [recipe]
    assert "nothing was overwritten" in capsys.readouterr().err


@pytest.mark.parametrize("slot", SLOTS)
def test_the_test_of_a_new_method_stands_where_the_contract_suite_looks_for_it(slot: str) -> None:
    module, _, test = (Path(path) for path in skeleton("my-method", slot))
    assert test == Path("tests") / module.parent.relative_to("src/trimtab") / "test_my_method.py"


def test_embedded_problems_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pocket", "show", "sums", "--count", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_json_has_null_where_nothing_was_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["steps=0", "eval.num_problems=0", "output.report=false", "threads=1"]
    assert main(["train", "grpo", "--json", *settings, f"output.dir={tmp_path / 'run'}"]) == 0
    line = capsys.readouterr().out
    assert "NaN" not in line
    assert json.loads(line)["accuracy_before"] is None


def test_train_prints_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["steps=1", "prompts_per_step=2", "group_size=2", "eval.num_problems=4", "threads=1"]
    assert main(["train", "grpo", "--json", *settings, f"output.dir={tmp_path / 'run'}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    summary = json.loads(lines[0])
    names = (
        "accuracy_before",
        "accuracy_after",
        "tokens_generated",
        "tokens_saved",
        "tokens_trained",
        "wall_s",
        "run_dir",
    )
    assert all(name in summary for name in names)
    assert Path(summary["report"]).stat().st_size > 100_000
    assert (tmp_path / "run/summary.json").exists()
