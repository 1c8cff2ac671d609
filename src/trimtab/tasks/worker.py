"""The verification process: reads jobs from its standard input, answers on its standard output, one at a time.

Started by :mod:`trimtab.tasks.pool`. The parent enforces the time limit; a watchdog in C stands behind it for the case
that the parent is gone, because a reward function that hangs in C code would otherwise run on for ever.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
from collections.abc import Callable
from typing import Any, BinaryIO

from trimtab.core.errors import ConfigError
from trimtab.core.records import Prompt, Status, Verdict
from trimtab.tasks.verifiers import judge, reason

GRACE_S = 2.0  # how long after the time limit the watchdog ends a process nobody watches

Message = tuple[str, str] | Verdict  # ("ready", ""), ("config", why), ("failed", why), or a verdict


def main() -> None:
    """Serve until the parent closes the pipe, then leave at once whatever threads the verifier left running."""
    jobs, answers = _take_pipes()
    try:
        verifier, graded, limit = _prepare(pickle.load(jobs))
    except BaseException as error:  # also SystemExit out of a user's module
        _send(answers, ("config", str(error)) if isinstance(error, ConfigError) else ("failed", reason(error)))
        os._exit(1)
    _silence(2)
    _send(answers, ("ready", ""))
    with open(os.devnull, "w") as nowhere:
        while (job := _receive(jobs)) is not None:
            faulthandler.dump_traceback_later(limit + GRACE_S, exit=True, file=nowhere)
            verdict = _answer(verifier, job, graded)
            faulthandler.cancel_dump_traceback_later()
            _send(answers, verdict)
    os._exit(0)


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Keep the pipes on private descriptors: what a verifier prints or reads must not touch them."""
    jobs, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    _silence(0)
    _silence(1)
    return jobs, answers


def _silence(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _prepare(start: tuple[bytes, bool, float]) -> tuple[Callable[[Prompt, str], Any], bool, float]:
    payload, graded, limit = start
    verifier = pickle.loads(payload)
    if hasattr(verifier, "prepare"):
        verifier.prepare()
    return verifier, graded, limit


def _receive(jobs: BinaryIO) -> bytes | None:
    try:
        payload: bytes = pickle.load(jobs)
    except (EOFError, pickle.UnpicklingError):  # the parent closed the pipe or died while writing
        return None
    return payload


def _answer(verifier: Callable[[Prompt, str], Any], payload: bytes, graded: bool) -> Verdict:
    try:
        prompt, text = pickle.loads(payload)
    except Exception as error:
        return Verdict(None, Status.ERROR, reason(error))
    return judge(verifier, prompt, text, graded)


def _send(answers: BinaryIO, message: Message) -> None:
    try:
        pickle.dump(message, answers)
        answers.flush()
    except BrokenPipeError:
        os._exit(0)
