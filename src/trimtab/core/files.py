"""Files that a kill at any moment leaves with the old content or the new, and JSON that any reader accepts."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from trimtab.core.errors import DataError

TEMPORARY = ".tmp"  # suffix of files being written; leftovers of a kill can be removed


def plain(value: Any, finite: bool = True) -> Any:
    """``value`` in the types of JSON and YAML: numpy and torch scalars as numbers, arrays as lists, paths as text.

    With ``finite`` NaN and infinities become None, which JSON has no word for; YAML has, and keeps them.
    """
    if value is None or isinstance(value, (bool, int)):
        return value if value is None or type(value) in (bool, int) else int(value)
    if isinstance(value, float):
        return None if finite and not math.isfinite(value) else float(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item, finite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, finite) for item in value]
    if isinstance(value, (set, frozenset)):
        return [plain(item, finite) for item in sorted(value, key=str)]
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
        return plain(value.tolist(), finite)
    return str(value)


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON text of ``value``; see :func:`plain`."""
    return json.dumps(plain(value), ensure_ascii=False, allow_nan=False, indent=indent)


@contextmanager
def atomic(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that appears at ``path``, whole, when the block ends without an error."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=TEMPORARY)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())  # mkstemp makes files only the owner can read
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text``, atomically. Lone surrogates, which UTF-8 cannot hold, become question marks."""
    with atomic(path) as file:
        file.write(text.encode("utf-8", "replace"))


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path`` by name, then put it in place at once."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=TEMPORARY)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        with temporary.open("rb") as file:  # without this a power cut may leave the new name with no content
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` by the indented JSON of ``value``, atomically."""
    write_text(path, to_json(value, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises DataError when it is not one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error})") from error


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises DataError when it is no JSON, or not an object."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a JSON {type(content).__name__}, not an object")
    return content


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one JSON object as a line, in one write, and wait until it is on disk.

    A line that a kill left half-written is cut first, so that the new line never grows onto it.
    """
    data = (to_json(record) + "\n").encode("utf-8", "replace")
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        end = _cut_half_line(handle)
        if os.write(handle, data) != len(data):
            os.ftruncate(handle, end)
            raise OSError(f"{path}: the line could not be written whole; the disk may be full")
        os.fsync(handle)
    finally:
        os.close(handle)


def _cut_half_line(handle: int) -> int:
    """Cut what follows the last line feed; the size of the file then."""
    size = os.lseek(handle, 0, os.SEEK_END)
    end, block = size, 4096
    while end > 0:
        start = max(0, end - block)
        os.lseek(handle, start, os.SEEK_SET)
        found = os.read(handle, end - start).rfind(b"\n")
        if found >= 0:
            end = start + found + 1
            break
        end = start
    if end < size:
        os.ftruncate(handle, end)
    return end


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, without a half-written last line; an absent file has none.

    Raises DataError naming file and line for a whole line that is no JSON object.
    """
    if not path.exists():
        return []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    records = []
    for number, line in enumerate(whole.split(b"\n") if whole else [], 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not valid JSON ({error})") from error
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {number}: {type(record).__name__} in place of an object")
        records.append(record)
    return records
