"""Engine, learner and teacher on the same rollouts: the numbers they exchange are the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest
import torch
from builders import context
from tiny import random_prompt, tiny_model
from torch import Tensor

from trimtab.core.records import Group, Rollout
from trimtab.generate.protocol import ChunkView, Request, Sampling, StreamScorer
from trimtab.generate.torch_engine import TorchEngine
from trimtab.learn.learner import Learner, LearnerConfig
from trimtab.learn.objective.clip import Clip
from trimtab.learn.teacher import Teacher, TeacherStream

SLOTS, K, LIMIT = 3, 4, 12
EOS = 1


@dataclass
class Never:
    """A stopper that reads the teacher and never stops."""

    part: ClassVar[str] = "never"
    every: int = 3
    signals: frozenset[str] = field(default_factory=lambda: frozenset({"teacher", "topk"}))

    def start(self, num_slots: int, device: torch.device) -> dict[str, Tensor]:
        return {"seen": torch.zeros(num_slots, dtype=torch.int64, device=device)}

    def step(self, state: dict[str, Tensor], view: ChunkView) -> tuple[dict[str, Tensor], Tensor]:
        return state, torch.full_like(view.count_B, -1)


def requests(temperature: float) -> list[Request]:
    prompts = [random_prompt(f"p{i}", 3 + i, seed=i) for i in range(3)]
    return [
        Request(f"{p.id}-{j}", p, j, key=10 * i + j, max_new_tokens=LIMIT, sampling=Sampling(temperature))
        for i, p in enumerate(prompts)
        for j in range(3)
    ]


def generate(
    temperature: float = 1.0, scorer: StreamScorer | None = None, hooks: Sequence[Never] = ()
) -> tuple[TorchEngine, list[Rollout]]:
    model = tiny_model()
    engine = TorchEngine(
        model, eos_ids=frozenset({EOS}), pad_id=EOS, num_slots=SLOTS, max_context=64, prefill_tokens=64
    )
    asked = requests(temperature)
    completions = engine.generate(asked, topk=K, scorer=scorer, hooks=hooks)
    rollouts = [
        Rollout(r.id, r.prompt, r.sample, c.tokens, c.logprobs, c.stop, signals=c.signals)
        for r, c in zip(asked, completions, strict=True)
    ]
    return engine, rollouts


def learner(temperature: float) -> Learner:
    config = LearnerConfig(lr=1e-3, micro_batch_tokens=40, logprob_chunk=7)
    return Learner(tiny_model(), config, objective=Clip(), temperature=temperature, max_new_tokens=LIMIT)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_engine_and_learner_agree_on_the_log_probs_of_sampled_tokens(temperature: float) -> None:
    _, rollouts = generate(temperature)
    check = learner(temperature).self_check(rollouts, 1e-4)
    assert check.tokens > 0
    assert check.max_gap < 1e-3
    for own, rollout in zip(learner(temperature).logprobs(rollouts), rollouts, strict=True):
        np.testing.assert_allclose(own, rollout.logprobs, rtol=1e-4, atol=1e-4)


def test_an_update_measures_no_gap_to_the_engine() -> None:
    _, rollouts = generate()
    for rollout in rollouts:
        rollout.advantage = 1.0 if rollout.sample == 0 else -0.5
    groups = [Group(rollouts[i].prompt, rollouts[i : i + 3]) for i in range(0, 9, 3)]
    result = learner(1.0).update(groups, epochs=2, minibatches=2, ctx=context())
    assert result.outcome == "updated"
    assert result.metrics["behaviour_log_ratio"] < 1e-4
    assert result.metrics["unscored_tokens"] == 0


def test_a_teacher_that_read_along_has_nothing_left_to_score() -> None:
    teacher = Teacher(tiny_model(seed=7).requires_grad_(False), temperature=1.2, chunk_tokens=5)
    stream = TeacherStream(teacher, num_slots=SLOTS, topk=K, max_len=4)
    _, streamed = generate(scorer=stream, hooks=[Never()])
    _, plain = generate()
    assert stream.tokens > 0
    assert teacher.score(streamed, topk=K) == 0
    teacher.score(plain, topk=K)
    for a, b in zip(streamed, plain, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        for name in ("teacher_logprob", "teacher_topk_ids", "teacher_topk_logprobs", "teacher_on_student", "overlap"):
            np.testing.assert_allclose(a.signals[name], b.signals[name], rtol=1e-4, atol=1e-4, err_msg=name)
