"""What every part must keep, over all of the registry."""

from __future__ import annotations

import copy
import io
import math
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

sys.path.insert(0, str(Path(__file__).parent))
from drive import AWKWARD, RUNNERS, absent, make_context, make_record, ordinary, run, run_advantage

from trimtab.core.part import check_range
from trimtab.core.recipe import from_dict, resolve, shipped
from trimtab.core.records import Group
from trimtab.core.registry import FOLDERS, all_parts, modules, slots_of
from trimtab.core.slots import SLOTS
from trimtab.run.checkpoint import from_plain, to_plain

ROOT = Path(__file__).resolve().parents[2]
PARTS = [pytest.param(cls, id=slug) for slug, cls in all_parts()]
INERT = [pytest.param(cls, id=slug) for slug, cls in all_parts() if cls.inert is not None]
OWN = {slug: module for slug, module in modules().items() if module.startswith("trimtab.")}


def same(a: Any, b: Any, exact: bool = True) -> None:
    """Assert that two outcomes are equal, to the bit or to float32 rounding."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a:
            same(a[name], b[name], exact)
    elif isinstance(a, np.ndarray):
        np.testing.assert_allclose(a, b, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6)
    elif isinstance(a, torch.Tensor):
        same(a.numpy(), b.numpy(), exact)
    elif isinstance(a, float):
        assert a == b if exact else math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-6)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y, exact)
    elif hasattr(a, "__dataclass_fields__"):
        for f in fields(a):
            same(getattr(a, f.name), getattr(b, f.name), exact)
    else:
        assert a == b


def numbers(outcome: Any) -> list[float]:
    if isinstance(outcome, dict):
        return [x for value in outcome.values() for x in numbers(value)]
    if isinstance(outcome, (list, tuple)):
        return [x for value in outcome for x in numbers(value)]
    if isinstance(outcome, np.ndarray):
        return outcome.astype(np.float64).flatten().tolist()
    return [float(outcome)] if isinstance(outcome, (int, float)) else []


# ------------------------------------------------------------ form


@pytest.mark.parametrize("cls", PARTS)
def test_knobs_are_documented_and_their_defaults_valid(cls):
    cls()
    for f in fields(cls):
        assert f.metadata.get("doc"), f"{cls.slug}.{f.name}: make it with knob(), with a description"
        if isinstance(f.default, (int, float)):
            check_range(f, f.default, f"{cls.slug}.{f.name}")


@pytest.mark.parametrize("cls", PARTS)
def test_the_module_cites_its_source_and_the_class_says_what_it_does(cls):
    assert re.search(r"arXiv|\bours\b|https?://", sys.modules[cls.__module__].__doc__ or ""), cls.__module__
    assert cls.__doc__
    assert not cls.__doc__.startswith(f"{cls.__name__}("), "the docstring is the generated signature"


@pytest.mark.parametrize("cls", PARTS)
def test_slug_is_file_name_is_test_name(cls):
    module = modules()[cls.slug]
    assert cls().slug == module.rpartition(".")[2].replace("_", "-")
    folder, _, name = module.removeprefix("trimtab.").replace(".", "/").rpartition("/")
    assert folder in FOLDERS
    assert (ROOT / "tests" / folder / f"test_{name}.py").exists()


@pytest.mark.parametrize("cls", PARTS)
def test_needs_and_required_slots_are_ones_that_exist(cls):
    part = cls()
    assert set(part.required_slots()) <= set(slots_of(cls)) <= set(SLOTS)
    assert part.needs().min_group >= 1
    assert part.needs() == part.needs()


def test_importing_the_parts_loads_no_torch():
    code = (
        "import sys\n"
        "from trimtab.core import recipe, registry\n"
        "parts = registry.all_parts()\n"
        "assert parts\n"
        "for slug, cls in parts: cls().needs()\n"
        "for name in recipe.shipped(): recipe.resolve(name)\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_every_slot_has_a_runner():
    assert set(RUNNERS) == set(SLOTS)


# ------------------------------------------------------------ behaviour


@pytest.mark.parametrize("cls", PARTS)
def test_the_same_inputs_twice_give_the_same_output(cls):
    groups = ordinary()
    same(run(cls(), groups, make_context(groups)), run(cls(), ordinary(), make_context(ordinary())))


@pytest.mark.parametrize("cls", PARTS)
def test_inputs_are_not_changed(cls):
    groups = ordinary()
    before = copy.deepcopy(groups)
    ctx = make_context(groups)
    part = cls()
    run(part, groups, ctx)
    part.observe(make_record(groups), ctx)
    part.metrics()
    same(groups, before)


@pytest.mark.parametrize("cls", PARTS)
def test_the_order_of_groups_and_rows_does_not_matter(cls):
    if {"select", "allocate"} & set(slots_of(cls)):
        pytest.skip("ties between equal prompts may fall by order")
    groups = ordinary()
    shuffled = [Group(g.prompt, g.rollouts[::-1], g.inclusion) for g in groups[::-1]]
    same(run(cls(), groups, make_context(groups)), run(cls(), shuffled, make_context(groups)), exact=False)


@pytest.mark.parametrize("case", AWKWARD)
@pytest.mark.parametrize("cls", PARTS)
def test_awkward_inputs_give_defined_finite_results(cls, case):
    part = cls()
    groups = AWKWARD[case]()
    ctx = make_context(groups)
    for x in numbers(run(part, groups, ctx)):
        assert math.isfinite(x)
    part.observe(make_record(groups), ctx)
    assert all(math.isfinite(x) for x in part.metrics().values())


@pytest.mark.parametrize("cls", [p for p in PARTS if "advantage" in slots_of(p.values[0])])
def test_advantages_keep_their_dtype(cls):
    groups = ordinary()
    wide = run_advantage(cls(), groups, make_context(groups), torch.float64)
    same(wide, run_advantage(cls(), groups, make_context(groups), torch.float32), exact=False)


@pytest.mark.parametrize("cls", PARTS)
def test_metrics_are_plain_numbers_under_relative_names(cls):
    part, groups = cls(), ordinary()
    part.observe(make_record(groups), make_context(groups))
    for name, value in part.metrics().items():
        assert isinstance(value, (int, float)), name
        assert not name.startswith(part.slug)


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(to_plain(state), buffer)
    buffer.seek(0)
    return from_plain(torch.load(buffer, weights_only=True))


@pytest.mark.parametrize("cls", PARTS)
def test_a_saved_and_loaded_part_continues_the_same(cls):
    part = cls()
    for step in range(2):
        groups = ordinary(step)
        ctx = make_context(groups, step)
        run(part, groups, ctx)
        part.observe(make_record(groups), ctx)
    other = cls()
    other.load_state_dict(through_a_file(part.state_dict()))
    groups = ordinary(2)
    ctx = make_context(groups, 2)
    same(run(part, groups, ctx), run(other, groups, ctx))
    for each in (part, other):
        each.observe(make_record(groups), ctx)
    same(part.state_dict(), other.state_dict())
    same(part.metrics(), other.metrics())


@pytest.mark.parametrize("cls", INERT)
def test_the_inert_setting_is_an_absent_part(cls):
    part = cls(**cls.inert)
    for step in range(2):
        groups = ordinary(step)
        ctx = make_context(groups, step)
        same(run(part, groups, ctx), {slot: absent(slot, groups, ctx) for slot in slots_of(cls)})
        part.observe(make_record(groups), ctx)


# ------------------------------------------------------------ recipes


@pytest.mark.parametrize("name", shipped())
def test_a_recipe_resolves_and_its_configuration_reads_back_to_the_same_object(name):
    resolved = resolve(name)
    again = from_dict(yaml.safe_load(yaml.safe_dump(resolved.to_dict())))
    assert again.to_dict() == resolved.to_dict()
    assert again.parts == resolved.parts
    assert again.settings == resolved.settings


@pytest.mark.parametrize("name", shipped())
def test_a_recipe_also_stands_for_other_models(name):
    resolved = resolve(name, {"model": "smollm2-135m", "teacher": "some/teacher"})
    assert resolved.settings.learner.lr < 1e-4, "the settings of the paper, not those of the pocket models"


@pytest.mark.parametrize("name", shipped())
def test_a_recipe_says_what_it_is(name):
    recipe = resolve(name).recipe
    assert recipe.title
    assert recipe.summary.endswith(".")
    assert recipe.year >= 2017
    assert recipe.maturity != "card", "a recipe with parts has its numbers checked"
    tests = " ".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "methods").glob("test_*.py"))
    assert f'"{name}"' in tests, f"no test in tests/methods resolves {name!r}"
