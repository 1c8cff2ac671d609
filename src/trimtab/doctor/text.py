"""Fingerprints of many texts at once, from the bytes of an Arrow column.

A text's hash is the polynomial sum of its bytes modulo 2^64. With prefix sums P and the powers of an odd base r, the
hash of any span [a, b) is (P[b] - P[a]) r^-a, which is what makes all spans of all rows comparable without a loop.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa

from trimtab.doctor.log import Bool, Int, Key

BASE = 0x9E3779B97F4A7C15 | 1
INVERSE = pow(BASE, -1, 2**64)
BLOCK = 1 << 22  # bytes hashed at a time: prefix sums take eight times that
TAIL = 256  # bytes of a text's end in which a loop is looked for
WINDOW = 16  # bytes of the last span
COPIES = 4  # so often the last span must stand in the tail


@cache
def _powers(base: int, size: int) -> Key:
    factors = np.full(size, base, dtype=np.uint64)
    factors[0] = 1
    return np.multiply.accumulate(factors)


def _mix(byte_T: np.ndarray[Any, np.dtype[np.uint8]]) -> Key:
    """Bytes spread over 64 bits, so that short texts do not collide."""
    value = (byte_T.astype(np.uint64) + np.uint64(1)) * np.uint64(0xBF58476D1CE4E5B9)
    return value ^ (value >> np.uint64(29))


def bytes_of(column: pa.Array) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], Int]:
    """The bytes of a string column and the offsets of its rows (N + 1,); null rows are empty."""
    wide = column.cast(pa.large_string())
    _, offsets, data = wide.buffers()
    row_N = np.frombuffer(offsets, dtype=np.int64)[wide.offset : wide.offset + len(wide) + 1]
    return np.frombuffer(data, dtype=np.uint8) if data is not None else np.zeros(0, np.uint8), row_N


def row_hash(column: pa.Array) -> Key:
    """A hash of each row's text (N,); equal texts have equal hashes."""
    data, offset_N = bytes_of(column)
    result = np.zeros(len(column), dtype=np.uint64)
    for first, last in _blocks(offset_N):
        start = offset_N[first]
        part = data[start : offset_N[last]]
        prefix = np.zeros(len(part) + 1, dtype=np.uint64)
        size = max(BLOCK, 1 << len(part).bit_length())
        np.cumsum(_mix(part) * _powers(BASE, size)[: len(part)], out=prefix[1:])
        edge = offset_N[first : last + 1] - start
        back = _powers(INVERSE, size)[np.minimum(edge[:-1], size - 1)]
        result[first:last] = (prefix[edge[1:]] - prefix[edge[:-1]]) * back + (edge[1:] - edge[:-1]).astype(np.uint64)
    return result


def _blocks(offset_N: Int) -> list[tuple[int, int]]:
    """Row ranges of at most :data:`BLOCK` bytes; a longer row stands alone."""
    rows, ranges, first = len(offset_N) - 1, [], 0
    while first < rows:
        last = int(np.searchsorted(offset_N, offset_N[first] + BLOCK, side="right")) - 1
        last = min(rows, max(last, first + 1))
        ranges.append((first, last))
        first = last
    return ranges


def repetitive(column: pa.Array) -> Bool:
    """Rows (N,) whose text ends in a loop: its last 16 bytes stand at least four times in its last 256 bytes."""
    data, offset_N = bytes_of(column)
    rows = len(offset_N) - 1
    result = np.zeros(rows, dtype=bool)
    step = BLOCK // TAIL
    for first in range(0, rows, step):
        result[first : first + step] = _loops(data, offset_N[first : first + step + 1])
    return result


def _loops(data: np.ndarray[Any, np.dtype[np.uint8]], offset_N: Int) -> Bool:
    end_N, size_N = offset_N[1:], offset_N[1:] - offset_N[:-1]
    long = np.flatnonzero(size_N >= WINDOW * COPIES // 2)
    found = np.zeros(len(size_N), dtype=bool)
    if not len(long):
        return found
    place = end_N[long, None] - TAIL + np.arange(TAIL)
    inside = place >= offset_N[:-1][long, None]
    mixed = np.where(inside, _mix(data[np.maximum(place, 0)]), np.uint64(0))
    prefix = np.zeros((len(long), TAIL + 1), dtype=np.uint64)
    np.cumsum(mixed * _powers(BASE, TAIL), axis=1, out=prefix[:, 1:])
    span = (prefix[:, WINDOW:] - prefix[:, :-WINDOW]) * _powers(INVERSE, TAIL)[: TAIL - WINDOW + 1]
    same = (span == span[:, -1:]) & inside[:, : TAIL - WINDOW + 1]
    found[long] = same.sum(axis=1) >= COPIES
    return found
