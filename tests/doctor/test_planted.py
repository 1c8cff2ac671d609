"""One fault at a time: its row is on top in at least nine of ten seeds, and a clean run shows nothing critical."""

from __future__ import annotations

import numpy as np
import pytest
from doctor.synthetic import FAULTS, ONSET, world

from trimtab.doctor import Log, diagnose
from trimtab.doctor.symptoms import SYMPTOMS

SEEDS = range(10)
FROM_THE_START = {"verifier_flips", "starvation"}
LATE = {"reward_hacking", "environment_drift"}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_clean_run_shows_nothing_critical(seed: int) -> None:
    found = diagnose(world(seed).log())
    assert found.at("critical") == []
    assert len(found.at("ok")) >= 18


@pytest.mark.parametrize("fault", FAULTS)
def test_the_planted_row_is_on_top(fault: str) -> None:
    row = FAULTS[fault][0]
    found = [diagnose(world(seed, fault).log()) for seed in SEEDS]
    assert sum(bool(d.top) and d.top[0].symptom.row == row for d in found) >= 9
    since = [d.findings[row].since for d in found]
    if fault not in FROM_THE_START | LATE:
        assert all(step is not None and ONSET <= step <= ONSET + 10 for step in since), since


def test_every_row_but_its_own_effects_is_planted() -> None:
    """Rows 7 and 20 never come alone: a narrow or a wasteful batch has a cause in the index."""
    assert {row for row, _ in FAULTS.values()} == SYMPTOMS.keys() - {7, 20}


def test_effects_are_hidden_behind_their_cause() -> None:
    found = diagnose(world(0, "everything_truncated").log())
    assert [finding.symptom.row for finding in found.top] == [9]
    explained = {finding.symptom.row: finding.explained_by for finding in found.hidden}
    assert explained[1] == (9,)
    assert 1 in explained[20]


def test_failures_read_as_nought_are_named() -> None:
    assert "carry a reward all the same" in diagnose(world(0, "failures_read_as_zero").log()).top[0].detail


def test_a_one_sided_gap_is_named() -> None:
    assert "above on nearly every token" in diagnose(world(0, "logprob_convention").log()).top[0].detail


@pytest.mark.parametrize("fault", ["", "repetition", "few_samples_dominate"])
def test_the_order_of_rollouts_does_not_matter(fault: str) -> None:
    log = world(3, fault).log()
    order = np.random.default_rng(0).permutation(len(log))
    shuffled = Log(
        log.step_N[order],
        log.prompt_N[order],  # type: ignore[index]
        log.group_N[order],  # type: ignore[index]
        {name: value[order] for name, value in log.values.items()},
        answer_N=log.answer_N[order],  # type: ignore[index]
    )
    one, other = diagnose(log), diagnose(shuffled)
    assert [f.symptom.row for f in one.top] == [f.symptom.row for f in other.top]
    for row, finding in one.findings.items():
        assert finding.severity == pytest.approx(other.findings[row].severity, rel=1e-6, nan_ok=True)
        assert finding.since == other.findings[row].since


def test_the_same_log_gives_the_same_diagnosis() -> None:
    log = world(6, "stragglers").log()
    assert repr(diagnose(log).to_dict()) == repr(diagnose(log).to_dict())
