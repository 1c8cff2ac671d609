"""What the run knows about each prompt: a struct of arrays keyed by the stable prompt id.

One row a prompt that was ever rolled out. A row is found through an open-addressed hash table over the ids (uint64), so
that looking up or updating the prompts of a step costs the same for a thousand prompts as for a million known ones.

Means and variances are moments (count, mean, sum of squared deviations) merged group by group with the pairwise rule of
Chan, Golub and LeVeque (1983), which stays exact where a running sum of squares cancels. A missing value (no reward, no
verdict, no entropy) is in no mean and in no count.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trimtab.core.errors import DataError, unknown
from trimtab.core.outcomes import moments
from trimtab.core.records import FloatArray, Group, IntArray, Rollout

KeyArray = np.ndarray[Any, np.dtype[np.uint64]]
Array = np.ndarray[Any, Any]

MAX_RECENT = 8
_CANONICAL = re.compile("[0-9a-f]{16}")  # what trimtab.core.records.prompt_id makes

# name -> (dtype, value of a prompt never seen)
_STORED: Mapping[str, tuple[type[np.generic], float]] = {
    "times": (np.int32, 0),  # steps in which it was rolled out
    "rollouts": (np.int32, 0),
    "scored": (np.int32, 0),  # rollouts whose verifier answered
    "rewarded": (np.int32, 0),  # rollouts with a reward
    "reward_mean": (np.float64, 0),
    "reward_m2": (np.float64, 0),  # sum of squared deviations from the mean
    "correct_sum": (np.float64, 0),
    "length_mean": (np.float64, 0),
    "length_last": (np.float32, 0),  # mean length of the last group, tokens
    "truncated": (np.int32, 0),
    "zero_variance_run": (np.int32, 0),  # constant groups in a row, up to the last one
    "entropy_mean": (np.float64, 0),  # mean over rollouts of a rollout's mean token entropy
    "entropy_count": (np.int32, 0),
    "version": (np.int32, -1),  # last seen, like step and epoch
    "step": (np.int32, -1),
    "epoch": (np.int32, -1),
}


def merge_moments(
    count_a: Array, mean_a: Array, m2_a: Array, count_b: Array, mean_b: Array, m2_b: Array
) -> tuple[Array, Array, Array]:
    """Moments of the union of two samples, elementwise; an empty sample changes nothing, whatever its mean."""
    count = count_a + count_b
    share_b = count_b / np.maximum(count, 1)
    delta = np.where(count_b > 0, mean_b - mean_a, 0.0)
    return count, mean_a + delta * share_b, m2_a + m2_b + delta * delta * count_a * share_b


def prompt_keys(ids: Sequence[str]) -> KeyArray:
    """Prompt ids as numbers (P,): 16 hexadecimal digits are the number, any other id is hashed to one."""
    if all(map(_CANONICAL.fullmatch, ids)):
        return np.frombuffer(bytes.fromhex("".join(ids)), dtype=">u8").astype(np.uint64)
    return np.array([_key(name) for name in ids], dtype=np.uint64)


def _key(name: str) -> int:
    digits = name if _CANONICAL.fullmatch(name) else hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
    return int(digits, 16)


class KeyIndex:
    """Key (uint64) to row number: open addressing with linear probing, all look-ups of a call at once.

    Prompt ids are content hashes, so their low bits serve as the hash. At most half of the table is in use.
    """

    def __init__(self) -> None:
        self.keys = np.zeros(64, dtype=np.uint64)  # by row
        self.size = 0
        self._table = np.full(128, -1, dtype=np.int32)  # row by slot, -1 = free

    def find(self, keys: KeyArray) -> IntArray:
        """Row of each key (P,), -1 where it is unknown."""
        mask = np.uint64(len(self._table) - 1)
        found = np.full(len(keys), -1, dtype=np.int64)
        open_ = np.arange(len(keys))
        slot = keys & mask
        while len(open_):
            row = self._table[slot]
            hit = (row >= 0) & (self.keys[row] == keys[open_])
            found[open_[hit]] = row[hit]
            on = (row >= 0) & ~hit
            open_, slot = open_[on], (slot[on] + np.uint64(1)) & mask
        return found

    def add(self, keys: KeyArray) -> IntArray:
        """Row of each key (P,), unknown ones getting new rows in order of appearance."""
        rows = self.find(keys)
        unknown_ = keys[rows < 0]
        if len(unknown_):
            _, first = np.unique(unknown_, return_index=True)
            self._append(unknown_[np.sort(first)])
            rows = self.find(keys)
        return rows

    def _append(self, fresh: KeyArray) -> None:
        start, self.size = self.size, self.size + len(fresh)
        self.keys = grown(self.keys, self.size, 0)
        self.keys[start : self.size] = fresh
        if 2 * self.size > len(self._table):
            self._table = np.full(_power_of_two(2 * self.size), -1, dtype=np.int32)
            start = 0
        self._enter(np.arange(start, self.size, dtype=np.int32))

    def _enter(self, rows: Array) -> None:
        """Put rows into the first free slots; of several that want the same slot one gets it, the rest move on."""
        mask = np.uint64(len(self._table) - 1)
        slot = self.keys[rows] & mask
        while len(rows):
            free = self._table[slot] < 0
            self._table[slot[free]] = rows[free]
            on = self._table[slot] != rows
            rows, slot = rows[on], (slot[on] + np.uint64(1)) & mask


def _power_of_two(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length()


def grown(array: Array, size: int, fill: float | Array) -> Array:
    """``array`` with room for ``size`` rows, doubling, new rows set to ``fill``."""
    if size <= len(array):
        return array
    new = np.full((max(size, 2 * len(array)), *array.shape[1:]), fill, dtype=array.dtype)
    new[: len(array)] = array
    return new


class History:
    """Per-prompt records of a run.

    Columns (see :meth:`column`), one value a prompt: ``times`` (steps in which it was rolled out), ``rollouts``,
    ``scored``, ``rewarded``, ``reward_sum``, ``reward_sum_sq``, ``reward_mean``, ``reward_var`` (divisor n),
    ``reward_m2``, ``correct_sum``, ``correct_mean``, ``recent`` (P, m), ``length_mean``, ``length_last``,
    ``truncated``, ``truncated_share``, ``zero_variance_run``, ``entropy_mean``, ``entropy_count``, and ``version``,
    ``step`` and ``epoch`` when last rolled out. A mean or share of nothing is NaN, never 0.

    Args:
        recent: how many group means of correctness to remember per prompt, at most 8.
    """

    def __init__(self, recent: int = MAX_RECENT) -> None:
        assert 1 <= recent <= MAX_RECENT, recent
        self._clear(recent)

    def _clear(self, recent: int) -> None:
        self._index = KeyIndex()
        self._columns: dict[str, Array] = {
            name: np.full(64, fill, dtype=dtype) for name, (dtype, fill) in _STORED.items()
        }
        self._recent: FloatArray = np.full((64, recent), np.nan, dtype=np.float32)  # oldest first, NaN = none

    def __len__(self) -> int:
        return self._index.size

    def __contains__(self, prompt_id: str) -> bool:
        return bool(self.rows([prompt_id])[0] >= 0)

    @property
    def keys(self) -> KeyArray:
        """The ids of all rows as numbers, in order of first appearance."""
        return self._index.keys[: len(self)]

    # ------------------------------------------------------------ reading

    def rows(self, ids: Sequence[str] | KeyArray) -> IntArray:
        """Row of each prompt (P,), -1 where it was never rolled out.

        ``ids`` are prompt ids, or their numbers from :func:`prompt_keys`, which a caller with a large fixed pool keeps.
        """
        return self._index.find(ids if isinstance(ids, np.ndarray) else prompt_keys(ids))

    def column(self, name: str, rows: IntArray | None = None) -> Array:
        """One column, of all rows or of ``rows`` (as :meth:`rows` gives them; -1 gives the value of a new prompt)."""
        if name not in COLUMNS:
            raise unknown("history column", name, COLUMNS)
        if rows is None:
            return self._value(name, slice(0, len(self)))
        values = self._value(name, np.maximum(rows, 0))
        values[rows < 0] = _unseen(name)
        return values

    def get(self, prompt_id: str) -> dict[str, Any] | None:
        """All columns of one prompt as plain numbers (``recent`` as a list without gaps), or None."""
        row = self.rows([prompt_id])
        if row[0] < 0:
            return None
        found: dict[str, Any] = {name: self._value(name, row)[0].item() for name in COLUMNS if name != "recent"}
        last = self._recent[row[0]]
        return found | {"recent": last[~np.isnan(last)].tolist()}

    def _value(self, name: str, at: slice | IntArray) -> Array:
        """A copy of a stored column, or a derived one; NaN where it is a mean of nothing."""
        if name == "recent":
            return self._recent[at].copy()

        def stored(column: str) -> Array:
            return self._columns[column][at]

        match name:
            case "reward_sum":
                value = stored("reward_mean") * stored("rewarded")
            case "reward_sum_sq":
                value = stored("reward_m2") + stored("reward_mean") ** 2 * stored("rewarded")
            case "reward_var":
                value = stored("reward_m2") / np.maximum(stored("rewarded"), 1)
            case "correct_mean":
                value = stored("correct_sum") / np.maximum(stored("scored"), 1)
            case "truncated_share":
                value = stored("truncated") / np.maximum(stored("rollouts"), 1)
            case _:
                value = stored(name).copy()
        return np.where(stored(_COUNT_OF[name]) > 0, value, np.nan) if name in _COUNT_OF else value

    # ------------------------------------------------------------ writing

    def observe(self, groups: Sequence[Group], step: int, version: int, epoch: int) -> None:
        """Enter the groups of a finished step.

        An empty group changes nothing. A prompt that comes twice counts as rolled out twice, in the order given. A
        group without any verdict says nothing about variance and leaves ``zero_variance_run`` alone.
        """
        groups = [group for group in groups if group.rollouts]
        if not groups:
            return
        seen = _Step(groups)
        rows = self._index.add(prompt_keys([group.prompt.id for group in groups]))
        self._reserve()
        for wave in _waves(rows):
            self._merge(rows[wave], seen, wave)
            for name, value in (("step", step), ("version", version), ("epoch", epoch)):
                self._columns[name][rows[wave]] = value

    def _reserve(self) -> None:
        size = len(self)
        for name, (_, fill) in _STORED.items():
            self._columns[name] = grown(self._columns[name], size, fill)
        self._recent = grown(self._recent, size, np.nan)

    def _merge(self, rows: IntArray, seen: _Step, wave: IntArray) -> None:
        """Update rows, all different, with groups ``wave`` of the step."""
        c = self._columns
        size = seen.size_P[wave]
        _, c["length_mean"][rows], _ = merge_moments(
            c["rollouts"][rows], c["length_mean"][rows], np.zeros(1), size, seen.length_P[wave], np.zeros(1)
        )
        c["length_last"][rows] = seen.length_P[wave]
        c["rewarded"][rows], c["reward_mean"][rows], c["reward_m2"][rows] = merge_moments(
            *(c[name][rows] for name in ("rewarded", "reward_mean", "reward_m2")), *(a[wave] for a in seen.reward)
        )
        c["entropy_count"][rows], c["entropy_mean"][rows], _ = merge_moments(
            c["entropy_count"][rows], c["entropy_mean"][rows], np.zeros(1), *(a[wave] for a in seen.entropy)
        )
        c["times"][rows] += 1
        c["rollouts"][rows] += size
        c["truncated"][rows] += seen.truncated_P[wave]
        self._merge_verdicts(rows, seen, wave)

    def _merge_verdicts(self, rows: IntArray, seen: _Step, wave: IntArray) -> None:
        """Correctness, the last outcomes and the run of constant groups; groups without a verdict change none."""
        judged = seen.correct[0][wave] > 0
        rows, wave, c = rows[judged], wave[judged], self._columns
        count, mean, _ = (array[wave] for array in seen.correct)
        c["scored"][rows] += count
        c["correct_sum"][rows] += mean * count
        self._recent[rows, :-1] = self._recent[rows, 1:]
        self._recent[rows, -1] = mean
        c["zero_variance_run"][rows] = np.where(seen.constant_P[wave], c["zero_variance_run"][rows] + 1, 0)

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Array]:
        """All rows as arrays: ``keys`` (uint64), ``recent`` (rows, m) and every stored column."""
        size = len(self)
        state: dict[str, Array] = {"keys": self.keys.copy(), "recent": self._recent[:size].copy()}
        return state | {name: values[:size].copy() for name, values in self._columns.items()}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore what :meth:`state_dict` gave; DataError when it is the state of another layout."""
        expected = {"keys", "recent", *_STORED}
        if set(state) != expected:
            raise DataError(f"history state has {sorted(state)}, this version has {sorted(expected)}")
        keys = np.array(state["keys"], dtype=np.uint64)
        sizes = {name: len(values) for name, values in state.items() if len(values) != len(keys)}
        if sizes or len(np.unique(keys)) != len(keys):
            raise DataError(f"history state: {len(keys)} keys, all different, need as many rows; found {sizes}")
        self._clear(state["recent"].shape[1])
        self._index.add(keys)
        self._reserve()
        self._recent[: len(keys)] = state["recent"]
        for name in _STORED:
            self._columns[name][: len(keys)] = state[name]


_DERIVED = ("recent", "reward_sum", "reward_sum_sq", "reward_var", "correct_mean", "truncated_share")
COLUMNS: tuple[str, ...] = (*_STORED, *_DERIVED)
_COUNT_OF: Mapping[str, str] = {  # a mean -> how many values it is a mean of
    "reward_mean": "rewarded",
    "reward_var": "rewarded",
    "correct_mean": "scored",
    "length_mean": "rollouts",
    "length_last": "rollouts",
    "truncated_share": "rollouts",
    "entropy_mean": "entropy_count",
}


def _unseen(name: str) -> float:
    if name in _COUNT_OF or name == "recent":
        return np.nan
    return _STORED[name][1] if name in _STORED else 0.0


def _waves(rows: IntArray) -> list[IntArray]:
    """Positions split so that no row comes twice in a wave and repeats keep their order; one wave as a rule."""
    if len(np.unique(rows)) == len(rows):
        return [np.arange(len(rows))]
    order = np.argsort(rows, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(rows[order]) > 0])
    occurrence = np.empty(len(rows), dtype=np.int64)
    occurrence[order] = np.arange(len(rows)) - np.repeat(starts, np.diff(np.r_[starts, len(rows)]))
    return [np.flatnonzero(occurrence == number) for number in range(occurrence.max() + 1)]


class _Step:
    """The groups of a step (none of them empty) in numbers, one a group."""

    def __init__(self, groups: Sequence[Group]) -> None:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        self.size_P = np.array([len(group.rollouts) for group in groups], dtype=np.int64)
        group_N = np.repeat(np.arange(len(groups)), self.size_P)
        length_N = np.array([len(rollout.tokens) for rollout in rollouts], dtype=np.float64)
        cut_N = np.array([rollout.truncated for rollout in rollouts], dtype=np.float64)
        self.length_P = moments(length_N, group_N, len(groups))[1]
        self.truncated_P = np.bincount(group_N, cut_N, len(groups)).astype(np.int64)
        self.constant_P = np.array([group.constant() for group in groups])
        correct_N = np.array([rollout.verdict.correct for rollout in rollouts], dtype=np.float64)  # None -> NaN
        reward_N = np.array([rollout.reward for rollout in rollouts], dtype=np.float64)
        self.correct = moments(correct_N, group_N, len(groups))
        self.reward = moments(reward_N, group_N, len(groups))
        self.entropy = moments(_entropies(rollouts), group_N, len(groups))


def _entropies(rollouts: Sequence[Rollout]) -> Array:
    """Mean token entropy of each rollout (N,) over the tokens that have one; NaN where none has."""
    found = np.full(len(rollouts), np.nan)
    having = [i for i, rollout in enumerate(rollouts) if len(rollout.signals.get("entropy", ()))]
    if having:
        sizes = np.array([len(rollouts[i].signals["entropy"]) for i in having])
        entropy_T = np.concatenate([rollouts[i].signals["entropy"] for i in having])
        found[having] = np.add.reduceat(entropy_T, np.cumsum(sizes) - sizes, dtype=np.float64) / sizes
    for i in having:
        if np.isnan(found[i]):
            values = rollouts[i].signals["entropy"]
            present = values[~np.isnan(values)]
            found[i] = present.mean(dtype=np.float64) if len(present) else np.nan
    return found
