from __future__ import annotations

import numpy as np
import pytest
from builders import group
from hypothesis import given
from hypothesis import strategies as st

from trimtab.core.outcomes import Outcomes, correctness

VALUES = st.lists(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, None]), max_size=6), max_size=6)


@given(VALUES)
def test_outcomes_are_those_of_each_group_alone(values):
    groups = [group(row, name=f"p{i}") for i, row in enumerate(values)]
    found = Outcomes.of(groups)
    for i, one in enumerate(groups):
        scored = [r.verdict.correct for r in one.rollouts if r.verdict.correct is not None]
        assert (found.size_P[i], found.scored_P[i]) == (len(one.rollouts), len(scored))
        assert found.mean_P[i] == pytest.approx(np.mean(scored) if scored else 0)
        assert found.var_P[i] == pytest.approx(np.var(scored) if scored else 0)
        assert found.best_P[i] == max(scored, default=-np.inf)
        assert found.constant_P[i] == one.constant()
        assert (found.var_P[i] > 0) == (len(set(scored)) > 1), "rounding is no variance"


def test_missing_outcomes_are_not_a_number():
    assert np.isnan(correctness([group([None, 1.0])])).tolist() == [True, False]
    assert len(correctness([])) == 0
