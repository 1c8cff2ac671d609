"""From a table in a log's words to one number a rollout and field.

A chunk is an Arrow table whose columns are named as in :data:`trimtab.doctor.log.FIELDS`. T tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trimtab.core.errors import DataError
from trimtab.core.files import to_json
from trimtab.doctor.log import FIELDS, Bool, Float, Int, Values
from trimtab.doctor.text import repetitive, row_hash

YES = ("true", "yes", "1", "length", "limit", "context", "max_tokens", "truncated", "timeout", "error", "failed")
NO = ("false", "no", "0", "", "stop", "eos", "end_turn", "tool_calls", "completed", "ok", "malformed", "part", "abort")
TOLERANCE = 1e-3  # log-probs may exceed 0 by rounding

Columns = dict[str, np.ndarray[Any, Any]]


def reduce(chunk: pa.Table, where: str) -> Columns:
    """Numbers of a chunk: ``step`` int64, keys uint64, everything else float32 with NaN for missing.

    Raises DataError naming ``where`` and the field for a column of a kind that cannot be read.
    """
    columns: dict[str, pa.Array] = {name: _one(chunk.column(name)) for name in chunk.column_names}
    rows = chunk.num_rows
    found: Columns = {}
    lists = {name: column for name, column in columns.items() if _is_list(column) and FIELDS[name].kind == "tokens"}
    for name, column in columns.items():
        kind = FIELDS[name].kind
        if name in lists:
            continue
        if kind == "key" or kind == "text":
            found |= _text(name, as_text(column))
        elif kind == "flag":
            found[name] = _flags(column, name, where)
        else:
            found[name] = _numbers(column, name, where)
    found = _tokens(lists, where) | found
    if any(name in columns for name in _CHECKED):
        found["invalid"] = _invalid(columns, lists, rows)
    if "step" in found:
        found["step"] = np.nan_to_num(found["step"], nan=0).astype(np.int64)
    return found


def _one(column: pa.ChunkedArray) -> pa.Array:
    joined = column.combine_chunks()
    return joined.chunk(0) if isinstance(joined, pa.ChunkedArray) else joined


def _is_list(column: pa.Array) -> bool:
    return bool(pa.types.is_list(column.type) or pa.types.is_large_list(column.type))


def as_text(column: pa.Array) -> pa.Array:
    """A column as texts; numbers are printed, messages and other nested values become JSON."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.dictionary_decode(), kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return column
    if pa.types.is_nested(kind):
        return pa.array([None if value is None else to_json(value) for value in column.to_pylist()], pa.large_string())
    return column.cast(pa.large_string())


def _text(name: str, column: pa.Array) -> Columns:
    """The hash of a text; of the response also its length in characters and whether it loops."""
    known = column.is_valid().to_numpy(zero_copy_only=False)
    hashed = np.where(known, row_hash(column), np.uint64(0))
    if name != "text":
        return {name: hashed}
    length = _floats(pc.utf8_length(column))
    return {
        "text": hashed,
        "characters": length,
        "repetitive": np.where(known, repetitive(column), np.nan).astype("f4"),
    }


def _floats(column: pa.Array) -> Values:
    return column.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False).astype(np.float32, copy=False)


def _numbers(column: pa.Array, name: str, where: str) -> np.ndarray[Any, Any]:
    try:
        if name == "step":
            return column.cast(pa.float64()).to_numpy(zero_copy_only=False)
        return _floats(column.cast(pa.uint8()) if pa.types.is_boolean(column.type) else column)
    except pa.ArrowException as error:
        raise _kind_error(column, name, where, "numbers") from error


def _flags(column: pa.Array, name: str, where: str) -> Values:
    """1, 0 or NaN. Words that are neither a yes nor a no are missing, not a no."""
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind):
        words = pc.utf8_lower(as_text(column))
        yes = pc.is_in(words, value_set=pa.array(YES, words.type)).to_numpy(zero_copy_only=False)
        no = pc.is_in(words, value_set=pa.array(NO, words.type)).to_numpy(zero_copy_only=False)
        return np.where(yes, 1.0, np.where(no, 0.0, np.nan)).astype(np.float32)
    number = _numbers(column, name, where)
    return np.where(np.isfinite(number), (number != 0).astype(np.float32), np.float32(np.nan))


def _kind_error(column: pa.Array, name: str, where: str, wanted: str) -> DataError:
    return DataError(f"{where}: the field for {name!r} holds {column.type}, and {wanted} are needed")


# ---------------------------------------------------------------- per-token arrays


class _Lists:
    """One list column as flat numbers with the row of each."""

    def __init__(self, column: pa.Array, name: str, where: str) -> None:
        column = column.fill_null([]) if column.null_count else column
        flat = column.flatten()
        try:
            flat = flat.cast(pa.uint8()) if pa.types.is_boolean(flat.type) else flat
            self.value_T = _floats(flat)
        except pa.ArrowException as error:
            raise _kind_error(column, name, where, "numbers per token") from error
        self.length_N: Int = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)

    def over_rows(self, value_N: Bool) -> Bool:
        """A flag per row for each of its tokens (T,)."""
        return np.repeat(value_N, self.length_N)

    def sums(self, value_T: np.ndarray[Any, Any]) -> Float:
        """Sum per row (N,)."""
        filled = self.length_N > 0
        start = (np.cumsum(self.length_N) - self.length_N)[filled]
        total = np.zeros(len(self.length_N))
        if len(start):
            total[filled] = np.add.reduceat(value_T, start, dtype=float)
        return total

    def means(self, value_T: Values, keep_T: Bool) -> Values:
        """Mean per row (N,) over kept tokens; NaN where there are none."""
        count = self.sums(keep_T)
        total = self.sums(np.where(keep_T, value_T, np.float32(0)))
        with np.errstate(invalid="ignore", divide="ignore"):
            return (total / np.where(count, count, np.nan)).astype(np.float32)


def _tokens(lists: dict[str, pa.Array], where: str) -> Columns:
    """Means over the trained tokens of each row; the gap of two log-probs where they line up."""
    parts = {name: _Lists(column, name, where) for name, column in lists.items()}
    mask = parts.pop("loss_mask", None)
    found: Columns = {}
    for name, part in parts.items():
        value_T = np.abs(part.value_T) if name == "advantage" else part.value_T
        mean_N = part.means(value_T, _kept(part, mask) & np.isfinite(part.value_T))
        if name == "logprobs":
            found["surprise"] = -mean_N
        elif name != "trainer_logprobs":
            found[name] = mean_N
    if mask is not None:
        found["length"] = mask.sums(mask.value_T).astype("f4")
    elif "logprobs" in parts:
        lengths = parts["logprobs"].length_N.astype(np.float32)
        found["length"] = np.where(lengths > 0, lengths, np.float32(np.nan))
    if "logprobs" in parts and "trainer_logprobs" in parts:
        found |= _gap(parts["logprobs"], parts["trainer_logprobs"], mask)
    return found


def _kept(part: _Lists, mask: _Lists | None) -> Bool:
    """Tokens inside the loss mask; all of them where the mask does not line up with the row."""
    if mask is None:
        return np.ones(len(part.value_T), dtype=bool)
    if np.array_equal(mask.length_N, part.length_N):
        return mask.value_T != 0
    fits_N = mask.length_N == part.length_N
    keep_T = np.ones(len(part.value_T), dtype=bool)
    keep_T[part.over_rows(fits_N)] = mask.value_T[mask.over_rows(fits_N)] != 0
    return keep_T


def _gap(engine: _Lists, trainer: _Lists, mask: _Lists | None) -> Columns:
    fits_N = engine.length_N == trainer.length_N
    fits_T = engine.over_rows(fits_N)
    difference_T = np.full(len(engine.value_T), np.nan, dtype=np.float32)
    difference_T[fits_T] = trainer.value_T[trainer.over_rows(fits_N)] - engine.value_T[fits_T]
    keep_T = _kept(engine, mask) & np.isfinite(difference_T)
    return {
        "gap": engine.means(np.abs(difference_T), keep_T),
        "gap_signed": engine.means(difference_T, keep_T),
    }


# ---------------------------------------------------------------- impossible numbers

_CHECKED = ("reward", "correct", "advantage", "weight", "entropy", "logprobs", "trainer_logprobs")


def _invalid(columns: dict[str, pa.Array], lists: dict[str, pa.Array], rows: int) -> Values:
    """1 where a reward, advantage or entropy is NaN or infinite, or a log-prob is positive or infinite (N,).

    A null is missing, not invalid. A NaN log-prob is not invalid: it marks a token that was not scored.
    """
    bad_N = np.zeros(rows, dtype=bool)
    for name in _CHECKED:
        column = columns.get(name)
        if column is None:
            continue
        part = None
        if name in lists:
            column = column.fill_null([]) if column.null_count else column
            part = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
            column = column.flatten()
        if not pa.types.is_floating(column.type):
            continue
        bad = _impossible(column, "logprobs" in name)
        if bad.any():
            bad_N[bad if part is None else np.repeat(np.arange(rows), part)[bad]] = True
    return bad_N.astype(np.float32)


def _impossible(column: pa.Array, logprob: bool) -> Bool:
    """Which values cannot be; nulls are missing."""
    value = column.to_numpy(zero_copy_only=False)
    if logprob:
        return (value > TOLERANCE) | np.isneginf(value)
    bad = ~np.isfinite(value)
    return bad & column.is_valid().to_numpy(zero_copy_only=False) if bad.any() else bad
