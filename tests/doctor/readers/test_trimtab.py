"""Run directories of Trimtab."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fabricate import fabricate

from trimtab.core.errors import ConfigError
from trimtab.doctor import diagnose, read_log
from trimtab.run.rundir import RunDir


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A finished run of 24 steps."""
    return fabricate(tmp_path_factory.mktemp("runs") / "run")


def test_columns_and_evaluations_are_read(run: RunDir) -> None:
    log = read_log(run.path)
    table = run.rollouts()
    assert len(log) == table.num_rows
    assert np.array_equal(log.values["length"], table.column("length").to_numpy())
    cut = np.isin(table.column("stop_reason").to_numpy(zero_copy_only=False).astype(str), ["limit", "context"])
    assert np.array_equal(log.values["truncated"] == 1, cut)
    failed = np.isin(table.column("status").to_numpy(zero_copy_only=False).astype(str), ["timeout", "error"])
    assert np.array_equal(log.values["failed"] == 1, failed)
    assert log.evals[0] == (0, 0.31)
    assert {"entropy", "invalid", "lag", "replayed", "malformed"} <= log.values.keys()


def test_rows_that_a_run_answers(run: RunDir) -> None:
    found = diagnose(read_log(run.path))
    unknown = {finding.symptom.row for finding in found.at("unknown")}
    assert unknown.isdisjoint({1, 2, 3, 6, 9, 10, 11, 13, 20, 32, 33})
    assert {12, 14, 15, 16, 19} <= unknown


def test_steps_that_were_not_finite_are_found(tmp_path: Path) -> None:
    made = fabricate(tmp_path / "run")
    for step in range(20, 25):
        made.append_metrics({"step": step, "update/outcome": "nonfinite"})
    found = diagnose(read_log(made.path)).findings[33]
    assert (found.level, found.since) == ("critical", 20)


def test_a_mapping_is_refused(run: RunDir) -> None:
    with pytest.raises(ConfigError, match="needs no mapping"):
        read_log(run.path, mapping={"reward": "correct"})
