"""Atomic checkpoints: a folder appears whole or not at all, and restores the run exactly.

Layout of ``checkpoints/step-000010``: the policy in Hugging Face format (config.json, model.safetensors, tokenizer
files) and ``state.pt`` (optimiser, parts, data order, history, ledger, counters). A folder is written beside its place
and renamed, so a run killed at any moment finds the last whole one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trimtab.core.errors import DataError

KEEP = 2
_NUMPY = "__numpy__"


def to_plain(value: Any) -> Any:
    """State as values ``torch.load(weights_only=True)`` accepts: arrays become tagged tensors."""
    if isinstance(value, np.ndarray):
        if value.dtype == np.uint64:
            return {_NUMPY: torch.from_numpy(value.view(np.int64).copy()), "dtype": "uint64"}
        return {_NUMPY: torch.from_numpy(np.ascontiguousarray(value).copy()), "dtype": str(value.dtype)}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_plain(item) for item in value)
    return value


def from_plain(value: Any) -> Any:
    """The inverse of :func:`to_plain`."""
    if isinstance(value, dict):
        if _NUMPY in value:
            array = value[_NUMPY].numpy()
            return array.view(np.uint64) if value["dtype"] == "uint64" else array.astype(value["dtype"], copy=False)
        return {key: from_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(from_plain(item) for item in value)
    return value


def folder_of(root: Path, step: int) -> Path:
    """The checkpoint folder of a step."""
    return root / f"step-{step:06d}"


def save(root: Path, step: int, state: dict[str, Any], save_model: Callable[[Path], None]) -> Path:
    """Write the checkpoint of ``step`` and remove all but the newest ones."""
    root.mkdir(parents=True, exist_ok=True)
    target = folder_of(root, step)
    for left in root.glob(".step-*"):  # by a process that was killed while it saved
        shutil.rmtree(left, ignore_errors=True)
    work = root / f".{target.name}-{os.getpid()}"
    work.mkdir()
    save_model(work)
    torch.save(to_plain(state), work / "state.pt")
    _sync(work)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(work, target)
    _sync_folder(root)
    for old in steps(root)[:-KEEP]:
        shutil.rmtree(folder_of(root, old), ignore_errors=True)
    return target


def steps(root: Path) -> list[int]:
    """Steps with a whole checkpoint, ascending."""
    found = {path.name.removeprefix("step-"): path for path in root.glob("step-*")}
    return sorted(int(step) for step, path in found.items() if step.isdigit() and (path / "state.pt").exists())


def load_state(root: Path, step: int) -> dict[str, Any]:
    """The state saved at ``step``; DataError naming the file when it cannot be read."""
    path = folder_of(root, step) / "state.pt"
    try:
        state: dict[str, Any] = from_plain(torch.load(path, weights_only=True, map_location="cpu"))
    except Exception as error:  # torch.load raises half a dozen unrelated classes for a damaged file
        raise DataError(f"checkpoint {path}: cannot be read ({type(error).__name__}: {error})") from error
    return state


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
