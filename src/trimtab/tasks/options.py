"""The spelling ``name?key=value&key=value`` shared by tasks and verifiers."""

from __future__ import annotations

import json
from typing import Any

from trimtab.core.errors import invalid


def split_options(text: str, path: str) -> tuple[str, dict[str, Any]]:
    """``chain_sum?min_terms=2`` as ("chain_sum", {"min_terms": 2}).

    A value is read as JSON (numbers, true, lists), else taken as text. ``path`` is the key named in errors.
    """
    name, _, rest = text.partition("?")
    options: dict[str, Any] = {}
    for pair in filter(None, rest.split("&")):
        key, sign, value = pair.partition("=")
        if not (key and sign):
            raise invalid(path, text, "name?key=value&key=value", f"{pair!r} has no '='.")
        if key in options:
            raise invalid(path, text, "each option once", f"{key!r} stands twice.")
        options[key] = _value(value)
    return name, options


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
