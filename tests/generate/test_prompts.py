from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trimtab.generate.prompts import batches_by_length


@given(st.lists(st.integers(0, 300), max_size=40), st.integers(1, 400))
def test_batches_hold_every_positive_length_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = batches_by_length(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == [i for i, n in enumerate(lengths) if n > 0]
    for batch in batches:
        longest, shortest = max(lengths[i] for i in batch), min(lengths[i] for i in batch)
        assert len(batch) == 1 or (longest <= 2 * shortest and longest * len(batch) <= budget)


def test_equal_lengths_fill_the_budget() -> None:
    assert [len(batch) for batch in batches_by_length([10] * 9, 40)] == [4, 4, 1]
    assert batches_by_length([], 10) == []
