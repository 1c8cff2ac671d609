"""Every response token of a run by where it came from and what became of it.

Two sides that must agree at any time (:meth:`Ledger.balance`)::

    sampled + reused + forced + environment + foreign  =  trained + dropped + buffered

``sampled`` holds overrun tokens too, which an engine drew past the cut of a stopper. ``trained`` are tokens that
carried gradient; a token that is kept with advantage or weight exactly 0 carried none and is dropped as
``zero_signal``. ``buffered`` are tokens held back for a later step. Beside the identity stand costs: tokens prefilled,
scored and probed, and seconds by phase. What the engine says it sampled must be what a record holds, so that tokens
lost on the way are noticed.

A worked example: a group of two, 10 tokens each, one dropped by a filter; the kept one has its last 2 tokens masked::

    sampled 20  =  trained 8  +  dropped 10 (truncated, by overlong) + 2 (masked)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trimtab.core.records import DropReason, IntArray, Rollout, Source

INFLOW: tuple[str, ...] = ("sampled", "reused", "forced", "environment", "foreign")
_INFLOW_OF = {source: source.name.lower() for source in Source if source != Source.PADDING}
GRADIENT_SOURCES: frozenset[Source] = frozenset({Source.SAMPLED, Source.REUSED})
COSTS: tuple[str, ...] = ("prefilled", "scored", "probed")
_NUM_SOURCES = len(Source)

Key = tuple[str, str]  # what became of it ("sampled", "trained", "dropped/masked", ...) and the part that decided


class ImbalanceError(AssertionError):
    """Tokens appeared or vanished: a fault of the program, never of its input."""


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One line of :meth:`Ledger.table`: tokens with one fate, and their share of all tokens that came in."""

    cause: str
    part: str
    tokens: int
    share: float


@dataclass(frozen=True, slots=True)
class _Rules:
    """How the step ended for rollouts that were kept."""

    trained: bool
    distilled: bool
    in_loss_S: np.ndarray[Any, np.dtype[np.bool_]]  # by source: its tokens are in the loss


def source_counts(rollout: Rollout, start: int = 0) -> IntArray:
    """Tokens of each :class:`Source` after the first ``start`` (6,); padding is no token and counts as 0."""
    if rollout.source is None:
        counts = np.zeros(_NUM_SOURCES, dtype=np.int64)
        counts[Source.SAMPLED] = max(0, rollout.length - start)
        return counts
    return np.bincount(_real(rollout.source)[start:], minlength=_NUM_SOURCES)


def size(rollout: Rollout) -> int:
    """Response tokens without padding."""
    return int(source_counts(rollout).sum())


def _real(source: IntArray) -> IntArray:
    return source[source != Source.PADDING]


def outflow(rollout: Rollout, rules: _Rules) -> Counter[Key]:
    """What becomes of the tokens of a rollout that is not held back. Sums to ``size(rollout)``."""
    if not rollout.keep:
        return Counter({(f"dropped/{rollout.dropped}", rollout.dropped_by): size(rollout)})
    learnt = "trained" if rules.trained else f"dropped/{DropReason.SKIPPED_STEP}"
    silent = f"dropped/{DropReason.ZERO_SIGNAL}"
    signal = _signal(rollout, rules.distilled)
    if rollout.source is None and rollout.token_mask is None and isinstance(signal, bool):
        return Counter({(learnt if signal else silent, ""): rollout.length})
    source = np.zeros(rollout.length, dtype=np.int64) if rollout.source is None else rollout.source
    inside = np.ones(rollout.length, dtype=bool) if rollout.token_mask is None else rollout.token_mask
    own = inside & rules.in_loss_S[source]
    found: Counter[Key] = Counter()
    found[f"dropped/{DropReason.MASKED}", ""] = int((~inside & (source != Source.PADDING)).sum())
    others = np.bincount(source[inside & ~own], minlength=_NUM_SOURCES)
    for kind, name in _INFLOW_OF.items():
        found[f"dropped/{name}", ""] += int(others[kind])
    found[learnt, ""] += int((own & signal).sum())
    found[silent, ""] += int((own & ~np.asarray(signal)).sum())
    return found


def _signal(rollout: Rollout, distilled: bool) -> bool | np.ndarray[Any, np.dtype[np.bool_]]:
    """Whether a token's loss has a gradient: one answer for the rollout, or one a token (T,)."""
    advantage = 1.0 if distilled else 0.0 if rollout.advantage is None else rollout.advantage
    token_weight = 1.0 if rollout.token_weight is None else rollout.token_weight
    if np.ndim(advantage) == 0 and np.ndim(token_weight) == 0:
        return bool(advantage != 0 and rollout.weight != 0)
    return np.asarray((np.asarray(advantage) != 0) & (np.asarray(token_weight) != 0) & (rollout.weight != 0))


class Ledger:
    """The accounts of a run, and of its last step."""

    def __init__(self) -> None:
        self._total: Counter[Key] = Counter()
        self._step: Counter[Key] = Counter()
        self._seconds: dict[str, float] = {}
        self._step_seconds: dict[str, float] = {}
        self._held: dict[str, int] = {}  # rollout id -> tokens held back
        self._suspect = ""  # a rollout whose engine count differs from its tokens

    # ------------------------------------------------------------ booking

    def book(
        self,
        rollouts: Sequence[Rollout],
        *,
        overruns: Mapping[str, int] | None = None,
        buffered: Collection[str] = (),
        released: Collection[str] = (),
        trained: bool = True,
        distilled: bool = False,
        gradient_sources: Collection[Source] = GRADIENT_SOURCES,
    ) -> None:
        """Enter the final records of one step. Starts the step that :meth:`step_record` shows.

        Tokens come in once. A rollout that was held back leaves the buffer when it comes again under its id, and so do
        the tokens a rollout resumes: its reused prefix when ``parent`` names a held rollout (what it does not take up
        is dropped as stale). Padding is no token.

        Args:
            rollouts: every rollout of the step, held-back ones included, none twice.
            overruns: tokens sampled past the cut, by rollout id; dropped as pruned by the part that stopped it.
            buffered: ids of rollouts held back after this step.
            released: ids of rollouts from earlier steps. One that is not held was accounted for before, so that it
                comes in as reused.
            trained: False when the step made no update.
            distilled: a teacher's signal gives gradient whatever the advantage.
            gradient_sources: sources whose tokens are in the loss.

        Raises:
            ImbalanceError: a rollout comes twice, or an overrun belongs to none of them.
        """
        overruns = overruns or {}
        buffered, released = frozenset(buffered), frozenset(released)
        names = Counter(rollout.id for rollout in rollouts)
        twice = [name for name, times in names.items() if times > 1]
        lost = [name for name in overruns if name not in names]
        if twice or lost:
            raise ImbalanceError(f"rollouts booked twice: {twice[:5]}; overruns without a rollout: {lost[:5]}")
        self._step, self._step_seconds = Counter(), {}
        rules = _Rules(trained, distilled, np.isin(np.arange(_NUM_SOURCES), list(gradient_sources)))
        for rollout in rollouts:
            self._book_inflow(rollout, overruns.get(rollout.id, 0), rollout.id in released)
            if rollout.id in buffered:
                self._hold(rollout)
            else:
                self._step.update(outflow(rollout, rules))
        self._total.update(self._step)

    def _book_inflow(self, rollout: Rollout, overrun: int, released: bool) -> None:
        """Tokens that are new to the run; those that were held back leave the buffer instead."""
        self._step["sampled", ""] += overrun
        self._step[f"dropped/{DropReason.PRUNED}", rollout.stop.part] += overrun
        returned = self._return(rollout, released)
        if released and returned is None:
            self._step["reused", ""] += size(rollout)
            return
        fresh = source_counts(rollout, returned or 0)
        for source, name in _INFLOW_OF.items():
            self._step[name, ""] += int(fresh[source])
        if returned is None or fresh.any():
            self._book_engine(rollout, int(fresh[Source.SAMPLED]) + overrun)

    def _return(self, rollout: Rollout, released: bool) -> int | None:
        """Leading tokens of the rollout that come out of the buffer; None when it has nothing there."""
        if rollout.id in self._held:
            held, ready = self._held.pop(rollout.id), size(rollout)
        elif not released and rollout.parent in self._held:
            held, ready = self._held.pop(rollout.parent), _reused_prefix(rollout)
        else:
            return None
        self._step["buffered", ""] -= held
        self._step[f"dropped/{DropReason.STALE}", ""] += max(0, held - ready)
        return min(held, ready)

    def _book_engine(self, rollout: Rollout, sampled: int) -> None:
        """Cost of a rollout that the engine worked on in this step; the engine's own count must be ``sampled``."""
        for name in COSTS:
            self._step[name, ""] += getattr(rollout.cost, name)
        known = rollout.dropped != DropReason.QUARANTINED  # a quarantined rollout has lost its sources
        if known and rollout.cost.sampled not in (0, sampled) and not self._suspect:
            self._suspect = f"{rollout.id}: engine {rollout.cost.sampled}, record and overrun {sampled}"

    def _hold(self, rollout: Rollout) -> None:
        self._held[rollout.id] = size(rollout)
        self._step["buffered", ""] += size(rollout)

    def discard(self, ids: Collection[str], reason: str, part: str) -> None:
        """Rollouts held back will not come again; ids that are not held are ignored."""
        for name in ids:
            tokens = self._held.pop(name, 0)
            for account in (self._step, self._total):
                account["buffered", ""] -= tokens
                account[f"dropped/{reason}", part] += tokens

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Wall seconds spent in a phase of the step booked last."""
        for account in (self._seconds, self._step_seconds):
            account[phase] = account.get(phase, 0.0) + seconds

    # ------------------------------------------------------------ reading

    def balance(self) -> None:
        """Raise ImbalanceError, with all numbers, unless every token that came in is accounted for."""
        for name, account in (("step", self._step), ("run", self._total)):
            came_in = sum(account[key, ""] for key in INFLOW)
            went_out = account["trained", ""] + _dropped(account) + account["buffered", ""]
            if came_in != went_out:
                raise ImbalanceError(f"{name}: {came_in} tokens came in, {went_out} are accounted for: {dict(account)}")
        if self._total["buffered", ""] != sum(self._held.values()):
            raise ImbalanceError(f"{self._total['buffered', '']} tokens buffered, but {self._held} are held")
        if self._suspect:
            raise ImbalanceError(f"sampled tokens differ between engine and record of rollout {self._suspect}")

    def step_record(self) -> dict[str, float]:
        """The last step in flat names: ``ledger/sampled``, ``ledger/dropped/masked``, ``ledger/seconds/update`` ...

        ``ledger/buffered`` is the change of the buffer in this step (negative when more came out), ``ledger/held`` what
        is in it; with the former the identity holds for the step.
        """
        record = {f"ledger/{name}": float(self._step[name, ""]) for name in (*INFLOW, "trained", "buffered", *COSTS)}
        record["ledger/held"] = float(self._total["buffered", ""])
        record["ledger/dropped"] = float(_dropped(self._step))
        for (cause, _), tokens in sorted(self._step.items()):
            if cause.startswith("dropped/") and tokens:
                record[f"ledger/{cause}"] = record.get(f"ledger/{cause}", 0.0) + tokens
        return record | {f"ledger/seconds/{phase}": value for phase, value in self._step_seconds.items()}

    def totals(self) -> dict[str, Any]:
        """The run so far, as plain nested numbers: ``inflow`` and ``cost`` by name, ``dropped`` by reason and part."""
        dropped: dict[str, dict[str, int]] = {}
        for (cause, part), tokens in sorted(self._total.items()):
            if cause.startswith("dropped/") and tokens:
                dropped.setdefault(cause.removeprefix("dropped/"), {})[part] = tokens
        return {
            "inflow": {name: self._total[name, ""] for name in INFLOW},
            "trained": self._total["trained", ""],
            "dropped": dropped,
            "buffered": self._total["buffered", ""],
            "cost": {name: self._total[name, ""] for name in COSTS},
            "seconds": dict(self._seconds),
        }

    def table(self) -> list[LedgerRow]:
        """Where the tokens of the run went: trained, then drops by size, then what is held back."""
        came_in = max(1, sum(self._total[name, ""] for name in INFLOW))
        drops = {key: tokens for key, tokens in self._total.items() if key[0].startswith("dropped/") and tokens}
        keys = [("trained", ""), *sorted(drops, key=lambda key: (-drops[key], key)), ("buffered", "")]
        return [
            LedgerRow(
                cause.removeprefix("dropped/"), part, self._total[cause, part], self._total[cause, part] / came_in
            )
            for cause, part in keys
        ]

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """The accounts of the run and what is held back; the step's own accounts end with the step."""
        accounts = [[cause, part, tokens] for (cause, part), tokens in sorted(self._total.items())]
        return {"accounts": accounts, "seconds": dict(self._seconds), "held": dict(self._held)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self._total = Counter({(cause, part): tokens for cause, part, tokens in state["accounts"]})
        self._seconds, self._held = dict(state["seconds"]), dict(state["held"])
        self._step, self._step_seconds, self._suspect = Counter(), {}, ""


def _dropped(account: Counter[Key]) -> int:
    return sum(tokens for (cause, _), tokens in account.items() if cause.startswith("dropped/"))


def _reused_prefix(rollout: Rollout) -> int:
    """Number of leading reused tokens."""
    if rollout.source is None:
        return 0
    source = _real(rollout.source)
    other = np.flatnonzero(source != Source.REUSED)
    return int(other[0]) if len(other) else len(source)
