"""The HTML report of a run."""

from __future__ import annotations

from trimtab.report.build import build_report, write_report

__all__ = ["build_report", "write_report"]
