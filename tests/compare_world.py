"""Comparisons of tiny models: work that a spawned process can find by name, and plans of a second."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from world import SMALL, digits, load_tiny

from trimtab.run import setup
from trimtab.run.compare import Budget, Plan, plan, train_run
from trimtab.tasks import load_task

OVERRIDES = [
    *(f"{key}={value}" for key, value in SMALL.items() if key not in ("steps", "output.report", "learner.lr")),
    "learner.lr=0.03",
    "output.rollouts=false",
    "eval.points=2",
]


def load_graded(*arguments: Any, **options: Any) -> Any:
    """A task whose verdicts vary with a random policy."""
    task = load_task(*arguments, **options)
    task.verify_all = digits
    return task


@pytest.fixture
def tiny_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process use tiny models and verdicts that vary."""
    monkeypatch.setattr(setup, "load_any", load_tiny)
    monkeypatch.setattr(setup, "load_task", load_graded)


def tiny_work(config: dict[str, Any], path: Path) -> None:
    """One run; that of rloo dies, as if the system had killed it."""
    setup.load_any, setup.load_task = load_tiny, load_graded
    if config["recipe"]["name"] == "rloo":
        os.kill(os.getpid(), signal.SIGKILL)
    train_run(config, path)


def tiny_plan(folder: Path, *more: str, seeds: int = 2, tokens: float = 150) -> Plan:
    """GRPO against RLOO."""
    return plan(["grpo", "rloo"], [*OVERRIDES, *more], Budget("tokens", tokens), seeds, folder)
