"""Small files: read with a clear error, replaced as a whole so that a killed run never leaves half of one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trimtab.core.errors import DataError


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then put it in place at once."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb") as file:  # without this a power cut may leave the new name with no content
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Put UTF-8 `text` at `path` at once."""
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        DataError: it is not valid JSON or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a JSON {type(content).__name__}, not an object")
    return content
