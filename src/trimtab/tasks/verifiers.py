"""Verifiers: what a response is worth. Named ones for files and data sets, and the door for a user's own function.

A verifier answers with a number in [0, 1], with ``(number, well_formed)`` or with a :class:`Verdict`; :func:`judge`
turns whatever comes back, exceptions included, into a Verdict.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar

from trimtab.core.errors import ConfigError, invalid, missing_extra, nearest, unknown
from trimtab.core.part import build_dataclass, knob
from trimtab.core.records import Prompt, Status, Verdict
from trimtab.tasks.answers import final_answer, last_number, normalise, same_number
from trimtab.tasks.options import split_options

Score = float | tuple[float, bool] | Verdict
KEY = "data.verifier"
_DETAIL = 300  # characters kept of a reason


class Verifier:
    """Base of verifiers. Instances are pickled to a worker process unless ``trusted``."""

    trusted: ClassVar[bool] = False  # bounded time on any text, never raises: may run inside the trainer
    needs_answer: ClassVar[bool] = True

    def prepare(self) -> None:
        """Load what calls need; runs once in each worker, outside the time limit of a call."""

    def check(self, answer: Any) -> str:
        """Why no response could ever match this reference answer, or "" when one can."""
        return ""

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """What the response ``text`` to ``prompt`` is worth."""
        raise NotImplementedError


def judge(verifier: Callable[[Prompt, str], Any], prompt: Prompt, text: str, graded: bool) -> Verdict:
    """The verdict on one response. A verifier that raises or answers nonsense gives a failed verdict, never a zero."""
    began = time.perf_counter()
    try:
        verdict = to_verdict(verifier(prompt, text), graded)
    except (Exception, SystemExit) as error:  # the one boundary between foreign code and records
        verdict = Verdict(None, Status.ERROR, reason(error))
    verdict.seconds = time.perf_counter() - began
    return verdict


def to_verdict(result: Any, graded: bool) -> Verdict:
    """A verifier's answer as a Verdict. Raises ValueError, naming the value, for what is not a score.

    Without ``graded`` only a score of exactly 1 is correct, whatever partial credit the verifier gives.
    """
    components: dict[str, float] = {}
    detail, status = "", Status.OK
    if isinstance(result, Verdict):
        detail, status = first_line(result.detail), result.status
        if status.failed:
            return Verdict(None, status, detail)
        components = {name: _number(v, f"component {name!r}", bounded=False) for name, v in result.components.items()}
        result = result.correct
    elif isinstance(result, tuple) and len(result) == 2 and isinstance(_plain(result[1]), bool):
        result, well_formed = result
        status = Status.OK if well_formed else Status.MALFORMED
    score = _number(result)
    return Verdict(score if graded else float(score == 1.0), status, detail, components)


def _plain(value: Any) -> Any:
    """A numpy or torch scalar as a Python number."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value


def _number(value: Any, what: str = "the verifier", bounded: bool = True) -> float:
    plain = _plain(value)
    allowed = "a number in [0, 1], (number, well_formed) or a Verdict" if bounded else "a finite number"
    if not isinstance(plain, Real):
        raise ValueError(f"{what} returned {type(value).__name__} {str(value)[:80]!r}, expected {allowed}")
    number = float(plain)
    if not (0.0 <= number <= 1.0 if bounded else abs(number) < float("inf")):
        raise ValueError(f"{what} returned {number}, expected {allowed}")
    return number


def reason(error: BaseException) -> str:
    """One line that says what was raised."""
    return first_line(f"{type(error).__name__}: {error}")


def first_line(text: str) -> str:
    """The first line that is not blank, cut to a length fit for a log."""
    return text.strip().partition("\n")[0][:_DETAIL]


def alternatives(answer: Any) -> list[str]:
    """The acceptable answers as text: a list means any of them."""
    values: Sequence[Any] = answer if isinstance(answer, (list, tuple)) else [answer]
    return [str(value) for value in values]


@dataclass(frozen=True, kw_only=True)
class Exact(Verifier):
    """The marked final answer, or the whole response, equals the reference after normalisation."""

    trusted: ClassVar[bool] = True

    def check(self, answer: Any) -> str:
        return _blank(answer)

    def __call__(self, prompt: Prompt, text: str) -> Score:
        found = _wanted(text)
        return float(bool(found) and found in map(_wanted, alternatives(prompt.answer))), bool(found)


def _wanted(text: str) -> str:
    """Normalised final answer; references may be marked too (``... #### 42``)."""
    marked = final_answer(text)
    return normalise(text if marked is None else marked)


def _blank(answer: Any) -> str:
    return "" if any(_wanted(one) for one in alternatives(answer)) else "the answer is blank"


@dataclass(frozen=True, kw_only=True)
class Number(Verifier):
    """The last number of the final answer (or of the response) equals that of the reference."""

    trusted: ClassVar[bool] = True
    tolerance: float = knob(1e-6, "relative difference allowed unless both numbers are whole", ge=0, lt=1)

    def check(self, answer: Any) -> str:
        unread = [one for one in alternatives(answer) if _final_number(one) is None]
        return f"the answer {unread[0][:80]!r} holds no number" if unread else ""

    def __call__(self, prompt: Prompt, text: str) -> Score:
        found = _final_number(text)
        if found is None:
            return 0.0, False
        wanted = (_final_number(one) for one in alternatives(prompt.answer))
        return float(any(w is not None and same_number(found, w, self.tolerance) for w in wanted)), True


def _final_number(text: str) -> Any:
    marked = final_answer(text)
    return last_number(text if marked is None else marked)


@dataclass(frozen=True, kw_only=True)
class Contains(Verifier):
    """The reference stands somewhere in the response, as whole words, after normalisation."""

    trusted: ClassVar[bool] = True

    def check(self, answer: Any) -> str:
        return _blank(answer)

    def __call__(self, prompt: Prompt, text: str) -> Score:
        text = normalise(text)
        return float(any(_has_words(text, _wanted(one)) for one in alternatives(prompt.answer))), bool(text)


def _has_words(text: str, words: str) -> bool:
    start = text.find(words) if words else -1
    while start >= 0:
        before, after = text[start - 1 : start], text[start + len(words) : start + len(words) + 1]
        if not before.isalnum() and not after.isalnum():
            return True
        start = text.find(words, start + len(words))
    return False


@dataclass(frozen=True, kw_only=True)
class Regex(Verifier):
    """The reference is a regular expression found in the response. It may backtrack without end: not trusted."""

    def check(self, answer: Any) -> str:
        try:
            for one in alternatives(answer):
                re.compile(one)
        except re.error as error:
            return f"the answer is no regular expression ({error})"
        return ""

    def __call__(self, prompt: Prompt, text: str) -> Score:
        return float(any(re.search(one, text) for one in alternatives(prompt.answer)))


@dataclass(frozen=True, kw_only=True)
class Choice(Verifier):
    """The letter of a multiple choice: marked, else after the word "answer", else the last one standing alone."""

    trusted: ClassVar[bool] = True
    letters: str = knob("ABCDEFGH", "letters on offer")

    def __post_init__(self) -> None:
        if not re.fullmatch("[A-Z]+", self.letters):
            raise invalid(f"{KEY}.letters", self.letters, "capital letters")

    def check(self, answer: Any) -> str:
        unread = [one for one in alternatives(answer) if self._letter(one) is None]
        return f"the answer {unread[0][:80]!r} holds none of the letters {self.letters}" if unread else ""

    def __call__(self, prompt: Prompt, text: str) -> Score:
        found = self._letter(text)
        return float(found is not None and found in map(self._letter, alternatives(prompt.answer))), found is not None

    def _letter(self, text: str) -> str | None:
        said, alone = _letter_patterns(self.letters)
        marked = final_answer(text)
        if marked is not None:
            return _last_letter(alone, marked)
        return _last_letter(said, text) or _last_letter(alone, text)


@cache
def _letter_patterns(letters: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """A letter after the word "answer", and any letter standing alone; bounded repeats keep the time linear."""
    letter = rf"[(*\[]{{0,3}}([{letters}])(?!\w)"
    return re.compile(rf"(?i:answer)\s{{0,3}}(?i:is|:|=)?:?\s{{0,3}}{letter}"), re.compile(rf"(?<!\w){letter}")


def _last_letter(pattern: re.Pattern[str], text: str) -> str | None:
    letter = None
    for match in pattern.finditer(text):
        letter = match[1]
    return letter


@dataclass(frozen=True, kw_only=True)
class Math(Verifier):
    """Symbolic equality by the package ``math-verify`` (LaTeX, expressions, sets, intervals)."""

    def __post_init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise missing_extra("math-verify", "tasks", "The verifier 'math'")

    def prepare(self) -> None:
        importlib.import_module("math_verify")

    def check(self, answer: Any) -> str:
        return _blank(answer)

    def __call__(self, prompt: Prompt, text: str) -> Score:
        from math_verify import verify

        found = _parse_math(text)
        gold = [_parse_math(one, bare=True) for one in alternatives(prompt.answer)]
        if not all(gold):
            raise ValueError(f"math-verify cannot read the reference answer {str(prompt.answer)[:80]!r}")
        return float(any(verify(one, found, timeout_seconds=None) for one in gold)), bool(found)


def _parse_math(text: str, bare: bool = False) -> list[Any]:
    """Expressions of the marked final answer, else of the whole text, where ``bare`` says that it is nothing but one.

    math-verify's own time limits are off: they set the process's alarm, and the service has a limit of its own.
    """
    from math_verify import parse

    marked = final_answer(text)
    if marked is None and not bare:
        return list(parse(text, parsing_timeout=None))
    expression = text if marked is None else marked
    boxed = parse(f"\\boxed{{{expression}}}", parsing_timeout=None)  # else "x^2 + 1" would be read as its last number
    return list(boxed) or list(parse(expression, parsing_timeout=None))


@dataclass(frozen=True)
class UserFunction(Verifier):
    """A user's ``function(prompt, text)`` out of a module or a file, imported in the worker only."""

    needs_answer: ClassVar[bool] = False
    target: str  # "python:module:function" or "/path/to/file.py:function"
    search: tuple[str, ...] = ()  # folders to import from besides sys.path

    def prepare(self) -> None:
        self.load()

    def load(self) -> Callable[[Prompt, str], Any]:
        """The function. Raises ConfigError when the module has no such function, and whatever importing it raises."""
        cached = _loaded.get(self.target)
        if cached is None:
            source, _, name = self.target.removeprefix("python:").rpartition(":")
            module = self._module(source)
            value: Any = getattr(module, name, None)
            if not callable(value):
                raise unknown(KEY, name, [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")])
            cached = _loaded[self.target] = value
        return cached

    def _module(self, source: str) -> Any:
        sys.path.extend(folder for folder in self.search if folder not in sys.path)
        if not source.endswith(".py"):
            return importlib.import_module(source)
        spec = importlib.util.spec_from_file_location(f"trimtab_user_{Path(source).stem}", source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses and pickle look their module up
        spec.loader.exec_module(module)
        return module

    def __call__(self, prompt: Prompt, text: str) -> Score:
        result: Score = self.load()(prompt, text)
        return result


_loaded: dict[str, Callable[[Prompt, str], Any]] = {}  # per process

VERIFIERS: dict[str, type[Verifier]] = {
    "exact": Exact,
    "number": Number,
    "contains": Contains,
    "regex": Regex,
    "choice": Choice,
    "math": Math,
}


def make_verifier(spec: str) -> Verifier:
    """A verifier from its spelling: a name, ``name?option=value``, ``python:module:function`` or ``file.py:function``.

    Raises ConfigError for an unknown name (with the nearest), a bad option or a missing file.
    """
    if spec.startswith("python:"):
        if not re.fullmatch(r"python:[\w.]+:\w+", spec):
            raise invalid(KEY, spec, "python:module:function")
        return UserFunction(spec, (str(Path.cwd()),))
    file, found, function = spec.rpartition(".py:")
    if found:
        return _user_file(Path(file + ".py"), function)
    name, options = split_options(spec, KEY)
    if name not in VERIFIERS:
        hint = "Or python:module:function, or file.py:function, for your own."
        raise unknown(KEY, name, VERIFIERS, hint)
    verifier: Verifier = build_dataclass(VERIFIERS[name], options, KEY)
    return verifier


def _user_file(path: Path, function: str) -> Verifier:
    path = path.expanduser().resolve()
    if not path.is_file():
        near = nearest(path.name, [p.name for p in path.parent.glob("*.py")]) if path.parent.is_dir() else None
        raise ConfigError(f"{KEY}: no file {str(path)!r}." + (f" Did you mean {near!r}?" if near else ""))
    if not function.isidentifier():
        raise invalid(KEY, f"{path}:{function}", "file.py:function")
    return UserFunction(f"{path}:{function}", (str(path.parent),))
