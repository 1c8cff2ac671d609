from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.core.errors import DataError
from trimtab.core.files import read_object, replace_file, write_text


def test_write_text_creates_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for text in ("one", "zwölf"):
        write_text(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [path]


def test_a_failing_write_leaves_the_old_content_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    def fail(temporary: Path) -> None:
        temporary.write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        replace_file(path, fail)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("text", "message"), [("{", "cannot be read as JSON"), ("[1]", "holds a JSON list")])
def test_read_object_names_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(DataError, match=f"c.json.*{message}"):
        read_object(path)
