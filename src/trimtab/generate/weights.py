"""Weights handed to another program through the file system."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from trimtab.model.load import save_pretrained
from trimtab.model.tokenizer import Tokenizer
from trimtab.model.transformer import Transformer


class WeightFolders:
    """One Hugging Face folder a version under ``root`` (empty = a temporary folder); only the newest is kept.

    Each version has a folder of its own, so that a reader on another machine cannot see a cached mixture of two. The
    newest stays, as servers remember the path they loaded from.
    """

    def __init__(self, root: str = "") -> None:
        self._scratch = None if root else tempfile.TemporaryDirectory(prefix="trimtab-weights-")
        self._root = Path(self._scratch.name if self._scratch else root).absolute()
        self._newest: Path | None = None

    def save(self, model: Transformer, tokenizer: Tokenizer | None, label: str) -> Path:
        """Write the folder ``label`` and drop the one before it."""
        folder = self._root / label
        save_pretrained(model, tokenizer, folder)
        if self._newest not in (None, folder):
            shutil.rmtree(str(self._newest), ignore_errors=True)
        self._newest = folder
        return folder
