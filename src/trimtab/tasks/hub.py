"""Tasks over the package ``datasets``: ``datasets:openai/gsm8k?name=main``, ``datasets:folder:train``."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trimtab.core.config import DataConfig
from trimtab.core.errors import DataError, missing_extra, unknown
from trimtab.tasks.files import TEST_NAMES
from trimtab.tasks.options import split_options
from trimtab.tasks.rows import Row, RowsTask, rows_task
from trimtab.tasks.verifiers import reason

OPTIONS = ("name", "split")


def load(rest: str, data: DataConfig) -> RowsTask:
    """The task ``datasets:<id or folder>[:split][?name=<configuration>]``.

    A named split is divided by ``data.holdout``; without one, ``train`` trains and ``test`` (or ``validation``) is held
    out. ConfigError for an unknown split, DataError for a data set that cannot be loaded.
    """
    source, options = split_options(rest, "task")
    for option in options:
        if option not in OPTIONS:
            raise unknown("task.datasets", option, OPTIONS)
    source, split = _source_and_split(source, options.get("split", ""))
    splits = _load(source, options.get("name"))
    name = f"datasets:{rest}"
    if split:
        if split not in splits:
            raise unknown("task.datasets.split", split, splits)
        return rows_task(name, _rows(split, splits[split]), None, data)
    if "train" not in splits:
        raise unknown("task.datasets.split", "train", splits, f"Name one as datasets:{source}:<split>.")
    test = next((found for found in TEST_NAMES if found in splits), None)
    return rows_task(name, _rows("train", splits["train"]), _rows(test, splits[test]) if test else None, data)


def _source_and_split(source: str, split: str) -> tuple[str, str]:
    head, colon, tail = source.rpartition(":")
    return (head, tail) if colon and not split and not Path(source).exists() else (source, split)


def _load(source: str, name: str | None) -> dict[str, Any]:
    """Splits by name."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise missing_extra("datasets", "tasks", "The task 'datasets:...'") from error
    saved = any((Path(source) / marker).is_file() for marker in ("dataset_dict.json", "state.json"))
    try:
        loaded = datasets.load_from_disk(source) if saved else datasets.load_dataset(source, name)
    except Exception as error:  # network, authentication, format: the library raises what its back ends raise
        raise DataError(f"task: the data set {source!r} cannot be loaded: {reason(error)}") from error
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}


def _rows(split: str, rows: Any) -> Iterator[Row]:
    for number, row in enumerate(rows):
        yield Row(f"{split} row {number}", row)
