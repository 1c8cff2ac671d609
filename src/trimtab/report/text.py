"""Text of unknown origin made safe to show and to embed."""

from __future__ import annotations

import json
import re
from typing import Any

from trimtab.core.files import plain

_DIRECTION = "\u061c\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff"
_CONTROL = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{_DIRECTION}\ud800-\udfff]")
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&"}


def visible(value: object) -> str:
    """Control characters, direction marks and lone surrogates by name, so that no text hides or reorders another's."""
    return _CONTROL.sub(lambda found: f"‹U+{ord(found[0]):04X}›", str(value))


def embed(value: Any) -> str:
    """JSON that may stand in a script element: no character in it can end the element or start a comment.

    Everything outside ASCII is escaped, the line separators U+2028 and U+2029 with it. NaN becomes null.
    """
    return json.dumps(plain(value), ensure_ascii=True, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)
