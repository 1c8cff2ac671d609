"""What is offered exists here, and the lines can be used as they are."""

from __future__ import annotations

import pytest

from trimtab.core import registry
from trimtab.core.recipe import parse_overrides, resolve, shipped
from trimtab.doctor.remedies import LEVERS, part_lines, remedies
from trimtab.doctor.symptoms import SYMPTOMS

FACTS = {"twice_longest": 512, "twice_group": 16}
ROWS = sorted(SYMPTOMS)


def test_every_row_has_levers() -> None:
    assert LEVERS.keys() == SYMPTOMS.keys()
    assert all(LEVERS.values())


@pytest.mark.parametrize("row", ROWS)
def test_cheapest_first(row: int) -> None:
    costs = [remedy.cost for remedy in remedies(row, FACTS)]
    assert costs == sorted(costs)


@pytest.mark.parametrize("row", ROWS)
def test_only_what_is_installed_is_named(row: int) -> None:
    for remedy in remedies(row, FACTS):
        assert all(slug in shipped() for slug in remedy.recipes)
        for line in remedy.lines:
            key, _, value = line.partition("=")
            if key in ("select", "stop", "filter", "reward", "advantage", "objective", "distill", "schedule"):
                assert value in registry.modules()


@pytest.mark.parametrize("row", ROWS)
def test_every_setting_resolves(row: int) -> None:
    """The settings of a lever are overrides that `trimtab train grpo` takes."""
    for lever in LEVERS[row]:
        if lever.settings:
            resolve("grpo", parse_overrides(setting.format_map(FACTS) for setting in lever.settings))


def test_part_lines_name_every_slot() -> None:
    assert part_lines("zero-variance") == ["filter=zero-variance"]
    assert "stop=esr" in part_lines("esr")
    assert part_lines("never-heard-of") == []


def test_a_setting_without_its_fact_is_left_out() -> None:
    with_fact = [line for remedy in remedies(9, FACTS) for line in remedy.lines]
    without = [line for remedy in remedies(9) for line in remedy.lines]
    assert "sampling.max_new_tokens=512" in with_fact
    assert not any(line.startswith("sampling.max_new_tokens") for line in without)
    assert "filter=overlong" in without
