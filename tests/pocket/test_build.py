from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors import safe_open

from trimtab.core.errors import ConfigError
from trimtab.pocket.build import RUNS, build, read_model

MODELS = ("student",)


def console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=200)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pocket")
    build(seed=3, out=out, steps={"student": 1}, models=MODELS, evaluated=2, console=console())
    return out


def test_a_build_leaves_half_precision_weights_and_a_manifest(built: Path) -> None:
    entry = json.loads((built / "manifest.json").read_text())["student"]
    assert entry["seed"] == 3
    assert entry["run"]["steps"] == 1
    assert set(entry["heldout_accuracy"]) == {*RUNS["student"].families, "sums by terms"}
    with safe_open(built / "student" / "model.safetensors", framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float16}  # noqa: SIM118
    assert sorted(path.name for path in built.iterdir()) == ["manifest.json", "student"]


def test_the_same_seed_builds_the_same_weights_and_another_does_not(built: Path, tmp_path: Path) -> None:
    first = json.loads((built / "manifest.json").read_text())["student"]["sha256"]
    for seed, same in ((3, True), (4, False)):
        again = build(seed, tmp_path / str(seed), {"student": 1}, MODELS, evaluated=1, console=console())
        assert (again["student"]["sha256"] == first) is same


def test_a_complete_model_is_kept(built: Path) -> None:
    screen = console()
    build(seed=3, out=built, steps={"student": 1}, models=MODELS, evaluated=2, console=screen)
    assert "already built" in screen.file.getvalue()  # type: ignore[attr-defined]


def test_float16_weights_are_read_as_float32(built: Path) -> None:
    assert {p.dtype for p in read_model(built / "student").parameters()} == {torch.float32}


def test_wrong_names_and_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'teachr'.*Did you mean 'teacher'"):
        build(out=tmp_path, models=("teachr",))
    with pytest.raises(ConfigError, match=r"steps\.student: 0"):
        build(out=tmp_path, steps={"student": 0}, models=MODELS)
