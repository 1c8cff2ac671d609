"""The record of a generation call: one row per decode step, one column per slot.

All running slots advance together, so what a step produced is written as one contiguous row without an index, and a
rollout is a run of rows in the column of its slot. Rows older than the oldest running rollout are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.core.records import IntArray


class Tape:
    """Named per-token values of running slots.

    Attributes:
        time: number of steps written; the newest row is ``time - 1``.
        arrays: (rows, num_slots, ...) by name; row 0 holds the step ``base``.
    """

    def __init__(self, num_slots: int, device: torch.device, rows: int = 64) -> None:
        self.num_slots, self.device, self.rows = num_slots, device, rows
        self.arrays: dict[str, Tensor] = {}
        self.base = self.time = 0

    def append(self, values: Mapping[str, Tensor], oldest: int) -> None:
        """Write the next step's values (B, ...) of the first B slots; rows before step ``oldest`` may be dropped."""
        if self.time - self.base == self.rows:
            self._make_room(oldest)
        row = self.time - self.base
        for name, value in values.items():
            self._array(name, value)[row, : len(value)] = value
        self.time += 1

    def put(self, values: Mapping[str, Tensor], slots: slice | IntArray, count_B: IntArray) -> None:
        """Write values (B, C, ...) beside the newest ``count_B`` tokens of each slot; columns >= count are left out."""
        row_B, column_C = np.nonzero(np.arange(count_B.max()) < count_B[:, None])
        first_B = self.time - self.base - count_B
        row_M = self._tensor(first_B[row_B] + column_C)
        slot_M = self._tensor(np.arange(self.num_slots)[slots][row_B])
        source = self._tensor(row_B), self._tensor(column_C)
        for name, value in values.items():
            self._array(name, value[:, 0])[row_M, slot_M] = value[source]

    def newest(self, names: list[str], slots: slice | IntArray, count_B: IntArray) -> dict[str, Tensor]:
        """The newest ``count_B`` >= 1 values of each slot as (B, C, ...), valid columns first, C the largest count."""
        width, end = int(count_B.max()), self.time - self.base
        if isinstance(slots, slice) and int(count_B.min()) == width:
            return {name: self.arrays[name][end - width : end, slots].transpose(0, 1) for name in names}
        row_BC = np.minimum(end - count_B[:, None] + np.arange(width), end - 1)
        index = self._tensor(row_BC), self._tensor(np.arange(self.num_slots)[slots])[:, None]
        return {name: self.arrays[name][index] for name in names}

    def column(self, name: str, slot: int, first: int, count: int) -> np.ndarray[Any, Any]:
        """A copy of ``count`` values of a slot from step ``first`` on."""
        row = first - self.base
        return self.arrays[name][row : row + count, slot].cpu().numpy().copy()

    def move(self, src: Tensor, dst: Tensor) -> None:
        """Slots ``dst`` continue what slots ``src`` held."""
        for values in self.arrays.values():
            values[:, dst] = values[:, src]

    def _array(self, name: str, like_B: Tensor) -> Tensor:
        if name not in self.arrays:
            self.arrays[name] = like_B.new_zeros(self.rows, self.num_slots, *like_B.shape[1:])
        return self.arrays[name]

    def _make_room(self, oldest: int) -> None:
        """Drop what no running rollout needs; double where that frees less than half."""
        kept = self.time - oldest
        rows = self.rows if 2 * kept <= self.rows else 2 * self.rows
        for name, values in self.arrays.items():
            self.arrays[name] = values.new_zeros(rows, *values.shape[1:])
            self.arrays[name][:kept] = values[self.rows - kept :]
        self.rows, self.base = rows, oldest

    def _tensor(self, values: IntArray) -> Tensor:
        return torch.as_tensor(values, device=self.device)
