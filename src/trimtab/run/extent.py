"""How long a run is: what it counts, the bounds on that, and when an evaluation is due."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.core.config import BudgetConfig, EvalConfig, RunConfig


@dataclass
class Counters:
    """What a run counts from its start; checkpointed."""

    step: int = 0
    version: int = 0
    tokens_generated: int = 0
    tokens_trained: int = 0
    tokens_saved: float = 0.0
    wall_s: float = 0.0
    train_s: float = 0.0  # seconds within steps: evaluations and checkpoints are not a method's cost
    empty_steps: int = 0


@dataclass(frozen=True)
class Extent:
    """The bounds of a run. It ends after the step that reaches the first of them."""

    steps: int
    budget: BudgetConfig

    @classmethod
    def of(cls, settings: RunConfig) -> Extent:
        return cls(settings.steps, settings.budget)

    def share(self, c: Counters) -> float:
        """How much of the tightest bound is used; 1 and more is the end. A run of 0 steps is at its end."""
        used = [c.step / self.steps if self.steps else 1.0]
        used += [spent / bound for _, spent, bound in self._spending(c) if bound]
        return max(used)

    def reached(self, c: Counters) -> bool:
        """The run is over."""
        return self.share(c) >= 1

    def expected_steps(self, c: Counters) -> int:
        """Steps the whole run will have at the pace so far; before the first step, at most as many."""
        return round(c.step / self.share(c)) if c.step else self.steps

    def overspent(self, c: Counters) -> dict[str, float]:
        """By how much the last step went past each bound that is set."""
        return {name: max(0, spent - bound) for name, spent, bound in self._spending(c) if bound}

    def _spending(self, c: Counters) -> list[tuple[str, float, float]]:
        b = self.budget
        return [
            ("tokens", c.tokens_generated, b.tokens),
            ("trained_tokens", c.tokens_trained, b.trained_tokens),
            ("seconds", c.train_s, b.seconds),
        ]

    def evaluation_due(self, config: EvalConfig, before: Counters, now: Counters) -> bool:
        """A multiple of an evaluation interval lies in the step from ``before`` to ``now``."""
        return (
            _crossed(before.step, now.step, config.every)
            or _crossed(before.tokens_generated, now.tokens_generated, config.every_tokens)
            or _crossed(self.share(before) * config.points, self.share(now) * config.points, 1)
        )


def _crossed(before: float, now: float, interval: int) -> bool:
    return interval > 0 and now // interval > before // interval
