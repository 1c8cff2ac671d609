"""The diagnosis as a person reads it in a terminal."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from trimtab.doctor.diagnosis import Diagnosis, Finding
from trimtab.doctor.symptoms import SYMPTOMS
from trimtab.run.format import number

STYLE = {"critical": "bold red", "warning": "yellow", "ok": "green", "unknown": "dim"}


def render(diagnosis: Diagnosis, console: Console, everything: bool = False) -> None:
    """Print the findings, what they explain, what to do, and with ``everything`` every row of the index."""
    first, last = diagnosis.steps
    console.print(f"{number(diagnosis.rollouts)} rollouts, steps {first} to {last}", highlight=False)
    for note in diagnosis.notes:
        console.print(Text(f"note: {note}", style="dim"))
    if diagnosis.top:
        console.print(_table(diagnosis.top))
    else:
        console.print(Text("Nothing shows in the rows that this log can answer.", style=STYLE["ok"]))
    for finding in diagnosis.hidden:
        causes = ", ".join(SYMPTOMS[row].name for row in finding.explained_by)
        console.print(Text(f"{finding.symptom.name} ({_value(finding)}) is explained by: {causes}", style="dim"))
    for finding in diagnosis.top:
        console.print(_actions(finding))
    if everything:
        console.print(_table([f for f in diagnosis.findings.values() if f.level != "unknown"]))
        for finding in diagnosis.at("unknown"):
            console.print(Text(f"{finding.symptom.row} {finding.symptom.name}: unknown, {finding.reason}", style="dim"))
    else:
        ok, unknown = len(diagnosis.at("ok")), len(diagnosis.at("unknown"))
        console.print(
            Text(f"{ok} rows are fine, {unknown} cannot be read from this log (--all lists them)", style="dim")
        )


def _table(findings: list[Finding]) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for name in ("row", "finding", "value", "interval", "limits", "severity", "since step"):
        table.add_column(name, justify="left" if name == "finding" else "right")
    for finding in findings:
        table.add_row(
            str(finding.symptom.row),
            _what(finding),
            number(finding.value),
            f"{number(finding.low)} to {number(finding.high)}" if finding.low != finding.high else "",
            f"{number(finding.warn)} / {number(finding.critical)}",
            Text(f"{finding.severity:.2f} {finding.level}", style=STYLE[finding.level]),
            "" if finding.since is None else str(finding.since),
        )
    return table


def _what(finding: Finding) -> RenderableType:
    lines = [Text(finding.symptom.name, style="bold"), Text(finding.symptom.indicator, style="dim")]
    if finding.detail:
        lines.append(Text(finding.detail, style="dim"))
    if finding.cleared is not None:
        lines.append(Text(f"showed earlier, cleared at step {finding.cleared}", style="dim"))
    return Group(*lines)


def _value(finding: Finding) -> str:
    since = "" if finding.since is None else f", since step {finding.since}"
    return f"{number(finding.value)}{since}"


def _actions(finding: Finding) -> RenderableType:
    """What acts on a finding, cheapest first."""
    table = Table.grid(padding=(0, 1))
    for _ in range(3):
        table.add_column()
    for remedy in finding.remedies:
        lines = "  ".join(remedy.lines)
        recipes = f"recipe {', '.join(remedy.recipes)}" if remedy.recipes else ""
        shown = "  ".join(part for part in (lines, recipes) if part)
        table.add_row(f"  {remedy.cost}", Text(remedy.action), Text(shown, style="cyan"))
    return Group(Text(f"\nAgainst {finding.symptom.name}:", style="bold"), table)
