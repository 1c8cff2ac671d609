"""What readers share: walking Parquet and JSON lines in chunks, renaming columns, and making a :class:`Log`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
import pyarrow.parquet as pq

from trimtab.core.errors import DataError, nearest
from trimtab.doctor.log import FIELDS, Key, Log, concatenate
from trimtab.doctor.reduce import Columns, reduce

BLOCK = 1 << 24  # bytes of JSON lines parsed at a time
ROWS = 1 << 15  # rows of a Parquet file reduced at a time
PROBE_LINES = 200  # lines that settle the types of a JSON-lines file


def files_under(path: Path, pattern: str) -> list[Path]:
    """The file itself when its name fits, or every fitting file below a folder, in natural order."""
    if path.is_file():
        return [path] if path.match(pattern) else []
    return sorted((p for p in path.rglob(pattern) if p.is_file()), key=natural)


def natural(path: Path) -> tuple[tuple[int, int, str], ...]:
    """Sort key under which step_9 comes before step_10."""
    parts = re.split(r"(\d+)", str(path))
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts)


def number_in(name: str) -> int | None:
    """The last whole number in a file or folder name."""
    found = re.findall(r"\d+", name)
    return int(found[-1]) if found else None


# ---------------------------------------------------------------- Parquet


def parquet_names(file: Path) -> list[str]:
    """Column names of a Parquet file; none when it is not one."""
    try:
        return list(pq.read_schema(file).names)
    except (OSError, pa.ArrowException):
        return []


def parquet_chunks(file: Path, names: Sequence[str]) -> Iterator[pa.Table]:
    """The named columns of a Parquet file in chunks. Raises DataError for a file that cannot be read."""
    try:
        with pq.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(ROWS, columns=list(names)):
                yield pa.Table.from_batches([batch])
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{file}: cannot be read as Parquet ({error})") from error


# ---------------------------------------------------------------- JSON lines


def first_record(file: Path) -> dict[str, Any]:
    """The first object of a JSON-lines file; empty when there is none."""
    return next(iter(_probe(file, 1)), {})


def _probe(file: Path, lines: int) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    try:
        with file.open("rb") as stream:
            for line in stream:
                if line.strip():
                    value = json.loads(line)
                    if isinstance(value, dict):
                        records.append(value)
                if len(records) >= lines:
                    break
    except (OSError, ValueError):
        return records
    return records


def jsonl_chunks(file: Path, names: Mapping[str, str]) -> Iterator[pa.Table]:
    """Columns of a JSON-lines file in chunks: ``names`` is our field to the name there, dots for nesting.

    Arrow parses a block at once, only the fields asked for. A block that it cannot take, because it holds NaN or a
    field of changing type, is parsed line by line. A field of which no line has anything is left out.
    Raises DataError naming file and line for a line that is no JSON object.
    """
    probe = _probe(file, PROBE_LINES)
    types = {ours: kind for ours, theirs in names.items() if (kind := _type(probe, ours, theirs)) is not None}
    schema = _schema({names[ours]: kind for ours, kind in types.items()})
    line = 1
    for block in _blocks(file):
        table = _fast(block, schema) if schema is not None else None
        if table is None:
            yield _slow(file, block, line, names)
        else:
            yield pa.table({ours: _dig(table, names[ours]) for ours in types})
        line += block.count(b"\n")


def _type(probe: Sequence[Mapping[str, Any]], ours: str, theirs: str) -> pa.DataType | None:
    """Arrow's type of a field; None when no probed line has it or their types differ."""
    values = [value for record in probe if (value := _get(record, theirs)) is not None]
    try:
        kind = pa.array(values).type
    except (pa.ArrowException, ValueError, TypeError):
        return None
    if pa.types.is_null(kind):
        return None
    if pa.types.is_integer(kind) and FIELDS[ours].kind != "key":
        return pa.float64()
    if pa.types.is_list(kind) and (pa.types.is_integer(kind.value_type) or pa.types.is_null(kind.value_type)):
        return pa.list_(pa.float64())
    return pa.large_string() if pa.types.is_string(kind) else kind


def _get(record: Mapping[str, Any], path: str) -> Any:
    if path in record:
        return record[path]
    value: Any = record
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _schema(types: Mapping[str, pa.DataType]) -> pa.Schema | None:
    """Arrow schema of dotted names; None when there is nothing to read."""
    tree: dict[str, Any] = {}
    for path, kind in types.items():
        node = tree
        *parents, leaf = path.split(".")
        for name in parents:
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                return None
        node[leaf] = kind
    return pa.schema(_fields(tree)) if tree else None


def _fields(tree: Mapping[str, Any]) -> list[pa.Field]:
    return [pa.field(n, pa.struct(_fields(k)) if isinstance(k, dict) else k) for n, k in tree.items()]


def _dig(table: pa.Table, path: str) -> pa.ChunkedArray:
    head, *rest = path.split(".")
    column = table.column(head)
    for name in rest:
        column = pc.struct_field(column, name)
    return column


def _blocks(file: Path) -> Iterator[bytes]:
    """The file in blocks that end with a line."""
    try:
        with file.open("rb") as stream:
            rest = b""
            while part := stream.read(BLOCK):
                whole, newline, tail = (rest + part).rpartition(b"\n")
                rest = tail
                if newline:
                    yield whole + newline
            if rest.strip():
                yield rest + b"\n"
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error})") from error


def _fast(block: bytes, schema: pa.Schema) -> pa.Table | None:
    try:
        return pyarrow.json.read_json(
            pa.BufferReader(block),
            read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=len(block) + 1),
            parse_options=pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
    except pa.ArrowException:
        return None


def _slow(file: Path, block: bytes, line: int, names: Mapping[str, str]) -> pa.Table:
    records = []
    for number, text in enumerate(block.split(b"\n"), line):
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except ValueError as error:
            raise DataError(f"{file}, line {number}: not valid JSON ({error})") from error
        if not isinstance(record, dict):
            raise DataError(f"{file}, line {number}: {type(record).__name__} in place of an object")
        records.append(record)
    columns = {ours: [_get(record, theirs) for record in records] for ours, theirs in names.items()}
    return pa.table({ours: python_column(values, ours, str(file)) for ours, values in columns.items()})


def python_column(values: Sequence[Any], name: str, where: str) -> pa.Array:
    """Values of one field as an Arrow column; texts and keys of mixed types become JSON."""
    if FIELDS[name].kind in ("key", "text"):
        texts = [v if v is None or isinstance(v, str) else json.dumps(v, sort_keys=True, default=str) for v in values]
        return pa.array(texts, pa.large_string())
    try:
        column = pa.array(values)
    except (pa.ArrowException, TypeError, ValueError):
        column = None
    if column is None:
        try:
            return pa.array([None if value is None else float(value) for value in values], pa.float64())
        except (TypeError, ValueError) as error:
            raise DataError(f"{where}: the field for {name!r} holds values of different kinds ({error})") from error
    return column.cast(pa.float64()) if pa.types.is_null(column.type) else column


# ---------------------------------------------------------------- making a log


def make_log(chunks: Iterable[tuple[pa.Table, str]], *, notes: Sequence[str] = ()) -> Log:
    """A log from chunks in our names, each with the file it came from (for errors).

    Raises DataError when there is not one rollout.
    """
    parts: list[Columns] = []
    where = ""
    for chunk, where in chunks:
        if chunk.num_rows:
            parts.append({"step": np.zeros(chunk.num_rows, np.int64), **reduce(chunk, where)})
    if not parts:
        raise DataError(f"{where or 'the log'}: holds no rollout")
    return log_of(concatenate(parts), list(notes))


def log_of(columns: Columns, notes: list[str]) -> Log:
    """A log from reduced columns: keys apart, groups, length and lag settled."""
    step = columns.pop("step")
    prompt, answer, text = (_key(columns, name) for name in ("prompt", "answer", "text"))
    group = _key(columns, "group")
    group = prompt if group is None else group
    characters = columns.pop("characters", None)
    unit = "tokens"
    if characters is not None and not _any(columns.get("length")):
        columns["length"], unit = characters, "characters"
        notes.append("lengths are in characters: the log has no token counts")
    if _any(columns.get("version")) and _any(columns.get("trainer_version")):
        columns["lag"] = columns["trainer_version"] - columns["version"]
    return Log(step, prompt, group, columns, text, answer, unit, notes=notes)


def _key(columns: Columns, name: str) -> Key | None:
    column = columns.pop(name, None)
    return None if column is None or not column.any() else column


def _any(column: Any) -> bool:
    return column is not None and bool(np.isfinite(column).any())


def renamed(table: pa.Table, names: Mapping[str, str]) -> pa.Table:
    """Columns of ``table`` under our names; those it lacks are left out."""
    return pa.table({ours: table.column(theirs) for ours, theirs in names.items() if theirs in table.column_names})


def check_mapped(mapping: Mapping[str, str], available: Sequence[str], where: Path) -> None:
    """Raises DataError naming the nearest column when a mapped name is not in the log."""
    for ours, theirs in mapping.items():
        if theirs not in available and theirs.split(".")[0] not in available:
            near = nearest(theirs, available)
            hint = f" Did you mean {near!r}?" if near else ""
            raise DataError(
                f"--map {ours}={theirs}: {where} has no field {theirs!r}.{hint} It has {', '.join(sorted(available))}."
            )
