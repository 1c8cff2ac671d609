"""The terminal output."""

from __future__ import annotations

import io

from doctor.synthetic import world
from rich.console import Console

from trimtab.doctor import Log, diagnose
from trimtab.doctor.render import render


def shown(log: Log, everything: bool = False) -> str:
    """What is printed on a wide terminal."""
    console = Console(file=io.StringIO(), width=200)
    render(diagnose(log), console, everything)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_finding_cause_step_and_line_are_printed() -> None:
    text = shown(world(0, "everything_truncated").log())
    assert "truncation" in text
    assert "critical" in text
    assert "all-wrong groups (1, since step 31) is explained by: truncation" in text
    assert "filter=overlong" in text


def test_markup_in_a_note_is_no_markup() -> None:
    log = world(0).log()
    log.notes.append("[bold]x[/bold] [/] [red]")
    assert "[bold]x[/bold] [/] [red]" in shown(log)


def test_all_lists_unknown_rows_with_their_reason() -> None:
    text = shown(world(0).log(), everything=True)
    assert "12 verifier noise: unknown, no audit in the log" in text
    assert "Nothing shows" in text
