"""Selectors, allocators and stoppers stand beside each other in one recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from play import run, same_run
from world import tiny

__all__ = ["tiny"]

SELECTORS: dict[str, dict[str, Any]] = {
    "greso": {"select": {"part": "greso", "oversample": 1.0, "max_draws": 2}, "filter": "zero-variance"},
    "dps": {"select": {"part": "dps", "candidates": 2.0}},
}
ALLOCATORS: dict[str, dict[str, Any]] = {
    "vigor": {"allocate": {"part": "vigor", "m0": 0, "rounds": 2}},
    "dars": {"allocate": {"part": "dars", "n_max": 5}},
    "ar3po": {"allocate": {"part": "ar3po", "k": 2, "stages": 2, "reuse": False}},
}


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("selector", SELECTORS)
def test_any_selector_with_any_allocator_and_a_stopper(tmp_path: Path, selector: str, allocator: str) -> None:
    overrides = {"steps": 3, "stop": {"part": "esr", "cutoff": 6}, **SELECTORS[selector], **ALLOCATORS[allocator]}
    first, second = (run(tmp_path / name, "grpo", overrides) for name in "ab")
    same_run(first, second)
    for metrics in first.run_dir.metrics():
        assert metrics["length/max"] <= 6
        assert any(name.startswith(f"{selector}/") for name in metrics)
        assert any(name.startswith(f"{allocator}/") for name in metrics)
