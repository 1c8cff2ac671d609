"""Dynamic sampling: keep drawing prompts until enough groups are left after the filter.

Source: DAPO, arXiv 2503.14476, section 3.2; cap and batch sizes as in verl's DAPO recipe.

Prompts come in epoch order. After each draw is rolled out, judged and filtered (by ``zero-variance``, or any filter),
another draw follows while fewer than the wanted groups are kept; groups beyond the wanted number are cut. The price
is rollouts of groups that are thrown away, each with its reason in the ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from trimtab.core.errors import ConfigError, TrimtabError
from trimtab.core.part import Needs, Part, knob
from trimtab.core.slots import PromptStream, Select, Selection, StepContext

if TYPE_CHECKING:
    from trimtab.core.config import RunConfig


@dataclass
class Seen:
    """What the last selection saw."""

    pool: int = 0  # prompts of the task


def further(kept: int, wanted: int, draws: int, *, first: int, each: int, max_draws: int, pool: int) -> int:
    """Prompts to draw now: 0 when enough groups are kept or nothing more may be drawn.

    ``first`` and ``each`` are the sizes of the first and of every further draw. Without a cap on draws
    (``max_draws`` <= 0) the draws of one step together stay within one epoch of ``pool`` prompts.
    """
    if kept >= wanted:
        return 0
    if max_draws > 0:
        return each if draws < max_draws else 0
    return max(min(each, pool - first - (draws - 1) * each), 0)


@dataclass(kw_only=True)
class DynamicSampling(Select):
    """Draws further prompts of a step in epoch order until the batch is full (DAPO)."""

    State: ClassVar[type] = Seen
    inert: ClassVar[dict[str, object] | None] = {"max_draws": 1}

    max_draws: int = knob(10, "most draws a step, the first included; 0 or less = until one epoch is drawn")
    each: int = knob(0, "prompts of every further draw; 0 = prompts_per_step, as in verl", ge=0)
    on_exhausted: Literal["short", "raise"] = knob(
        "short", "when no draw is left: train on fewer groups, or stop the run"
    )

    def needs(self) -> Needs:
        return Needs(verdicts=True)

    def check(self, parts: Mapping[str, list[Part]], settings: RunConfig) -> None:
        if not parts["filter"]:
            raise ConfigError(
                "select.dynamic-sampling: no filter is set, so every group is kept and nothing is ever drawn again. "
                "Add one, for example filter=zero-variance."
            )

    def select(self, stream: PromptStream, num: int, ctx: StepContext) -> Selection:
        self.state.pool = len(stream.pool)
        index = stream.take(num)
        return Selection(index, [1.0] * len(index))

    def refill(self, kept: int, wanted: int, draws: int, ctx: StepContext) -> int:
        first = ctx.prompts_per_step
        more = further(
            kept,
            wanted,
            draws,
            first=first,
            each=self.each or first,
            max_draws=self.max_draws,
            pool=self.state.pool,
        )
        if more == 0 and kept < wanted and self.on_exhausted == "raise":
            raise TrimtabError(
                f"select.dynamic-sampling: {draws} draws left {kept} of {wanted} groups with differing outcomes. Raise "
                f"max_draws (now {self.max_draws}), choose easier or harder prompts, or set on_exhausted=short."
            )
        return more
