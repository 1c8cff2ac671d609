"""What the report says in numbers and curves, from config, metrics, evaluations and summary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from trimtab.run.format import MISSING, duration, number, percent, share

MAX_POINTS = 1500  # of a curve; longer ones are thinned evenly
Record = dict[str, Any]


def is_number(value: object) -> TypeGuard[float]:
    """True for what a curve can show; truth values are no numbers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def thin(records: Sequence[Record]) -> list[Record]:
    """At most :data:`MAX_POINTS` of the records, evenly spaced, first and last among them."""
    if len(records) <= MAX_POINTS:
        return list(records)
    return [records[i] for i in np.linspace(0, len(records) - 1, MAX_POINTS).round().astype(int)]


def rounded(value: object) -> float | int | None:
    """A number with six significant digits: more are not seen and only make the file larger."""
    if not is_number(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def latest(evals: Sequence[Record]) -> list[Record]:
    """Evaluations in order; of one that was made twice (a run that was resumed after it) the later."""
    by_key = {(record.get("step"), record.get("name")): record for record in evals}
    return sorted(by_key.values(), key=lambda record: record.get("step") or 0)


def header(config: Mapping[str, Any], environment: Mapping[str, Any]) -> Record:
    """Title line and the facts below it."""
    recipe, settings = _mapping(config.get("recipe")), _mapping(config.get("settings"))
    arxiv = f"arXiv:{recipe['arxiv']}" if recipe.get("arxiv") else ""
    paper = ", ".join(str(item) for item in (recipe.get("paper"), arxiv, recipe.get("year")) if item)
    facts = [
        ("Model", settings.get("model")),
        ("Teacher", settings.get("teacher")),
        ("Task", settings.get("task")),
        ("Seed", settings.get("seed")),
        ("Steps", settings.get("steps")),
        ("Batch", _batch(settings)),
        ("Parts", _parts(_mapping(config.get("parts")))),
    ]
    return {
        "recipe": recipe.get("name") or MISSING,
        "title": recipe.get("title") or recipe.get("name") or "Run",
        "paper": paper,
        "summary": recipe.get("summary") or "",
        "facts": [(label, str(value)) for label, value in facts if value not in (None, "")],
        "made": _made(environment),
    }


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _batch(settings: Mapping[str, Any]) -> str:
    prompts, group = settings.get("prompts_per_step"), settings.get("group_size")
    limit = _mapping(settings.get("sampling")).get("max_new_tokens")
    return f"{prompts} prompts × {group} rollouts, up to {limit} tokens" if prompts and group and limit else ""


def _parts(parts: Mapping[str, Any]) -> str:
    chains = {slot: [_mapping(link).get("part") for link in chain or ()] for slot, chain in parts.items()}
    return "; ".join(f"{slot}: {' › '.join(map(str, chain))}" for slot, chain in chains.items() if chain)


def _made(environment: Mapping[str, Any]) -> str:
    git = _mapping(environment.get("git"))
    commit = f" ({str(git.get('commit'))[:10]}{', modified' if git.get('dirty') else ''})" if git else ""
    names = environment.get("accelerators") or [environment.get("device")]
    memory = environment.get("memory_bytes")
    items = [
        f"Trimtab {environment['trimtab']}{commit}" if environment.get("trimtab") else "",
        f"torch {environment['torch']}" if environment.get("torch") else "",
        f"Python {environment['python']}" if environment.get("python") else "",
        ", ".join(str(name) for name in names if name),
        f"{environment['cores']} cores" if environment.get("cores") else "",
        f"{memory / 2**30:.0f} GiB" if is_number(memory) else "",
        f"started {environment['started']}" if environment.get("started") else "",
    ]
    return " · ".join(item for item in items if item)


def progress(config: Mapping[str, Any], metrics: Sequence[Record], summary: Mapping[str, Any]) -> str:
    """Whether the run is finished and how far it is."""
    done = metrics[-1].get("step") if metrics else 0
    planned = _mapping(config.get("settings")).get("steps")
    if summary:
        return f"finished, {summary.get('steps', done)} steps"
    return f"not finished, {done} of {planned if planned is not None else MISSING} steps"


def cards(metrics: Sequence[Record], evals: Sequence[Record], summary: Mapping[str, Any]) -> list[Record]:
    """The summary cards: label, value, and a line below. A run without a summary shows where it stands."""
    last = {**(evals[-1] if evals else {}), **(metrics[-1] if metrics else {}), **summary}
    generated, saved, trained = (last.get(f"tokens_{name}") for name in ("generated", "saved", "trained"))
    whole = saved + generated if is_number(saved) and is_number(generated) else None
    return [
        _accuracy_card(evals, summary),
        _card("Tokens generated", number(generated), "training rollouts"),
        _card("Tokens saved", number(saved), f"estimate, {percent(share(saved, whole))} of all"),
        _card("Trained share", percent(share(trained, generated)), f"{number(trained)} tokens carried gradient"),
        _card("Wall time", duration(last.get("wall_s")), f"{number(last.get('step', last.get('steps')))} steps"),
    ]


def _card(label: str, value: str, note: str) -> Record:
    return {"label": label, "value": value, "note": "not recorded yet" if value == MISSING else note}


def _accuracy_card(evals: Sequence[Record], summary: Mapping[str, Any]) -> Record:
    before = summary.get("accuracy_before", evals[0].get("accuracy") if evals else None)
    after = summary.get("accuracy_after", evals[-1].get("accuracy") if len(evals) > 1 else None)
    error = summary.get("accuracy_se", evals[-1].get("accuracy_se") if evals else None)
    gain = f"{100 * (after - before):+.1f} points" if is_number(before) and is_number(after) else "held out"
    margin = f", standard error {100 * error:.1f}" if is_number(error) else ""
    return _card("Held-out accuracy", f"{percent(before)} → {percent(after)}", gain + margin)


def learning_curve(metrics: Sequence[Record], evals: Sequence[Record]) -> Record | None:
    """Held-out accuracy, and training accuracy and reward, each against generated tokens."""
    if not metrics and not evals:
        return None
    shown = thin(metrics)
    return {
        "evals": columns(evals, ("tokens_generated", "step", "accuracy", "accuracy_se"))
        | {"name": [str(record.get("name", "")) for record in evals]},
        "train": columns(shown, ("tokens_generated", "step", "accuracy", "reward")),
        "same": all(_same(record.get("accuracy"), record.get("reward")) for record in metrics),
    }


def _same(left: object, right: object) -> bool:
    """Equal up to the rounding of single precision."""
    return math.isclose(left, right, rel_tol=1e-5) if is_number(left) and is_number(right) else left == right


def length_curve(metrics: Sequence[Record]) -> Record | None:
    """Mean length, limit and share of cut responses over steps."""
    names = ("step", "length/mean", "length/limit", "rollouts/truncated_share")
    return columns(thin(metrics), names) if any(is_number(m.get("length/mean")) for m in metrics) else None


def metric_series(metrics: Sequence[Record]) -> Record | None:
    """Every number that was logged, by name."""
    shown = thin(metrics)
    names = sorted({name for record in shown for name, value in record.items() if is_number(value)} - {"step"})
    if not names:
        return None
    return {"step": [m.get("step") for m in shown], "series": {n: [rounded(m.get(n)) for m in shown] for n in names}}


def columns(records: Sequence[Record], names: Sequence[str]) -> dict[str, list[Any]]:
    """The named numbers of all records, None where a record lacks one."""
    return {name: [rounded(record.get(name)) for record in records] for name in names}
