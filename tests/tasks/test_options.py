from __future__ import annotations

import pytest

from trimtab.core.errors import ConfigError
from trimtab.tasks.options import split_options


def test_values_are_read_as_json_else_as_text() -> None:
    name, options = split_options("chain_sum?a=2&b=1e-3&c=true&d=[1,2]&e=x=y&f=", "task")
    assert name == "chain_sum"
    assert options == {"a": 2, "b": 1e-3, "c": True, "d": [1, 2], "e": "x=y", "f": ""}
    assert split_options("plain", "task") == ("plain", {})
    assert split_options("plain?", "task") == ("plain", {})


@pytest.mark.parametrize(
    ("text", "match"), [("x?a", "'a' has no '='"), ("x?=2", "no '='"), ("x?a=1&a=2", "'a' stands twice")]
)
def test_bad_options_name_the_fault(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=rf"task: .*{match}"):
        split_options(text, "task")
