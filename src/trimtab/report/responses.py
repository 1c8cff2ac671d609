"""What the report reads from the rollouts: lengths, agreement with a teacher, and some responses in full.

Only the columns and steps that are shown are read, step by step, so that a long run fits in memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trimtab.report.curves import is_number, rounded
from trimtab.run.rundir import RunDir

MAX_STEPS = 60  # steps whose token arrays are read for one curve
BINS = 32
EXAMPLE_STEPS, EXAMPLE_GROUPS, SIBLINGS = 3, 3, 8
HEAD, TAIL = 320, 80  # tokens shown of a long response, at its start and at its end
FACTS = (  # columns shown as they are
    *("id", "sample", "length", "stop_reason", "stop_index", "stop_part", "stop_limit", "correct", "status"),
    *("reward", "advantage", "keep", "dropped", "dropped_by"),
)
EXAMPLE_COLUMNS = (
    *FACTS,
    *("step", "prompt_id", "prompt", "answer", "pieces", "source", "token_mask"),
    *("logprobs", "entropy", "overlap", "token_weight", "advantages"),
)


def spaced(steps: Sequence[int], count: int) -> list[int]:
    """At most ``count`` of the steps, evenly spaced, first and last among them."""
    if len(steps) <= count:
        return list(steps)
    return [steps[i] for i in np.linspace(0, len(steps) - 1, count).round().astype(int)]


def length_histogram(run: RunDir) -> dict[str, Any] | None:
    """Response lengths of the first and the last tenth of the steps, in shared bins, as shares."""
    steps = run.rollout_steps()
    tenth = max(1, len(steps) // 10)
    ends = [steps[:tenth], steps[-tenth:]] if len(steps) > 1 else [steps]
    lengths = [run.rollouts(part, ["length"])["length"].to_numpy() for part in ends]
    if not any(map(len, lengths)):
        return None
    top = max(int(x.max()) for x in lengths if len(x)) + 1
    width = -(-top // BINS)
    edges = np.arange(0, top + width, width)
    parts = [
        {"name": _span(part), "count": len(x), "share": (np.histogram(x, edges)[0] / max(1, len(x))).round(5)}
        for part, x in zip(ends, lengths, strict=True)
    ]
    return {"edges": edges, "parts": parts}


def _span(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


# ---------------------------------------------------------------- distillation


def overlap_by_position(run: RunDir) -> dict[str, Any] | None:
    """Mean top-k overlap with the teacher at each response position, first against last third of the steps."""
    steps = run.rollout_steps()
    third = max(1, len(steps) // 3)
    parts = [_overlap(run, part) for part in ([steps[:third], steps[-third:]] if len(steps) > 1 else [steps]) if part]
    return {"parts": parts} if any(part["mean"] for part in parts) else None


def _overlap(run: RunDir, steps: Sequence[int]) -> dict[str, Any]:
    total, count = np.zeros(0), np.zeros(0)
    for step in spaced(steps, MAX_STEPS // 2):
        column = run.rollouts([step], ["overlap"])["overlap"]
        flat, position = _flat_positions(column)
        good = ~np.isnan(flat)
        size = max(len(total), int(position.max()) + 1 if len(position) else 0)
        total, count = (np.pad(x, (0, size - len(x))) for x in (total, count))
        total += np.bincount(position[good], flat[good], minlength=size)
        count += np.bincount(position[good], minlength=size)
    mean = [rounded(float(t / n)) if n else None for t, n in zip(total, count, strict=True)]
    return {"name": _span(steps), "mean": mean, "count": count.astype(int)}


def _flat_positions(column: pa.ChunkedArray) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Values of all lists and the index of each within its list; a null list has none."""
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
    flat = pc.list_flatten(column).to_numpy().astype(np.float64)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)[:-1]]) if len(lengths) else lengths
    return flat, np.arange(len(flat)) - np.repeat(starts, lengths)


def effective_length(run: RunDir, metrics: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Tokens of a response that still count, over steps: as a part logged it, else tokens with a weight above 0."""
    logged = next((name for record in metrics for name in record if name.endswith("effective_length")), None)
    if logged:
        shown = [record for record in metrics if is_number(record.get(logged))]
        steps, values = [record.get("step") for record in shown], [rounded(record[logged]) for record in shown]
        return {"step": steps, "mean": values, "from": f"as {logged.rpartition('/')[0]} reports it"}
    sampled = spaced(run.rollout_steps(), MAX_STEPS)
    found = {step: value for step in sampled if (value := _weighted_tokens(run, step)) is not None}
    return {"step": list(found), "mean": list(found.values()), "from": "tokens with weight above 0"} if found else None


def _weighted_tokens(run: RunDir, step: int) -> float | None:
    column = run.rollouts([step], ["token_weight"])["token_weight"]
    rows = len(column) - column.null_count
    return rounded(float((pc.list_flatten(column).to_numpy() > 0).sum() / rows)) if rows else None


# ---------------------------------------------------------------- responses in full


def examples(run: RunDir) -> list[dict[str, Any]]:
    """Groups to look at: some prompts of the first, the middle and the last step, all siblings side by side."""
    steps = run.rollout_steps()
    found = []
    for step in spaced(steps, EXAMPLE_STEPS):
        rows = run.rollouts([step], EXAMPLE_COLUMNS).to_pylist()
        groups = [list(group) for _, group in groupby(rows, key=lambda row: row["prompt_id"])]
        groups.sort(key=lambda group: len({row["correct"] for row in group}) < 2)  # mixed outcomes first
        found += [_group(group) for group in groups[:EXAMPLE_GROUPS]]
    return found


def _group(rows: list[dict[str, Any]]) -> dict[str, Any]:
    first = rows[0]
    right = sum((row["correct"] or 0) > 0 for row in rows)
    return {
        "name": f"step {first['step']}, prompt {str(first['prompt_id'])[:8]}, {right} of {len(rows)} correct",
        "prompt": first["prompt"] or "",
        "answer": _answer(first["answer"] or ""),
        "more": max(0, len(rows) - SIBLINGS),
        "rollouts": [_rollout(row) for row in rows[:SIBLINGS]],
    }


def _answer(text: str) -> str:
    """An answer that is a text without its quotes, any other as its JSON."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, str) else text


def _rollout(row: dict[str, Any]) -> dict[str, Any]:
    length = len(row["pieces"] or ())
    shown = _shown(length)
    facts = {name: rounded(row[name]) if isinstance(row[name], float) else row[name] for name in FACTS}
    return facts | {
        "pieces": [row["pieces"][i] for i in shown],
        "gap": length - len(shown),
        "head": min(HEAD, length),
        "values": {name: _pick(values, shown) for name, values in _quantities(row, length).items() if values},
        "source": _pick(row["source"], shown) if any(row["source"] or ()) else None,
        "masked": [not kept for kept in _pick(row["token_mask"], shown)] if row["token_mask"] else None,
    }


def _shown(length: int) -> list[int]:
    if length <= HEAD + TAIL:
        return list(range(length))
    return [*range(HEAD), *range(length - TAIL, length)]


def _quantities(row: dict[str, Any], length: int) -> dict[str, Any]:
    """The numbers a token can be coloured by; one that is the same for the whole response is repeated."""
    advantage = row["advantages"] or ([row["advantage"]] * length if row["advantage"] is not None else None)
    return {
        "logprob": row["logprobs"],
        "entropy": row["entropy"],
        "overlap": row["overlap"],
        "weight": row["token_weight"],
        "advantage": advantage,
    }


def _pick(values: Sequence[Any] | None, shown: Sequence[int]) -> list[Any]:
    if not values:
        return []
    picked = [values[i] if i < len(values) else None for i in shown]
    return [float(f"{value:.4g}") if isinstance(value, float) else value for value in picked]
