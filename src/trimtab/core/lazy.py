"""Modules imported at first use, so that a recipe can be checked and methods listed without loading torch."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


class _LazyModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # introspection (copy, inspect, doctest) must not trigger the import
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


def lazy(name: str) -> Any:
    """A stand-in for module ``name`` that imports it at the first attribute access."""
    return _LazyModule(name)
