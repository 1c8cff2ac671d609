"""JSON lines of any tool, with the fields named by the user: ``--map reward=score --map prompt=question``.

Fields that already bear our names need no mapping. One object a rollout.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trimtab.core.errors import DataError
from trimtab.doctor.log import FIELDS, Log
from trimtab.doctor.readers.common import check_mapped, files_under, first_record, jsonl_chunks, make_log

WANTED = "*.jsonl with one object a rollout, and --map field=name for what is named otherwise"


def find(path: Path) -> list[Path]:
    """All JSON lines with an object in the first line."""
    return [file for file in files_under(path, "*.jsonl") if first_record(file)]


def read(path: Path, files: list[Path], mapping: Mapping[str, str]) -> Log:
    """All files in natural order of their names."""
    available = list(first_record(files[0]))
    check_mapped(mapping, available, files[0])
    names = {name: name for name in FIELDS if name in available} | dict(mapping)
    if not names:
        raise DataError(
            f"{files[0]}: no field of ours in it. Name them with --map field=name; fields: {', '.join(FIELDS)}"
        )
    return make_log((chunk, str(file)) for file in files for chunk in jsonl_chunks(file, names))
