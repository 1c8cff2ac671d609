from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from trimtab.core.config import DataConfig
from trimtab.core.errors import ConfigError, DataError, MissingExtraError
from trimtab.tasks import make_task
from trimtab.tasks.rows import RowsTask

datasets = pytest.importorskip("datasets")
ROWS = [{"prompt": f"q{i}", "answer": str(i)} for i in range(20)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set as `save_to_disk` leaves it: nothing is fetched."""
    path = tmp_path_factory.mktemp("saved") / "set"
    splits = {"train": datasets.Dataset.from_list(ROWS[:16]), "validation": datasets.Dataset.from_list(ROWS[15:])}
    datasets.DatasetDict(splits).save_to_disk(path)
    return path


def made(spec: str, **data: Any) -> RowsTask:
    task = make_task(f"datasets:{spec}", DataConfig(**data))
    assert isinstance(task, RowsTask)
    return task


def test_train_trains_and_validation_is_held_out(folder: Path) -> None:
    task = made(str(folder))
    assert [r.text for r in task.rows] == [f"q{i}" for i in range(15)]
    assert {r.text for r in task.held} == {f"q{i}" for i in range(15, 20)}
    assert task.rows[3].where == "train row 3"


@pytest.mark.parametrize("spelled", [":train", "?split=train"])
def test_a_named_split_is_divided(folder: Path, spelled: str) -> None:
    task = made(f"{folder}{spelled}", holdout=0.3)
    assert len(task.rows) + len(task.held) == 16
    assert task.held


def test_a_plain_folder_of_files_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    task = made(str(tmp_path / "data"), holdout=0.0)
    assert [(r.text, r.answer) for r in task.rows] == [(r["prompt"], r["answer"]) for r in ROWS]


def test_errors(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown name 'trian'\. Did you mean 'train'.*train, validation"):
        made(f"{folder}:trian")
    with pytest.raises(ConfigError, match=r"'nam'\. Did you mean 'name'"):
        made(f"{folder}?nam=x")
    with pytest.raises(DataError, match="cannot be loaded"):
        made(str(tmp_path / "nowhere"))
    datasets.DatasetDict({"a": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "odd")
    with pytest.raises(ConfigError, match=r"unknown name 'train'.*Name one as datasets:.*odd:<split>"):
        made(str(tmp_path / "odd"))


def test_without_the_package_the_error_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'trimtab\[tasks\]'"):
        made(str(folder))
