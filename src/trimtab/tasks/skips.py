"""Counting what was left out: nothing is skipped silently."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Skips:
    """Rows left out, by reason, with where the first of each stood."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, where: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.first.setdefault(reason, where)

    def merge(self, other: Skips) -> None:
        for reason, count in other.counts.items():
            self.counts[reason] = self.counts.get(reason, 0) + count
            self.first.setdefault(reason, other.first[reason])

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def lines(self) -> list[str]:
        """``12 x invalid JSON, first at data.jsonl line 7``, the most frequent first."""
        ranked = sorted(self.counts.items(), key=lambda entry: -entry[1])
        return [f"{count} x {reason}, first at {self.first[reason]}" for reason, count in ranked]
