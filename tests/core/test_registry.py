from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

from trimtab.core import registry
from trimtab.core.errors import ConfigError
from trimtab.core.slots import Filter, Select


@pytest.fixture(autouse=True)
def fresh():
    registry.modules.cache_clear()
    registry.classes.cache_clear()
    yield
    registry.modules.cache_clear()
    registry.classes.cache_clear()


class Entry:
    def __init__(self, name: str, value: str) -> None:
        self.name, self.value = name, value


def offer(monkeypatch: pytest.MonkeyPatch, *entries: Entry) -> None:
    monkeypatch.setattr(registry.importlib.metadata, "entry_points", lambda group: list(entries))


def test_every_file_is_a_part_and_every_part_a_file():
    root = Path(registry.__file__).parents[1]
    files = {p.stem.replace("_", "-") for f in registry.FOLDERS for p in (root / f).glob("[!_]*.py")}
    assert files == {slug for slug, module in registry.modules().items() if module.startswith("trimtab.")}
    assert {slug for slug, _ in registry.all_parts()} == set(registry.modules())


def test_a_part_of_several_slots_is_one_class():
    assert registry.lookup("stop", "esr", "stop") is registry.lookup("filter", "esr", "filter")
    assert registry.slots_of(registry.lookup("stop", "esr", "stop")) == ["stop", "filter"]


def test_unknown_and_misplaced_parts():
    with pytest.raises(
        ConfigError, match=r"filter\.zero-varianc: unknown name 'zero-varianc'\. Did you mean 'zero-variance'"
    ):
        registry.lookup("filter", "zero-varianc", "filter.zero-varianc")
    with pytest.raises(ConfigError, match=r"select: 'clip' has no part for the slot 'select'; it fills objective"):
        registry.lookup("select", "clip", "select")


def module(monkeypatch: pytest.MonkeyPatch, name: str, **classes: type) -> None:
    made = types.ModuleType(name)
    for key, cls in classes.items():
        cls.__module__ = name
        setattr(made, key, cls)
    monkeypatch.setitem(sys.modules, name, made)


def test_a_third_party_part_is_found_by_the_name_of_its_entry_point(monkeypatch):
    @dataclass(kw_only=True)
    class Mine(Filter):
        """A part."""

    module(monkeypatch, "elsewhere.my_method", Mine=Mine)
    offer(monkeypatch, Entry("mine", "elsewhere.my_method"))
    assert registry.lookup("filter", "mine", "filter") is Mine
    assert Mine().slug == "mine"


def test_two_definitions_of_a_slug_are_refused(monkeypatch):
    offer(monkeypatch, Entry("clip", "elsewhere.clip"))
    with pytest.raises(
        ConfigError, match=r"'clip' is defined by both trimtab\.learn\.objective\.clip and elsewhere\.clip"
    ):
        registry.modules()


def test_a_module_without_a_part_and_one_with_two_for_a_slot(monkeypatch):
    @dataclass(kw_only=True)
    class One(Select):
        """A part."""

    @dataclass(kw_only=True)
    class Two(Select):
        """Another."""

    module(monkeypatch, "elsewhere.none")
    module(monkeypatch, "elsewhere.two", One=One, Two=Two)
    offer(monkeypatch, Entry("none-here", "elsewhere.none"), Entry("two", "elsewhere.two"))
    with pytest.raises(ConfigError, match=r"elsewhere\.none defines no part"):
        registry.lookup("select", "none-here", "select")
    with pytest.raises(ConfigError, match=r"'two' defines several parts for the slot 'select'"):
        registry.lookup("select", "two", "select")
