"""From severities to findings."""

from __future__ import annotations

import numpy as np

from trimtab.doctor.causes import course, explained_by, ranked
from trimtab.doctor.symptoms import EXPLAINS, SYMPTOMS


def test_a_row_clears_after_five_fine_readings() -> None:
    bad, fine = [0.5], [-1.0]
    still = course(np.array(fine + bad + fine * 4))
    assert (still.now, still.since) == (0.5, 1)
    over = course(np.array(fine + bad + fine * 5))
    assert (over.now, over.since, over.ended, over.peak) == (-1.0, None, 6, 0.5)


def test_a_finding_that_comes_back_begins_anew() -> None:
    found = course(np.array([0.5] + [-1.0] * 5 + [0.2, 0.9]))
    assert (found.now, found.since, found.ended) == (0.9, 6, None)


def test_steps_without_a_reading_do_not_clear_a_row() -> None:
    assert course(np.array([0.5] + [np.nan] * 20)).since == 0
    assert np.isnan(course(np.full(3, np.nan)).now)


def test_only_firing_causes_explain() -> None:
    assert explained_by({9, 1, 20}) == {1: [9], 20: [1]}
    assert explained_by({1}) == {}


def test_rank_by_severity_then_row() -> None:
    assert ranked({4: 0.5, 2: 0.5, 7: 2.0, 9: -1.0, 1: 3.0}, hidden={1}) == [7, 2, 4]


def test_causes_form_no_circle() -> None:
    def below(row: int) -> set[int]:
        return {row}.union(*(below(effect) for effect in EXPLAINS.get(row, ())))

    for row in EXPLAINS:
        assert all(row not in below(effect) for effect in EXPLAINS[row])
        assert set(EXPLAINS[row]) <= SYMPTOMS.keys()
