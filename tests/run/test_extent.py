"""Runs that are bounded by what they spend: where they end, when they evaluate, and that they resume exactly."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from world import build, graded, rollouts, tiny

from trimtab.core.config import BudgetConfig, EvalConfig
from trimtab.run import setup
from trimtab.run.display import Display
from trimtab.run.extent import Counters, Extent
from trimtab.run.rundir import RunDir

__all__ = ["tiny"]


def counters(step: int = 0, tokens: int = 0, trained: int = 0, seconds: float = 0.0) -> Counters:
    return Counters(step=step, tokens_generated=tokens, tokens_trained=trained, train_s=seconds)


def test_the_tightest_bound_ends_a_run() -> None:
    extent = Extent(10, BudgetConfig(tokens=100, trained_tokens=50, seconds=2.0))
    assert extent.share(counters()) == 0
    assert extent.share(counters(step=1, tokens=40, trained=10, seconds=0.2)) == 0.4
    assert not extent.reached(counters(step=9, tokens=99, trained=49, seconds=1.99))
    for spent in (counters(step=10), counters(tokens=100), counters(trained=50), counters(seconds=2.0)):
        assert extent.reached(spent)
    assert extent.overspent(counters(tokens=130, trained=20, seconds=2.5)) == {
        "tokens": 30,
        "trained_tokens": 0,
        "seconds": 0.5,
    }
    assert Extent(0, BudgetConfig()).reached(counters())


def test_parts_are_told_how_many_steps_the_budget_will_last() -> None:
    extent = Extent(1_000_000, BudgetConfig(tokens=1000))
    assert extent.expected_steps(counters(step=2, tokens=100)) == 20
    plain = Extent(7, BudgetConfig())
    assert [plain.expected_steps(counters(step=n)) for n in range(8)] == [7] * 8


def due(config: EvalConfig, *tokens: int) -> list[bool]:
    extent = Extent(1000, BudgetConfig(tokens=100))
    seen = [counters(step=i, tokens=n) for i, n in enumerate(tokens)]
    return [extent.evaluation_due(config, a, b) for a, b in itertools.pairwise(seen)]


def test_evaluations_are_due_when_a_multiple_lies_in_the_step() -> None:
    assert due(EvalConfig(), 0, 30, 60, 90) == [False, False, False]
    assert due(EvalConfig(every=2), 0, 30, 60, 90, 95) == [False, True, False, True]
    assert due(EvalConfig(every_tokens=50), 0, 49, 50, 99, 210) == [False, True, False, True]
    assert due(EvalConfig(points=4), 0, 24, 25, 49, 80) == [False, True, False, True]


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("kind", ["tokens", "trained_tokens"])
def test_a_run_ends_after_the_step_that_reaches_its_budget(tmp_path: Path, kind: str) -> None:
    trainer = graded(build(tmp_path / "run", "grpo", {"steps": 1000, f"budget.{kind}": 150, "eval.points": 3}))
    summary = trainer.run()
    files = RunDir.open(tmp_path / "run")
    name = "tokens_generated" if kind == "tokens" else "tokens_trained"
    after_each = [record[name] for record in files.metrics()]
    assert after_each[-1] >= 150
    assert all(value < 150 for value in after_each[:-1])
    assert summary[f"{kind}_overspent"] == after_each[-1] - 150
    evals = files.evals()
    assert (evals[0]["name"], evals[-1]["name"]) == ("before", "after")
    assert len(evals) >= 3
    assert evals[-1]["train_s"] > evals[1]["train_s"] > evals[0]["train_s"] == 0
    assert (tmp_path / "run/checkpoints").is_dir()


@pytest.mark.usefixtures("tiny")
def test_a_bounded_run_resumes_exactly(tmp_path: Path) -> None:
    overrides: dict[str, Any] = {"steps": 1000, "budget.tokens": 260, "eval.every_tokens": 100}
    whole = graded(build(tmp_path / "whole", "grpo", overrides))
    whole.run()
    part = graded(build(tmp_path / "part", "grpo", overrides))
    part.first_evaluation = part.evaluate("before")
    for _ in range(2):
        part.step()
        part.after_step()
    resumed = graded(setup.resume(tmp_path / "part", Display(quiet=True)))
    assert resumed.counters.train_s > 0
    resumed.run()
    assert rollouts(tmp_path / "whole") == rollouts(tmp_path / "part")
    states = whole.policy.state_dict(), resumed.policy.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(*(s.values() for s in states), strict=True))
    curves = [
        [(e["step"], e["name"], e["tokens_generated"], e["accuracy"]) for e in RunDir.open(tmp_path / name).evals()]
        for name in ("whole", "part")
    ]
    assert curves[0] == curves[1]
    assert len(curves[0]) > 3


@pytest.mark.usefixtures("tiny")
def test_several_samples_give_pass_at_k(tmp_path: Path) -> None:
    trainer = build(tmp_path / "run", "grpo", {"steps": 0, "eval.samples": 3, "eval.temperature": 1.0})
    trainer.run()
    assert RunDir.open(tmp_path / "run").evals()[0]["pass_at_k"].keys() == {"1", "2", "3"}


def test_pass_at_k_leaves_out_what_was_not_verified() -> None:
    import numpy as np

    from trimtab.run.evaluate import pass_curve

    nan = float("nan")
    found = pass_curve(np.array([[1.0, 0.0, 0.5], [nan, nan, 1.0], [nan, nan, nan]]))
    assert found["1"] == pytest.approx((1 / 3 + 1) / 2)
    assert found["2"] == pytest.approx(1 - 1 / 3)
    assert found["3"] == 1.0
    assert pass_curve(np.zeros((0, 2))) == {}
