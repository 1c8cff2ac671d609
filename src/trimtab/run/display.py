"""What a run shows in the terminal: a live panel, short lines where output is redirected, or nothing.

A display never stops a run: the first error in it silences it for good and is named once on standard error.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, Self

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trimtab.run.format import MISSING, duration, number, percent, share

LINES = 20  # step lines of a whole run where output is redirected
REFRESH_PER_SECOND = 4


class Figures:
    """The numbers worth a look, kept up to date from the metrics of each step."""

    def __init__(self) -> None:
        self.steps = 0  # 0 = not known
        self.step = 0
        self.phase = ""
        self.done = self.tokens = 0  # of the generation under way
        self.started = time.monotonic()
        self.evaluated: float | None = None
        self.metrics: Mapping[str, Any] = {}
        self.tokens_per_s: float | None = None
        self._generated: float | None = None  # None: a resumed run, whose earlier total is not known yet
        self._ends: deque[tuple[float, int]] = deque([(self.started, 0)], maxlen=LINES)

    def enter(self, phase: str) -> None:
        """A phase begins."""
        self.phase, self.done, self.tokens = phase, 0, 0

    def update(self, metrics: Mapping[str, Any]) -> None:
        """A step is done."""
        self.step, self.metrics = int(metrics.get("step", self.step + 1)), metrics
        before = 0.0 if self.step == 1 else self._generated
        self._generated = metrics.get("tokens_generated")
        if before is not None and self._generated is not None:
            self.tokens_per_s = share(self._generated - before, metrics.get("seconds/generate"))
        if self._ends[-1][1] == 0 and self.step > 1:  # resumed: the steps before are not this process's work
            self._ends[-1] = (self.started, self.step - 1)
        self._ends.append((time.monotonic(), self.step))

    def seconds_left(self) -> float | None:
        """Time left at the pace of the last steps."""
        (start, first), (end, last) = self._ends[0], self._ends[-1]
        if last <= first or not self.steps:
            return None
        return (self.steps - self.step) * (end - start) / (last - first)

    def columns(self) -> list[tuple[str, str]]:
        """Label and text, most wanted first."""
        m, generated = self.metrics, self.metrics.get("tokens_generated")
        saved = m.get("tokens_saved")
        whole = saved + generated if saved is not None and generated is not None else None
        return [
            ("reward", number(m.get("reward"))),
            ("accuracy", percent(m.get("accuracy"))),
            ("held out", percent(self.evaluated)),
            ("length", number(m.get("length/mean"))),
            ("limit", number(m.get("length/limit"))),
            ("tokens", number(generated)),
            ("tok/s", number(self.tokens_per_s)),
            ("saved", percent(share(saved, whole))),
            ("trained", percent(share(m.get("tokens_trained"), generated))),
        ]


def evaluation_text(name: str, result: Mapping[str, Any]) -> str:
    """One line about an evaluation."""
    error = result.get("accuracy_se")
    margin = f" ± {percent(error)}" if isinstance(error, float) and error == error else ""
    parts = [
        f"accuracy {percent(result.get('accuracy'))}{margin}",
        f"mean length {number(result.get('mean_length'))}",
        f"cut {percent(result.get('truncated_share'))}",
    ]
    parts += [f"{result['failed']} not verified"] if result.get("failed") else []
    return f"held out ({name}): {', '.join(parts)}"


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The rows of the closing table; numbers without a wording of their own follow under their name."""
    s, generated = dict(summary), summary.get("tokens_generated")
    rows = [("recipe", str(s.pop("recipe", MISSING))), ("steps", number(s.pop("steps", None)))]
    error = s.pop("accuracy_se", None)
    after = percent(s.pop("accuracy_after", None)) + (f" ± {percent(error)}" if isinstance(error, float) else "")
    rows += [("held-out accuracy", f"{percent(s.pop('accuracy_before', None))} → {after}")]
    lengths = number(s.pop("mean_length_before", None)), number(s.pop("mean_length_after", None))
    rows += [("mean length", " → ".join(lengths)), ("tokens generated", number(s.pop("tokens_generated", None)))]
    saved, trained = s.pop("tokens_saved", None), s.pop("tokens_trained", None)
    whole = saved + generated if saved is not None and generated is not None else None
    rows += [("tokens saved (estimate)", f"{number(saved)} ({percent(share(saved, whole))})")]
    rows += [("tokens trained on", f"{number(trained)} ({percent(share(trained, generated))})")]
    rows += [("wall time", duration(s.pop("wall_s", None)))]
    return rows + [(key.replace("_", " "), v if isinstance(v, str) else number(v)) for key, v in s.items()]


class View(Protocol):
    """One way of showing a run."""

    def plan(self, lines: Sequence[tuple[str, str]]) -> None: ...
    def phase(self) -> None: ...
    def step(self) -> None: ...
    def say(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...
    def table(self, rows: Sequence[tuple[str, str]]) -> None: ...
    def close(self) -> None: ...


class SilentView:
    """Nothing but warnings, on standard error."""

    def plan(self, lines: Sequence[tuple[str, str]]) -> None:
        pass

    def phase(self) -> None:
        pass

    def step(self) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        sys.stderr.write(f"trimtab: {text}\n")

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        pass

    def close(self) -> None:
        pass


class PlainView(SilentView):
    """Short lines, for logs and pipes: about :data:`LINES` steps of a run, and everything that is said."""

    def __init__(self, console: Console, figures: Figures) -> None:
        self._console, self._figures = console, figures

    def plan(self, lines: Sequence[tuple[str, str]]) -> None:
        self.table(lines)

    def step(self) -> None:
        f = self._figures
        if f.steps and f.step % -(-f.steps // LINES) and f.step not in (1, f.steps):
            return
        parts = [f"step {f.step}" + (f"/{f.steps}" if f.steps else "")]
        parts += [f"{label} {text}" for label, text in f.columns() if text != MISSING]
        left = f.seconds_left()
        self.say("  ".join(parts + ([f"left {duration(left)}"] if left else [])))

    def say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        for label, text in rows:
            self.say(f"{label}: {text}")


class LiveView:
    """A panel that is redrawn a few times a second; everything that is said scrolls by above it."""

    def __init__(self, console: Console, figures: Figures) -> None:
        self._console, self._figures = console, figures
        self._live = Live(self, console=console, refresh_per_second=REFRESH_PER_SECOND)

    def plan(self, lines: Sequence[tuple[str, str]]) -> None:
        self.table(lines)

    def phase(self) -> None:
        if not self._live.is_started:
            self._live.start()

    def step(self) -> None:
        self._live.refresh()

    def say(self, text: str) -> None:
        self._console.print(Text(text))

    def warn(self, text: str) -> None:
        self._console.print(Text(text, style="yellow"))

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        table = Table.grid(padding=(0, 2))
        for label, text in rows:
            table.add_row(Text(label, style="cyan"), Text(text))
        self._console.print(table)

    def close(self) -> None:
        self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Group(self._progress(), self._columns())

    def _progress(self) -> Table:
        f = self._figures
        left = f.seconds_left()
        row = Table.grid(padding=(0, 2))
        position = Text(f"step {f.step}" + (f"/{f.steps}" if f.steps else ""), style="bold")
        bar = ProgressBar(total=f.steps or None, completed=f.step, width=28, pulse=not f.steps)
        times = f"{duration(time.monotonic() - f.started)}" + (f", {duration(left)} left" if left is not None else "")
        row.add_row(position, bar, Text(times), Text(self._activity(), style="dim"))
        return row

    def _activity(self) -> str:
        f = self._figures
        return f"{f.phase} ({f.done} rollouts, {number(f.tokens)} tokens)" if f.tokens else f.phase

    def _columns(self) -> Table:
        shown = [(label, text) for label, text in self._figures.columns() if text != MISSING]
        table = Table.grid(padding=(0, 2))
        if shown:
            table.add_row(*(Text(label, style="dim") for label, _ in shown))
            table.add_row(*(Text(text) for _, text in shown))
        return table


class RunConsole(Console):
    """A console whose reader may go away (``| head``) without ending the program, as rich would."""

    def on_broken_pipe(self) -> None:
        """Called while the error is handled. What Python still wants to flush at exit goes nowhere."""
        if self.file is sys.stdout:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


class Display:
    """The display of a run, as a context manager.

    ``quiet``: only warnings, on standard error. Otherwise a live panel on a terminal, and plain lines elsewhere.
    """

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        console = console or RunConsole()
        self._figures = Figures()
        self._view: View = SilentView()
        if not quiet:
            self._view = LiveView(console, self._figures) if console.is_terminal else PlainView(console, self._figures)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._show("close")

    def plan(self, lines: Sequence[tuple[str, str]], steps: int = 0) -> None:
        """The derived plan, label and text a line; ``steps`` the run will have (0: not known)."""
        self._figures.steps = steps
        self._show("plan", lines)

    def phase(self, name: str) -> None:
        """The run enters a phase (generate, update, evaluate ...)."""
        self._figures.enter(name)
        self._show("phase")

    def generation_progress(self, done: int, tokens: int) -> None:
        """Finished requests and tokens so far of the generation under way. Cheap enough for every decoding step."""
        self._figures.done, self._figures.tokens = done, tokens

    def step(self, metrics: Mapping[str, Any]) -> None:
        """A step is done; ``metrics`` as written to metrics.jsonl."""
        try:
            self._figures.update(metrics)
        except (TypeError, ValueError, OverflowError) as error:
            self._silence(error)
        self._show("step")

    def evaluation(self, name: str, result: Mapping[str, Any]) -> None:
        """An evaluation is done; ``result`` as written to evals.jsonl."""
        self._figures.evaluated = result.get("accuracy")
        self._show("say", evaluation_text, name, result)

    def warn(self, message: str) -> None:
        """Something the user should know, shown in every mode."""
        self._show("warn", message)

    def summary(self, summary: Mapping[str, Any]) -> None:
        """The closing table; the live panel ends here."""
        self._figures.enter("")
        self._show("close")
        self._show("table", summary_rows, summary)

    def _show(self, verb: str, *arguments: Any) -> None:
        """The boundary: a closed pipe, a terminal that went away or an odd value must not end a run.

        A callable as first argument makes the text from the others, inside the boundary.
        """
        try:
            if arguments and callable(arguments[0]):
                arguments = (arguments[0](*arguments[1:]),)
            getattr(self._view, verb)(*arguments)
        except Exception as error:
            self._silence(error)

    def _silence(self, error: Exception) -> None:
        broken, self._view = self._view, SilentView()
        with suppress(Exception):  # a panel that cannot even be closed
            broken.close()
        with suppress(OSError):  # standard error is gone too: nobody is left to tell
            self._view.warn(f"the display stopped ({type(error).__name__}: {error}); the run goes on")
