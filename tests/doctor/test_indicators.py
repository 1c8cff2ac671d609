"""Single indicators against worked numbers; what a log must lack for a row to be unknown."""

from __future__ import annotations

import numpy as np
import pytest
from doctor.synthetic import GROUP, world

from trimtab.doctor import Log, diagnose
from trimtab.doctor.indicators import INDICATORS, Unknown
from trimtab.doctor.symptoms import SYMPTOMS
from trimtab.doctor.view import View


def test_every_row_has_an_indicator() -> None:
    assert INDICATORS.keys() == SYMPTOMS.keys()


def test_answer_shares() -> None:
    """Answers 4, 2, 1, 1 of 8."""
    key = np.repeat(np.arange(1, 5, dtype=np.uint64), 8)
    answer = np.tile(np.array([1, 1, 1, 1, 2, 2, 3, 4], np.uint64), 4)
    log = Log(np.ones(32, np.int64), key, key, {"reward": np.zeros(32, np.float32)}, answer_N=answer)
    assert INDICATORS[6](View(log))[0].value_S == pytest.approx([0.34375])


def test_rollouts_without_answer_do_not_agree() -> None:
    key = np.repeat(np.arange(1, 5, dtype=np.uint64), 8)
    log = Log(np.ones(32, np.int64), key, key, {}, answer_N=np.zeros(32, np.uint64))
    assert INDICATORS[6](View(log))[0].value_S == pytest.approx([1 / 8])


def test_idle_share_of_a_step() -> None:
    log = Log(np.ones(16, np.int64), values={"length": np.tile(np.float32([100, 120, 140, 1000]), 4)})
    assert INDICATORS[10](View(log))[0].value_S == pytest.approx([0.66])


def test_shares_of_groups_add_up() -> None:
    view = View(world(0).log())
    outcomes = view.outcomes
    assert outcomes is not None
    informative = view.windowed(view.count_groups(outcomes, outcomes.low_P < outcomes.high_P))
    wrong, right = INDICATORS[1](view)[0], INDICATORS[2](view)[0]
    total = wrong.value_S + right.value_S + informative / wrong.count_S
    assert total == pytest.approx(np.ones(60))


def test_verifier_noise_from_audits() -> None:
    """fp = 0.05 and fn = 0.2 give J = 0.75."""
    said = np.repeat([1.0, 0.0, 0.0, 1.0], [40, 10, 95, 5]).astype(np.float32)
    audit = np.repeat([1.0, 0.0], [50, 100]).astype(np.float32)
    log = Log(np.ones(150, np.int64), values={"reward": said, "audit": audit})
    found = INDICATORS[12](View(log))[0]
    assert found.value_S == pytest.approx([0.75])
    assert found.low_S[0] < 0.75 < found.high_S[0]


def test_one_rollout_a_prompt_is_no_group() -> None:
    key = np.arange(1, 41, dtype=np.uint64)
    log = Log(
        np.ones(40, np.int64), key, key, {name: np.ones(40, np.float32) for name in ("reward", "advantage", "length")}
    )
    for row in (1, 2, 6, 17, 20):
        with pytest.raises(Unknown, match="one rollout a prompt"):
            INDICATORS[row](View(log))


def test_an_empty_log_answers_nothing_and_says_why() -> None:
    found = diagnose(Log(np.ones(40, np.int64)))
    assert {finding.level for finding in found.findings.values()} == {"unknown"}
    assert all(finding.reason for finding in found.findings.values())


@pytest.mark.parametrize(
    ("field", "rows"),
    [
        ("reward", {1, 2, 3, 7, 8, 31}),
        ("length", {8, 10, 20, 31}),
        ("truncated", {9}),
        ("failed", {13}),
        ("malformed", {11}),
        ("entropy", {4, 5}),
        ("gap", {19}),
        ("advantage", {17}),
        ("replayed", {26}),
    ],
)
def test_a_missing_field_makes_its_rows_unknown(field: str, rows: set[int]) -> None:
    log = world(1).log()
    before = {finding.symptom.row for finding in diagnose(log).at("unknown")}
    del log.values[field]
    after = {finding.symptom.row for finding in diagnose(log).at("unknown")}
    assert after - before == rows


def test_few_observations_are_no_reading() -> None:
    log = Log(np.ones(15, np.int64), values={"truncated": np.ones(15, np.float32)})
    finding = diagnose(log).findings[9]
    assert finding.level == "unknown"
    assert "15 observations" in finding.reason


def test_the_first_twenty_steps_are_the_reference() -> None:
    log = world(2).log()
    short = log.step_N <= 20
    cut = Log(log.step_N[short], values={name: value[short] for name, value in log.values.items()})
    assert "20 steps" in diagnose(cut).findings[4].reason


def test_longer_responses_are_no_fault_while_accuracy_rises() -> None:
    log = world(3, "length_inflation").log()
    assert diagnose(log).findings[8].level == "critical"
    log.evals = [(0, 0.3), (29, 0.6)]
    assert diagnose(log).findings[8].level == "ok"


def test_lag_stands_in_for_clipped_tokens() -> None:
    log = world(4, "stale_data").log()
    del log.values["clipped"]
    finding = diagnose(log).findings[18]
    assert finding.level == "warning"
    assert (finding.value, finding.warn, finding.critical) == (12, 8, 32)


def test_graded_rewards_without_known_ends_are_unknown() -> None:
    log = world(5).log()
    log.values["reward"] = (
        log.values["reward"] * 0.7 + np.random.default_rng(0).random(len(log)).astype(np.float32) * 0.1
    )
    finding = diagnose(log).findings[1]
    assert finding.level == "unknown"
    assert "map 'correct'" in finding.reason


def test_zero_advantages_do_not_count_as_small_weights() -> None:
    """A constant group gives no signal; that is row 20's."""
    weight = np.tile(np.repeat(np.float32([1, 0]), GROUP // 2), 40)
    key = np.repeat(np.arange(1, 41, dtype=np.uint64), GROUP)
    log = Log(np.ones(len(weight), np.int64), key, key, {"advantage": weight})
    assert INDICATORS[17](View(log))[0].value_S == pytest.approx([1.0])
