"""The shipped weights do what their manifest says."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open

from trimtab.core.errors import ConfigError
from trimtab.model.load import load_model
from trimtab.pocket import FAMILIES, MODELS, load, manifest, weights_path
from trimtab.pocket.build import RUNS
from trimtab.pocket.evaluate import accuracy, heldout


def test_all_weights_together_stay_under_six_megabytes() -> None:
    files = [path for path in weights_path("teacher").parent.rglob("*") if path.is_file()]
    assert {"teacher", "student", "teacher-b"} <= {path.parent.name for path in files}
    assert sum(path.stat().st_size for path in files) < 6_000_000


@pytest.mark.parametrize("name", MODELS)
def test_files_are_the_ones_the_manifest_describes(name: str) -> None:
    entry, path = manifest()[name], weights_path(name) / "model.safetensors"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == entry["sha256"]
    assert entry["run"]["steps"] == RUNS[name].steps
    with safe_open(path, framework="pt") as file:
        assert {file.get_tensor(key).dtype for key in file.keys()} == {torch.float16}  # noqa: SIM118


# The bounds leave room for the sampling error of 128 problems around the accuracies the manifest gives for 512.
@pytest.mark.parametrize(
    ("name", "low", "high"), [("teacher", 0.96, 1.0), ("student", 0.2, 0.55), ("teacher-b", 0.9, 1.0)]
)
def test_quick_accuracy_on_heldout_sums(name: str, low: float, high: float) -> None:
    model, _ = load(name)
    assert low <= accuracy(model, heldout("sums", 128, seed=1)) <= high


def test_measured_accuracies_are_what_the_defaults_need() -> None:
    measured = {name: manifest()[name]["heldout_accuracy"] for name in MODELS}
    assert measured["teacher"]["sums"] >= 0.97
    assert 0.25 <= measured["student"]["sums"] <= 0.5
    assert measured["teacher-b"]["sums"] >= 0.9
    for family in FAMILIES:
        assert measured["teacher"][family] > measured["student"][family] > 0.0, family


def test_the_student_always_solves_some_and_never_solves_some() -> None:
    by_terms = manifest()["student"]["heldout_accuracy"]["sums by terms"]
    assert by_terms["2"] >= 0.7
    assert by_terms["6"] <= 0.15


def test_the_folders_load_like_any_other_model() -> None:
    model, tokenizer = load_model(weights_path("student"))
    ours, our_tokenizer = load("student")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), ours.parameters(), strict=True))
    assert tokenizer.encode("47+85=") == our_tokenizer.encode("47+85=")
    assert tokenizer.eos_ids == our_tokenizer.eos_ids


def test_unknown_model_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'teacher_b'.*Did you mean 'teacher-b'"):
        load("teacher_b")


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, trimtab.pocket; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
