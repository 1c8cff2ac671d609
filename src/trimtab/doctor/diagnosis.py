"""Put together: log in, diagnosis out. Pure: the same log gives the same diagnosis, in any order of its rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trimtab.doctor.causes import Course, course, explained_by, ranked
from trimtab.doctor.indicators import INDICATORS, Readings, Unknown
from trimtab.doctor.log import Float, Log
from trimtab.doctor.remedies import Remedy, remedies
from trimtab.doctor.statistics import severity
from trimtab.doctor.symptoms import SYMPTOMS, Symptom
from trimtab.doctor.view import View


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the diagnosis. ``level`` is ``critical``, ``warning``, ``ok`` or ``unknown`` (``reason`` says why).

    ``value``, ``low`` and ``high`` are the last reading with its interval; ``severity`` is 0 at the threshold of a
    warning and 1 at the critical one. ``since`` is the first step where it shows, ``cleared`` the step at which an
    earlier finding was over.
    """

    symptom: Symptom
    level: str
    value: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")
    severity: float = float("nan")
    warn: float = float("nan")
    critical: float = float("nan")
    observations: int = 0
    since: int | None = None
    cleared: int | None = None
    peak: float = float("nan")
    detail: str = ""
    reason: str = ""
    explained_by: tuple[int, ...] = ()
    remedies: tuple[Remedy, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, named as in the command's JSON."""
        symptom = self.symptom
        head = {"row": symptom.row, "name": symptom.name, "stage": symptom.stage, "indicator": symptom.indicator}
        names = ("level", "value", "low", "high", "severity", "warn", "critical", "observations", "since", "cleared")
        values = {name: getattr(self, name) for name in (*names, "peak", "detail", "reason")}
        return (
            head
            | values
            | {
                "explained_by": list(self.explained_by),
                "remedies": [remedy.to_dict() for remedy in self.remedies],
            }
        )


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the log says: ``top`` are the visible findings, worst first; ``hidden`` those a finding explains."""

    rollouts: int
    steps: tuple[int, int]
    findings: dict[int, Finding]
    top: list[Finding]
    hidden: list[Finding]
    notes: list[str] = field(default_factory=list)

    def at(self, level: str) -> list[Finding]:
        """Findings of a level, by row."""
        return [finding for finding in self.findings.values() if finding.level == level]

    def to_dict(self) -> dict[str, Any]:
        """Plain values; every row stands under ``rows``."""
        return {
            "rollouts": self.rollouts,
            "steps": list(self.steps),
            "critical": [finding.symptom.row for finding in self.top if finding.level == "critical"],
            "top": [finding.symptom.row for finding in self.top],
            "explained": {str(f.symptom.row): list(f.explained_by) for f in self.hidden},
            "rows": [finding.to_dict() for finding in self.findings.values()],
            "notes": self.notes,
        }


def diagnose(log: Log) -> Diagnosis:
    """Read every row of the index off the log, explain symptoms by causes, and name what acts on what is left."""
    view = View(log)
    findings = {row: _finding(view, symptom) for row, symptom in SYMPTOMS.items()}
    firing = {row: finding.severity for row, finding in findings.items() if finding.severity > 0}
    causes, facts = explained_by(firing), _facts(view)
    for row, finding in findings.items():
        if row in firing:
            findings[row] = replace(finding, explained_by=tuple(causes.get(row, ())), remedies=remedies(row, facts))
    return Diagnosis(
        rollouts=len(log),
        steps=(int(view.steps[0]), int(view.steps[-1])),
        findings=findings,
        top=[findings[row] for row in ranked(firing, causes)],
        hidden=[findings[row] for row in sorted(causes)],
        notes=list(log.notes),
    )


def _facts(view: View) -> dict[str, int]:
    """Numbers that a setting can be made from."""
    facts: dict[str, int] = {}
    if view.log.length_unit == "tokens" and view.log.has("length"):
        facts["twice_longest"] = 2 * int(np.nanmax(view.log.values["length"]))
    if view.grouped:
        facts["twice_group"] = 2 * int(np.bincount(view.group_N).max())
    return facts


def _finding(view: View, symptom: Symptom) -> Finding:
    try:
        readings = INDICATORS[symptom.row](view)
    except Unknown as why:
        return Finding(symptom, "unknown", reason=str(why))
    rows = [_read(view, symptom, reading) for reading in readings]
    known = [row for row in rows if row.level != "unknown"]
    return max(known, key=lambda row: row.severity) if known else rows[0]


def _read(view: View, symptom: Symptom, reading: Readings) -> Finding:
    """A row from one of its indicators."""
    warn, critical = reading.thresholds or (symptom.warn, symptom.critical)
    severity_S: Float = severity(reading.low_S, reading.high_S, warn, critical)
    how = course(severity_S)
    if not np.isfinite(how.now):
        most = int(np.nanmax(reading.count_S, initial=0))
        return Finding(symptom, "unknown", reason=f"too little to read it from ({most} observations in a window)")
    last = int(np.flatnonzero(np.isfinite(severity_S))[-1])
    return Finding(
        symptom,
        level="critical" if how.now >= 1 else "warning" if how.now > 0 else "ok",
        value=float(reading.value_S[last]),
        low=float(reading.low_S[last]),
        high=float(reading.high_S[last]),
        severity=how.now,
        warn=warn,
        critical=critical,
        observations=int(reading.count_S[last]),
        since=_step(view, how),
        cleared=None if how.ended is None else int(view.steps[how.ended]),
        peak=how.peak,
        detail=reading.detail,
    )


def _step(view: View, how: Course) -> int | None:
    return None if how.since is None else int(view.steps[how.since])
