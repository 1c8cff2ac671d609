"""Rollout dumps of verl (``trainer.rollout_data_dir``): ``<step>.jsonl`` with input, output, gts, score, step.

Whatever the reward function returns beside the score stands in further fields; ``acc`` is verl's own name for
correctness. Texts are decoded without special tokens, and no token count is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trimtab.doctor.log import Log
from trimtab.doctor.readers.common import check_mapped, files_under, first_record, jsonl_chunks, make_log

WANTED = "<step>.jsonl with input, output, score, step"
_NAMES = {"step": "step", "prompt": "input", "text": "output", "reward": "score", "correct": "acc"}
_NEEDED = {"input", "output", "score"}


def find(path: Path) -> list[Path]:
    """JSON lines whose first object has the fields of a dump."""
    return [file for file in files_under(path, "*.jsonl") if first_record(file).keys() >= _NEEDED]


def read(path: Path, files: list[Path], mapping: Mapping[str, str]) -> Log:
    """All dumps, one step after the other."""
    check_mapped(mapping, list(first_record(files[0])), files[0])
    names = _NAMES | dict(mapping)
    return make_log((chunk, str(file)) for file in files for chunk in jsonl_chunks(file, names))
