"""From columns to numbers."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from trimtab.core.errors import DataError
from trimtab.doctor.reduce import reduce


def test_means_are_over_the_loss_mask() -> None:
    table = pa.table(
        {
            "entropy": [[1.0, 3.0], [], None, [5.0]],
            "loss_mask": [[1, 0], [], None, [1]],
        }
    )
    found = reduce(table, "x")
    assert found["entropy"].tolist()[0::3] == [1.0, 5.0]
    assert np.isnan(found["entropy"][1:3]).all()
    assert found["length"].tolist() == [1, 0, 0, 1]


def test_gap_is_absolute_and_signed_over_rows_that_line_up() -> None:
    table = pa.table(
        {
            "logprobs": [[-1.0, -2.0], [-1.0], [-1.0, -1.0, -1.0]],
            "trainer_logprobs": [[-1.5, -1.9], [-1.0, -1.0], [-1.0, -1.0, -1.3]],
        }
    )
    found = reduce(table, "x")
    assert found["gap"] == pytest.approx([0.3, np.nan, 0.1], nan_ok=True, abs=1e-6)
    assert found["gap_signed"] == pytest.approx([-0.2, np.nan, -0.1], nan_ok=True, abs=1e-6)
    assert found["surprise"] == pytest.approx([1.5, 1.0, 1.0])


def test_null_is_missing_and_nan_is_invalid() -> None:
    table = pa.table({"reward": pa.array([1.0, None, float("nan"), float("inf")])})
    found = reduce(table, "x")
    assert found["invalid"].tolist() == [0, 0, 1, 1]
    assert np.isnan(found["reward"][1])


def test_impossible_log_probs() -> None:
    """A NaN log-prob marks a token that was not scored; a positive one is the negative of a log-prob."""
    table = pa.table({"logprobs": [[-1.0, float("nan")], [0.7], [float("-inf")], [0.0]]})
    assert reduce(table, "x")["invalid"].tolist() == [0, 1, 1, 0]


def test_flags_from_words_numbers_and_booleans() -> None:
    words = reduce(pa.table({"truncated": ["length", "stop", "who knows", None]}), "x")["truncated"]
    assert words[:2].tolist() == [1, 0]
    assert np.isnan(words[2:]).all()
    assert reduce(pa.table({"truncated": [True, False]}), "x")["truncated"].tolist() == [1, 0]
    assert reduce(pa.table({"truncated": [2, 0]}), "x")["truncated"].tolist() == [1, 0]


def test_messages_are_texts_too() -> None:
    messages = [
        [{"role": "user", "content": "a"}],
        [{"role": "user", "content": "b"}],
        [{"role": "user", "content": "a"}],
    ]
    hashed = reduce(pa.table({"prompt": messages}), "x")["prompt"]
    assert hashed[0] == hashed[2] != hashed[1]


def test_a_column_of_the_wrong_kind_is_named() -> None:
    with pytest.raises(DataError, match=r"dump\.jsonl: the field for 'reward' holds string, and numbers"):
        reduce(pa.table({"reward": ["good"]}), "dump.jsonl")
