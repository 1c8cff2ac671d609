from __future__ import annotations

import json
import math
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trimtab.core.errors import ConfigError, DataError
from trimtab.core.files import append_line, atomic, plain, read_lines, to_json
from trimtab.core.records import Cost, Group, Prompt, Rollout, Source, Status, StopReason, StopRecord, Verdict, flatten
from trimtab.pocket.tokenizer import CharTokenizer
from trimtab.run.environment import checkout
from trimtab.run.rollout_table import SCHEMA, PieceTable
from trimtab.run.rundir import RunDir

TOKENIZER = CharTokenizer()
CONFIG: dict[str, Any] = {"recipe": {"name": "grpo"}, "settings": {"lr": 1e-6, "clip": math.inf}, "parts": {}}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", CONFIG, "grpo")


def make_rollout(prompt: Prompt, sample: int = 0, text: str = "12+3=15", **fields: Any) -> Rollout:
    tokens = np.array(TOKENIZER.encode(text), dtype=np.int64)
    values: dict[str, Any] = {
        "logprobs": np.full(len(tokens), -0.5, np.float32),
        "stop": StopRecord(StopReason.EOS, len(tokens) - 1),
        "verdict": Verdict(1.0, Status.OK),
        "reward": 1.0,
        "text": text,
        "cost": Cost(prefilled=3, sampled=len(tokens)),
    }
    return Rollout(f"0-{prompt.id}-{sample}", prompt, sample, tokens, **(values | fields))


def make_prompt(name: str = "aa", **fields: Any) -> Prompt:
    return Prompt(name, **({"text": "12+3=?", "tokens": (3, 4), "answer": {"value": 15}, "task": "sums"} | fields))


def groups_of(*rollouts: Rollout) -> list[Group]:
    return [Group(rollouts[0].prompt, list(rollouts))] if rollouts else []


# ---------------------------------------------------------------- making and opening


def test_create_lays_out_the_folder_and_the_config_reads_back(run: RunDir) -> None:
    assert run.config() == CONFIG
    names = {path.name for path in run.path.iterdir()}
    assert names == {"config.yaml", "environment.json", "rollouts", "checkpoints"}
    environment = run.environment()
    assert environment["cores"] >= 1
    assert environment["torch"]
    assert RunDir.open(run.path).config() == CONFIG


def test_create_without_a_path_numbers_folders_of_the_same_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = [RunDir.create("", CONFIG, "my recipe/../x").path for _ in range(3)]
    assert len(set(made)) == 3
    assert {path.parent for path in made} == {Path("runs")}
    assert all(path.name.startswith("my-recipe-") and (path / "config.yaml").is_file() for path in made)


def test_create_takes_an_empty_folder_and_refuses_others(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    RunDir.create(empty, CONFIG, "grpo")
    with pytest.raises(ConfigError, match=r"output\.dir.*holds a run.*resume"):
        RunDir.create(empty, CONFIG, "grpo")
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        RunDir.create(full, CONFIG, "grpo")
    with pytest.raises(ConfigError, match="is a file"):
        RunDir.create(full / "notes.txt", CONFIG, "grpo")
    assert (full / "notes.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"output.dir: .*file/run' cannot be made \(Not a directory\)"):
        RunDir.create(tmp_path / "file" / "run", {}, "grpo")


def test_open_names_a_run_that_is_near(run: RunDir) -> None:
    with pytest.raises(DataError, match=r"does not exist.*Did you mean .*run'"):
        RunDir.open(run.path.parent / "rum")
    with pytest.raises(DataError, match=r"no config\.yaml in it.*Did you mean .*run'"):
        RunDir.open(run.path.parent)
    (run.path / "config.yaml").write_text("- a list\n")
    with pytest.raises(DataError, match="in place of a mapping"):
        RunDir.open(run.path).config()


def test_checkout_is_none_for_code_that_git_does_not_track(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    git("init")
    (tmp_path / "other").write_text("x")
    git("add", "other")
    git("commit", "-m", "x")
    assert checkout(tmp_path / "pkg") is None
    git("add", "pkg")
    git("commit", "-m", "y")
    found = checkout(tmp_path / "pkg")
    assert found is not None
    assert not found["dirty"]
    assert len(found["commit"]) == 40
    (tmp_path / "pkg" / "new.py").write_text("")
    assert checkout(tmp_path / "pkg") == found | {"dirty": True}


# ---------------------------------------------------------------- JSON lines


def test_metrics_take_numpy_and_write_null_for_what_is_not_finite(run: RunDir) -> None:
    numbers = {"a": np.float32(0.5), "b": float("nan"), "c": -math.inf, "d": np.bool_(True)}
    run.append_metrics({"step": np.int64(1)} | numbers)
    run.append_metrics({"step": 2, "e": np.array([1, 2]), "f": StopReason.EOS, "g": Source.FORCED})
    assert run.metrics() == [
        {"step": 1, "a": 0.5, "b": None, "c": None, "d": True},
        {"step": 2, "e": [1, 2], "f": "eos", "g": 1},
    ]


def test_a_half_written_last_line_is_ignored_and_never_grown_onto(run: RunDir) -> None:
    run.append_eval({"step": 0, "accuracy": 0.5})
    file = run.path / "evals.jsonl"
    with file.open("ab") as handle:
        handle.write(b'{"step": 1, "accur' + b"x" * 9000)  # longer than one block read backwards
    before = file.read_bytes()
    assert RunDir.open(run.path).evals() == [{"step": 0, "accuracy": 0.5}]
    assert file.read_bytes() == before  # readers never write
    run.append_eval({"step": 1, "accuracy": 0.6})
    assert [record["step"] for record in run.evals()] == [0, 1]
    assert file.read_bytes().count(b"\n") == 2


def test_a_first_line_cut_in_half_leaves_an_empty_log(run: RunDir) -> None:
    (run.path / "metrics.jsonl").write_bytes(b'{"step": 1')
    assert run.metrics() == []
    run.append_metrics({"step": 1})
    assert run.metrics() == [{"step": 1}]


def test_a_damaged_whole_line_is_named(run: RunDir) -> None:
    (run.path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2"):
        run.metrics()
    (run.path / "metrics.jsonl").write_bytes(b"[1]\n")
    with pytest.raises(DataError, match="list in place of an object"):
        run.metrics()


@given(st.dictionaries(st.text(), st.one_of(st.floats(), st.integers(), st.text(), st.none(), st.booleans())))
def test_every_record_is_one_strict_json_line(record: dict[str, Any]) -> None:
    line = to_json(record)
    assert "\n" not in line
    back = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert back == {key: plain(value) for key, value in record.items()}


def test_append_leaves_nothing_of_a_line_that_did_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.jsonl"
    append_line(file, {"step": 1})
    write = __import__("os").write
    monkeypatch.setattr("trimtab.core.files.os.write", lambda handle, data: write(handle, data[:4]))
    with pytest.raises(OSError, match="could not be written whole"):
        append_line(file, {"step": 2})
    assert file.read_bytes() == b'{"step": 1}\n'
    assert read_lines(file) == [{"step": 1}]


def test_an_interrupted_write_keeps_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    file.write_text("old")

    def interrupted() -> None:
        with atomic(file) as handle:
            handle.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_ledger_and_summary_are_replaced_and_empty_before(run: RunDir) -> None:
    assert run.ledger() == run.summary() == {}
    run.write_ledger({"inflow": {"sampled": 3}})
    run.write_summary({"accuracy_after": float("nan"), "steps": 1})
    run.write_summary({"accuracy_after": 0.5, "steps": 2})
    assert run.ledger() == {"inflow": {"sampled": 3}}
    assert run.summary() == {"accuracy_after": 0.5, "steps": 2}


# ---------------------------------------------------------------- rollouts


def test_rollouts_keep_every_field(run: RunDir) -> None:
    prompt = make_prompt()
    full = make_rollout(
        prompt,
        text="1+1=2",
        source=np.array([0, 0, 2, 1, 0]),
        stop=StopRecord(StopReason.PART, 4, "prune-opd", 64),
        signals={"overlap": np.linspace(0, 1, 5), "entropy": np.ones(5), "topk_ids": np.zeros((5, 4))},
        advantage=np.array([1, 2, 3, 4, 5], np.float32),
        token_weight=np.full(5, 0.5, np.float32),
        token_mask=np.array([True, True, True, True, False]),
        version=7,
        inclusion=0.25,
        weight=2.0,
        cost=Cost(prefilled=6, sampled=3, forced=1, reused=1, scored=11),
    )
    run.write_rollouts(3, groups_of(full), TOKENIZER.decode)
    (row,) = run.rollouts().to_pylist()
    assert list(row) == SCHEMA.names
    assert (row["step"], row["prompt_id"], row["task"], row["prompt"]) == (3, "aa", "sums", "12+3=?")
    assert json.loads(row["answer"]) == {"value": 15}
    assert "".join(row["pieces"]) == row["text"] == "1+1=2"
    assert row["tokens"] == TOKENIZER.encode("1+1=2")
    assert row["source"] == [0, 0, 2, 1, 0]
    stop = [row[f"stop_{name}"] for name in ("reason", "index", "part", "limit")]
    assert stop == ["part", 4, "prune-opd", 64]
    assert row["overlap"] == [0, 0.25, 0.5, 0.75, 1]
    assert row["teacher_logprob"] is None
    assert (row["advantage"], row["advantages"]) == (3, [1, 2, 3, 4, 5])
    assert row["token_mask"] == [True] * 4 + [False]
    costs = [row[name] for name in ("prefilled", "sampled", "forced", "reused", "scored")]
    assert costs == [6, 3, 1, 1, 11]
    assert (row["version"], row["inclusion"], row["weight"], row["length"]) == (7, 0.25, 2.0, 5)


def test_missing_values_are_null_and_never_zero(run: RunDir) -> None:
    prompt = make_prompt()
    unscored = make_rollout(prompt, 0, verdict=Verdict(None, Status.TIMEOUT), reward=None, advantage=None)
    nan = make_rollout(prompt, 1, verdict=Verdict(0.4, Status.OK), reward=float("nan"), advantage=float("nan"))
    scalar = make_rollout(prompt, 2, advantage=-0.5, signals={"entropy": np.ones(7)})
    empty = make_rollout(prompt, 3, text="", advantage=np.zeros(0, np.float32))
    dropped = make_rollout(prompt, 4)
    dropped.drop("truncated", "overlong", 0.5)
    rollouts = [unscored, nan, scalar, empty, dropped]
    run.write_rollouts(1, groups_of(*rollouts), TOKENIZER.decode)
    table = run.rollouts()
    assert table["reward"].to_pylist() == [None, None, 1, 1, 1]
    assert table["correct"].to_pylist() == [None, pytest.approx(0.4), 1, 1, 1]
    assert table["status"].to_pylist()[:2] == ["timeout", "ok"]
    assert table["advantage"].to_pylist() == [None, None, -0.5, None, None]
    assert table["advantages"].to_pylist() == [None, None, None, [], None]
    assert [values is None for values in table["entropy"].to_pylist()] == [True, True, False, True, True]
    assert table["stop_limit"].null_count == len(rollouts)
    assert table["tokens"].to_pylist()[3] == table["pieces"].to_pylist()[3] == []
    assert table.to_pylist()[4]["dropped_by"] == "overlong"
    assert table.to_pylist()[4]["inclusion"] == 0.5


def test_quarantined_and_odd_rollouts_are_written_as_they_are(run: RunDir) -> None:
    prompt = make_prompt(text="\ud800 \x00 \u202e", answer={1, 2})
    crooked = make_rollout(prompt, text="1+1", logprobs=np.zeros(9, np.float32))
    run.write_rollouts(1, groups_of(crooked, make_rollout(prompt, 1)), TOKENIZER.decode)
    first, second = run.rollouts().to_pylist()
    assert (len(first["logprobs"]), len(first["tokens"]), len(second["logprobs"])) == (9, 3, 7)
    assert first["prompt"] == "? \x00 \u202e"
    assert json.loads(first["answer"]) == [1, 2]


def test_pieces_are_decoded_once_for_each_token_id(run: RunDir) -> None:
    calls: list[int] = []

    def decode(ids: Any) -> str:
        calls.extend(ids)
        return TOKENIZER.decode(ids)

    prompt = make_prompt()
    for step in (1, 2):
        run.write_rollouts(step, groups_of(make_rollout(prompt, text="1+1=2"), make_rollout(prompt, 1)), decode)
    assert len(calls) == len(set(calls)) == len(set("1+1=2" + "12+3=15"))
    assert PieceTable(decode).pieces(np.array([], dtype=np.int64)).to_pylist() == []


def test_rollouts_by_step_and_column(run: RunDir) -> None:
    assert run.rollouts().num_rows == 0
    prompt = make_prompt()
    for step in (1, 2, 10):
        run.write_rollouts(step, groups_of(*(make_rollout(prompt, i) for i in range(step))), TOKENIZER.decode)
    run.write_rollouts(3, [], TOKENIZER.decode)
    assert run.rollout_steps() == [1, 2, 3, 10]
    assert run.rollouts([10, 2, 99], ["step", "sample"])["step"].to_pylist() == [2, 2] + [10] * 10
    assert run.rollouts(columns=["length"]).column_names == ["length"]
    with pytest.raises(ConfigError, match=r"lenght.*Did you mean 'length'"):
        run.rollouts(columns=["lenght"])


def test_a_file_without_a_column_gives_nulls_and_a_damaged_file_is_named(run: RunDir) -> None:
    run.write_rollouts(1, groups_of(make_rollout(make_prompt())), TOKENIZER.decode)
    file = run.path / "rollouts" / "step-000001.parquet"
    pq.write_table(pq.read_table(file).drop_columns(["overlap", "reward"]), file)
    assert run.rollouts(columns=["reward", "length", "overlap"]).to_pylist() == [
        {"reward": None, "length": 7, "overlap": None}
    ]
    file.write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match=r"step-000001\.parquet"):
        run.rollouts()


def test_512_rollouts_of_100_tokens_are_written_fast(run: RunDir) -> None:
    rng, names = np.random.default_rng(0), ("overlap", "entropy", "teacher_logprob")
    groups = []
    for index in range(64):
        prompt = make_prompt(f"{index:x}")
        text = ["".join(map(str, rng.integers(0, 10, 100))) for _ in range(8)]
        signals = [{name: rng.random(100).astype(np.float32) for name in names} for _ in range(8)]
        groups.append(Group(prompt, [make_rollout(prompt, i, text[i], signals=signals[i]) for i in range(8)]))
    assert len(flatten(groups)) == 512
    run.write_rollouts(1, groups, TOKENIZER.decode)
    seconds = []
    for step in range(2, 7):
        start = time.process_time()  # other processes on the machine do not count
        run.write_rollouts(step, groups, TOKENIZER.decode)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.1, seconds


# ---------------------------------------------------------------- resuming


def test_truncate_after_forgets_later_steps_and_what_speaks_of_the_end(run: RunDir) -> None:
    run.append_eval({"step": 0, "accuracy": 0.1})
    for step in (1, 2, 3):
        run.append_metrics({"step": step, "x": 0.1 * step})
        run.write_rollouts(step, groups_of(make_rollout(make_prompt())), TOKENIZER.decode)
    run.append_eval({"step": 3, "accuracy": 0.2})
    run.write_summary({"steps": 3})
    run.write_ledger({"trained": 1})
    run.report.write_text("<html>")
    (run.path / "rollouts" / ".step-000004.parquet-x.tmp").write_bytes(b"half")
    with (run.path / "metrics.jsonl").open("ab") as handle:
        handle.write(b'{"step": 4, "x"')
    kept = run.metrics()[:2]
    run.truncate_after(2)
    assert run.metrics() == kept
    assert [record["step"] for record in run.evals()] == [0]
    assert run.rollout_steps() == [1, 2]
    assert [path.name for path in (run.path / "rollouts").iterdir() if path.name.startswith(".")] == []
    assert run.summary() == {}
    assert not run.report.exists()
    run.truncate_after(-1)
    assert run.metrics() == run.evals() == run.rollout_steps() == []


def test_a_finished_run_taken_up_again_is_not_evaluated_twice(run: RunDir) -> None:
    for name, step in (("before", 0), ("step 2", 2), ("after", 2)):
        run.append_eval({"name": name, "step": step, "accuracy": 0.1})
    run.truncate_after(2)
    assert [record["name"] for record in run.evals()] == ["before", "step 2"]


def test_truncate_after_on_a_fresh_run_makes_no_files(run: RunDir) -> None:
    before = sorted(path.name for path in run.path.iterdir())
    run.truncate_after(-1)
    assert sorted(path.name for path in run.path.iterdir()) == before


def test_config_keeps_small_numbers_as_numbers(run: RunDir) -> None:
    assert yaml.safe_load((run.path / "config.yaml").read_text())["settings"] == {"lr": 1e-6, "clip": math.inf}
