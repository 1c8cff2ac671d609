"""Recipes side by side: the same model, data, seeds and budget, one run directory a recipe and seed.

Layout of a comparison::

    runs/<recipe>/seed-<n>/   run directories; finished ones (summary.json) are kept, others go on from their checkpoint
    compare.html
"""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import re
import shutil
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Literal

from trimtab.core.config import RunConfig
from trimtab.core.errors import ConfigError, TrimtabError, invalid
from trimtab.core.files import plain, to_json
from trimtab.core.recipe import Resolved, from_dict, parse_overrides, resolve
from trimtab.run import setup
from trimtab.run.display import Display
from trimtab.run.environment import usable_cores
from trimtab.run.rundir import CONFIG, RunDir

Kind = Literal["tokens", "trained_tokens", "seconds", "steps"]
UNBOUNDED_STEPS = 1_000_000  # where something else bounds the run; only stops one that never spends anything
POINTS = 10  # evaluations at equal shares of the budget, besides before and after
SHARED = ("model", "drop_layers", "task", "data", "eval", "verify", "dtype", "device")  # equal, or not comparable
MANAGED = {"steps": "--steps", "budget": "--tokens, --trained or --seconds", "output.dir": "--out"}
FREE = (
    "recipe.",
    "settings.output.",
    "settings.threads",
)  # may differ between a run that was begun and its continuation

Work = Callable[[dict[str, Any], Path], None]


@dataclass(frozen=True)
class Budget:
    """What every run may spend."""

    kind: Kind
    amount: float

    def overrides(self) -> dict[str, Any]:
        """The settings that hold a run to it."""
        if self.kind == "steps":
            return {"steps": int(self.amount)}
        amount = self.amount if self.kind == "seconds" else int(self.amount)
        return {"steps": UNBOUNDED_STEPS, f"budget.{self.kind}": amount}


@dataclass(frozen=True)
class Variant:
    """A recipe with overrides of its own; its name spells both."""

    name: str
    recipe: str
    overrides: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Planned:
    """One run of a comparison."""

    variant: Variant
    seed: int
    path: Path
    resolved: Resolved

    @property
    def name(self) -> str:
        return f"{self.variant.name}, seed {self.seed}"

    @property
    def finished(self) -> bool:
        return (self.path / "summary.json").is_file()


@dataclass(frozen=True)
class Plan:
    """A whole comparison; the first variant is the baseline."""

    folder: Path
    budget: Budget
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    runs: tuple[Planned, ...]


# ---------------------------------------------------------------- what to run


def plan(
    recipes: Sequence[str], overrides: Sequence[str], budget: Budget, num_seeds: int, folder: Path | None = None
) -> Plan:
    """The runs of a comparison, all resolved and checked before the first one starts.

    Args:
        recipes: slugs or YAML files, each with settings of its own in brackets: ``prune-opd[stop.form=streaming]``.
        overrides: ``key=value`` for all recipes; a list of plain values, ``key=1,2,3``, makes a variant of each.
        budget: what each run may spend.
        num_seeds: runs a variant; seeds count up from the override ``seed`` (0).
        folder: where to keep the runs; None: a name under ``runs/`` that is the same for the same comparison.

    Raises:
        ConfigError: a recipe or an override is wrong, or the recipes differ in what must be equal.
    """
    if num_seeds < 1:
        raise invalid("--seeds", num_seeds, "a whole number >= 1")
    if not budget.amount > 0:
        raise invalid("budget", budget.amount, "an amount above 0")
    variants = tuple(v for recipe in recipes for v in expand(recipe, overrides))
    names = [v.name for v in variants]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"compare: {', '.join(sorted(twice))} given twice. Name each recipe once.")
    if len(variants) < 2:
        raise ConfigError(
            f"compare: {', '.join(names) or 'no recipe'} given, and a comparison takes two or more. Name another "
            "recipe, or sweep a knob: learner.lr=1e-4,2e-4."
        )
    first = int(dict(variants[0].overrides).get("seed", 0))
    seeds = tuple(range(first, first + num_seeds))
    common = {"eval.points": POINTS} | budget.overrides() | {"output.report": False}
    settings = {v.name: resolve(v.recipe, common | dict(v.overrides)).settings for v in variants}
    last = {"eval.max_new_tokens": _evaluation_limit(settings)}
    _check_shared({v.name: resolve(v.recipe, common | dict(v.overrides) | last).settings for v in variants})
    folder = folder or Path("runs") / _folder_name(variants, budget)
    runs = []
    for variant, seed in itertools.product(variants, seeds):
        path = folder / "runs" / _slug(variant.name) / f"seed-{seed}"
        values = common | dict(variant.overrides) | last | {"seed": seed, "output.dir": str(path)}
        runs.append(Planned(variant, seed, path, resolve(variant.recipe, values)))
    for run in runs:
        _check_kept(run)
    return Plan(folder, budget, variants, seeds, tuple(runs))


def expand(item: str, overrides: Sequence[str]) -> Iterator[Variant]:
    """The variants of one recipe: every combination of the values its settings list."""
    found = re.fullmatch(r"([^\[\]]+)\[(.+)\]", item)
    recipe, own = (found[1], found[2].split()) if found else (item, [])
    _refuse_managed([*overrides, *own])
    if any(text.startswith("seed=") for text in own) or any(
        text.startswith("seed=") and "," in text for text in overrides
    ):
        raise ConfigError("seed: every recipe runs with every seed. Use --seeds, and seed=N for the first of them.")
    fixed = {key: value for key, (value, *more) in map(_values, overrides) if not more}
    shown = [_values(text) for text in own] + [pair for pair in map(_values, overrides) if len(pair[1]) > 1]
    for texts in itertools.product(*(values for _, values in shown)):
        chosen = {key: text for (key, _), text in zip(shown, texts, strict=True)}
        label = " ".join(f"{key}={text}" for key, text in chosen.items())
        parsed = parse_overrides(f"{key}={text}" for key, text in {**fixed, **chosen}.items())
        yield Variant(f"{recipe}[{label}]" if label else recipe, recipe, tuple(parsed.items()))


def _values(item: str) -> tuple[str, list[str]]:
    """Key and values of an override; a list in brackets, a mapping and quoted text are one value."""
    key, sign, text = item.partition("=")
    if not sign:
        raise invalid("override", item, "key=value, for example stop.threshold=0.6")
    if text.strip()[:1] in ("[", "{", '"', "'"):
        return key.strip(), [text]
    values = [value.strip() for value in text.split(",")]
    if len(values) > 1 and not all(values):
        raise invalid(key.strip(), text, "values with one comma between two of them")
    return key.strip(), values


def _refuse_managed(overrides: Sequence[str]) -> None:
    for item in overrides:
        key = item.partition("=")[0].strip()
        for managed, flag in MANAGED.items():
            if key == managed or key.startswith(f"{managed}."):
                raise ConfigError(f"{key}: set by the comparison for all its runs. Use {flag}.")


def _evaluation_limit(settings: Mapping[str, RunConfig]) -> int:
    """One response limit for all evaluations, where recipes train under different ones."""
    return max(s.eval.max_new_tokens or s.sampling.max_new_tokens for s in settings.values())


def _check_shared(settings: Mapping[str, RunConfig]) -> None:
    (first, base), *others = settings.items()
    for name, other in others:
        for key in SHARED:
            a, b = getattr(base, key), getattr(other, key)
            if a != b:
                raise ConfigError(
                    f"compare: {key} differs, so that the results could not be compared: {first} has {_text(a)}, "
                    f"{name} has {_text(b)}. Set it for all of them."
                )


def _text(value: Any) -> str:
    return str(vars(value)) if hasattr(value, "__dict__") else repr(value)


def _slug(name: str) -> str:
    """A folder name; a digest keeps names apart that differ in other characters only."""
    clean = re.sub(r"[^A-Za-z0-9._=-]+", "-", name).strip("-.")
    return clean if clean == name else f"{clean[:80]}-{_digest(name)[:6]}"


def _folder_name(variants: Sequence[Variant], budget: Budget) -> str:
    """Without the number of seeds: more seeds are added to the same comparison."""
    names = "-".join(dict.fromkeys(Path(v.recipe).stem for v in variants))
    return f"compare-{names[:60]}-{_digest(to_json([[v.name, v.overrides] for v in variants]) + str(budget))[:8]}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _check_kept(run: Planned) -> None:
    """Refuse to take up a run that was begun with other settings."""
    if not (run.path / CONFIG).is_file():
        return
    kept = dict(_flat(RunDir.open(run.path).config()))
    wanted = dict(_flat(plain(run.resolved.to_dict(), finite=False)))
    for key in sorted(kept.keys() | wanted.keys()):
        if not key.startswith(FREE) and kept.get(key) != wanted.get(key):
            raise ConfigError(
                f"--out: {run.path} holds a run with {key}={kept.get(key)!r} where this comparison has "
                f"{wanted.get(key)!r}. Give another folder, or the settings it was begun with."
            )


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


# ---------------------------------------------------------------- running


def default_jobs(plan: Plan) -> int:
    """As many runs at once as cores where nothing but cores is shared, else one."""
    s = plan.runs[0].resolved.settings
    on_cpu = setup.resolve_device(s.device).type == "cpu" and s.engine.name == "torch"
    return min(usable_cores(), len(plan.runs)) if on_cpu else 1


def execute(
    plan: Plan, jobs: int, *, say: Callable[[Planned, str], None] | None = None, work: Work | None = None
) -> dict[str, str]:
    """Bring every run to its end; returns the errors of those that failed, by name.

    With one job the runs go on in this process, one after another; with more, each in a process of its own with one
    thread. ``say`` hears of each run that ended, with its error or ``""``. ``work`` brings one run to its end.
    """
    say, work = say or (lambda run, error: None), work or train_run
    waiting = [run for run in plan.runs if not run.finished]
    errors: dict[str, str] = {}
    for run, error in _one_by_one(waiting, work) if jobs == 1 else _side_by_side(waiting, jobs, work):
        if error:
            errors[run.name] = error
        say(run, error)
    return errors


def train_run(config: dict[str, Any], path: Path) -> None:
    """Start the run of a resolved configuration, or continue it where its directory stands, and bring it to its end."""
    display = Display(quiet=True)
    _remove_stillborn(path)
    trainer = setup.resume(path, display) if (path / CONFIG).is_file() else setup.start(from_dict(config), display)
    try:
        trainer.run()
    finally:
        trainer.task.close()


def _remove_stillborn(path: Path) -> None:
    """A run that was killed before it had its configuration."""
    if path.is_dir() and {entry.name for entry in path.iterdir()} <= {"checkpoints", "rollouts", "environment.json"}:
        shutil.rmtree(path)


def _one_by_one(runs: Sequence[Planned], work: Work) -> Iterator[tuple[Planned, str]]:
    for run in runs:
        yield run, _attempt(work, run.resolved.to_dict(), run.path)


def _attempt(work: Work, config: dict[str, Any], path: Path) -> str:
    """Do the work; the error in a line, or "". The traceback of an unexpected one is kept beside the run."""
    trace = path.with_name(f"{path.name}.error.txt")
    trace.unlink(missing_ok=True)
    try:
        work(config, path)
    except TrimtabError as error:
        return str(error)
    except Exception as error:
        trace.parent.mkdir(parents=True, exist_ok=True)
        trace.write_text(traceback.format_exc(), encoding="utf-8")
        return f"{type(error).__name__}: {error} (traceback in {trace})"
    return ""


def _side_by_side(runs: Sequence[Planned], jobs: int, work: Work) -> Iterator[tuple[Planned, str]]:
    """A process a run, so that one that dies takes no other with it."""
    context = multiprocessing.get_context("spawn")  # a forked child would inherit torch's threads, and hang
    waiting = list(runs)
    running: dict[int, tuple[Planned, SpawnProcess, Connection]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                config = run.resolved.to_dict()
                config["settings"]["threads"] = 1
                process = context.Process(target=_child, args=(work, config, run.path, theirs))
                process.start()
                theirs.close()
                running[process.sentinel] = (run, process, ours)
            for sentinel in wait(list(running)):
                assert isinstance(sentinel, int)
                run, process, ours = running.pop(sentinel)
                process.join()
                yield run, _outcome(ours, process.exitcode)
    finally:
        for _, process, _ in running.values():
            process.terminate()
        for _, process, _ in running.values():
            process.join()


def _child(work: Work, config: dict[str, Any], path: Path, pipe: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        pipe.send(_attempt(work, config, path))
    except KeyboardInterrupt:
        pipe.send("interrupted")


def _end_with_parent() -> None:
    """A killed comparison leaves no run behind that writes into the directories of its continuation."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _outcome(pipe: Connection, exitcode: int | None) -> str:
    with pipe:
        try:
            error: str = pipe.recv()
        except EOFError:
            return f"its process ended with code {exitcode}; a negative one is the signal that killed it"
    return error
