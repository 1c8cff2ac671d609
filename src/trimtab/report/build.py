"""The HTML report of a run: one file, readable offline, a pure function of the run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trimtab.core.files import write_text
from trimtab.report import accounts, curves, responses
from trimtab.report.page import render
from trimtab.run.rundir import RunDir


def build_report(run_dir: Path) -> str:
    """The report of the run in ``run_dir`` as HTML. Raises DataError when it is no run directory."""
    run = RunDir.open(run_dir)
    return render("report", *collect(run))


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the report to ``out``, or to report.html in the run directory; returns its path."""
    text = build_report(run_dir)
    path = out or RunDir.open(run_dir).report
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    return path


def collect(run: RunDir) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the page says in words, and the data its plots are drawn from."""
    config, metrics, evals, summary = run.config(), run.metrics(), curves.latest(run.evals()), run.summary()
    page: dict[str, Any] = {
        "header": curves.header(config, run.environment()),
        "progress": curves.progress(config, metrics, summary),
        "cards": curves.cards(metrics, evals, summary),
        "flow": accounts.flow(run.ledger(), metrics),
    }
    data: dict[str, Any] = {
        "curve": curves.learning_curve(metrics, evals),
        "histogram": responses.length_histogram(run),
        "lengths": curves.length_curve(metrics),
        "ledger": accounts.ledger_steps(metrics),
        "overlap": responses.overlap_by_position(run),
        "effective": responses.effective_length(run, metrics),
        "metrics": curves.metric_series(metrics),
        "examples": responses.examples(run),
    }
    page["distilled"] = data["overlap"] is not None or data["effective"] is not None
    page["effective_from"] = data["effective"]["from"] if data["effective"] else ""
    return page, data
