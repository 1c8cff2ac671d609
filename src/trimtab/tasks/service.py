"""Runs verifiers so that nothing they do hurts the run: they may raise, hang in C code, exit, print or lie."""

from __future__ import annotations

import hashlib
import os
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from trimtab.core.config import VerifyConfig
from trimtab.core.errors import ConfigError
from trimtab.core.records import Prompt, Status, Verdict
from trimtab.tasks.pool import WorkerPool
from trimtab.tasks.verifiers import KEY, judge, reason

MEMO_ENTRIES = 32768

Item = tuple[Prompt, str]
Key = tuple[str, bytes]
Judge = Callable[[Prompt, str], Any]


class VerifierService:
    """Verifies responses in order, each within a time limit, and remembers what it has seen.

    A verification that raised, hung, died or returned nonsense is a Verdict with status error or timeout and no score.
    Only a verifier that cannot be started raises: ConfigError when it does not exist, else EngineError.
    """

    def __init__(self, verifier: Judge, config: VerifyConfig, workers: int | None = None) -> None:
        """A ``verifier`` with a true attribute ``trusted`` runs inline, any other in ``workers`` processes.

        None takes half the cores, at most 4 and at least 2, so that one hanging response does not hold up all others.
        Raises ConfigError for an untrusted verifier that cannot be pickled.
        """
        self.verifier = verifier
        self.graded = config.graded
        self._memo: OrderedDict[Key, Verdict] = OrderedDict()
        self._lock = threading.Lock()
        self._pool: WorkerPool | None = None
        if not getattr(verifier, "trusted", False):
            count = workers or max(2, min(4, (os.cpu_count() or 1) // 2))
            self._pool = WorkerPool(_pickled(verifier), config.graded, config.timeout_s, count)

    def start(self) -> None:
        """Wait for a first worker, so that a wrong verifier fails before any token is spent. Nothing to do inline."""
        if self._pool:
            with self._lock:
                self._pool.start()

    def verify_all(self, items: Sequence[Item]) -> list[Verdict]:
        """One verdict per (prompt, response text), in order; equal pairs (by prompt id) are verified once."""
        keys = [(prompt.id, hashlib.blake2b(text.encode("utf-8", "surrogatepass")).digest()) for prompt, text in items]
        with self._lock:
            fresh = {key: item for key, item in zip(keys, items, strict=True) if key not in self._memo}
            found = dict(zip(fresh, self._verify(list(fresh.values())), strict=True))
            verdicts = [self._recall(key, found) for key in keys]
            self._remember(found)
        return verdicts

    def close(self) -> None:
        """End all workers. Safe to call twice; a later :meth:`verify_all` starts new ones."""
        if self._pool:
            with self._lock:
                self._pool.close()

    def _verify(self, items: Sequence[Item]) -> list[Verdict]:
        if self._pool is None:
            return [judge(self.verifier, prompt, text, self.graded) for prompt, text in items]
        failed: dict[int, Verdict] = {}
        payloads: dict[int, bytes] = {}
        for index, item in enumerate(items):
            try:
                payloads[index] = pickle.dumps(item)
            except Exception as error:  # whatever a foreign object raises when pickled
                failed[index] = Verdict(None, Status.ERROR, f"cannot be sent to a worker: {reason(error)}")
        done = dict(zip(payloads, self._pool.run(list(payloads.values())), strict=True)) | failed
        return [done[index] for index in range(len(items))]

    def _recall(self, key: Key, found: dict[Key, Verdict]) -> Verdict:
        """A copy, because verdicts are mutable. Time is booked to the call that spent it."""
        if key in found:
            return replace(found[key], components=dict(found[key].components))
        self._memo.move_to_end(key)
        return replace(self._memo[key], components=dict(self._memo[key].components), seconds=0.0)

    def _remember(self, found: dict[Key, Verdict]) -> None:
        """Findings about responses only: a failure of the evaluator may pass, so it is tried again."""
        self._memo.update((key, verdict) for key, verdict in found.items() if not verdict.status.failed)
        while len(self._memo) > MEMO_ENTRIES:
            self._memo.popitem(last=False)


def _pickled(verifier: Judge) -> bytes:
    try:
        return pickle.dumps(verifier)
    except Exception as error:  # whatever a foreign object raises when pickled
        hint = "Put the function into a file and name it as file.py:function."
        raise ConfigError(f"{KEY}: {verifier!r} cannot be sent to a process ({reason(error)}). {hint}") from error
