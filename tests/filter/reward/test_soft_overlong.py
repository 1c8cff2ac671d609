from __future__ import annotations

import math

import numpy as np
import pytest
from builders import context, group
from hypothesis import given
from hypothesis import strategies as st

from trimtab.core.errors import ConfigError
from trimtab.core.recipe import resolve
from trimtab.filter.reward.soft_overlong import SoftOverlong, penalty


@given(st.lists(st.integers(0, 40), max_size=10), st.integers(1, 30), st.integers(1, 30), st.floats(0, 3))
def test_the_penalty_is_bounded_and_never_smaller_for_a_longer_response(lengths, limit, buffer, factor):
    found = penalty(np.sort(np.array(lengths, dtype=np.int64)), limit, min(buffer, limit), factor)
    assert ((found <= 0) & (found >= -np.float32(factor) * 1.0001)).all()
    assert (np.diff(found) <= 0).all()


def test_the_edges_of_the_zone():
    part = SoftOverlong(max_length=100, buffer=20, factor=2.0)
    groups = [group([1.0] * 5, [79, 80, 90, 100, 130])]
    shaped = part.shape(groups, np.ones(5, dtype=np.float32), context())
    assert shaped.tolist() == pytest.approx([1, 1, 0, -1, -1])


def test_the_limit_of_the_run_by_default_and_a_missing_reward_stays_missing():
    reward = np.array([1.0, math.nan], dtype=np.float32)
    shaped = SoftOverlong(buffer=64).shape([group([1.0, None], [224, 224])], reward, context(max_new_tokens=256))
    assert shaped[0] == 0.5
    assert np.isnan(shaped[1])
    assert shaped.dtype == np.float32


def test_a_buffer_beyond_the_limit_is_refused():
    with pytest.raises(ConfigError, match=r"reward.soft-overlong.buffer: 4096.*at most the length limit, 256 tokens"):
        resolve("dapo", {"reward.buffer": 4096})
