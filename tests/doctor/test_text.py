"""Fingerprints of texts."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.doctor import text
from trimtab.doctor.text import repetitive, row_hash

VARIED = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz ", k=400))


@given(st.lists(st.text(max_size=12), min_size=1, max_size=20))
def test_equal_hashes_are_equal_texts(texts: list[str]) -> None:
    hashed = row_hash(pa.array(texts))
    for i, one in enumerate(texts):
        for j, other in enumerate(texts):
            assert (hashed[i] == hashed[j]) == (one == other)


def test_blocks_and_slices_do_not_change_a_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [VARIED[:n] for n in (3, 0, 50, 120, 7, 400)]
    whole = row_hash(pa.array(texts))
    assert np.array_equal(row_hash(pa.array(["x", *texts]).slice(1)), whole)
    monkeypatch.setattr(text, "BLOCK", 64)
    assert np.array_equal(row_hash(pa.array(texts)), whole)


def test_a_loop_at_the_end_is_found() -> None:
    texts = [VARIED, VARIED + "the same thing again " * 12, "0" * 40, "the same thing again " * 12 + VARIED, "", None]
    assert repetitive(pa.array(texts)).tolist() == [False, True, True, False, False, False]


def test_a_text_does_not_loop_into_its_neighbour() -> None:
    part = "abcdefghijklmnopqr"
    assert not repetitive(pa.array([part + VARIED[:30], part, part, part, part, part + "!" + part])).any()
