"""From severities over time to what is the matter now: which symptoms show, since when, and which explain which."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from trimtab.doctor.log import Float
from trimtab.doctor.symptoms import EXPLAINS

PATIENCE = 5  # readings in a row without a finding that clear a row


@dataclass(frozen=True, slots=True)
class Course:
    """How a row went: its severity now (0 or less: ok), the index of the step where this began, and the worst of it.

    ``now`` is that of the last finding while fewer than five readings in a row were fine. A row that fired and cleared
    has ``now`` at 0 or below and ``ended`` set. NaN: no reading at all.
    """

    now: float
    since: int | None
    peak: float
    ended: int | None = None


def course(severity_S: Float) -> Course:
    """Walk through the readings of a row (S,); steps without a reading (NaN) are passed over."""
    readings = [(int(i), float(severity_S[i])) for i in np.flatnonzero(np.isfinite(severity_S))]
    if not readings:
        return Course(float("nan"), None, float("nan"))
    now, since, fine, ended = readings[0][1], None, 0, None
    for index, value in readings:
        if value > 0:
            since = index if since is None else since
            now, fine, ended = value, 0, None
        elif since is None:
            now = value
        else:
            fine += 1
            if fine >= PATIENCE:
                now, since, fine, ended = value, None, 0, index
    return Course(now, since, max(value for _, value in readings), ended)


def explained_by(firing: Collection[int]) -> dict[int, list[int]]:
    """Every firing row that a firing cause explains, with its causes; a cause that is itself explained still counts."""
    found: dict[int, list[int]] = {}
    for cause in sorted(firing):
        for effect in EXPLAINS.get(cause, ()):
            if effect in firing:
                found.setdefault(effect, []).append(cause)
    return found


def ranked(severity: Mapping[int, float], hidden: Collection[int]) -> list[int]:
    """Visible firing rows, worst first; ties by row number."""
    visible = [row for row, value in severity.items() if value > 0 and row not in hidden]
    return sorted(visible, key=lambda row: (-severity[row], row))
