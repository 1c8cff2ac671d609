"""Run directories of Trimtab, read through :class:`trimtab.run.rundir.RunDir`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trimtab.core.errors import ConfigError
from trimtab.core.records import Status, StopReason
from trimtab.doctor.log import Log
from trimtab.doctor.readers.common import make_log, renamed

if TYPE_CHECKING:
    from trimtab.run.rundir import RunDir

CONFIG = "config.yaml"
WANTED = f"a run directory with {CONFIG}"
STEPS = 8  # rollout files read at a time
_NAMES = {
    "step": "step",
    "prompt": "prompt_id",
    "text": "text",
    "length": "length",
    "reward": "reward",
    "correct": "correct",
    "advantage": "advantage",
    "weight": "weight",
    "entropy": "entropy",
    "logprobs": "logprobs",
    "version": "version",
}
_READ = (*_NAMES.values(), "stop_reason", "status", "reused")
_CUT = pa.array([str(StopReason.LIMIT), str(StopReason.CONTEXT)])
_FAILED = pa.array([str(Status.TIMEOUT), str(Status.ERROR)])


def find(path: Path) -> list[Path]:
    """The run's configuration when ``path`` is a run directory."""
    return [path / CONFIG] if (path / CONFIG).is_file() else []


def read(path: Path, files: list[Path], mapping: Mapping[str, str]) -> Log:
    """Rollouts, held-out accuracy, and the steps whose loss was not finite."""
    if mapping:
        raise ConfigError("--map: a run directory of Trimtab needs no mapping; leave it out")
    from trimtab.run.rundir import RunDir  # loads torch, which logs of other frameworks do without

    run = RunDir.open(path)
    log = make_log((chunk, str(path)) for chunk in _chunks(run))
    _lag(log)
    log.evals = [(record["step"], record["accuracy"]) for record in run.evals() if record.get("accuracy") is not None]
    bad = [r["step"] for r in run.metrics() if r.get("update/outcome") == "nonfinite"]
    log.values["invalid"][np.isin(log.step_N, bad)] = 1
    return log


def _chunks(run: RunDir) -> Iterator[pa.Table]:
    steps = run.rollout_steps()
    for first in range(0, len(steps), STEPS):
        table = run.rollouts(steps[first : first + STEPS], _READ)
        status = table.column("status")
        yield (
            renamed(table, _NAMES)
            .append_column("truncated", pc.is_in(table.column("stop_reason"), value_set=_CUT))
            .append_column("failed", pc.is_in(status, value_set=_FAILED))
            .append_column("malformed", pc.equal(status, str(Status.MALFORMED)))
            .append_column("replayed", pc.greater(table.column("reused"), 0))
        )


def _lag(log: Log) -> None:
    """Versions behind the trainer. The engine is synced after every step, so the newest rollout has its version."""
    version = log.values["version"]
    steps, index = np.unique(log.step_N, return_inverse=True)
    newest = np.full(len(steps), -np.inf)
    np.maximum.at(newest, index, version)
    log.values["lag"] = (np.maximum.accumulate(newest)[index] - version).astype(np.float32)
