"""The ledger in the report: where the tokens of each step went, and of the whole run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.core.ledger import INFLOW
from trimtab.report.curves import is_number, rounded, thin
from trimtab.run.format import number, percent

DROPPED = "ledger/dropped/"
TRAINED, BUFFERED = "trained", "held back"


def ledger_steps(metrics: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Tokens by fate over steps: trained, each reason to drop (largest first), and the change of the buffer."""
    shown = thin([record for record in metrics if "ledger/trained" in record])
    if not shown:
        return None
    series = {TRAINED: [rounded(record["ledger/trained"]) for record in shown]}
    for reason in drop_reasons(metrics):
        series[reason] = [rounded(record.get(DROPPED + reason, 0)) for record in shown]
    held = [rounded(record.get("ledger/buffered", 0)) for record in shown]
    if any(held):
        series[BUFFERED] = held
    return {"step": [record.get("step") for record in shown], "series": series}


def drop_reasons(metrics: Sequence[dict[str, Any]]) -> list[str]:
    """Reasons for which tokens were dropped, those with most tokens first."""
    tokens = _sums(metrics, DROPPED)
    return sorted(tokens, key=lambda reason: (-tokens[reason], reason))


def flow(ledger: Mapping[str, Any], metrics: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Both sides of the account: what came in, and what became of it, each as rows with tokens and share.

    Read from ledger.json; while a run goes on there is none, and the steps are summed, which lack the parts.
    """
    inflow, outflow = _from_totals(ledger) if ledger else _from_steps(metrics)
    total = sum(tokens for _, _, tokens in inflow)
    if total <= 0:
        return None
    return {"total": number(total), "inflow": _rows(inflow, total), "outflow": _rows(outflow, total)}


Entry = tuple[str, str, float]  # cause, part, tokens


def _from_totals(ledger: Mapping[str, Any]) -> tuple[list[Entry], list[Entry]]:
    inflow = [(name, "", tokens) for name, tokens in ledger.get("inflow", {}).items()]
    drops = [(reason, part, n) for reason, parts in ledger.get("dropped", {}).items() for part, n in parts.items()]
    return inflow, _outflow(ledger.get("trained", 0), drops, ledger.get("buffered", 0))


def _from_steps(metrics: Sequence[dict[str, Any]]) -> tuple[list[Entry], list[Entry]]:
    sums = _sums(metrics, "ledger/")
    drops = [(reason, "", tokens) for reason, tokens in _sums(metrics, DROPPED).items()]
    inflow = [(name, "", sums[name]) for name in INFLOW]
    return inflow, _outflow(sums["trained"], drops, sums["buffered"])


def _sums(metrics: Sequence[dict[str, Any]], prefix: str) -> defaultdict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for record in metrics:
        for name, value in record.items():
            if name.startswith(prefix) and is_number(value):
                sums[name.removeprefix(prefix)] += value
    return sums


def _outflow(trained: float, drops: Sequence[Entry], buffered: float) -> list[Entry]:
    ordered = sorted(drops, key=lambda entry: (-entry[2], entry))
    return [(TRAINED, "", trained), *ordered, (BUFFERED, "", buffered)]


def _rows(entries: Sequence[Entry], total: float) -> list[dict[str, Any]]:
    return [
        {"cause": cause, "part": part, "tokens": number(round(n)), "share": n / total, "percent": percent(n / total)}
        for cause, part, n in entries
        if n > 0
    ]
