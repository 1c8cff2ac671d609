"""Rollouts as a columnar table: one row a rollout, token arrays as lists, built from flat arrays and offsets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from trimtab.core.files import to_json
from trimtab.core.records import Group, Rollout, flatten

Decode = Callable[[Sequence[int]], str]
Arrays = Sequence[np.ndarray[Any, Any] | None]

SIGNALS = ("overlap", "entropy", "teacher_logprob")  # per-token signals with a column; null where not computed

_FLOATS = pa.list_(pa.float32())
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("step", pa.int32()),
        ("prompt_id", pa.string()),
        ("sample", pa.int32()),
        ("task", pa.string()),
        ("prompt", pa.string()),
        ("answer", pa.string()),  # JSON
        ("text", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("pieces", pa.list_(pa.string())),  # the text of each token alone, for display
        ("logprobs", _FLOATS),  # NaN = not scored
        ("source", pa.list_(pa.int8())),  # trimtab.core.records.Source
        ("stop_reason", pa.string()),
        ("stop_index", pa.int32()),
        ("stop_part", pa.string()),
        ("stop_limit", pa.int32()),
        ("length", pa.int32()),
        ("correct", pa.float32()),
        ("status", pa.string()),
        ("reward", pa.float32()),
        ("advantage", pa.float32()),  # mean over the tokens where it is per token
        ("advantages", _FLOATS),
        ("keep", pa.bool_()),
        ("dropped", pa.string()),
        ("dropped_by", pa.string()),
        ("weight", pa.float32()),
        ("token_weight", _FLOATS),
        ("token_mask", pa.list_(pa.bool_())),
        ("overlap", _FLOATS),
        ("entropy", _FLOATS),
        ("teacher_logprob", _FLOATS),
        ("version", pa.int32()),
        ("inclusion", pa.float32()),
        ("sampled", pa.int32()),
        ("forced", pa.int32()),
        ("reused", pa.int32()),
        ("prefilled", pa.int32()),
        ("scored", pa.int32()),
    ]
)

# Columns whose values repeat; a dictionary of floats would only cost time and space.
DICTIONARY = [field.name for field in SCHEMA if field.type == pa.string()]
DICTIONARY += [f"{name}.list.element" for name in ("tokens", "pieces", "source")]


class PieceTable:
    """Token id to the text of that token alone, each decoded once."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._row_of: dict[int, int] = {}
        self._pieces: list[str] = []

    def pieces(self, token_T: np.ndarray[Any, Any]) -> pa.Array:
        """The texts of flat token ids (T,)."""
        ids, inverse = np.unique(token_T, return_inverse=True)
        for index in ids.tolist():
            if index not in self._row_of:
                self._row_of[index] = len(self._pieces)
                self._pieces.append(self._decode([index]))
        rows = np.array([self._row_of[index] for index in ids.tolist()], dtype=np.int64)
        return _strings(self._pieces).take(pa.array(rows[inverse]))


def rollout_table(step: int, groups: Sequence[Group], pieces: PieceTable) -> pa.Table:
    """All rollouts of a step in the row order of ``flatten(groups)``, with the columns of :data:`SCHEMA`.

    Token arrays need not line up with each other: a quarantined rollout is written as it is.
    """
    rollouts = flatten(groups)
    columns = _plain_columns(step, rollouts) | _stop_columns(rollouts) | _learn_columns(rollouts)
    columns |= _token_columns(rollouts, pieces)
    return pa.table([columns[field.name] for field in SCHEMA], schema=SCHEMA)


def _column(name: str, values: Sequence[Any]) -> pa.Array:
    kind = SCHEMA.field(name).type
    return _strings(values) if kind == pa.string() else pa.array(values, type=kind)


def _strings(values: Sequence[str]) -> pa.Array:
    try:
        return pa.array(values, type=pa.string())
    except UnicodeEncodeError:  # lone surrogates
        return pa.array([value.encode("utf-8", "replace").decode() for value in values], type=pa.string())


def _plain_columns(step: int, rollouts: Sequence[Rollout]) -> dict[str, pa.Array]:
    prompts = {id(r.prompt): r.prompt for r in rollouts}
    answers = {key: to_json(prompt.answer) for key, prompt in prompts.items()}
    values: dict[str, list[Any]] = {
        "id": [r.id for r in rollouts],
        "step": [step] * len(rollouts),
        "prompt_id": [r.prompt.id for r in rollouts],
        "sample": [r.sample for r in rollouts],
        "task": [r.prompt.task for r in rollouts],
        "prompt": [r.prompt.text for r in rollouts],
        "answer": [answers[id(r.prompt)] for r in rollouts],
        "text": [r.text for r in rollouts],
        "version": [r.version for r in rollouts],
        "inclusion": [r.inclusion for r in rollouts],
    }
    for name in ("sampled", "forced", "reused", "prefilled", "scored"):
        values[name] = [getattr(r.cost, name) for r in rollouts]
    return {name: _column(name, column) for name, column in values.items()}


def _stop_columns(rollouts: Sequence[Rollout]) -> dict[str, pa.Array]:
    values: dict[str, list[Any]] = {
        "stop_reason": [str(r.stop.reason) for r in rollouts],
        "stop_index": [r.stop.index for r in rollouts],
        "stop_part": [r.stop.part for r in rollouts],
        "stop_limit": [r.stop.limit for r in rollouts],
        "length": [r.length for r in rollouts],
    }
    return {name: _column(name, column) for name, column in values.items()}


def _learn_columns(rollouts: Sequence[Rollout]) -> dict[str, pa.Array]:
    values: dict[str, list[Any]] = {
        "correct": [r.verdict.correct for r in rollouts],
        "status": [str(r.verdict.status) for r in rollouts],
        "reward": [_or_null(r.reward) for r in rollouts],
        "advantage": [_or_null(_mean(r.advantage)) for r in rollouts],
        "keep": [bool(r.keep) for r in rollouts],
        "dropped": [str(r.dropped) for r in rollouts],
        "dropped_by": [r.dropped_by for r in rollouts],
        "weight": [float(r.weight) for r in rollouts],
    }
    return {name: _column(name, column) for name, column in values.items()}


def _or_null(value: float | None) -> float | None:
    return None if value is None or value != value else float(value)


def _mean(advantage: Any) -> float | None:
    if advantage is None or np.size(advantage) == 0:
        return None
    return float(np.mean(advantage))


def _token_columns(rollouts: Sequence[Rollout], pieces: PieceTable) -> dict[str, pa.Array]:
    tokens = [r.tokens for r in rollouts]
    arrays: dict[str, Arrays] = {
        "tokens": tokens,
        "logprobs": [r.logprobs for r in rollouts],
        "source": [np.zeros(r.length, np.int8) if r.source is None else r.source for r in rollouts],
        "advantages": [_per_token(r.advantage) for r in rollouts],
        "token_weight": [r.token_weight for r in rollouts],
        "token_mask": [r.token_mask for r in rollouts],
    }
    arrays |= {name: [r.signals.get(name) for r in rollouts] for name in SIGNALS}
    columns = {name: _lists(column, SCHEMA.field(name).type) for name, column in arrays.items()}
    flat, offsets, _ = _flatten(tokens, np.dtype(np.int64))
    return columns | {"pieces": pa.ListArray.from_arrays(pa.array(offsets), pieces.pieces(flat))}


def _per_token(advantage: Any) -> np.ndarray[Any, Any] | None:
    return advantage if isinstance(advantage, np.ndarray) and advantage.ndim == 1 else None


def _lists(arrays: Arrays, kind: pa.ListType) -> pa.Array:
    flat, offsets, missing = _flatten(arrays, np.dtype(kind.value_type.to_pandas_dtype()))
    mask = pa.array(missing) if missing.any() else None
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat, type=kind.value_type), mask=mask)


def _flatten(arrays: Arrays, dtype: np.dtype[Any]) -> tuple[Any, Any, Any]:
    """Values of all rows, offsets (N + 1,) and which rows are missing (N,)."""
    missing = np.array([array is None for array in arrays], dtype=bool)
    parts = [np.asarray(array).astype(dtype, copy=False) for array in arrays if array is not None]
    lengths = np.array([0 if array is None else len(array) for array in arrays], dtype=np.int32)
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
    return np.concatenate(parts) if parts else np.zeros(0, dtype), offsets, missing
