"""The doctor: reads rollout logs of any framework and says what is the matter with the run."""

from __future__ import annotations

from trimtab.doctor.diagnosis import Diagnosis, Finding, diagnose
from trimtab.doctor.log import FIELDS, Log
from trimtab.doctor.readers import FORMATS, read_log

__all__ = ["FIELDS", "FORMATS", "Diagnosis", "Finding", "Log", "diagnose", "read_log"]
