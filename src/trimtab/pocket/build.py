"""Train the shipped pocket models from nothing, measure them on held-out problems, and write them with a manifest.

About an hour on two CPU cores; a build that was killed continues where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from trimtab.core.errors import invalid, unknown
from trimtab.core.files import read_object, write_text
from trimtab.model.load import load_weights, read_config, save_pretrained
from trimtab.model.transformer import Transformer
from trimtab.pocket import MODELS
from trimtab.pocket.evaluate import accuracy, heldout
from trimtab.pocket.families import FAMILIES
from trimtab.pocket.tokenizer import CharTokenizer
from trimtab.pocket.train import Run, Step, train

EVALUATED = 512  # held-out problems a family
TERMS = range(2, 7)
LINE_EVERY = 100  # steps between printed lines when there is no terminal

_MIX = {"sums": 8, "euclid": 2, "countdown": 3, "equation": 3}
_LONG_SUMS = {2: 2, 3: 2, 4: 3, 5: 3, 6: 4}
_SHORT_SUMS = {2: 5, 3: 4, 4: 3, 5: 1, 6: 1}

RUNS: dict[str, Run] = {
    "teacher": Run(families=_MIX, terms=_LONG_SUMS, steps=1400),
    # Stopped early, at full learning rate: it often solves the easy problems and hardly ever the hard ones.
    "student": Run(families=_MIX, terms=_SHORT_SUMS, steps=544, lr=2e-3, last_lr=1.0),
    "teacher-b": Run(families={"sums": 1}, terms=_LONG_SUMS, steps=1500, style="B"),
}


def build(
    seed: int = 0,
    out: str | Path = "pocket-weights",
    steps: Mapping[str, int] | None = None,
    models: Sequence[str] = MODELS,
    evaluated: int = EVALUATED,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train ``models``, write each to ``out/<name>`` in float16 and return the manifest, also in ``out/manifest.json``.

    The same seed on the same machine and number of threads gives the same weights. ``steps`` overrides a model's number
    of training steps, ``evaluated`` is held-out problems a family. A model is complete once its manifest entry is
    written; completed models of the same run are kept, a half-trained one continues from its last checkpoint.

    Raises:
        ConfigError: an unknown model, or a number of steps below one.
        DataError: ``out`` holds the checkpoint of another run.
    """
    folder, console = Path(out), console or Console()
    runs = _runs(models, steps or {})
    manifest = _read_manifest(folder)
    for name, run in runs.items():
        if _complete(folder, manifest, name, run, seed):
            console.print(f"{name}: already built")
            continue
        checkpoint = folder / ".checkpoints" / f"{name}.pt"
        with _reporter(console, name) as report:
            model, seconds = train(name, run, seed, checkpoint, report=report)
        write_model(model, folder / name)
        manifest[name] = _entry(folder / name, run, seed, seconds, evaluated)
        write_text(folder / "manifest.json", json.dumps(manifest, indent=2) + "\n")
        console.print(f"{name}: {manifest[name]['heldout_accuracy']}")
    shutil.rmtree(folder / ".checkpoints", ignore_errors=True)
    return manifest


def write_model(model: Transformer, folder: Path) -> None:
    """Write ``model`` in float16 and its tokenizer to ``folder``, in Hugging Face layout."""
    save_pretrained(model, CharTokenizer(), folder, dtype=torch.float16)


def read_model(folder: Path) -> Transformer:
    """The model in ``folder``, in float32."""
    model = Transformer.empty(read_config(folder))
    load_weights(model, folder)
    return model


def measure(model: Transformer, families: Sequence[str], count: int) -> dict[str, Any]:
    """Greedy held-out accuracy per family, and for sums per number of terms."""
    found: dict[str, Any] = {name: round(accuracy(model, heldout(name, count)), 4) for name in families}
    if "sums" in families:
        found["sums by terms"] = {n: round(accuracy(model, heldout("sums", count // 2, terms=n)), 4) for n in TERMS}
    return found


def _runs(models: Sequence[str], steps: Mapping[str, int]) -> dict[str, Run]:
    for name in (*models, *steps):
        if name not in RUNS:
            raise unknown("pocket.build.models", name, RUNS)
    for name, count in steps.items():
        if count < 1:
            raise invalid(f"pocket.build.steps.{name}", count, "a whole number from 1")
    return {name: replace(RUNS[name], steps=steps.get(name, RUNS[name].steps)) for name in models}


def _entry(folder: Path, run: Run, seed: int, seconds: float, evaluated: int) -> dict[str, Any]:
    # The files are measured, not the model in memory: float16 is what users get.
    model = read_model(folder)
    weights = folder / "model.safetensors"
    return {
        "heldout_accuracy": measure(model, [name for name in FAMILIES if name in run.families], evaluated),
        "evaluated": evaluated,
        "parameters": model.num_parameters(),
        "seed": seed,
        "run": _plain(run),
        "seconds": round(seconds, 1),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": version("torch"), "trimtab": version("trimtab")},
        "bytes": weights.stat().st_size,
        "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
    }


def _plain(run: Run) -> dict[str, Any]:
    """The run as JSON gives it back, so that a manifest entry can be compared with it."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(run)))
    return plain


def _complete(folder: Path, manifest: Mapping[str, Any], name: str, run: Run, seed: int) -> bool:
    entry, weights = manifest.get(name), folder / name / "model.safetensors"
    if entry is None or not weights.exists() or (entry["run"], entry["seed"]) != (_plain(run), seed):
        return False
    return bool(hashlib.sha256(weights.read_bytes()).hexdigest() == entry["sha256"])


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    return read_object(path) if path.exists() else {}


@contextmanager
def _reporter(console: Console, name: str) -> Iterator[Callable[[Step], None]]:
    """A progress bar on a terminal, a line now and then elsewhere."""
    if not console.is_terminal:
        yield _line_reporter(console, name)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(name)

        def report(step: Step) -> None:
            described = f"{name} loss {step.loss:.4f}"
            progress.update(task, completed=step.step, total=step.steps, description=described)

        yield report


def _line_reporter(console: Console, name: str) -> Callable[[Step], None]:
    def report(step: Step) -> None:
        if step.step % LINE_EVERY == 0 or step.step == step.steps:
            console.print(f"{name}: step {step.step}/{step.steps}, loss {step.loss:.4f}, {step.seconds:.0f} s")

    return report
