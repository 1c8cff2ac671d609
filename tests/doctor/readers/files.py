"""Small logs in the formats of other frameworks, written as those frameworks write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

STEPS, PROMPTS, GROUP = 24, 8, 8
ROWS = PROMPTS * GROUP


def rewards(seed: int = 0) -> np.ndarray[Any, Any]:
    """Binary rewards (STEPS, ROWS)."""
    return (np.random.default_rng(seed).random((STEPS, ROWS)) < 0.5).astype(float)


def text(step: int, row: int, loop: bool = False) -> str:
    """A response; no two are equal."""
    return f"response {step}-{row} " + ("and so on and " * 30 if loop else "done")


def question(step: int, row: int) -> str:
    """The prompt of a row; eight rows share it."""
    return f"question {(step * PROMPTS + row // GROUP) % 16}"


def trl(folder: Path, **columns: Any) -> Path:
    """``completions/completions_00001.parquet`` and on; extra columns are (STEPS, ROWS) arrays."""
    (folder / "completions").mkdir(parents=True)
    reward = rewards()
    for step in range(1, STEPS + 1):
        table = {
            "step": [step] * ROWS,
            "prompt": [question(step, row) for row in range(ROWS)],
            "completion": [text(step, row) for row in range(ROWS)],
            "accuracy_reward": reward[step - 1],
            "advantage": reward[step - 1] - 0.5,
        }
        table |= {name: values[step - 1] for name, values in columns.items()}
        arrays = {name: pa.array(values, from_pandas=True) for name, values in table.items()}
        pq.write_table(pa.table(arrays), folder / "completions" / f"completions_{step:05d}.parquet")
    return folder


def jsonl(file: Path, records: list[dict[str, Any]]) -> Path:
    """One object a line, NaN as Python writes it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return file


def verl(folder: Path, loop: bool = False, **fields: Any) -> Path:
    """``1.jsonl`` and on."""
    reward = rewards()
    for step in range(1, STEPS + 1):
        records = [
            {
                "input": question(step, row),
                "output": text(step, row, loop and row % 2 == 0),
                "gts": "7",
                "score": reward[step - 1, row],
                "step": step,
            }
            | {name: values[step - 1][row] for name, values in fields.items()}
            for row in range(ROWS)
        ]
        jsonl(folder / f"{step}.jsonl", records)
    return folder


def slime(folder: Path, **fields: Any) -> Path:
    """``0.pt`` and on, as ``--save-debug-rollout-data`` leaves them."""
    folder.mkdir(parents=True)
    reward = rewards()
    for step in range(STEPS):
        samples = [
            {
                "group_index": step * PROMPTS + row // GROUP,
                "index": row,
                "prompt": [{"role": "user", "content": question(step, row)}],
                "tokens": [1, 2, 3],
                "response": text(step, row),
                "response_length": 20 + row % 4,
                "label": "7",
                "reward": reward[step, row],
                "loss_mask": None,
                "weight_versions": [str(step)],
                "rollout_log_probs": [-0.5] * (20 + row % 4),
                "status": "completed",
                "metadata": {"a": 1},
                "spec_info": {"spec_accept_token_num": 0},
            }
            | {name: values[step][row] for name, values in fields.items()}
            for row in range(ROWS)
        ]
        torch.save({"rollout_id": step, "samples": samples}, folder / f"{step}.pt")
    return folder


def slime_training(folder: Path, gap: float) -> Path:
    """``--save-debug-train-data``: tensors a sample, trainer and engine ``gap`` nats apart."""
    folder.mkdir(parents=True)
    for step in range(STEPS):
        samples = [
            {
                "sample_index": row,
                "tokens": torch.arange(30),
                "response_lengths": 20,
                "loss_masks": torch.ones(20, dtype=torch.int32),
                "rollout_log_probs": torch.full((20,), -0.7),
                "log_probs": torch.full((20,), -0.7 - gap),
                "advantages": torch.full((20,), 0.5 if row % 2 else -0.5),
                "truncated": 0,
            }
            for row in range(ROWS)
        ]
        torch.save(
            {"format_version": 2, "rollout_id": step, "samples": samples, "dp_shards": []}, folder / f"{step}.pt"
        )
    return folder


def episode(
    step: int, row: int, reward: float | None, finish: str = "stop", start: int | None = None
) -> dict[str, Any]:
    """One line of prime-rl's ``traces.jsonl``."""
    trace = {
        "task": {"type": "T", "data": {}, "key": question(step, row)},
        "agent": {"config": {}, "name": "agent", "trainable": True},
        "nodes": [
            {"message": {"role": "user", "content": question(step, row)}, "sampled": False},
            {"message": {"role": "assistant", "content": text(step, row)}, "sampled": True},
        ],
        "calls": [{"finish_reason": finish, "usage": {"prompt_tokens": 9, "completion_tokens": 30 + row % 3}}],
        "rewards": {"correct": None if reward is None else {"score": reward, "weight": 1.0}},
        "info": {"advantage": 0.5},
        "ok": True,
    }
    judge = {"agent": {"name": "judge", "trainable": False}, "rewards": {}, "nodes": [], "calls": []}
    work = {"type": "train", "step": step, "policy": {"start": step if start is None else start, "end": step}}
    return {
        "id": f"{step}-{row}",
        "env": {"id": "math"},
        "task": trace["task"],
        "group": {"id": f"g{step}-{row // GROUP}"},
        "run": {"type": "train", "id": "r", "work": work},
        "ok": True,
        "traces": [trace, judge],
    }


def prime_rl(folder: Path, **values: Any) -> Path:
    """``rollouts/step_N/train/all/traces.jsonl``; values are keywords of :func:`episode`."""
    reward = rewards()
    for step in range(STEPS):
        place = folder / "rollouts" / f"step_{step}" / "train" / "all" / "traces.jsonl"
        jsonl(place, [episode(step, row, **({"reward": reward[step, row]} | values)) for row in range(ROWS)])
    return folder
