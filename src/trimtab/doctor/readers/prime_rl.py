"""Dumps of prime-rl, of three kinds:

- ``rollouts/step_N/train/<subset>/traces.jsonl``: one episode a line, its traces nested in it;
- ``rollouts/step_N/train_rollouts.jsonl``: one rollout a line, in the earlier format of verifiers;
- ``token_exports/step_N/rank_R.jsonl``: what was trained on, one array a field.

Of the subsets ``all`` is read, ``effective`` where it is missing. Names of rewards differ between environments, so
episodes are parsed one by one; the other two kinds are read by column.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from trimtab.core.errors import DataError
from trimtab.doctor.log import Log
from trimtab.doctor.readers.common import (
    check_mapped,
    files_under,
    first_record,
    jsonl_chunks,
    make_log,
    number_in,
    python_column,
)

WANTED = "rollouts/step_N/... traces.jsonl or train_rollouts.jsonl, or token_exports/step_N/rank_R.jsonl"
LINES = 4096  # episodes turned into a chunk at a time
_FLAT = {
    "prompt": "example_id",
    "text": "completion",
    "length": "token_usage.output_tokens",
    "reward": "reward",
    "truncated": "is_truncated",
    "failed": "error",
    "advantage": "advantage",
}
_TOKENS = {
    "step": "step",
    "advantage": "advantages",
    "logprobs": "inference_logprobs",
    "trainer_logprobs": "trainer_logprobs",
    "entropy": "entropy",
    "clipped": "is_masked",
    "loss_mask": "loss_mask",
}
_CUT = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "context_length")


def find(path: Path) -> list[Path]:
    """Files of the first kind that is there; evaluations are left out."""
    traces = [f for f in files_under(path, "traces.jsonl") if "traces" in first_record(f) and "eval" not in f.parts]
    whole = [file for file in traces if file.parent.name == "all"]
    flat = [f for f in files_under(path, "*rollouts.jsonl") if "example_id" in first_record(f) and _trains(f)]
    tokens = [f for f in files_under(path, "rank_*.jsonl") if "inference_logprobs" in first_record(f)]
    return whole or traces or flat or tokens


def _trains(file: Path) -> bool:
    return not file.name.startswith("eval")


def read(path: Path, files: list[Path], mapping: Mapping[str, str]) -> Log:
    """All files of that kind."""
    record = first_record(files[0])
    if "traces" in record:
        if mapping:
            raise DataError("--map: episodes of prime-rl are nested and take no mapping")
        return make_log((chunk, str(file)) for file in files for chunk in _episodes(file))
    check_mapped(mapping, list(record), files[0])
    if "inference_logprobs" in record:
        names = _TOKENS | dict(mapping)
        return make_log((chunk, str(file)) for file in files for chunk in jsonl_chunks(file, names))
    return make_log((chunk, str(file)) for file in files for chunk in _flat(file, mapping))


def _step(file: Path) -> int:
    folder = next((part for part in reversed(file.parts[:-1]) if part.startswith("step_")), "")
    return number_in(folder) or 0


def _flat(file: Path, mapping: Mapping[str, str]) -> Iterator[pa.Table]:
    for chunk in jsonl_chunks(file, _FLAT | dict(mapping)):
        if "failed" not in mapping:
            rows = chunk.num_rows
            failed = chunk.column("failed").is_valid() if "failed" in chunk.column_names else pa.array([False] * rows)
            position = chunk.column_names.index("failed") if "failed" in chunk.column_names else None
            chunk = (
                chunk.append_column("failed", failed)
                if position is None
                else chunk.set_column(position, "failed", failed)
            )
        if "step" not in chunk.column_names:
            chunk = chunk.append_column("step", pa.array([_step(file)] * chunk.num_rows))
        yield chunk


def _episodes(file: Path) -> Iterator[pa.Table]:
    rows: list[dict[str, Any]] = []
    step = _step(file)
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                episode = json.loads(line)
                rows += [_row(episode, trace, step) for trace in episode["traces"] if _trainable(trace)]
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{file}, line {number}: not an episode of prime-rl ({error})") from error
            if len(rows) >= LINES:
                yield _table(rows, file)
                rows = []
    if rows:
        yield _table(rows, file)


def _trainable(trace: Mapping[str, Any]) -> bool:
    return bool(trace.get("agent", {}).get("trainable", True))


def _row(episode: Mapping[str, Any], trace: Mapping[str, Any], step: int) -> dict[str, Any]:
    """One trace. Its reward is the weighted sum; a reward without value means that scoring did not run."""
    task = episode.get("task") or trace.get("task") or {}
    rewards = trace.get("rewards") or {}
    scored = bool(rewards) and all(reward is not None for reward in rewards.values())
    calls = [call for call in trace.get("calls", []) if call.get("error") is None]
    usage = [call["usage"]["completion_tokens"] for call in calls if call.get("usage")]
    policy = ((episode.get("run") or {}).get("work") or {}).get("policy") or {}
    return {
        "step": step,
        "prompt": task.get("key") or task.get("hash") or json.dumps(task, sort_keys=True),
        "group": (episode.get("group") or {}).get("id"),
        "text": "\n".join(_said(node) for node in trace.get("nodes", []) if node.get("sampled")) or None,
        "length": sum(usage) if usage else None,
        "reward": sum(r["score"] * r.get("weight", 1.0) for r in rewards.values()) if scored else None,
        "failed": not scored,
        "truncated": trace.get("stop_condition") in _CUT or bool(calls and calls[-1].get("finish_reason") == "length"),
        "advantage": (trace.get("info") or {}).get("advantage"),
        "version": policy.get("start"),
        "trainer_version": step,
    }


def _said(node: Mapping[str, Any]) -> str:
    content = (node.get("message") or {}).get("content")
    return content if isinstance(content, str) else json.dumps(content) if content else ""


def _table(rows: list[dict[str, Any]], file: Path) -> pa.Table:
    """Columns of which no row has anything are left out."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return pa.table(
        {
            name: python_column(values, name, str(file))
            for name, values in columns.items()
            if any(value is not None for value in values)
        }
    )
