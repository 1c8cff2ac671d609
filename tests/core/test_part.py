from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest

from trimtab.core.config import RunConfig
from trimtab.core.errors import ConfigError
from trimtab.core.part import Needs, Part, build_dataclass, knob
from trimtab.core.slots import Filter


@dataclass
class Counted:
    steps: int = 0
    seen: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Sample(Filter):
    """A part with a knob of every kind."""

    State: ClassVar[type] = Counted

    share: float = knob(0.5, "a share", ge=0, lt=1)
    count: int = knob(3, "a count", gt=0, le=10)
    mode: Literal["fast", "slow"] = knob("fast", "a mode")
    flag: bool = knob(False, "a switch")
    name: str | None = knob(None, "a name or none")
    sizes: list[int] = knob(list, "sizes", factory=True)
    table: dict[str, Any] = knob(dict, "a table", factory=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"shar": 0.1},
            r"filter\.sample\.shar: unknown name 'shar'\. Did you mean 'share'\? Allowed: count, flag, mode",
        ),
        ({"share": 1.0}, r"filter\.sample\.share: 1\.0 is not valid\. Allowed: a value < 1\. a share"),
        ({"share": -0.1}, r"filter\.sample\.share: -0\.1 .*>= 0"),
        ({"share": math.nan}, r"filter\.sample\.share: nan .*not NaN"),
        ({"share": "half"}, r"filter\.sample\.share: 'half' is not valid\. Allowed: a number"),
        ({"share": True}, r"filter\.sample\.share: True"),
        ({"count": 0}, r"filter\.sample\.count: 0 .*> 0"),
        ({"count": 11}, r"filter\.sample\.count: 11 .*<= 10"),
        ({"count": 2.0}, r"filter\.sample\.count: 2\.0 .*whole number"),
        ({"mode": "fats"}, r"filter\.sample\.mode: unknown name 'fats'\. Did you mean 'fast'\? Allowed: fast, slow"),
        ({"flag": 1}, r"filter\.sample\.flag: 1 .*true or false"),
        ({"name": 3}, r"filter\.sample\.name: 3 .*text or null"),
        ({"sizes": 3}, r"filter\.sample\.sizes: 3 .*a list"),
        ({"sizes": [1, "x"]}, r"filter\.sample\.sizes\.1: 'x' .*whole number"),
        ({"table": []}, r"filter\.sample\.table: \[\] .*a mapping"),
    ],
)
def test_an_error_names_key_value_and_what_is_allowed(values, message):
    with pytest.raises(ConfigError, match=message):
        Sample.build(values, "filter.sample")


def test_a_part_made_in_code_is_checked_too():
    with pytest.raises(ConfigError, match=r"share: 2.0"):
        Sample(share=2.0)
    with pytest.raises(ConfigError, match="'quick'"):
        Sample(mode="quick")  # type: ignore[arg-type]


def test_a_whole_number_is_a_number():
    part = Sample.build({"share": 0}, "x")
    assert isinstance(part.share, float)
    assert isinstance(Sample(share=0).share, float)


def test_a_knob_may_have_a_bound_of_the_other_number_type():
    @dataclass
    class Mixed:
        n: int = knob(3, "", ge=0.5)
        x: float = knob(3.0, "", gt=2)

    with pytest.raises(ConfigError, match=r"p\.n: 0"):
        build_dataclass(Mixed, {"n": 0}, "p")
    with pytest.raises(ConfigError, match=r"p\.x: 2\.0"):
        build_dataclass(Mixed, {"x": 2}, "p")


def test_validation_does_not_change_what_it_checks():
    sizes = [1, 2]
    part = Sample.build({"sizes": sizes}, "x")
    part.sizes.append(3)
    assert sizes == [1, 2]
    assert Sample().sizes is not Sample().sizes


def test_state_is_saved_restored_and_not_shared_between_parts():
    one, two = Sample(), Sample()
    one.state.steps, one.state.seen = 4, ["a"]
    assert two.state_dict() == {"steps": 0, "seen": []}
    two.load_state_dict(one.state_dict())
    assert two.state == one.state
    with pytest.raises(ConfigError, match=r"\['steps'\], this version has \['seen', 'steps'\]"):
        two.load_state_dict({"steps": 1})


def test_knobs_read_back():
    part = Sample(share=0.25, sizes=[3])
    assert Sample.build(part.knobs(), "x") == part
    assert part.slug == "test-part"  # the name of the file


def test_needs_add_up():
    left = Needs(signals=frozenset({"entropy"}), topk=4, min_group=2)
    right = Needs(topk=2, teacher_topk=8, teacher=True, verdicts=True)
    both = left | right
    assert both == Needs(frozenset({"entropy"}), 4, True, 8, False, 2, True)
    assert left | Needs() == left


def test_a_bare_part_asks_for_nothing_and_does_nothing():
    part = Part()
    assert part.needs() == Needs()
    assert part.metrics() == part.state_dict() == {}
    assert part.required_slots() == ()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"step": 3}, r"settings\.step: unknown name 'step'\. Did you mean 'steps'"),
        ({"sampling": {"temperature": 0.0}}, r"settings\.sampling\.temperature: 0\.0 .*>= 0\.0001"),
        ({"sampling": 3}, r"settings\.sampling: 3 .*a mapping"),
        ({"dtype": "float16"}, r"settings\.dtype: unknown name 'float16'"),
        ({"drop_layers": [1.5]}, r"settings\.drop_layers\.0"),
    ],
)
def test_settings_are_checked_the_same_way(values, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig.build(values)
