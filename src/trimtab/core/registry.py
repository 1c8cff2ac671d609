"""Finds parts by slug. A part's slug is its file name; the folder is the registry, so adding a file registers it.

Nothing is imported before it is asked for. Third-party packages add modules through the entry-point group
``trimtab.parts``: the entry's name is the slug, its value the module (``mypackage.my_method``).
"""

from __future__ import annotations

import importlib
import importlib.metadata
from functools import cache
from pathlib import Path
from types import ModuleType

from trimtab.core.errors import ConfigError, unknown
from trimtab.core.part import Part
from trimtab.core.slots import SLOTS

ENTRY_POINTS = "trimtab.parts"
FOLDERS = (
    "control/select",
    "control/allocate",
    "control/stop",
    "control/schedule",
    "generate/parts",
    "filter/reward",
    "filter/keep",
    "replay",
    "learn/advantage",
    "learn/objective",
    "learn/correct",
    "learn/distill",
)


def slots_of(cls: type[Part]) -> list[str]:
    """The slots a part class fills, in step order."""
    return [name for name, slot in SLOTS.items() if issubclass(cls, slot)]


@cache
def modules() -> dict[str, str]:
    """Slug to module name, from the folders and the entry points. A slug that stands twice is an error."""
    root = Path(__file__).resolve().parent.parent
    found: dict[str, str] = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).glob("[!_]*.py")):
            _add(found, path.stem.replace("_", "-"), f"trimtab.{folder.replace('/', '.')}.{path.stem}")
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        _add(found, entry.name, entry.value)
    return found


def _add(found: dict[str, str], slug: str, module: str) -> None:
    if found.get(slug, module) != module:
        raise ConfigError(f"parts: {slug!r} is defined by both {found[slug]} and {module}. Rename one of the files.")
    found[slug] = module


@cache
def classes(slug: str) -> tuple[type[Part], ...]:
    """The part classes of one method file, with their slug set."""
    if slug not in modules():
        raise unknown("part", slug, modules())
    return _part_classes(importlib.import_module(modules()[slug]), slug)


def _part_classes(module: ModuleType, slug: str) -> tuple[type[Part], ...]:
    found = []
    for value in vars(module).values():
        if (
            isinstance(value, type)
            and issubclass(value, Part)
            and value.__module__ == module.__name__
            and slots_of(value)
        ):
            value.slug = slug
            found.append(value)
    if not found:
        raise ConfigError(f"parts: module {module.__name__} defines no part. Subclass a slot of trimtab.core.slots.")
    return tuple(found)


def lookup(slot: str, slug: str, path: str) -> type[Part]:
    """The class that fills ``slot`` in the method file ``slug``."""
    if slug not in modules():
        raise unknown(path, slug, modules())
    fitting = [cls for cls in classes(slug) if slot in slots_of(cls)]
    if not fitting:
        fills = sorted({s for cls in classes(slug) for s in slots_of(cls)})
        raise ConfigError(f"{path}: {slug!r} has no part for the slot {slot!r}; it fills {', '.join(fills)}.")
    if len(fitting) > 1:
        raise ConfigError(f"{path}: {slug!r} defines several parts for the slot {slot!r}; one file, one part a slot.")
    return fitting[0]


def all_parts() -> list[tuple[str, type[Part]]]:
    """Every registered (slug, class); imports the modules, not torch."""
    return [(slug, cls) for slug in sorted(modules()) for cls in classes(slug)]
