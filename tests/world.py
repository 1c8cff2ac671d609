"""A whole run in a second: a random two-layer policy and teacher on embedded problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from trimtab.core.recipe import Recipe, resolve
from trimtab.core.records import Status, Verdict
from trimtab.model.config import ModelConfig
from trimtab.model.transformer import Transformer
from trimtab.pocket import CharTokenizer
from trimtab.run import setup
from trimtab.run.display import Display
from trimtab.run.rundir import RunDir
from trimtab.run.trainer import Trainer

CONFIG = ModelConfig(
    family="llama",
    vocab_size=CharTokenizer.vocab_size,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=64,
    max_positions=128,
    tie_embeddings=True,
)

SMALL: dict[str, Any] = {
    "model": "tiny:1",
    "task": "pocket:sums",
    "data.num_prompts": 7,
    "prompts_per_step": 3,
    "group_size": 2,
    "steps": 4,
    "threads": 1,
    "sampling.max_new_tokens": 12,
    "eval.num_problems": 4,
    "learner.lr": 1e-3,
    "engine.slots": 4,
    "output.checkpoint_every": 1,
    "output.report": False,
}


def load_tiny(spec: str, settings: Any, device: torch.device) -> tuple[Transformer, CharTokenizer]:
    """``tiny:<seed>``: a random policy with the embedded tokenizer."""
    model = Transformer.init(CONFIG, int(spec.removeprefix("tiny:")))
    with torch.no_grad():  # the usual 0.02 gives nearly uniform policies, on which nothing can be learnt
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    return model, CharTokenizer()


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """``tiny:<seed>`` models can be named in settings."""
    monkeypatch.setattr(setup, "load_any", load_tiny)


def digits(items: Sequence[tuple[Any, str]]) -> list[Verdict]:
    """Verdicts a random policy varies in: the share of digits, in tenths."""
    return [Verdict(round(sum(c.isdigit() for c in text) / max(1, len(text)), 1), Status.OK) for _, text in items]


def graded(trainer: Trainer) -> Trainer:
    """The trainer with :func:`digits` as its verifier."""
    trainer.task.verify_all = digits
    trainer.rounds.verify = digits
    return trainer


def build(path: Path, recipe: str | Recipe, overrides: Mapping[str, Any] | None = None) -> Trainer:
    """A trainer of the recipe, small settings and overrides laid over it."""
    values = {**SMALL, "output.dir": str(path), **(overrides or {})}
    return setup.start(resolve(recipe, values), Display(quiet=True))


def rollouts(path: Path) -> list[dict[str, Any]]:
    """All rollouts of a run, in order, without what may differ between equal runs."""
    rows: list[dict[str, Any]] = RunDir.open(path).rollouts().to_pylist()
    return rows
