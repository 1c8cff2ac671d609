"""A small pool of verification processes that survives anything a reward function does.

One response at a time per worker, so that a worker lost to one response loses no other. Workers are plain ``python -c``
processes and not ``multiprocessing`` ones, which would import the user's main script again in each of them.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO

from trimtab.core.errors import ConfigError, EngineError
from trimtab.core.records import Status, Verdict
from trimtab.tasks.verifiers import KEY, first_line
from trimtab.tasks.worker import Message

START_LIMIT_S = 120.0  # imports of a reward function, on a slow disk
MAX_START_FAILURES = 3  # in one call
GIVE_UP_AFTER = 16  # workers lost in a row without a verdict between: the verifier is broken, the rest is not tried
_EXIT_S = 5.0  # how long a killed process may take to be gone

Event = Message | None  # None: the process is gone


@dataclass(eq=False)
class _Worker:
    """One process. Its thread (:func:`_converse`) does all blocking reads and writes; the pool waits for events."""

    process: subprocess.Popen[bytes]
    log: IO[bytes]  # what the process wrote to stderr before it was ready
    deadline: float  # monotonic; of the start, then of the present job
    outbox: queue.SimpleQueue[bytes | None] = field(default_factory=queue.SimpleQueue)
    thread: threading.Thread | None = None
    ready: bool = False
    job: int | None = None

    def give(self, job: int, payload: bytes, limit: float) -> None:
        self.job, self.deadline = job, time.monotonic() + limit
        self.outbox.put(payload)

    def kill(self) -> None:
        """End the process with everything it started; leaves no zombie."""
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):  # the worker leads a session of its own
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_EXIT_S)
        self.outbox.put(None)
        if self.thread:
            self.thread.join(_EXIT_S)  # a thread inside a pipe would abort the interpreter's shutdown
        self.log.close()

    def last_words(self) -> str:
        """Why a start failed, as far as the process said so."""
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return first_line(lines[-1]) if lines else f"exit code {self.exit_code()}"

    def exit_code(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(_EXIT_S)
        return None


def _converse(worker: _Worker, start: bytes, events: queue.SimpleQueue[tuple[_Worker, Event]]) -> None:
    """Write the start, then alternate: read one message, write one job."""
    to, back = worker.process.stdin, worker.process.stdout
    assert to is not None
    assert back is not None
    payload: bytes | None = start
    try:
        while payload is not None:
            to.write(payload)
            to.flush()
            events.put((worker, pickle.load(back)))
            payload = worker.outbox.get()
    except Exception:  # broken pipe, end of file, or bytes that are no message
        events.put((worker, None))
    finally:
        for stream in (to, back):
            with contextlib.suppress(OSError):
                stream.close()


def _kill_all(workers: list[_Worker], owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not end its parent's workers
        while workers:
            workers.pop().kill()


class WorkerPool:
    """Judges responses in worker processes, each within ``limit`` seconds.

    A call waits at most about ``limit`` times the number of responses over the number of workers, and far less when the
    verifier hangs on all of them: after GIVE_UP_AFTER lost workers in a row the rest of the call fails unseen.
    """

    def __init__(self, verifier: bytes, graded: bool, limit: float, workers: int) -> None:
        """``verifier`` is pickled."""
        self.limit = limit
        self.workers = workers
        self._start = pickle.dumps((verifier, graded, limit))
        self._pool: list[_Worker] = []
        self._events: queue.SimpleQueue[tuple[_Worker, Event]] = queue.SimpleQueue()
        self._started_once = False
        self._start_failures = 0
        self._why = ""
        weakref.finalize(self, _kill_all, self._pool, os.getpid())  # also runs when the interpreter ends

    def start(self) -> None:
        """Start all workers and wait until one is ready.

        Raises ConfigError for a verifier that does not exist and EngineError for one that cannot be loaded.
        """
        with self._clean():
            self._start_failures = 0
            while not any(worker.ready for worker in self._pool):
                self._top_up(self.workers)
                self._handle(*self._next(), verdicts={})

    def run(self, payloads: Sequence[bytes]) -> list[Verdict]:
        """The verdicts on pickled (prompt, text) pairs, in order. Raises as :meth:`start` does."""
        verdicts: dict[int, Verdict] = {}
        jobs = deque(enumerate(payloads))
        self._start_failures = lost = 0
        with self._clean():
            while len(verdicts) < len(payloads):
                self._assign(jobs)
                lost = self._handle(*self._next(), verdicts=verdicts, lost=lost)
                if lost >= GIVE_UP_AFTER:
                    detail = f"not tried: {lost} responses in a row ended the verification process or its time"
                    verdicts |= {index: Verdict(None, Status.ERROR, detail) for index, _ in jobs}
                    jobs.clear()
        return [verdicts[index] for index in range(len(payloads))]

    def close(self) -> None:
        """End all workers; a later call starts new ones."""
        _kill_all(self._pool, os.getpid())

    @contextlib.contextmanager
    def _clean(self) -> Iterator[None]:
        """Interrupted between question and answer, a worker would answer the next question with the last verdict."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _assign(self, jobs: deque[tuple[int, bytes]]) -> None:
        for worker in [w for w in self._pool if w.job is None and w.process.poll() is not None and w.ready]:
            self._remove(worker)  # died while idle: no response is to blame
        working = sum(worker.job is not None for worker in self._pool)
        if jobs:
            self._top_up(min(self.workers, working + len(jobs)))
        for worker in self._pool:
            if jobs and worker.ready and worker.job is None:
                index, payload = jobs.popleft()
                worker.give(index, pickle.dumps(payload), self.limit)

    def _top_up(self, count: int) -> None:
        while len(self._pool) < count and self._start_failures < MAX_START_FAILURES:
            try:
                self._pool.append(self._spawn())
            except OSError as error:
                self._start_failed(str(error))
        if not self._pool:
            raise EngineError(f"{KEY}: the verification process could not be started: {self._why}")

    def _spawn(self) -> _Worker:
        code = f"import sys; sys.path[:] = {sys.path!r}; from trimtab.tasks.worker import main; main()"
        log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the worker
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={"OMP_NUM_THREADS": "1", **os.environ},  # beside a trainer that uses every core
            start_new_session=True,  # Ctrl-C is for the trainer
        )
        worker = _Worker(process, log, time.monotonic() + START_LIMIT_S)
        worker.thread = threading.Thread(target=_converse, args=(worker, self._start, self._events), daemon=True)
        worker.thread.start()
        return worker

    def _start_failed(self, why: str) -> None:
        self._start_failures += 1
        self._why = why

    def _next(self) -> tuple[_Worker, Event | str]:
        """The next message of a living worker, or "late" for one whose time is over."""
        while True:
            busy = [worker for worker in self._pool if worker.job is not None or not worker.ready]
            first = min(busy, key=lambda worker: worker.deadline)
            try:
                worker, event = self._events.get(timeout=max(0.0, first.deadline - time.monotonic()))
            except queue.Empty:
                return first, "late"
            if worker in self._pool:
                return worker, event

    def _handle(self, worker: _Worker, event: Event | str, verdicts: dict[int, Verdict], lost: int = 0) -> int:
        """Act on an event and return how many workers were lost in a row."""
        if not worker.ready:
            self._handle_start(worker, event)
            return lost
        assert worker.job is not None
        if isinstance(event, Verdict):
            verdicts[worker.job] = event
            worker.job = None
            return 0
        if event == "late":
            verdicts[worker.job] = Verdict(None, Status.TIMEOUT, f"no answer in {self.limit:g} s", seconds=self.limit)
        else:
            detail = f"the verification process ended with exit code {worker.exit_code()}"
            verdicts[worker.job] = Verdict(None, Status.ERROR, detail)
        self._remove(worker)
        return lost + 1

    def _handle_start(self, worker: _Worker, event: Event | str) -> None:
        if event == ("ready", ""):
            worker.ready = self._started_once = True
            return
        if isinstance(event, tuple):
            kind, why = event
            if kind == "config":
                raise ConfigError(why)
            if not self._started_once:
                raise EngineError(f"{KEY}: the reward function could not be loaded: {why}")
        else:
            why = f"not ready after {START_LIMIT_S:g} s" if event == "late" else worker.last_words()
        self._remove(worker)
        self._start_failed(why)

    def _remove(self, worker: _Worker) -> None:
        self._pool.remove(worker)
        worker.kill()
