"""The embedded default world: a character tokenizer, verifiable problem families, shipped teacher and student weights.

Everything runs offline on two CPU cores. Importing this package loads no torch; :func:`load` does.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.core.errors import unknown
from trimtab.core.files import read_object
from trimtab.pocket.families import DEFAULT_FAMILY, FAMILIES, MARKER, SPLITS, Problem, problem, solution, verify
from trimtab.pocket.tokenizer import CharTokenizer

if TYPE_CHECKING:
    from trimtab.model.transformer import Transformer

MODELS = ("teacher", "student", "teacher-b")


def weights_path(name: str) -> Path:
    """Folder of a shipped model, in Hugging Face layout. ConfigError for an unknown name."""
    if name not in MODELS:
        raise unknown("pocket.model", name, MODELS)
    return Path(str(files("trimtab.pocket") / "weights" / name))


def manifest() -> dict[str, Any]:
    """How each shipped model was trained and how well it does, per model: runs, held-out accuracies, hashes."""
    return read_object(Path(str(files("trimtab.pocket") / "weights" / "manifest.json")))


def load(name: str) -> tuple[Transformer, CharTokenizer]:
    """A shipped model in float32, and its tokenizer. The weights are stored in float16."""
    from trimtab.pocket.build import read_model

    return read_model(weights_path(name)), CharTokenizer()


__all__ = [
    "DEFAULT_FAMILY",
    "FAMILIES",
    "MARKER",
    "MODELS",
    "SPLITS",
    "CharTokenizer",
    "Problem",
    "load",
    "manifest",
    "problem",
    "solution",
    "verify",
    "weights_path",
]
