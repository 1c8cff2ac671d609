"""Records for tests: prompts, rollouts, groups and contexts of a few lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trimtab.core.records import Group, Prompt, Rollout, Status, StopReason, StopRecord, Verdict, flatten, group_ids
from trimtab.core.slots import AdvantageRows, StepContext, StepRecord

EOS = 1


def prompt(name: str = "p", tokens: Sequence[int] = (2, 3)) -> Prompt:
    return Prompt(id=name, text=name, tokens=tuple(tokens))


def verdict(correct: float | None) -> Verdict:
    return Verdict() if correct is None else Verdict(correct=correct, status=Status.OK)


def rollout(
    length: int = 4,
    correct: float | None = 0.0,
    *,
    name: str = "r",
    reason: StopReason = StopReason.EOS,
    of: Prompt | None = None,
    signals: dict[str, Any] | None = None,
    **fields: Any,
) -> Rollout:
    """A rollout of ``length`` tokens, the last one an end of sequence where ``reason`` says so."""
    tokens = np.arange(2, 2 + length, dtype=np.int64)
    if length and reason == StopReason.EOS:
        tokens[-1] = EOS
    return Rollout(
        id=name,
        prompt=of or prompt(),
        sample=0,
        tokens=tokens,
        logprobs=np.full(length, -0.5, dtype=np.float32),
        stop=StopRecord(reason, length - 1),
        verdict=verdict(correct),
        reward=correct,
        signals={key: np.asarray(value) for key, value in (signals or {}).items()},
        **fields,
    )


def group(
    corrects: Sequence[float | None], lengths: Sequence[int] | None = None, name: str = "p", **fields: Any
) -> Group:
    """A group with these correctness values."""
    lengths = lengths or [4] * len(corrects)
    owner = prompt(name)
    rollouts = [
        rollout(length, correct, name=f"{name}-{i}", of=owner, **fields)
        for i, (correct, length) in enumerate(zip(corrects, lengths, strict=True))
    ]
    return Group(owner, rollouts)


def context(**fields: Any) -> StepContext:
    base: dict[str, Any] = {
        "seed": 0,
        "step": 0,
        "num_steps": 10,
        "version": 0,
        "prompts_per_step": 4,
        "group_size": 4,
        "max_new_tokens": 256,
        "temperature": 1.0,
        "eos_ids": frozenset({EOS}),
        "history": None,
    }
    return StepContext(**{**base, **fields})


def record(groups: Sequence[Group]) -> StepRecord:
    return StepRecord(list(groups), {}, None)  # type: ignore[arg-type]


def advantage_rows(groups: Sequence[Group]) -> AdvantageRows:
    rollouts = flatten(groups)
    reward = torch.tensor([math.nan if r.reward is None else float(r.reward) for r in rollouts])
    return AdvantageRows(
        reward_N=reward,
        correct_N=reward,
        group_N=torch.from_numpy(group_ids(groups)),
        num_groups=len(groups),
        length_N=torch.tensor([r.length for r in rollouts], dtype=torch.int64),
        scored_N=~reward.isnan(),
        keep_N=torch.tensor([r.keep for r in rollouts], dtype=torch.bool),
    )


def start(rows: AdvantageRows) -> torch.Tensor:
    """What the advantage chain starts with: the reward, 0 where it is missing."""
    return torch.where(rows.scored_N, rows.reward_N, torch.zeros_like(rows.reward_N))


def run_chain(chain: Sequence[Any], groups: Sequence[Group]) -> torch.Tensor:
    """The advantage of a chain of links, rows spread over tokens before a link that works on tokens."""
    rows = advantage_rows(groups)
    advantage, per_token = start(rows), False
    for part in chain:
        if part.per_token and not per_token:
            advantage, per_token = advantage[rows.row_T], True
        advantage = part.advantage(rows, advantage)
    return advantage
