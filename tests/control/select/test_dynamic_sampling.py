from __future__ import annotations

import pytest
from builders import context, prompt
from hypothesis import given
from hypothesis import strategies as st

from trimtab.control.select.dynamic_sampling import DynamicSampling, further
from trimtab.core.errors import ConfigError, TrimtabError
from trimtab.core.recipe import resolve
from trimtab.core.slots import PromptStream


def stream(count: int = 100) -> PromptStream:
    return PromptStream([prompt(f"p{i}") for i in range(count)], seed=0)


def test_prompts_come_in_the_order_of_an_empty_slot_draw_after_draw():
    part, plain, own = DynamicSampling(), stream(), stream()
    chosen = part.select(own, 4, context())
    assert chosen.index + part.select(own, 7, context()).index == plain.take(11)
    assert chosen.inclusion == [1.0] * 4


@given(
    rates=st.lists(st.integers(0, 4), min_size=1, max_size=50),
    wanted=st.integers(1, 12),
    max_draws=st.integers(-1, 8),
    each=st.integers(0, 6),
)
def test_draws_end_full_or_exhausted(rates, wanted, max_draws, each):
    """``rates``: groups kept of each draw."""
    part = DynamicSampling(max_draws=max_draws, each=each)
    ctx = context(prompts_per_step=4)
    part.select(stream(40), 4, ctx)
    kept, draws, drawn = min(rates[0], 4), 1, 4
    while more := part.refill(kept, wanted, draws, ctx):
        kept += min(rates[draws % len(rates)], more)
        draws, drawn = draws + 1, drawn + more
        assert drawn < 1000, "it never ends"
    if kept < wanted:
        assert draws == max_draws if max_draws > 0 else drawn == 40
    assert draws <= max_draws or max_draws <= 0
    if max_draws <= 0:
        assert drawn <= 40


def test_a_full_batch_draws_no_more():
    assert further(4, 4, 1, first=4, each=4, max_draws=10, pool=100) == 0
    assert further(3, 4, 1, first=4, each=4, max_draws=10, pool=100) == 4


def test_an_exhausted_step_stops_the_run_when_asked_to():
    part = DynamicSampling(max_draws=2, on_exhausted="raise")
    part.select(stream(), 4, context())
    assert part.refill(1, 4, 1, context()) == 4
    with pytest.raises(TrimtabError, match=r"2 draws left 1 of 4 groups.*max_draws \(now 2\)"):
        part.refill(1, 4, 2, context())
    assert part.refill(4, 4, 2, context()) == 0


def test_it_needs_a_filter():
    with pytest.raises(ConfigError, match=r"dynamic-sampling: no filter is set.*zero-variance"):
        resolve("dapo", {"filter": "none"})
