from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tasks.plain import BytesTokenizer

from trimtab.core.config import DataConfig, VerifyConfig
from trimtab.core.errors import ConfigError, DataError
from trimtab.tasks import load_task
from trimtab.tasks.files import load_path, read_rows
from trimtab.tasks.rows import RowsTask

ROWS = [{"prompt": f"What is {i} plus 1?", "answer": str(i + 1)} for i in range(20)]
DATA = DataConfig(holdout=0.2)


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def parquet(path: Path, rows: list[Any]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write(path: Path, rows: list[Any]) -> Path:
    if path.suffix == ".parquet":
        return parquet(path, rows)
    if path.suffix == ".csv":
        path.write_text("prompt,answer\n" + "".join(f'"{r["prompt"]}",{r["answer"]}\n' for r in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        jsonl(path, rows)
    return path


def texts(task: RowsTask) -> set[str]:
    return {r.text for r in task.rows}


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "csv"])
def test_all_kinds_hold_the_same_rows_and_hold_out_the_same(tmp_path: Path, kind: str) -> None:
    made = load_path(str(write(tmp_path / f"data.{kind}", ROWS)), DATA)
    reference = load_path(str(jsonl(tmp_path / "reference.jsonl", ROWS)), DATA)
    assert [(r.text, r.answer) for r in made.rows] == [(r.text, r.answer) for r in reference.rows]
    assert {r.text for r in made.held} == {r.text for r in reference.held}
    assert len(made.rows) + len(made.held) == 20
    assert made.skips.total == 0


def test_bad_lines_are_counted_with_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    good = [json.dumps(row).encode() for row in ROWS]
    deep = b"[" * 100_000 + b"]" * 100_000
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join([*good[:3], b"", b'{"prompt": ', b"\xff\xfe", deep, *good[3:]]))
    made = load_path(str(path), DataConfig(holdout=0.0))
    assert len(made.rows) == 20
    assert made.rows[0].where == "data.jsonl line 1"
    assert made.skips.counts["unreadable row (JSONDecodeError)"] == 1
    assert made.skips.first["unreadable row (JSONDecodeError)"] == "data.jsonl line 5"
    assert made.skips.first["unreadable row (UnicodeDecodeError)"] == "data.jsonl line 6"
    assert made.skips.total == 3


def test_a_file_of_the_wrong_fields_names_file_line_and_fields(tmp_path: Path) -> None:
    path = parquet(tmp_path / "data.parquet", [{"prompts": "q", "label": "1"}] * 3)
    with pytest.raises(DataError, match=r"3 of 3 rows.*data\.parquet row 1.*prompts, label.*prompt_key=prompts"):
        load_path(str(path), DATA)


def test_chat_messages_and_nested_answers_from_parquet(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": "1", "style": "rule"}}
    path = parquet(tmp_path / "data.parquet", [row])
    made = load_path(str(path), DataConfig(answer_key="reward_model.ground_truth")).rows[0]
    assert (made.text, made.answer, made.messages) == ("q", "1", ({"role": "user", "content": "q"},))
    assert made.meta["reward_model"]["style"] == "rule"


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("data.parquet", b"PAR1 not really", r"data\.parquet cannot be read as Parquet"),
        ("data.json", b'[{"prompt": 1', r"data\.json is no JSON"),
        ("data.csv", b"prompt,answer\n\xff\xfe,1", r"data\.csv cannot be read as CSV"),
        ("data.jsonl", b"", "no rows"),
        ("data.jsonl", b"\n\n", "no rows"),
        ("data.json", b"[]", "no rows"),
        ("data.jsonl", b"not json\n", "1 of 1 rows are bad"),
    ],
)
def test_unreadable_files(tmp_path: Path, name: str, content: bytes, match: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=match):
        load_path(str(tmp_path / name), DATA)


def test_json_lines_in_a_json_file(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "data.json", ROWS)
    assert len(list(read_rows(path))) == 20


def test_a_folder_with_splits_and_shards(tmp_path: Path) -> None:
    parquet(tmp_path / "train-00000-of-00002.parquet", ROWS[:8])
    parquet(tmp_path / "train-00001-of-00002.parquet", ROWS[8:16])
    parquet(tmp_path / "test.parquet", ROWS[15:])
    parquet(tmp_path / "validation.parquet", ROWS[:2])
    (tmp_path / "README.md").write_text("x")
    made = load_path(str(tmp_path), DATA)
    assert {r.text for r in made.held} == {r["prompt"] for r in ROWS[15:]}
    assert texts(made) == {r["prompt"] for r in ROWS[:15]}
    assert made.skips.counts == {"prompt is in the test split too": 1}


def test_a_folder_with_one_file_and_one_with_none(tmp_path: Path) -> None:
    jsonl(tmp_path / "questions.jsonl", ROWS)
    assert len(load_path(str(tmp_path), DATA).held) > 0
    jsonl(tmp_path / "more.jsonl", ROWS)
    with pytest.raises(ConfigError, match=r"no file named train\.\*.*more\.jsonl, questions\.jsonl"):
        load_path(str(tmp_path), DATA)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="Data files there: none"):
        load_path(str(tmp_path / "empty"), DATA)


def test_a_missing_file_and_one_of_another_kind(tmp_path: Path) -> None:
    jsonl(tmp_path / "data.jsonl", ROWS)
    with pytest.raises(ConfigError, match=r"no file .*dat\.jsonl.*In that folder: data\.jsonl"):
        load_path(str(tmp_path / "dat.jsonl"), DATA)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"notes\.txt' is no data file\. Allowed: \.csv, \.json, \.jsonl, \.parquet"):
        load_path(str(tmp_path / "notes.txt"), DATA)


def test_loaded_like_any_task(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "data.jsonl", [*ROWS, "bad"])
    with load_task(str(path), DATA, VerifyConfig(), BytesTokenizer(), seed=3) as task:
        held = task.heldout(100)
        assert len(task.train) + len(held) == 20
        assert task.skipped == {"row is no object with fields": 1}
        verdicts = task.verify_all([(p, f"<answer>{p.answer}</answer>") for p in held])
        assert [v.correct for v in verdicts] == [1.0] * len(held)
    again = load_task(str(path), DATA, VerifyConfig(), BytesTokenizer(), seed=4)
    assert again.train == task.train
    assert again.heldout(3) == held[:3]
