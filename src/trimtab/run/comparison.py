"""What a comparison found: numbers of each recipe over its seeds, paired with the baseline's, and the result file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.core.errors import ConfigError
from trimtab.core.files import write_json
from trimtab.run.compare import Plan, Planned
from trimtab.run.environment import environment
from trimtab.run.rundir import RunDir
from trimtab.run.statistics import (
    LEVEL,
    Estimate,
    estimate,
    first_reach,
    interpolate,
    paired_difference,
    paired_ratio,
    verdict,
)

GRID_POINTS = 41
MADE_WITH = ("trimtab", "python", "torch", "numpy", "platform", "device", "accelerators", "cores", "memory_bytes")
Counts = dict[str, dict[str, int | None]]


@dataclass(frozen=True)
class Finished:
    """A finished run, as its directory tells it."""

    seed: int
    path: Path
    evals: list[dict[str, Any]]  # one a step, in order
    summary: dict[str, Any]
    ledger: dict[str, Any]
    environment: dict[str, Any]

    @classmethod
    def read(cls, run: Planned) -> Finished:
        files = RunDir.open(run.path)
        by_step = {record["step"]: record for record in files.evals()}  # of one made twice, after a kill, the later
        evals = [by_step[step] for step in sorted(by_step)]
        return cls(run.seed, run.path, evals, files.summary(), files.ledger(), files.environment())

    @property
    def points(self) -> list[dict[str, Any]]:
        """Evaluations with an accuracy."""
        return [record for record in self.evals if record.get("accuracy") is not None]

    def column(self, name: str) -> list[float]:
        return [record[name] for record in self.points]

    def reach(self, axis: str, target: float) -> float | None:
        """Tokens or seconds at which the target is first reached; None when it is not (right-censored)."""
        return first_reach(self.column(axis), self.column("accuracy"), target)

    @property
    def last(self) -> dict[str, Any]:
        """The evaluation at the end; empty when none could be verified."""
        points = self.points
        return points[-1] if points else {}


def compare(plan: Plan, errors: Mapping[str, str], target: float | None = None) -> dict[str, Any]:
    """The comparison as plain numbers; ``results`` is keyed by variant.

    ``target`` is an accuracy; None: the mean final accuracy of the baseline. Runs that failed are named under
    ``failed`` and stand in no number.
    """
    runs: dict[str, list[Finished]] = {variant.name: [] for variant in plan.variants}
    for run in plan.runs:
        if run.finished:
            runs[run.variant.name].append(Finished.read(run))
    baseline = plan.variants[0].name
    given = target is not None
    if target is None:
        target = estimate(_column(runs[baseline], "accuracy")).mean
    grid = token_grid(plan, runs)
    return {
        "budget": {"kind": plan.budget.kind, "amount": plan.budget.amount},
        "baseline": baseline,
        "seeds": list(plan.seeds),
        "level": LEVEL,
        "target": {"accuracy": target, "from": "given" if given else f"mean final accuracy of {baseline}"},
        "failed": dict(errors),
        "results": {
            variant.name: {
                "recipe": variant.recipe,
                "overrides": dict(variant.overrides),
                **result(runs[variant.name], runs[baseline], target, grid, variant.name == baseline),
            }
            for variant in plan.variants
        },
    }


def result(
    runs: Sequence[Finished], baseline: Sequence[Finished], target: float | None, grid: Sequence[float], is_base: bool
) -> dict[str, Any]:
    """Everything about one variant."""
    pairs = _paired(runs, baseline)
    difference = paired_difference(*_both(pairs, "accuracy"))
    reached = {
        name: to_target(runs, pairs, axis, target, is_base)
        for name, axis in (("tokens_to_target", "tokens_generated"), ("seconds_to_target", "train_s"))
    }
    return {
        "seeds": [run.seed for run in runs],
        "final_accuracy": _over(runs, "accuracy") | {"values": _column(runs, "accuracy")},
        "difference": None if is_base else difference.to_dict() | {"verdict": verdict(difference)},
        **reached,
        "pass_at_k": pass_at_k(runs),
        "mean_length": _over(runs, "mean_length"),
        "spent": spent(runs),
        "trained_share": _trained_share(runs),
        "waste": waste(runs),
        "curve": curve(runs, grid),
        "runs": [raw(run) for run in runs],
    }


def token_grid(plan: Plan, runs: Mapping[str, Sequence[Finished]]) -> list[float]:
    """Tokens at which all curves are read: up to the budget, else as far as some variant got with all its seeds."""
    if plan.budget.kind == "tokens":
        end = plan.budget.amount
    else:
        ends = [min(r.last.get("tokens_generated", 0) for r in group) for group in runs.values() if group]
        end = max(ends, default=0)
    grid: list[float] = np.linspace(0, end, GRID_POINTS).tolist()
    return grid


def curve(runs: Sequence[Finished], grid: Sequence[float]) -> dict[str, list[float | None]]:
    """Accuracy against tokens; where a seed has no value there is no mean, so that it is always over the same seeds."""
    rows = [interpolate(run.column("tokens_generated"), run.column("accuracy"), grid) for run in runs]
    found = [_all_or_none(values) for values in zip(*rows, strict=True)] or [estimate([])] * len(grid)
    return {
        "tokens": list(grid),
        "mean": [e.mean for e in found],
        "low": [e.low for e in found],
        "high": [e.high for e in found],
    }


def _all_or_none(values: Sequence[float | None]) -> Estimate:
    known = [value for value in values if value is not None]
    return estimate(known if len(known) == len(values) else [])


def to_target(
    runs: Sequence[Finished],
    pairs: Sequence[tuple[Finished, Finished]],
    axis: str,
    target: float | None,
    is_base: bool,
) -> dict[str, Any]:
    """Cost up to the target accuracy, and its ratio to the baseline's.

    A run that never reaches the target is right-censored: all that is known is that it costs more than what was spent.
    Mean and ratio are over the runs and pairs that did reach it, and how many did not is said beside them.
    """
    if target is None:
        return {"by_seed": {}, "reached": 0, "runs": len(runs), **estimate([]).to_dict(), "ratio": None}
    costs = {str(run.seed): run.reach(axis, target) for run in runs}
    reached = [cost for cost in costs.values() if cost is not None]
    found = {"by_seed": costs, "reached": len(reached), "runs": len(runs), **estimate(reached).to_dict()}
    return found | {"ratio": None if is_base else ratio(pairs, axis, target)}


def ratio(pairs: Sequence[tuple[Finished, Finished]], axis: str, target: float) -> dict[str, Any]:
    """Cost to the target as a share of the baseline's, paired by seed, with the pairs that say nothing counted.

    ``at_start`` are pairs of which one had the target before training: a ratio to a cost of 0 does not exist.
    """
    costs = [(a.reach(axis, target), b.reach(axis, target)) for a, b in pairs]
    both = [(a, b) for a, b in costs if a is not None and b is not None]
    positive = [(a, b) for a, b in both if a > 0 and b > 0]
    return paired_ratio([a for a, _ in positive], [b for _, b in positive]).to_dict() | {
        "pairs": len(pairs),
        "baseline_never": sum(a is not None and b is None for a, b in costs),
        "recipe_never": sum(a is None and b is not None for a, b in costs),
        "neither": sum(a is None and b is None for a, b in costs),
        "at_start": len(both) - len(positive),
    }


def pass_at_k(runs: Sequence[Finished]) -> dict[str, dict[str, Any]]:
    """pass@k of the final policies; empty with one sample a problem."""
    sizes = sorted({k for run in runs for k in run.last.get("pass_at_k", {})}, key=int)
    curves = [run.last.get("pass_at_k", {}) for run in runs]
    return {k: estimate([c[k] for c in curves if k in c]).to_dict() for k in sizes}


def spent(runs: Sequence[Finished]) -> dict[str, Any]:
    """What the runs cost, by kind; evaluations are apart, they are no method's cost."""
    sums = {
        "generated_tokens": [run.summary["tokens_generated"] for run in runs],
        "trained_tokens": [run.summary["tokens_trained"] for run in runs],
        "steps": [run.summary["steps"] for run in runs],
        "seconds": [run.evals[-1]["train_s"] for run in runs],
        "evaluation_tokens": [sum(record["tokens"] for record in run.evals) for run in runs],
    }
    for name in ("prefilled", "scored", "probed"):
        sums[f"{name}_tokens"] = [run.ledger.get("cost", {}).get(name, 0) for run in runs]
    for name in runs[0].summary if runs else ():
        if name.endswith("_overspent"):
            sums[name] = [run.summary[name] for run in runs]
    return {name: estimate(values).to_dict() | {"values": values} for name, values in sums.items()}


def waste(runs: Sequence[Finished]) -> list[dict[str, Any]]:
    """Share of the tokens that came in and trained nothing, by cause and part, largest first; mean over seeds."""
    shares: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        came_in = sum(run.ledger["inflow"].values())
        causes = {(reason, part): n for reason, parts in run.ledger["dropped"].items() for part, n in parts.items()}
        causes["held_back", ""] = run.ledger["buffered"]
        for cause, tokens in causes.items():
            if tokens:
                shares.setdefault(cause, []).append(tokens / came_in)
    rows = [
        {"cause": cause, "part": part, "share": math.fsum(values) / len(runs)}
        for (cause, part), values in shares.items()
    ]
    return sorted(rows, key=lambda row: (-row["share"], row["cause"], row["part"]))


def raw(run: Finished) -> dict[str, Any]:
    """A run's own curve and where it lies."""
    names = ("step", "tokens_generated", "tokens_trained", "train_s", "accuracy", "accuracy_se", "mean_length")
    return {
        "seed": run.seed,
        "dir": str(run.path),
        "started": run.environment.get("started"),
        "git": run.environment.get("git"),
        "curve": {name: run.column(name) for name in names},
        "pass_at_k": run.last.get("pass_at_k", {}),
    }


def _trained_share(runs: Sequence[Finished]) -> dict[str, Any]:
    totals = [(run.ledger["trained"], sum(run.ledger["inflow"].values())) for run in runs]
    return estimate([trained / came_in for trained, came_in in totals if came_in]).to_dict()


def _paired(runs: Sequence[Finished], baseline: Sequence[Finished]) -> list[tuple[Finished, Finished]]:
    """Runs of equal seed that both have a final accuracy."""
    by_seed = {run.seed: run for run in baseline if run.last}
    return [(run, by_seed[run.seed]) for run in runs if run.seed in by_seed and run.last]


def _both(pairs: Sequence[tuple[Finished, Finished]], name: str) -> tuple[list[float], list[float]]:
    return [a.last[name] for a, _ in pairs], [b.last[name] for _, b in pairs]


def _column(runs: Sequence[Finished], name: str) -> list[float]:
    """The final value of every run that has one."""
    return [run.last[name] for run in runs if run.last]


def _over(runs: Sequence[Finished], name: str) -> dict[str, Any]:
    return estimate(_column(runs, name)).to_dict()


# ---------------------------------------------------------------- the result file


def unpublishable(plan: Plan, here: Mapping[str, Any]) -> list[str]:
    """Why numbers of this comparison cannot be traced to one state of the code; empty when they can."""
    checkouts = [here.get("git")] + [RunDir.open(r.path).environment().get("git") for r in plan.runs if r.finished]
    reasons = []
    if any(git is None for git in checkouts):
        reasons.append("the commit is unknown: Trimtab does not run from a git checkout of its own")
    if any(git and git["dirty"] for git in checkouts):
        reasons.append("the checkout has changes that are not committed")
    if len({git["commit"] for git in checkouts if git}) > 1:
        reasons.append("the runs are of different commits")
    return reasons


def write_result(folder: Path, plan: Plan, found: Mapping[str, Any], *, allow_dirty: bool) -> Path:
    """Write <folder>/<name of the comparison>.json and return its path. Runs that failed are named in it.

    Raises:
        ConfigError: the numbers cannot be traced to one clean commit, and ``allow_dirty`` is not set; with it the file
            says why it is not to be published.
    """
    here = environment()
    reasons = unpublishable(plan, here)
    if reasons and not allow_dirty:
        raise ConfigError(
            f"result file: refused, {'; '.join(reasons)}. The run directories are kept in {plan.folder}. Commit and "
            "repeat the command with another --out, or give --allow-dirty for a file that says so."
        )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{plan.folder.name}.json"
    record = {
        "name": plan.folder.name,
        "made": datetime.now().astimezone().isoformat(timespec="seconds"),
        "publishable": not reasons,
        "unpublishable_because": reasons,
        "git": here["git"],
        "versions": {name: here[name] for name in MADE_WITH},
        "argv": here["argv"],
        **found,
        "configurations": configurations(plan),
    }
    write_json(path, record)
    return path


def configurations(plan: Plan) -> dict[str, Any]:
    """The resolved configuration of each variant, as its first seed ran it; seeds differ in seed and directory."""
    first = {run.variant.name: run for run in reversed(plan.runs)}
    kept = {name: RunDir.open(run.path).config() for name, run in first.items() if run.finished}
    return {name: kept.get(name) or run.resolved.to_dict() for name, run in first.items()}
