"""Dumps of slime: ``--save-debug-rollout-data`` (rollouts) and ``--save-debug-train-data`` (what was trained on).

Both are ``{"rollout_id": step, "samples": [one dict a sample]}`` written by ``torch.save``. They are read without
running code from the file (``weights_only``). Samples are Python objects, so here a loop over them cannot be avoided.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trimtab.core.errors import DataError
from trimtab.core.lazy import lazy
from trimtab.doctor.log import FIELDS, Log
from trimtab.doctor.readers.common import check_mapped, files_under, make_log, natural, python_column

torch: Any = lazy("torch")

WANTED = "*.pt with rollout_id and samples"
_NAMES = {
    "group": "group_index",
    "prompt": "prompt",
    "text": "response",
    "length": "response_length",
    "reward": "reward",
    "logprobs": "rollout_log_probs",
    "loss_mask": "loss_mask",
}
_TRAIN_NAMES = {
    "length": "response_lengths",
    "reward": "raw_reward",
    "truncated": "truncated",
    "logprobs": "rollout_log_probs",
    "trainer_logprobs": "log_probs",
    "loss_mask": "loss_masks",
    "advantage": "advantages",
    "entropy": "entropy",
}


def find(path: Path) -> list[Path]:
    """Files of ``torch.save``; dumps of evaluations are left out."""
    return sorted((f for f in files_under(path, "*.pt") if not f.name.startswith("eval_")), key=natural)


def read(path: Path, files: list[Path], mapping: Mapping[str, str]) -> Log:
    """All dumps of rollouts; where a folder has none, all dumps of training data."""
    kinds = {file: _is_training(_load(file)[1]) for file in _one_per_folder(files)}
    training = {file.parent for file, trained in kinds.items() if trained}
    chosen = [file for file in files if file.parent not in training] or files
    notes = ["dumps of training data beside those of rollouts were left out"] if len(chosen) < len(files) else []
    return make_log(((t, str(f)) for f in chosen for t in _chunks(f, mapping)), notes=notes)


def _one_per_folder(files: list[Path]) -> list[Path]:
    return list({file.parent: file for file in reversed(files)}.values())


def _is_training(samples: list[dict[str, Any]]) -> bool:
    return bool(samples) and "response_lengths" in samples[0]


def _allow_numpy() -> None:
    """Let numbers and arrays of numpy through, which samples may hold; their pickles run no code of the file."""
    core = getattr(np, "_core", None) or np.core
    kinds = ("bool", "uint8", "int32", "int64", "float32", "float64")
    types = [type(np.dtype(kind)) for kind in kinds]
    torch.serialization.add_safe_globals(
        [core.multiarray.scalar, core.multiarray._reconstruct, np.ndarray, np.dtype, *types]
    )


def _load(file: Path) -> tuple[int, list[dict[str, Any]]]:
    _allow_numpy()
    try:
        data = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever the pickle makes it raise
        reason = next((word for word in str(error).splitlines() if "GLOBAL" in word), type(error).__name__).strip()
        raise DataError(
            f"{file}: cannot be read as a slime dump without running code from it ({reason}). "
            f"Save it again with plain lists, numbers and tensors in the samples."
        ) from error
    if not isinstance(data, dict) or not isinstance(data.get("samples"), list) or "rollout_id" not in data:
        raise DataError(f"{file}: not a slime dump: no rollout_id and samples in it")
    return int(data["rollout_id"]), data["samples"]


def _chunks(file: Path, mapping: Mapping[str, str]) -> Iterator[pa.Table]:
    step, samples = _load(file)
    if not samples:
        return
    check_mapped(mapping, list(samples[0]), file)
    training = _is_training(samples)
    names = {k: v for k, v in (_TRAIN_NAMES if training else _NAMES).items() if v in samples[0]} | dict(mapping)
    columns = {ours: [_value(sample.get(theirs), ours) for sample in samples] for ours, theirs in names.items()}
    columns = {ours: values for ours, values in columns.items() if any(value is not None for value in values)}
    if not training:
        status = [sample.get("status") for sample in samples]
        columns.setdefault("truncated", status)
        finished = [word in ("completed", "truncated") for word in status]
        reward = [sample.get("reward") for sample in samples]
        columns.setdefault("failed", [f and r is None for f, r in zip(finished, reward, strict=True)])
    arrays = {name: python_column(values, name, str(file)) for name, values in columns.items()}
    yield pa.table({**arrays, "step": pa.array([step] * len(samples))})


def _value(value: Any, field: str) -> Any:
    """Tensors as lists; a reward of several parts is missing, for which of them counts is not in the dump."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return None if isinstance(value, dict) and FIELDS[field].kind != "text" else value
