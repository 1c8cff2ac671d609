from __future__ import annotations

import io
import threading
import time
from typing import Any

import pytest
from rich.console import Console

from trimtab.run.display import Display, Figures, RunConsole, evaluation_text, summary_rows
from trimtab.run.format import duration, number, percent, share

SUMMARY = {
    "recipe": "grpo",
    "steps": 40,
    "accuracy_before": 0.31,
    "accuracy_after": 0.62,
    "accuracy_se": 0.02,
    "mean_length_before": 60.24,
    "mean_length_after": 40.0,
    "tokens_generated": 60_000,
    "tokens_saved": 20_000,
    "tokens_trained": 30_000,
    "wall_s": 123.4,
    "run_dir": "runs/[red]x",
    "report": "runs/x/report.html",
}


def metrics(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "tokens_generated": 1000 * step,
        "tokens_saved": 250.0 * step,
        "tokens_trained": 500 * step,
        "reward": 0.25,
        "accuracy": 0.5,
        "length/mean": 55.5,
        "length/limit": 64,
        "seconds/generate": 0.5,
    } | more


def play(display: Display, steps: int = 40, first: int = 1) -> None:
    with display:
        display.plan([("recipe", "grpo [red]"), ("tokens a step", "at most 12k")], steps=steps)
        display.phase("evaluate (before)")
        display.evaluation("before", {"accuracy": 0.31, "accuracy_se": 0.02, "mean_length": 60.2})
        for step in range(first, steps + 1):
            display.phase("generate")
            display.generation_progress(3, 120)
            display.step(metrics(step))
        display.warn("step 3: nothing to train on")
        display.summary(SUMMARY)


def plain_console() -> Console:
    return Console(file=io.StringIO(), width=60)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_redirected_output_is_about_twenty_unwrapped_lines(capsys: pytest.CaptureFixture[str]) -> None:
    console = plain_console()
    play(Display(console=console), steps=400)
    lines = text_of(console).splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 21
    assert steps[0].startswith("step 1/400  reward 0.25  accuracy 50.0%")
    assert steps[-1].startswith("step 400/400")
    assert "recipe: grpo [red]" in lines
    assert "\x1b" not in text_of(console)
    assert capsys.readouterr().err == "trimtab: step 3: nothing to train on\n"


def test_quiet_says_nothing_but_warnings_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    play(Display(quiet=True))
    assert capsys.readouterr() == ("", "trimtab: step 3: nothing to train on\n")


def test_a_terminal_gets_a_panel_and_the_table_at_the_end() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    play(Display(console=console), steps=5)
    text = text_of(console)
    assert "generate (3 rollouts, 120 tokens)" in text
    assert "step 5/5" in text
    assert "step 3: nothing to train on" in text
    tail = text[text.rindex("recipe") :]
    assert "31.0% → 62.0% ± 2.0%" in tail
    assert "20k (25.0%)" in tail
    assert "runs/[red]x" in tail


def test_the_live_thread_has_ended_when_the_display_closes() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    before = set(threading.enumerate())
    own: set[threading.Thread] = set()

    def interrupted() -> None:
        with Display(console=console) as display:
            display.phase("generate")
            own.update(set(threading.enumerate()) - before)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    deadline = time.monotonic() + 5
    while any(thread.is_alive() for thread in own) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert own
    assert not any(thread.is_alive() for thread in own)
    assert text_of(console).endswith("\x1b[?25h")  # the cursor is back


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError("the reader went away")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_broken_output_silences_the_display_and_the_run_goes_on(
    terminal: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    play(Display(console=RunConsole(file=Broken(), force_terminal=terminal)))
    error = capsys.readouterr().err
    assert error.count("the display stopped (BrokenPipeError") == 1
    assert "step 3: nothing to train on" in error


def test_odd_values_never_raise() -> None:
    display = Display(console=plain_console())
    with display:
        display.plan([])
        display.step({})
        display.step({"step": 1, "reward": None, "accuracy": float("nan"), "tokens_generated": None})
        display.step({"step": "x"})
        display.evaluation("after", {})
        display.summary({})
        display.summary({"tokens_saved": "many"})


def test_speed_and_time_left_count_only_what_this_process_did(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 20.0])
    monkeypatch.setattr("trimtab.run.display.time.monotonic", lambda: next(clock))
    figures = Figures()
    figures.steps = 100
    figures.update(metrics(51))  # resumed at step 50, whose total is not known
    assert figures.tokens_per_s is None
    assert figures.seconds_left() == pytest.approx(490)
    figures.update(metrics(52))
    assert figures.tokens_per_s == 2000
    assert figures.seconds_left() == pytest.approx(480)


def test_columns_are_shares_of_the_right_wholes() -> None:
    figures = Figures()
    figures.update(metrics(1))
    shown = dict(figures.columns())
    assert (shown["saved"], shown["trained"], shown["tok/s"]) == ("20.0%", "50.0%", "2k")
    assert shown["held out"] == "–"


def test_an_evaluation_names_what_could_not_be_verified() -> None:
    result = {"accuracy": 0.5, "accuracy_se": float("nan"), "mean_length": 12.0, "truncated_share": 0.25, "failed": 3}
    assert evaluation_text("after", result) == (
        "held out (after): accuracy 50.0%, mean length 12, cut 25.0%, 3 not verified"
    )


def test_the_summary_keeps_numbers_it_has_no_wording_for() -> None:
    rows = dict(summary_rows({"recipe": "grpo", "audit_rate": 0.125, "tokens_generated": 0, "tokens_saved": 0}))
    assert rows["audit rate"] == "0.125"
    assert rows["tokens saved (estimate)"] == "0 (–)"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (9.96, "10.0 s"), (42.4, "42 s"), (59.9, "1 min 00 s"), (3599.9, "1 h 00 min"), (None, "–")],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_numbers() -> None:
    assert [number(x) for x in (0.31234, 12, 12_300_000, -4321.0, float("nan"), None, True)] == [
        *("0.312", "12", "12.3M", "-4.32k", "–", "–", "–")
    ]
    assert [percent(x) for x in (0.3125, None, float("inf"))] == ["31.2%", "–", "–"]
    assert [share(1, 4), share(1, 0), share(None, 4)] == [0.25, None, None]
