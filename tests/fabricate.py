"""A realistic run directory without a run: distillation with a stopper, a window that grows, filters and a ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from trimtab.core.ledger import Ledger
from trimtab.core.records import (
    Cost,
    DropReason,
    Group,
    Prompt,
    Rollout,
    Status,
    StopReason,
    StopRecord,
    Verdict,
    flatten,
)
from trimtab.pocket.tokenizer import CHARACTERS, CharTokenizer
from trimtab.run.rundir import RunDir

TOKENIZER = CharTokenizer()
OVERRUN = 6  # tokens drawn past a cut
CONFIG = {
    "recipe": {
        "name": "prune-opd",
        "title": "Prune-OPD",
        "paper": "Prune-OPD: Efficient and Reliable On-Policy Distillation for Long-Horizon Reasoning",
        "arxiv": "2605.07804",
        "year": 2026,
        "maturity": "numbers-checked",
        "summary": "Weights fall where the student leaves the teacher, and the response window follows.",
        "deviations": [],
    },
    "settings": {
        "model": "pocket:student",
        "teacher": "pocket:teacher",
        "task": "pocket:sums",
        "seed": 0,
        "steps": 24,
        "prompts_per_step": 6,
        "group_size": 4,
        "sampling": {"temperature": 1.0, "max_new_tokens": 96},
    },
    "parts": {"stop": [{"part": "prune-opd", "threshold": 0.7}], "distill": [{"part": "opd"}]},
}


def fabricate(path: Path, steps: int = 24, seed: int = 0) -> RunDir:
    """A finished run of ``steps`` steps with 24 rollouts each."""
    rng = np.random.default_rng(seed)
    run = RunDir.create(path, CONFIG, "prune-opd")
    ledger, generated, trained, saved = Ledger(), 0, 0, 0.0
    run.append_eval(evaluation(0, 0, 0.31, "before"))
    for step in range(1, steps + 1):
        groups = step_groups(rng, step, steps)
        run.write_rollouts(step, groups, TOKENIZER.decode)
        overruns = {r.id: OVERRUN for r in flatten(groups) if r.stop.reason == StopReason.PART}
        ledger.book(flatten(groups), overruns=overruns, distilled=True)
        ledger.balance()
        generated += sum(r.cost.sampled for r in flatten(groups))
        trained += int(ledger.step_record()["ledger/trained"])
        saved += 14.0 * len(overruns)
        tokens = {"tokens_generated": generated, "tokens_trained": trained, "tokens_saved": saved}
        run.append_metrics(metrics(step, groups, rng) | tokens | ledger.step_record())
        if step % 6 == 0 and step < steps:
            run.append_eval(evaluation(step, generated, 0.31 + 0.5 * step / steps, f"step {step}"))
    run.append_eval(evaluation(steps, generated, 0.83, "after"))
    run.write_ledger(ledger.totals())
    run.write_summary(summary(steps) | tokens)
    return run


def metrics(step: int, groups: list[Group], rng: np.random.Generator) -> dict[str, Any]:
    """One line of metrics.jsonl, without its token counts."""
    rollouts = flatten(groups)
    lengths = [r.length for r in rollouts]
    correct = [r.verdict.correct for r in rollouts if r.verdict.correct is not None]
    return {
        "step": step,
        "reward": float(np.mean(correct)),
        "accuracy": float(np.mean(correct)),
        "length/mean": float(np.mean(lengths)),
        "length/max": max(lengths),
        "length/limit": rollouts[0].stop.limit,
        "rollouts/truncated_share": float(np.mean([r.truncated for r in rollouts])),
        "groups/constant_share": float(np.mean([g.constant() for g in groups])),
        "update/outcome": "updated",
        "update/grad_norm": float(rng.gamma(2.0, 0.3)),
        "update/loss": float("nan") if step == 5 else float(rng.normal(0.4, 0.05)),
        "seconds/generate": 1.4,
        "seconds/update": 0.9,
    }


def summary(steps: int) -> dict[str, Any]:
    """The closing numbers, without the token counts."""
    return {
        "recipe": "prune-opd",
        "steps": steps,
        "accuracy_before": 0.31,
        "accuracy_after": 0.83,
        "accuracy_se": 0.023,
        "mean_length_before": 60.0,
        "mean_length_after": 36.0,
        "wall_s": 62.5,
    }


def evaluation(step: int, tokens: int, accuracy: float, name: str) -> dict[str, Any]:
    """One line of evals.jsonl, as the trainer writes it."""
    return {
        "step": step,
        "tokens_generated": tokens,
        "name": name,
        "wall_s": 2.5 * step,
        "accuracy": accuracy,
        "accuracy_se": 0.03,
        "scored": 256,
        "failed": 0,
        "mean_length": 60.0 - step,
        "truncated_share": 0.1,
        "tokens": 12000,
    }


def step_groups(rng: np.random.Generator, step: int, steps: int, prompts: int = 6, siblings: int = 4) -> list[Group]:
    """The groups of a step; the student gets better, and agrees with its teacher for longer, as the run goes on."""
    groups = []
    for index in range(prompts):
        left, right = rng.integers(10, 99, 2).tolist()
        prompt = Prompt(f"{step:04x}{index:04x}", f"{left} + {right} = ?\n", (1, 2), answer=left + right, task="sums")
        groups.append(Group(prompt, [rollout(rng, prompt, i, step, steps) for i in range(siblings)]))
        drop_constant(groups[-1])
    return groups


def rollout(rng: np.random.Generator, prompt: Prompt, sample: int, step: int, steps: int) -> Rollout:
    """One response with overlap that decays along it, cut by the stopper once it has drifted."""
    progress, limit = step / steps, 40 + 2 * step
    length = int(np.clip(rng.lognormal(4.2 - 0.3 * progress, 0.4), 4, limit))
    overlap = np.clip(1.05 - np.arange(length) / (60 + 120 * progress) + rng.normal(0, 0.14, length), 0, 1)
    events = np.cumsum(np.round(overlap * 8) / 8 < 0.7)
    weight = np.maximum(0.0, 1 - 0.06 * events).astype(np.float32)
    drifted = np.flatnonzero(weight <= 0)
    length = min(length, int(drifted[0]) + 8) if len(drifted) else length  # the stopper looks every few tokens
    correct, failed = float(rng.random() < 0.3 + 0.5 * progress), rng.random() < 0.02
    stop = stop_record(length, limit, bool(len(drifted)))
    tokens = np.array(TOKENIZER.encode(response(rng, length, prompt.answer if correct else prompt.answer + 1)))
    entropy = rng.gamma(1.2, 0.5 - 0.3 * progress, length).astype(np.float32)
    return Rollout(
        id=f"{step - 1}-{prompt.id}-{sample}",
        prompt=prompt,
        sample=sample,
        tokens=tokens,
        logprobs=-rng.gamma(0.8, 0.6, length).astype(np.float32),
        stop=stop,
        version=step - 1,
        signals={
            "overlap": np.round(overlap[:length] * 8).astype(np.float32) / 8,
            "entropy": entropy,
            "teacher_logprob": -rng.gamma(0.9, 0.8, length).astype(np.float32),
        },
        text=TOKENIZER.decode(tokens),
        verdict=Verdict(None, Status.TIMEOUT) if failed else Verdict(correct, Status.OK),
        reward=None if failed else correct,
        token_weight=weight[:length],
        advantage=rng.normal(0, 1, length).astype(np.float32),
        cost=Cost(prefilled=10, sampled=length + OVERRUN * bool(len(drifted)), scored=length),
    )


def stop_record(length: int, limit: int, drifted: bool) -> StopRecord:
    """How a response of this length ended."""
    if drifted:
        return StopRecord(StopReason.PART, length - 1, "prune-opd", limit)
    reason = StopReason.LIMIT if length == limit else StopReason.EOS
    return StopRecord(reason, length - 1, "prune-opd" if reason == StopReason.LIMIT else "", limit)


def response(rng: np.random.Generator, length: int, answer: int) -> str:
    """Worked steps of exactly ``length`` characters that end in the answer where there is room."""
    filler = "".join(f"{a}+{b}={a + b};\n" for a, b in rng.integers(1, 60, (30, 2)).tolist())
    tail = f"#{answer}"
    text = (filler[: max(0, length - len(tail))] + tail)[:length]
    assert set(text) <= set(CHARACTERS)
    return text


def drop_constant(group: Group) -> None:
    """What the filters of this run would have dropped."""
    for item in group.rollouts:
        if group.constant():
            item.drop(DropReason.CONSTANT_GROUP, "constant-groups")
        elif item.stop.reason == StopReason.LIMIT:
            item.drop(DropReason.TRUNCATED, "overlong")
