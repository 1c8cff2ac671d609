"""A part's own knowledge about prompts: columns by prompt, found by the prompt's key.

For what :class:`trimtab.core.history.History` does not keep: beliefs, runs, last successes. Rows follow the prompt's
stable key and not its place in a pool, so that a changed pool keeps what is known about the prompts that stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trimtab.core.errors import DataError
from trimtab.core.history import Array, KeyArray, KeyIndex, grown
from trimtab.core.records import IntArray


class PromptTable:
    """Struct of arrays over prompts.

    Args:
        columns: name to the value of a new prompt, a scalar or an array; it gives the column's dtype and shape.
    """

    def __init__(self, **columns: Any) -> None:
        self._new = {name: np.asarray(value) for name, value in columns.items()}
        self._clear()

    def _clear(self) -> None:
        self._index = KeyIndex()
        self._columns = {name: np.broadcast_to(value, (0, *value.shape)).copy() for name, value in self._new.items()}

    def __len__(self) -> int:
        return self._index.size

    def __getitem__(self, name: str) -> Array:
        """A column of all rows (rows, ...), to read and to write in place."""
        return self._columns[name][: len(self)]

    def find(self, keys: KeyArray) -> IntArray:
        """Row of each prompt (P,), -1 where it has none."""
        return self._index.find(keys)

    def add(self, keys: KeyArray) -> IntArray:
        """Row of each prompt (P,), new rows for unknown ones."""
        rows = self._index.add(keys)
        for name, value in self._new.items():
            self._columns[name] = grown(self._columns[name], len(self), value)
        return rows

    def values(self, name: str, keys: KeyArray) -> Array:
        """A column at these prompts (P, ...); the value of a new prompt where it has no row."""
        rows = self.find(keys)
        found = np.broadcast_to(self._new[name], (len(keys), *self._new[name].shape)).copy()
        found[rows >= 0] = self._columns[name][rows[rows >= 0]]
        return found

    def state_dict(self) -> dict[str, Array]:
        """``keys`` (uint64) and every column."""
        keys = self._index.keys[: len(self)].copy()
        return {"keys": keys} | {name: self[name].copy() for name in self._new}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore what :meth:`state_dict` gave; DataError when it is that of another layout."""
        if set(state) != {"keys", *self._new}:
            raise DataError(f"prompt table has {sorted(state)}, this version has {sorted({'keys', *self._new})}")
        self._clear()
        self.add(np.asarray(state["keys"], dtype=np.uint64))
        for name in self._new:
            if state[name].shape != self[name].shape:
                raise DataError(f"prompt table: {name} has shape {state[name].shape}, needed is {self[name].shape}")
            self[name][:] = state[name]
