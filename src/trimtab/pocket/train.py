"""Supervised training of the pocket models on written-out work: batches, schedule, checkpoints that resume."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from trimtab.core.errors import DataError
from trimtab.core.files import replace_file
from trimtab.core.rng import key
from trimtab.model.attention import plan_sequences
from trimtab.model.config import ModelConfig
from trimtab.model.transformer import Transformer
from trimtab.pocket.families import family, problem
from trimtab.pocket.families.base import Draw
from trimtab.pocket.tokenizer import CharTokenizer

K = TypeVar("K")

CONFIG = ModelConfig(
    family="llama",
    vocab_size=CharTokenizer.vocab_size,
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    head_dim=32,
    intermediate_size=352,
    max_positions=512,
)


@dataclass(frozen=True)
class Run:
    """How one pocket model is trained.

    ``families`` and ``terms`` are relative weights of the problem families and of the number of terms in a sum;
    ``batch`` is problems a step; the learning rate warms up linearly to ``lr``, then follows a cosine that ends at
    ``last_lr * lr`` after ``steps``.
    """

    families: Mapping[str, int]
    terms: Mapping[int, int]
    steps: int
    style: str = "A"
    batch: int = 64
    lr: float = 3e-3
    last_lr: float = 0.0
    warmup: int = 100
    weight_decay: float = 0.1
    clip: float = 1.0


@dataclass
class Step:
    """Where a training run stands, for a progress display: loss is in nats per trained token."""

    step: int
    steps: int
    loss: float
    seconds: float


def batch(run: Run, seed: int, step: int, tokenizer: CharTokenizer) -> tuple[Tensor, list[int], Tensor]:
    """The packed training batch of ``step``: tokens (T,), sequence lengths (N), and True where a token is trained (T,).

    Trained are the work and the end of sequence, not the problem.
    """
    tokens: list[int] = []
    lengths: list[int] = []
    trained: list[bool] = []
    for row in range(run.batch):
        prompt, work = _example(run, seed, step * run.batch + row)
        head, tail = tokenizer.encode(prompt), [*tokenizer.encode(work), tokenizer.eos_id]
        tokens += head + tail
        lengths.append(len(head) + len(tail))
        trained += [False] * len(head) + [True] * len(tail)
    return torch.tensor(tokens), lengths, torch.tensor(trained)


def _example(run: Run, seed: int, index: int) -> tuple[str, str]:
    draw = Draw("pocket-train", seed, index)
    name = _weighted(draw, run.families)
    difficulty = {"terms": _weighted(draw, run.terms)} if name == "sums" else {}
    drawn = problem(name, "train", seed, index, **difficulty)
    source = family(name)
    return drawn.text, source.solution(drawn, run.style if run.style in source.styles else "A")


def _weighted(draw: Draw, weights: Mapping[K, int]) -> K:
    return draw.choice([name for name, weight in weights.items() for _ in range(weight)])


def loss(model: Transformer, tokens_T: Tensor, lengths: list[int], trained_T: Tensor) -> Tensor:
    """Mean cross-entropy over the trained tokens, in nats."""
    plan = plan_sequences(lengths)
    hidden = model(tokens_T, plan)
    kept = trained_T[plan.target_index]
    logits = model.logits(hidden[plan.predict_index[kept]])
    return F.cross_entropy(logits.float(), tokens_T[plan.target_index[kept]])


def learning_rate(run: Run, step: int) -> float:
    """Linear warm-up to ``lr``, then a cosine to ``last_lr * lr``."""
    if step < run.warmup:
        return run.lr * (step + 1) / run.warmup
    share = (step - run.warmup) / max(1, run.steps - run.warmup)
    return run.lr * (run.last_lr + (1.0 - run.last_lr) * 0.5 * (1.0 + math.cos(math.pi * share)))


def train(
    name: str, run: Run, seed: int, checkpoint: Path, every: int = 100, report: Callable[[Step], None] | None = None
) -> tuple[Transformer, float]:
    """Train model ``name`` to the end of ``run``; returns it and the seconds spent, earlier attempts included.

    The state goes to ``checkpoint`` every ``every`` steps; a run that was killed continues from there and ends with the
    same weights. Raises DataError when the checkpoint belongs to another run.
    """
    model = Transformer.init(CONFIG, key("pocket-init", name, seed) & (2**63 - 1))
    optimizer = _optimizer(model, run)
    tokenizer = CharTokenizer()
    identity = {"name": name, "seed": seed, **asdict(run)}
    start, spent = _resume(checkpoint, identity, model, optimizer)
    began = time.monotonic() - spent
    for step in range(start, run.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(run, step)
        value = loss(model, *batch(run, seed, step, tokenizer))
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds = time.monotonic() - began
        if report is not None:
            report(Step(step + 1, run.steps, float(value.detach()), seconds))
        if (step + 1) % every == 0 or step + 1 == run.steps:
            _save(checkpoint, identity, model, optimizer, step + 1, seconds)
    return model, time.monotonic() - began


def _optimizer(model: Transformer, run: Run) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": run.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=run.lr, betas=(0.9, 0.98), eps=1e-9)


def _save(
    path: Path,
    identity: dict[str, Any],
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    step: int,
    seconds: float,
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "seconds": seconds}
    replace_file(path, lambda temporary: torch.save({"identity": identity, **state}, temporary))


def _resume(
    path: Path, identity: dict[str, Any], model: Transformer, optimizer: torch.optim.Optimizer
) -> tuple[int, float]:
    if not path.exists():
        return 0, 0.0
    state = torch.load(path, weights_only=True)
    if state["identity"] != identity:
        raise DataError(f"{path} was written by another training run ({state['identity']}); move it away to start anew")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"]), float(state["seconds"])
