"""A tiny model, rollouts of random tokens for it, and the plain computation the learner is checked against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.core.records import Group, Prompt, Rollout, StopReason, StopRecord
from trimtab.model.attention import plan_sequences
from trimtab.model.config import ModelConfig
from trimtab.model.transformer import Transformer

VOCAB = 19


def tiny_model(seed: int = 0, vocab_size: int = VOCAB, tie: bool = False, scale: float = 20.0) -> Transformer:
    """Two layers, embeddings and head larger than at a fresh start, so that the distributions are not flat."""
    config = ModelConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=24,
        tie_embeddings=tie,
    )
    model = Transformer.init(config, seed)
    with torch.no_grad():
        model.embed.weight.mul_(scale)
        if not tie:
            model.head_weight.mul_(scale)
    return model


def random_prompt(name: str, length: int, seed: int) -> Prompt:
    tokens = np.random.default_rng(seed).integers(2, VOCAB, size=length)
    return Prompt(id=name, text=name, tokens=tuple(tokens.tolist()))


def random_rollout(of: Prompt, length: int, name: str, seed: int, **fields: Any) -> Rollout:
    tokens = np.random.default_rng(seed).integers(0, VOCAB, size=length)
    fields.setdefault("logprobs", np.full(length, np.nan, dtype=np.float32))
    stop = StopRecord(StopReason.EOS, length - 1)
    return Rollout(id=name, prompt=of, sample=0, tokens=tokens, stop=stop, reward=0.0, **fields)


def random_groups(lengths: Sequence[Sequence[int]] = ((3, 5, 1), (4, 2)), seed: int = 0) -> list[Group]:
    """A group for each list of response lengths, with advantages of both signs."""
    rng = np.random.default_rng(seed)
    groups = []
    for i, of_group in enumerate(lengths):
        owner = random_prompt(f"p{i}", 3 + 2 * i, seed=100 * seed + i)
        rollouts = [
            random_rollout(owner, n, f"p{i}-{j}", seed=1000 * seed + 10 * i + j, advantage=float(rng.normal()))
            for j, n in enumerate(of_group)
        ]
        groups.append(Group(owner, rollouts))
    return groups


def distributions(model: Transformer, rollout: Rollout, temperature: float = 1.0) -> Tensor:
    """Log-probs (T, V) that predict each response token, from one plain pass over the whole sequence."""
    tokens = torch.tensor([*rollout.prompt.tokens, *rollout.tokens.tolist()])
    logits = model.logits(model(tokens, plan_sequences([len(tokens)])))
    start = len(rollout.prompt.tokens) - 1
    return torch.log_softmax(logits[start : start + rollout.length] / temperature, -1)


def plain_logprobs(model: Transformer, rollout: Rollout, temperature: float = 1.0) -> Tensor:
    """Log-probs (T,) of the rollout's tokens, from the same pass."""
    return distributions(model, rollout, temperature).gather(1, torch.from_numpy(rollout.tokens)[:, None])[:, 0]
