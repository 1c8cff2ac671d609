"""Numbers as a person reads them, the same in the terminal and in the report."""

from __future__ import annotations

import math

from trimtab.run.plan import short

MISSING = "–"


def number(value: object, digits: int = 3) -> str:
    """0.31234 as ``0.312``, 12300000 as ``12.3M``; a dash for what is no finite number."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        return MISSING
    if abs(value) >= 1000:
        return ("-" if value < 0 else "") + short(abs(value))
    return str(value) if isinstance(value, int) else f"{value:.{digits}g}"


def percent(value: object) -> str:
    """0.3125 as ``31.2%``."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return MISSING
    return f"{100 * value:.1f}%"


def duration(seconds: object) -> str:
    """Seconds as ``42 s``, ``3 min 20 s`` or ``2 h 05 min``."""
    if not isinstance(seconds, (int, float)) or not math.isfinite(seconds):
        return MISSING
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def share(part: object, whole: object) -> float | None:
    """``part / whole``, None when it does not exist."""
    if not isinstance(part, (int, float)) or not isinstance(whole, (int, float)) or not whole > 0:
        return None
    return part / whole
