"""Plays control parts through steps: scripted outcomes for allocators, tiny whole runs for anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from builders import prompt, rollout
from world import build, rollouts

from trimtab.core.records import Group, Prompt, Status, Verdict
from trimtab.core.slots import Allocate, AllocationRequest, StepContext
from trimtab.run import setup
from trimtab.run.display import Display
from trimtab.run.trainer import Trainer

Outcome = Callable[[str, int], float | None]


def scripted(values: Mapping[str, Sequence[float | None]]) -> Outcome:
    """Sample i of a prompt comes out as the i-th value, repeated from the start."""
    return lambda name, sample: values[name][sample % len(values[name])]


def bernoulli(rates: Mapping[str, float], seed: int = 0) -> Outcome:
    """Right with the prompt's rate; the same for the same sample whatever the order of asking."""

    def draw(name: str, sample: int) -> float:
        return float(np.random.default_rng([seed, sample, *name.encode()]).random() < rates[name])

    return draw


def play(
    part: Allocate, names: Sequence[str], outcome: Outcome, ctx: StepContext
) -> tuple[list[Group], list[list[int]]]:
    """Groups and the rollouts of every round, under the rules of the loop; fails where a plan breaks them."""
    groups = [Group(prompt(name)) for name in names]
    prompts: list[Prompt] = [group.prompt for group in groups]
    remaining, rounds = part.budget(len(groups), ctx), list[list[int]]()
    while remaining > 0:
        counts = part.plan(AllocationRequest(prompts, groups, len(rounds), remaining), ctx)
        assert counts.shape == (len(groups),)
        assert counts.dtype == np.int64
        assert (counts >= 0).all()
        assert counts.sum() <= remaining
        if not counts.any():
            break
        for group, count in zip(groups, counts.tolist(), strict=True):
            for sample in range(len(group.rollouts), len(group.rollouts) + count):
                name = f"{ctx.step}-{group.prompt.id}-{sample}"
                group.rollouts.append(rollout(2, outcome(group.prompt.id, sample), name=name, of=group.prompt))
        rounds.append(counts.tolist())
        remaining -= int(counts.sum())
    return groups, rounds


def halves(items: Sequence[tuple[Any, str]]) -> list[Verdict]:
    """Right or wrong by the text alone, about half each on a random policy."""
    return [Verdict(float(sum(map(ord, text)) % 2), Status.OK) for _, text in items]


def judged(trainer: Trainer) -> Trainer:
    """The trainer with :func:`halves` as its verifier."""
    trainer.task.verify_all = halves
    trainer.rounds.verify = halves
    return trainer


def run(path: Path, recipe: str, overrides: Mapping[str, Any]) -> Trainer:
    """A finished tiny run."""
    trainer = judged(build(path, recipe, overrides))
    trainer.run()
    trainer.ledger.balance()
    return trainer


def same_run(a: Trainer, b: Trainer) -> None:
    """Assert that two runs made the same rollouts and ended in the same weights."""
    assert rollouts(a.run_dir.path) == rollouts(b.run_dir.path)
    pairs = zip(a.policy.state_dict().values(), b.policy.state_dict().values(), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)


def resumed(path: Path, recipe: str, overrides: Mapping[str, Any], stop_after: int = 2) -> Trainer:
    """The same run, left after some steps and resumed from its checkpoint."""
    trainer = judged(build(path, recipe, overrides))
    trainer.first_evaluation = trainer.evaluate("before")
    for _ in range(stop_after):
        trainer.step()
        trainer.after_step()
    del trainer
    again = judged(setup.resume(path, Display(quiet=True)))
    again.run()
    return again
