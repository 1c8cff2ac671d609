"""Readers of rollout logs, one module a format: ``find`` says which files are its, ``read`` gives a :class:`Log`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from trimtab.core.errors import ConfigError, DataError, nearest, unknown
from trimtab.doctor.log import FIELDS, Log

FORMATS = ("trimtab", "trl", "verl", "slime", "prime-rl", "jsonl")  # in the order in which they are tried


def read_log(path: Path, kind: str = "auto", mapping: Mapping[str, str] | None = None) -> Log:
    """The rollouts at ``path``.

    Args:
        path: a run directory, a folder of dumps or one file.
        kind: one of :data:`FORMATS`, or ``auto``.
        mapping: our field to the name it has in the log; dots go into nested objects.

    Raises:
        ConfigError: an unknown format or field.
        DataError: nothing can be read there; the message says what was tried.
    """
    mapping = dict(mapping or {})
    for name in mapping:
        if name not in FIELDS:
            raise unknown("--map", name, FIELDS)
    if kind not in ("auto", *FORMATS):
        raise unknown("--format", kind, ("auto", *FORMATS))
    if not path.exists():
        near = nearest(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else None
        hint = f" Did you mean {str(path.parent / near)!r}?" if near else ""
        raise DataError(f"{str(path)!r} does not exist.{hint}")
    tried = FORMATS if kind == "auto" else (kind,)
    for name in tried:
        module = _module(name)
        files = module.find(path)
        if files and (kind != "auto" or name != "jsonl" or mapping):
            log: Log = module.read(path, files, mapping)
            return log
    raise _nothing(path, tried)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}")


def _nothing(path: Path, tried: tuple[str, ...]) -> DataError | ConfigError:
    wanted = "; ".join(f"{name}: {_module(name).WANTED}" for name in tried)
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())[:1]
    if "jsonl" in tried and _module("jsonl").find(path):
        return ConfigError(
            f"{str(path)!r}: JSON lines of an unknown format. Say what the fields are called, for example "
            f"--map step=iteration --map prompt=question --map reward=score. Tried {wanted}."
        )
    seen = f" The first file there is {files[0].name!r}." if files and path.is_dir() else ""
    return DataError(f"{str(path)!r}: no rollout log found. Tried {wanted}.{seen}")
