"""Tasks over files: JSON lines, JSON, Parquet or CSV, one file or a folder with a training and a test split."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trimtab.core.config import DataConfig
from trimtab.core.errors import ConfigError, DataError
from trimtab.tasks.rows import Row, RowsTask, rows_task

TRAIN_NAMES = ("train", "training")
TEST_NAMES = ("test", "heldout", "validation", "valid", "val", "dev", "eval")  # the first that exists is the split


def is_data_path(spec: str) -> bool:
    """True when ``spec`` names a file of a kind we read, existing or not, or an existing folder or file."""
    return Path(spec).suffix.lower() in READERS or Path(spec).expanduser().exists()


def load_path(spec: str, data: DataConfig) -> RowsTask:
    """The task over a file or a folder. ConfigError for a path that is not there, DataError for unreadable data."""
    path = Path(spec).expanduser()
    if path.is_dir():
        return _load_folder(spec, path, data)
    if not path.is_file():
        kinds = ", ".join(sorted(p.name for p in _data_files(path.parent))) if path.parent.is_dir() else ""
        raise ConfigError(f"task: no file {spec!r}. {f'In that folder: {kinds}.' if kinds else 'Check the path.'}")
    return rows_task(spec, read_rows(path), None, data)


def _load_folder(spec: str, folder: Path, data: DataConfig) -> RowsTask:
    files = _data_files(folder)
    train = [path for path in files if _split_name(path) in TRAIN_NAMES]
    tests = [[path for path in files if _split_name(path) == name] for name in TEST_NAMES]
    test = next((found for found in tests if found), None)
    if not train and len(files) == 1:
        train, test = files, None
    if not train:
        names = ", ".join(path.name for path in files) or "none"
        raise ConfigError(f"task: folder {spec!r} has no file named train.*. Data files there: {names}. Name one file.")
    return rows_task(spec, _read_all(train), _read_all(test) if test else None, data)


def _data_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in READERS and path.is_file())


def _split_name(path: Path) -> str:
    """``train-00000-of-00002.parquet`` and ``train_a.jsonl`` belong to ``train``."""
    return path.name.lower().replace("_", "-").replace(".", "-").partition("-")[0]


def _read_all(paths: list[Path]) -> Iterator[Row]:
    for path in paths:
        yield from read_rows(path)


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of one file with where each stands. DataError when the file as a whole cannot be read."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"task: {str(path)!r} is no data file. Allowed: {', '.join(sorted(READERS))}.")
    return reader(path)


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield Row(f"{path.name} line {number}", _parsed(line.removeprefix(b"\xef\xbb\xbf")))


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested beyond reason
        return error


def _json(path: Path) -> Iterator[Row]:
    """A list of objects; a file with an object on each line is read as JSON lines."""
    content = path.read_bytes()
    if not content.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        yield from _jsonl(path)
        return
    rows = _parsed(content.removeprefix(b"\xef\xbb\xbf"))
    if isinstance(rows, Exception):
        raise DataError(f"{path} is no JSON: {rows}")
    for number, row in enumerate(rows, 1):
        yield Row(f"{path.name} entry {number}", row)


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=4096):
                for row in batch.to_pylist():
                    number += 1
                    yield Row(f"{path.name} row {number}", row)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet (after row {number}): {error}") from error


def _csv(path: Path) -> Iterator[Row]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            for row in reader:
                yield Row(f"{path.name} line {reader.line_num}", row)
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as CSV: {error}") from error


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".parquet": _parquet,
    ".csv": _csv,
}
