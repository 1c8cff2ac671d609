"""Integer allocation: whole rollouts for P prompts within a budget, by five rules.

Every rule takes ``total`` and per-prompt ``floor`` and ``cap`` (one whole number or (P,)) and returns an
:class:`Allocation` whose ``counts`` lie between them. Without ``cost`` the budget is in rollouts and spent to the last
one. With ``cost`` (P,), the tokens one rollout of each prompt takes, the budget is in tokens, is never exceeded, and
what is left buys no further rollout of any prompt below its cap. Whole costs are summed exactly, others up to rounding.

What cannot be done as asked has a defined result, and ``Allocation.reason`` says which:

- the floors cost more than ``total``: they give way evenly, as :func:`water_fill` does with the floors as caps;
- the caps leave some of ``total`` over: every prompt is at its cap and the rest is ``unspent``;
- no prompts: nothing is spent.

Equal claims are settled by ``rng`` (:func:`trimtab.core.rng.generator`), never by position. All rules are array code,
made for a million prompts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from trimtab.core.errors import invalid
from trimtab.core.records import IntArray

Array = np.ndarray[Any, Any]
Gain = Callable[[IntArray, IntArray], Array]

_CLOSE = 1e-9  # shares that differ by less are equal
_NEGLIGIBLE = 1e-200  # weights below this part of the largest are 0: their multiplier would overflow
_MAX_LOG = 700.0  # exp of this is still a float
_SAMPLE, _SLACK = 16384, 0.05  # prompts on which the greedy price is guessed, and how far off it may be


class Reason(StrEnum):
    """Why an allocation does not spend the total under the floors and caps asked for."""

    NONE = ""
    FLOORS = "the floors cost more than the total"
    CAPS = "every prompt is at its cap"
    REST = "the rest buys no further rollout"
    RANGE = "no multiplier asks for the total"
    EMPTY = "no prompts"


@dataclass(frozen=True, slots=True)
class Allocation:
    """Rollouts per prompt (P,) and what of the total was spent, in rollouts or in tokens."""

    counts: IntArray
    spent: float
    unspent: float
    reason: Reason = Reason.NONE


# ---------------------------------------------------------------- the rules


def even(total: int, tie_P: Array) -> IntArray:
    """The whole total (P,) in counts that differ by at most one; the lowest tie numbers get the larger ones.

    :func:`water_fill` from level 0 without floors, caps and costs, for the hot path, with ties settled by the caller's
    own numbers, such as :func:`trimtab.core.rng.scrambled` gives. Without prompts nothing is spent.
    """
    size = len(tie_P)
    each, rest = divmod(total, max(size, 1))
    counts_P = np.full(size, each, dtype=np.int64)
    if size and rest:
        counts_P[np.argsort(tie_P, kind="stable")[:rest]] += 1
    return counts_P


def largest_remainder(
    weight_P: Array,
    total: float,
    *,
    floor: int | Array = 0,
    cap: int | Array | None = None,
    cost: Array | None = None,
    rng: np.random.Generator,
) -> Allocation:
    """Counts proportional to the weights (Hamilton's method), clipped to floors and caps.

    The exact shares ``clip(x * weight, floor, cap)``, with x such that they cost ``total``, are rounded down, and what
    is left goes to the largest remainders; in a budget of rollouts every count is its exact share rounded down or up.
    Prompts of weight 0 stay at their floor unless all others are at their caps, then they share evenly. A count never
    falls when its weight rises; when the total rises by one it may fall by one (the Alabama paradox), which cannot
    happen in :func:`water_fill` and :func:`greedy`.

    Args:
        weight_P: finite, >= 0, any scale.
    """
    b = _budget(len(weight_P), total, floor, cap, cost, rng)
    weight_P = _claims("weight", weight_P, low=0)
    if b.overdrawn:
        return _yield_floors(b)
    if not b.size:
        return b.result(b.floor_P)
    share_P = _proportional(weight_P, b)
    nearest_P = np.rint(share_P)
    snapped_P = np.where(abs(share_P - nearest_P) < _CLOSE * np.maximum(1, nearest_P), nearest_P, share_P)
    if b.spent(np.floor(snapped_P)) <= b.total:
        share_P = snapped_P
    counts_P = np.floor(share_P).astype(np.int64)
    remainder_P = np.round(share_P - counts_P, 9)
    return b.result(_fill(counts_P, np.lexsort((b.tie_P, -remainder_P)), b))


def square_root(
    std_P: Array,
    total: float,
    *,
    floor: int | Array = 0,
    cap: int | Array | None = None,
    cost: Array | None = None,
    rng: np.random.Generator,
) -> Allocation:
    """Neyman's rule: counts proportional to ``std / sqrt(cost)``, rounded by :func:`largest_remainder`.

    For fixed ``sum cost * n`` this makes ``sum std^2 / n`` smallest (Neyman 1934; Cochran, Sampling Techniques, 5.5).
    For outcomes that are right with probability p the deviation is :func:`bernoulli_std`.
    """
    std_P = np.asarray(std_P, dtype=np.float64)
    weight_P = std_P if cost is None else std_P / np.sqrt(_costs(cost, len(std_P)))
    return largest_remainder(weight_P, total, floor=floor, cap=cap, cost=cost, rng=rng)


def bernoulli_std(success_P: Array) -> Array:
    """Standard deviation sqrt(p (1 - p)) of outcomes with success probabilities (P,)."""
    p_P = np.asarray(success_P, dtype=np.float64)
    return np.sqrt(p_P * (1 - p_P))


def water_fill(
    level_P: Array,
    total: float,
    *,
    floor: int | Array = 0,
    cap: int | Array | None = None,
    cost: Array | None = None,
    rng: np.random.Generator,
) -> Allocation:
    """Each rollout goes to the prompt whose level, raised by one for each it got, is lowest.

    With levels 0 the counts are even; with levels the rollouts so far, the sums are; a prompt's need is its cap.

    Args:
        level_P: finite, in rollouts.
    """
    b = _budget(len(level_P), total, floor, cap, cost, rng)
    level_P = _claims("level", level_P, low=-np.inf)
    return _yield_floors(b) if b.overdrawn else b.result(_level(level_P, b))


def greedy(
    gain: Array | Gain,
    total: float,
    *,
    size: int | None = None,
    floor: int | Array = 0,
    cap: int | Array | None = None,
    cost: Array | None = None,
    rng: np.random.Generator,
) -> Allocation:
    """Each rollout goes where its gain (per token, with ``cost``) is largest; optimal for gains that never rise.

    A prompt whose next rollout does not fit any more is passed over. The whole total is spent, on negative gains too;
    a cap is the way to stop earlier. Between equal gains the prompt with fewer rollouts is first.

    Args:
        gain: (P, max_n), column k the gain of a prompt's rollout k + 1 (its width is a further cap); or a function of
            prompt indices (M,) and numbers k (M,) that gives these gains (M,). Finite, non-increasing in k; of a
            function this is checked only where it was asked for neighbouring numbers.
        size: P, when ``gain`` is a function.
    """
    if callable(gain):
        assert size is not None, "greedy: a gain function needs size"
        b, gain_of = _budget(size, total, floor, cap, cost, rng), gain
    else:
        matrix = np.asarray(gain)
        _check_gains(matrix[:, 1:], matrix[:, :-1])
        width = matrix.shape[1]
        b = _budget(len(matrix), total, floor, width if cap is None else np.minimum(cap, width), cost, rng)

        def gain_of(index_M: IntArray, number_M: IntArray) -> Array:
            return matrix[index_M, number_M]

    if b.overdrawn:
        return _yield_floors(b)

    def key_of(index_M: IntArray, number_M: IntArray) -> Array:
        key_M = np.asarray(gain_of(index_M, number_M), dtype=np.float64) / b.cost_P[index_M]
        if not np.isfinite(key_M).all():
            raise invalid("gain", key_M[~np.isfinite(key_M)][0], "finite numbers")
        return key_M

    return b.result(_finish(_best(key_of, b), key_of, b))


def bisect_multiplier(
    count_of: Callable[[float], Array],
    total: float,
    *,
    floor: int | Array = 0,
    cap: int | Array | None = None,
    cost: Array | None = None,
    rng: np.random.Generator,
) -> Allocation:
    """Counts of the smallest multiplier that ``total`` can pay for, clipped to floors and caps.

    Rollouts that only a just smaller multiplier would give (ties at the multiplier) take what is left, in random order.

    Args:
        count_of: whole counts (P,) at a multiplier > 0, not rising with it.
    """
    first_P = np.asarray(count_of(1.0))
    b = _budget(len(first_P), total, floor, cap, cost, rng)
    if b.overdrawn:
        return _yield_floors(b)

    def counts_at(log: float) -> IntArray:
        return np.clip(np.asarray(count_of(float(np.exp(log)))), b.floor_P, b.cap_P).astype(np.int64)

    fits_P, exceeds_P = _bracket(counts_at, b)
    order = np.argsort(b.tie_P)
    if exceeds_P is None:
        wanting = (fits_P < b.cap_P) & (b.cost_P <= b.left(fits_P))
        return b.result(fits_P, Reason.RANGE if wanting.any() else Reason.NONE)
    counts_P = _fill(fits_P, order, replace(b, cap_P=np.maximum(exceeds_P, fits_P)))
    return b.result(_fill(counts_P, order, b))


# ---------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class _Budget:
    """A checked request."""

    total: float
    floor_P: IntArray
    cap_P: IntArray  # no more than the total can buy
    asked_cap_P: Array  # as asked for, infinite where none was
    cost_P: Array  # float64
    tie_P: IntArray  # a random permutation: the lower number wins between equal claims

    @property
    def size(self) -> int:
        return len(self.floor_P)

    @property
    def overdrawn(self) -> bool:
        return self.spent(self.floor_P) > self.total

    def spent(self, counts_P: Array) -> float:
        return float((self.cost_P * counts_P).sum())

    def left(self, counts_P: Array) -> float:
        return self.total - self.spent(counts_P)

    def capped(self, counts_P: IntArray) -> bool:
        return bool((counts_P >= self.asked_cap_P).all())

    def result(self, counts_P: IntArray, reason: Reason = Reason.NONE) -> Allocation:
        unspent = self.left(counts_P)
        if not self.size:
            reason = Reason.EMPTY
        elif not reason and unspent > 0:
            reason = Reason.CAPS if self.capped(counts_P) else Reason.REST
        return Allocation(counts_P, self.spent(counts_P), unspent, reason)


def _budget(
    size: int, total: float, floor: int | Array, cap: int | Array | None, cost: Array | None, rng: np.random.Generator
) -> _Budget:
    """The request with every default filled in; ConfigError names what is not possible."""
    if not (0 <= total < np.inf) or (cost is None and total != int(total)):
        raise invalid("total", total, "a finite number >= 0, whole when it counts rollouts")
    cost_P = np.ones(size) if cost is None else _costs(cost, size)
    floor_P = _whole("floor", floor, size)
    buys_P = np.floor(total / cost_P).astype(np.int64)
    asked_P: Array = np.full(size, np.inf) if cap is None else _whole("cap", cap, size)
    if (floor_P < 0).any() or (asked_P < floor_P).any():
        raise invalid("floor", floor, f"whole numbers between 0 and the caps ({cap})")
    cap_P = np.maximum(np.minimum(asked_P, buys_P), floor_P).astype(np.int64)
    return _Budget(float(total), floor_P, cap_P, asked_P, cost_P, rng.permutation(size))


def _costs(cost: Array, size: int) -> Array:
    cost_P = np.asarray(cost, dtype=np.float64)
    if cost_P.shape != (size,) or not (np.isfinite(cost_P) & (cost_P > 0)).all():
        raise invalid("cost", cost, f"{size} finite numbers > 0")
    return cost_P


def _whole(name: str, value: int | Array, size: int) -> IntArray:
    array = np.asarray(value)
    if array.shape not in ((), (size,)) or not np.issubdtype(array.dtype, np.integer):
        raise invalid(name, value, f"one whole number, or {size} of them")
    return np.broadcast_to(array, (size,)).astype(np.int64)


def _claims(name: str, values: Array, low: float) -> Array:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not (np.isfinite(array) & (array >= low)).all():
        raise invalid(name, values, "one finite number a prompt" + (", >= 0" if low == 0 else ""))
    return array


# ---------------------------------------------------------------- exact shares


def _proportional(weight_P: Array, b: _Budget) -> Array:
    """Real shares (P,) that cost ``b.total``: first the positive weights up to their caps, then the others evenly."""
    weight_P = weight_P / (weight_P.max() or 1.0)
    positive_P = weight_P > _NEGLIGIBLE
    share_P = np.where(positive_P, b.cap_P, b.floor_P).astype(np.float64)
    over = b.left(share_P)
    chosen_P, slope_P = (positive_P, weight_P) if over <= 0 else (~positive_P, np.ones(b.size))
    if chosen_P.any():
        spare = b.total - b.spent(np.where(chosen_P, 0, share_P))
        low_P, high_P, cost_P = (a[chosen_P] for a in (b.floor_P, b.cap_P, b.cost_P))
        share_P[chosen_P] = _scaled(np.zeros(len(low_P)), slope_P[chosen_P], low_P, high_P, cost_P, spare)
    return share_P


def _scaled(base_P: Array, slope_P: Array, low_P: Array, high_P: Array, cost_P: Array, spare: float) -> Array:
    """``clip(base + slope * x, low, high)`` (P,) for the x at which it costs ``spare``; slopes > 0.

    The cost is a rising broken line in x whose corners are where a prompt leaves its floor or reaches its cap.
    Bisection over the sorted corners finds the piece; on it every share is linear.
    """

    def at(x: float) -> tuple[Array, float]:
        share_P = np.clip(base_P + slope_P * x, low_P, high_P)
        return share_P, float((cost_P * share_P).sum())

    corners = np.sort(np.concatenate([(low_P - base_P) / slope_P, (high_P - base_P) / slope_P]))
    first, last = 0, len(corners) - 1
    while last - first > 1:
        middle = (first + last) // 2
        if at(corners[middle])[1] <= spare:
            first = middle
        else:
            last = middle
    (below_P, below), (above_P, above) = at(corners[first]), at(corners[last])
    part = (spare - below) / (above - below) if above > below else 1.0
    return below_P + min(max(part, 0.0), 1.0) * (above_P - below_P)


# ---------------------------------------------------------------- whole rollouts


def _yield_floors(b: _Budget) -> Allocation:
    """Floors that cost too much, lowered to a common level."""
    lower = replace(b, floor_P=np.zeros_like(b.floor_P), cap_P=b.floor_P)
    return b.result(_level(np.zeros(b.size), lower), Reason.FLOORS)


def _level(level_P: Array, b: _Budget) -> IntArray:
    """Counts of :func:`water_fill`: close to the exact solution at once, the last rollouts one by one."""
    if not b.size:
        return b.floor_P
    share_P = _scaled(-level_P, np.ones(b.size), b.floor_P, b.cap_P, b.cost_P, b.total)
    margin = _CLOSE * max(1.0, float(abs(level_P).max()))  # rather one too few, which is put right below
    counts_P = np.maximum(np.floor(share_P - margin).astype(np.int64), b.floor_P)
    raised_P = level_P + counts_P
    order = np.lexsort((b.tie_P, counts_P, raised_P))
    order = order[counts_P[order] < b.cap_P[order]]
    served = order[: np.searchsorted(np.cumsum(b.cost_P[order]), b.left(counts_P), side="right")]
    counts_P[served] += 1
    return _finish(counts_P, lambda index, number: -(level_P[index] + number), b)


def _fill(counts_P: IntArray, order: IntArray, b: _Budget) -> IntArray:
    """Hand out what is left, one rollout a prompt in ``order``, round after round, passing over what does not fit."""
    counts_P = counts_P.copy()
    queue = order
    while True:
        left = b.left(counts_P)
        queue = queue[(counts_P[queue] < b.cap_P[queue]) & (b.cost_P[queue] <= left)]
        if not len(queue):
            queue = order[(counts_P[order] < b.cap_P[order]) & (b.cost_P[order] <= left)]
            if not len(queue):
                return counts_P
        served = int(np.searchsorted(np.cumsum(b.cost_P[queue]), left, side="right"))
        counts_P[queue[:served]] += 1
        queue = queue[served:]


def _finish(counts_P: IntArray, key_of: Gain, b: _Budget) -> IntArray:
    """Hand out what is left, each rollout to the largest key among the prompts that it still fits.

    ``key_of(index, number)`` is the key of a prompt's rollout ``number + 1`` and does not rise with it. Only as many
    prompts as there can be rollouts enter the heap; it is made anew when a prompt outside it may be next.
    """
    counts_P = counts_P.copy()
    while True:
        left = b.left(counts_P)
        open_M = np.flatnonzero((counts_P < b.cap_P) & (b.cost_P <= left))
        if not len(open_M):
            return counts_P
        key_M = key_of(open_M, counts_P[open_M])
        most = int(left // b.cost_P[open_M].min())
        least = float(np.partition(key_M, -most)[-most]) if len(open_M) > most else -np.inf
        open_M, key_M = open_M[key_M >= least], key_M[key_M >= least]
        heap = list(
            zip((-key_M).tolist(), counts_P[open_M].tolist(), b.tie_P[open_M].tolist(), open_M.tolist(), strict=True)
        )
        heapq.heapify(heap)
        while heap and -heap[0][0] >= least:
            _, number, tie, index = heapq.heappop(heap)
            if b.cost_P[index] > left:
                continue
            counts_P[index] += 1
            left -= b.cost_P[index]
            if number + 1 < b.cap_P[index]:
                key = float(key_of(np.array([index]), np.array([number + 1]))[0])
                heapq.heappush(heap, (-key, number + 1, tie, index))


# ---------------------------------------------------------------- greedy


@dataclass(frozen=True, slots=True)
class _Units:
    """Single rollouts on offer (M,): their key, their prompt, and which of the prompt's rollouts each is."""

    key_M: Array
    prompt_M: IntArray
    number_M: IntArray

    def at(self, index: Array | slice) -> _Units:
        return _Units(self.key_M[index], self.prompt_M[index], self.number_M[index])

    def __add__(self, other: _Units) -> _Units:
        pairs = zip(self.arrays(), other.arrays(), strict=True)
        return _Units(*(np.concatenate(pair) for pair in pairs))

    def arrays(self) -> tuple[Array, Array, Array]:
        return self.key_M, self.prompt_M, self.number_M


def _best(key_of: Gain, b: _Budget) -> IntArray:
    """Counts after buying units in the order of their keys until one does not fit.

    For many prompts two prices found on a sample, one likely above the final price and one likely below, settle most
    units without listing them. Guesses that miss leave more units to list, never another result.
    """
    low_P, high_P = b.floor_P, b.cap_P
    for price in _guesses(key_of, b) if b.size > 4 * _SAMPLE else ():
        reached_P = _reach(price, False, low_P, high_P, key_of)
        if b.left(reached_P) >= 0:
            low_P = reached_P
            continue
        above_P = _reach(price, True, low_P, reached_P, key_of)
        if b.left(above_P) >= 0:  # units of exactly this price are the last to go, fewest rollouts first
            return _level(np.zeros(b.size), replace(b, floor_P=above_P, cap_P=reached_P))
        high_P = above_P
    bought = _take_best(key_of, replace(b, floor_P=low_P, cap_P=high_P))
    return low_P + np.bincount(bought.prompt_M, minlength=b.size)


def _guesses(key_of: Gain, b: _Budget) -> tuple[float, ...]:
    """Prices at which a sample of the prompts spends a little less, and a little more, than its part of the budget."""
    chosen = np.flatnonzero(b.tie_P < _SAMPLE)
    spare = b.left(b.floor_P) * len(chosen) / b.size
    floor_P, cap_P, cost_P, tie_P = (a[chosen] for a in (b.floor_P, b.cap_P, b.cost_P, b.tie_P))
    total = float((cost_P * floor_P).sum() + (1 + _SLACK) * spare)
    sample = _Budget(total, floor_P, cap_P, cap_P, cost_P, tie_P)
    bought = _take_best(lambda index, number: key_of(chosen[index], number), sample)
    order = np.argsort(-bought.key_M)
    spent = np.cumsum(cost_P[bought.prompt_M[order]])
    positions = np.searchsorted(spent, [(1 - _SLACK) * spare, (1 + _SLACK) * spare]).clip(max=len(order) - 1)
    return tuple(bought.key_M[order[positions]].tolist()) if len(order) else ()


def _reach(price: float, strict: bool, low_P: IntArray, high_P: IntArray, key_of: Gain) -> IntArray:
    """Counts (P,) between the bounds with all units at or above ``price`` (above it, when ``strict``) bought.

    Doubling steps from the lower bound, then bisection, for all prompts at once.
    """

    def bought(index: IntArray, number: IntArray) -> Array:
        key = key_of(index, number)
        return key > price if strict else key >= price

    reached_P, beyond_P = low_P.copy(), high_P.copy()
    active, step = np.flatnonzero(low_P < high_P), 1
    while len(active):
        probe = np.minimum(reached_P[active] + step, beyond_P[active]) - 1
        yes = bought(active, probe)
        reached_P[active[yes]] = probe[yes] + 1
        beyond_P[active[~yes]] = probe[~yes]
        active = active[yes]
        active, step = active[reached_P[active] < beyond_P[active]], 2 * step
    active = np.flatnonzero(reached_P < beyond_P)
    while len(active):
        probe = (reached_P[active] + beyond_P[active]) // 2
        yes = bought(active, probe)
        reached_P[active[yes]] = probe[yes] + 1
        beyond_P[active[~yes]] = probe[~yes]
        active = active[reached_P[active] < beyond_P[active]]
    return reached_P


def _take_best(key_of: Gain, b: _Budget) -> _Units:
    """The units to buy, in the order of their keys until one does not fit.

    Units are offered a few per prompt; only prompts whose units were all bought offer more. Further offers only raise
    the price, so that units that were not bought can be forgotten, but for the first of them, which bars all behind it.
    """
    none = np.zeros(0, dtype=np.int64)
    bought = bar = _Units(np.zeros(0), none, none)
    offered_P = b.floor_P.copy()
    left, counts_P = b.left(b.floor_P), b.floor_P
    lowest_P = np.full(b.size, np.inf)  # the lowest key offered so far
    width = max(1, int(left / max(1.0, b.cost_P.sum())) // 2)
    while True:
        growing = np.flatnonzero((counts_P == offered_P) & (offered_P < b.cap_P))
        if not len(growing):
            return bought
        bought, bar = _buy(bought + bar + _offer(growing, offered_P, width, lowest_P, key_of, b), left, b)
        counts_P = b.floor_P + np.bincount(bought.prompt_M, minlength=b.size)
        width *= 2


def _offer(growing: IntArray, offered_P: IntArray, width: int, lowest_P: Array, key_of: Gain, b: _Budget) -> _Units:
    """The next ``width`` units of these prompts; enters them into ``offered_P`` and ``lowest_P``."""
    size_G = np.minimum(width, b.cap_P[growing] - offered_P[growing])
    prompt_M = np.repeat(growing, size_G)
    number_M = np.arange(len(prompt_M)) - np.repeat(np.cumsum(size_G) - size_G - offered_P[growing], size_G)
    key_M = key_of(prompt_M, number_M)
    before_M = np.r_[np.inf, key_M[:-1]]
    first_G = np.cumsum(size_G) - size_G
    before_M[first_G] = lowest_P[growing]
    _check_gains(key_M, before_M)
    offered_P[growing] += size_G
    lowest_P[growing] = key_M[first_G + size_G - 1]
    return _Units(key_M, prompt_M, number_M)


def _check_gains(later: Array, earlier: Array) -> None:
    rises = later > earlier + _CLOSE * abs(later).max(initial=0.0)
    if rises.any():
        raise invalid("gain", later[rises][0], "gains that do not rise with the number of rollouts")


def _buy(units: _Units, left: float, b: _Budget) -> tuple[_Units, _Units]:
    """The units with the largest keys that ``left`` pays for, up to the first that does not fit, and that one."""
    cost_M = b.cost_P[units.prompt_M]
    if cost_M.sum() <= left:
        return units, units.at(slice(0))
    price = _price(units.key_M, cost_M, left)
    above, ties = np.flatnonzero(units.key_M > price), np.flatnonzero(units.key_M == price)
    ties = ties[np.lexsort((b.tie_P[units.prompt_M[ties]], units.number_M[ties]))]
    fit = int(np.searchsorted(np.cumsum(cost_M[ties]), left - cost_M[above].sum(), side="right"))
    return units.at(np.concatenate([above, ties[:fit]])), units.at(ties[fit : fit + 1])


def _price(key_M: Array, cost_M: Array, left: float) -> float:
    """The key of the first unit that ``left`` does not pay for, in descending order; all units cost more than it."""
    while True:
        middle = float(np.partition(key_M, len(key_M) // 2)[len(key_M) // 2])
        above = key_M > middle
        upper = cost_M[above].sum()
        with_ties = upper + cost_M[key_M == middle].sum()
        if upper <= left < with_ties:
            return middle
        rest = above if upper > left else key_M < middle
        left -= 0.0 if upper > left else with_ties
        key_M, cost_M = key_M[rest], cost_M[rest]
        if not len(key_M):  # by rounding of the sums all of them fit after all
            return -np.inf


# ---------------------------------------------------------------- multiplier


def _bracket(counts_at: Callable[[float], IntArray], b: _Budget) -> tuple[IntArray, IntArray | None]:
    """Counts that fit and counts that do not, of neighbouring multipliers; None where no multiplier exceeds."""
    logs: dict[bool, float] = {}
    counts: dict[bool, IntArray] = {}  # by whether they fit
    log, step = 0.0, 1.0
    while True:
        counts_P = counts_at(log)
        fits = b.spent(counts_P) <= b.total
        logs[fits], counts[fits] = log, counts_P
        if fits and b.spent(counts_P) == b.total:
            return counts_P, None
        if len(logs) == 2:
            if logs[True] - logs[False] <= 1e-13 * max(1.0, abs(log)):
                break
            log = (logs[True] + logs[False]) / 2
        elif abs(log) == _MAX_LOG:
            break
        else:
            log, step = max(-_MAX_LOG, min(_MAX_LOG, log - step if fits else log + step)), 2 * step
    return counts.get(True, b.floor_P), counts.get(False)
