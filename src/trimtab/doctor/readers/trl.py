"""Completion tables of TRL (``log_completions=True``): ``completions/completions_00010.parquet``.

Columns: step, prompt, completion, one for each reward function, columns logged by the user, advantage. pandas writes
NaN as null, so that a null reward is a function that gave none, and a null advantage one that was NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trimtab.doctor.log import Log
from trimtab.doctor.readers.common import check_mapped, files_under, make_log, parquet_chunks, parquet_names

WANTED = "completions_*.parquet with the columns step, prompt, completion"
_NAMES = {"step": "step", "prompt": "prompt", "text": "completion", "advantage": "advantage"}
_NEEDED = {"step", "prompt", "completion"}


def find(path: Path) -> list[Path]:
    """Parquet files with the columns of a completion table."""
    return [file for file in files_under(path, "*.parquet") if set(parquet_names(file)) >= _NEEDED]


def read(path: Path, files: list[Path], mapping: Mapping[str, str]) -> Log:
    """All tables, one step after the other."""
    available = parquet_names(files[0])
    check_mapped(mapping, available, files[0])
    rewards = _reward_functions(files[0])
    notes = []
    if len(rewards) > 1 and "reward" not in mapping:
        notes.append(
            f"several reward functions ({', '.join(rewards)}) and their weights are not in the log: choose what counts "
            f"with --map reward={rewards[0]}"
        )
    return make_log(((c, str(f)) for f in files for c in _chunks(f, rewards, mapping)), notes=notes)


def _reward_functions(file: Path) -> list[str]:
    """Float columns between completion and advantage."""
    schema = pq.read_schema(file)
    others = set(_NAMES.values())
    return [f.name for f in schema if f.name not in others and pa.types.is_floating(f.type)]


def _chunks(file: Path, rewards: list[str], mapping: Mapping[str, str]) -> Iterator[pa.Table]:
    names = dict(_NAMES)
    if len(rewards) == 1:
        names["reward"] = rewards[0]
    names |= mapping
    present = parquet_names(file)
    wanted = [name for name in {*names.values(), *rewards} if name in present]
    for table in parquet_chunks(file, wanted):
        chunk = {ours: table.column(theirs) for ours, theirs in names.items() if theirs in wanted}
        if rewards and "failed" not in mapping:
            chunk["failed"] = _none_scored(table, [name for name in rewards if name in wanted])
        if "advantage" in chunk:
            chunk["advantage"] = pc.fill_null(chunk["advantage"].cast(pa.float64()), float("nan"))
        yield pa.table(chunk)


def _none_scored(table: pa.Table, rewards: list[str]) -> pa.ChunkedArray:
    """True where no reward function gave a value."""
    missing = pc.is_null(table.column(rewards[0]), nan_is_null=True)
    for name in rewards[1:]:
        missing = pc.and_(missing, pc.is_null(table.column(name), nan_is_null=True))
    return missing
