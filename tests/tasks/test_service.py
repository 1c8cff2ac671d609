from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trimtab.core.config import VerifyConfig
from trimtab.core.errors import ConfigError, EngineError
from trimtab.core.records import Prompt, Status, Verdict
from trimtab.tasks import pool
from trimtab.tasks.service import VerifierService
from trimtab.tasks.verifiers import Exact, UserFunction, make_verifier

HOSTILE = Path(__file__).with_name("hostile.py")
LIMIT = 1.5  # long enough for a starved machine to answer what does not hang


def prompt(name: str = "p", answer: Any = "42") -> Prompt:
    return Prompt(id=name, text=name, tokens=(2,), answer=answer)


def hostile(graded: bool = False, limit: float = LIMIT, workers: int = 2) -> VerifierService:
    return VerifierService(make_verifier(f"{HOSTILE}:score"), VerifyConfig(timeout_s=limit, graded=graded), workers)


@pytest.fixture(scope="module")
def service() -> Iterator[VerifierService]:
    made = hostile(limit=20.0)  # generous: these tests must not fail on a busy machine
    yield made
    made.close()


@pytest.fixture(scope="module")
def impatient() -> Iterator[VerifierService]:
    made = hostile()
    yield made
    made.close()


def one(service: VerifierService, text: str) -> Verdict:
    return service.verify_all([(prompt(), text)])[0]


def gone(pid: int) -> bool:
    """No such process, not even a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def dead(pid: int) -> bool:
    """Gone, or a zombie that the system's first process has yet to collect: for processes that are not our children."""
    return gone(pid) or Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    "text", ["right", "true", "numpy", "numpy bool", "numpy scalar", "well formed", "print", "thread"]
)
def test_what_counts_as_right(service: VerifierService, text: str) -> None:
    verdict = one(service, text)
    assert (verdict.correct, verdict.status, verdict.detail) == (1.0, Status.OK, "")
    assert verdict.seconds >= 0.0


def test_wrong_malformed_and_full_verdicts(service: VerifierService) -> None:
    wrong, malformed, full, own = service.verify_all(
        [(prompt(), text) for text in ("wrong", "malformed", "verdict", "own error")]
    )
    assert (wrong.correct, wrong.status) == (0.0, Status.OK)
    assert (malformed.correct, malformed.status) == (0.0, Status.MALFORMED)
    assert (full.correct, full.detail, full.components) == (1.0, "fine", {"style": 0.25})
    assert type(full.components["style"]) is float
    assert (own.correct, own.status, own.detail) == (None, Status.ERROR, "judge offline")


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("nan", "returned nan"),
        ("inf", "returned inf"),
        ("none", "returned NoneType"),
        ("text", "returned str '1.0'"),
        ("two", "returned 2.0"),
        ("minus", "returned -0.25"),
        ("list", "returned list"),
        ("vector", "returned ndarray"),
        ("complex", "returned complex"),
        ("decimal", "returned Decimal"),
        ("triple", "returned tuple"),
        ("bad component", "component 'style' returned nan"),
        ("raise", "ZeroDivisionError: division by zero"),
        ("recurse", "RecursionError"),
        ("sys exit", "SystemExit: bye"),
        ("input", "EOFError"),
        ("no such action", "KeyError"),
    ],
)
def test_nonsense_is_an_error_and_never_a_zero(service: VerifierService, text: str, detail: str) -> None:
    verdict = one(service, text)
    assert (verdict.correct, verdict.status) == (None, Status.ERROR)
    assert detail in verdict.detail
    assert "\n" not in verdict.detail


def test_a_partial_score_is_right_only_when_graded(service: VerifierService) -> None:
    assert one(service, "half").correct == 0.0
    graded = hostile(graded=True, limit=20.0, workers=1)
    try:
        assert [v.correct for v in graded.verify_all([(prompt(), t) for t in ("half", "right", "two")])] == [
            0.5,
            1.0,
            None,
        ]
    finally:
        graded.close()


def test_lost_workers_lose_no_other_response(impatient: VerifierService) -> None:
    """One response hangs asleep, one in C with the interpreter lock, one exits the process, one closes its pipes."""
    texts = [f"right/{i}" for i in range(40)]
    for place, text in ((3, "hang"), (4, "hang in c"), (10, "exit"), (39, "close")):
        texts[place] = text
    began = time.monotonic()
    verdicts = impatient.verify_all([(prompt(), text) for text in texts])
    assert time.monotonic() - began < 15.0
    assert [i for i, v in enumerate(verdicts) if v.status.failed] == [3, 4, 10, 39]
    assert all(v.correct == 1.0 for v in verdicts if not v.status.failed)
    assert [verdicts[i].status for i in (3, 4)] == [Status.TIMEOUT] * 2
    assert verdicts[3].detail == "no answer in 1.5 s"
    assert verdicts[3].seconds == LIMIT
    assert verdicts[10].status == Status.ERROR
    assert "exit code 7" in verdicts[10].detail
    assert verdicts[39].status == Status.ERROR


def test_results_keep_the_order_of_the_questions(service: VerifierService) -> None:
    cycle = ["right", "wrong", "malformed", "raise"]
    texts = [f"{cycle[i % 4]}/{i}" for i in range(60)]
    found = [(v.correct, v.status) for v in service.verify_all([(prompt(), text) for text in texts])]
    expected = [(1.0, Status.OK), (0.0, Status.OK), (0.0, Status.MALFORMED), (None, Status.ERROR)]
    assert found == [expected[i % 4] for i in range(60)]
    assert service.verify_all([]) == []


def test_children_of_a_verifier_go_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTILE_PID_FILE", str(tmp_path / "pid"))
    fresh = hostile(workers=1)  # an environment is read when a worker starts
    try:
        assert one(fresh, "child").status == Status.TIMEOUT
        child = int((tmp_path / "pid").read_text())
        assert eventually(lambda: dead(child))
    finally:
        fresh.close()


def test_a_verifier_that_always_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "GIVE_UP_AFTER", 3)
    service = hostile(limit=0.2)
    try:
        verdicts = service.verify_all([(prompt(), f"hang/{i}") for i in range(200)])
        tried = [v for v in verdicts if v.status == Status.TIMEOUT]
        assert 3 <= len(tried) <= 4  # a second worker may have been under way
        assert all(v.correct is None and "not tried" in v.detail for v in verdicts if v not in tried)
    finally:
        service.close()


def test_an_idle_worker_that_died_is_replaced_and_blames_no_response() -> None:
    service = hostile(limit=20.0, workers=1)
    try:
        pid = int(one(service, "pid").detail)
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: service._pool._pool[0].process.poll() is not None)  # type: ignore[union-attr]
        again = one(service, "pid/again")
        assert again.correct == 1.0
        assert int(again.detail) != pid
    finally:
        service.close()


def test_close_ends_the_workers_and_a_later_call_starts_new_ones() -> None:
    service = hostile(limit=20.0, workers=1)
    pid = int(one(service, "pid").detail)
    service.close()
    service.close()
    assert gone(pid)
    assert one(service, "right").correct == 1.0
    service.close()


def test_ctrl_c_does_not_leave_an_answer_for_the_next_question(monkeypatch: pytest.MonkeyPatch) -> None:
    service = hostile(limit=20.0, workers=1)
    try:
        assert one(service, "right").correct == 1.0
        with monkeypatch.context() as patch:
            patch.setattr(service._pool, "_next", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                one(service, "wrong/interrupted")
        assert one(service, "right/next").correct == 1.0
    finally:
        service.close()


class Counting:
    """A trusted verifier that counts its calls."""

    trusted = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, prompt: Prompt, text: str) -> float:
        self.calls.append(f"{prompt.id}:{text}")
        return 1.0 if text == "right" else 1 / 0


def test_equal_questions_are_asked_once_and_answers_are_copies() -> None:
    verifier = Counting()
    service = VerifierService(verifier, VerifyConfig())
    assert service._pool is None  # trusted: inline
    items = [(prompt("a"), "right"), (prompt("b"), "right"), (prompt("a"), "right")]
    first = service.verify_all(items)
    assert verifier.calls == ["a:right", "b:right"]
    first[0].components["spoiled"] = 1.0
    second = service.verify_all(items)
    assert len(verifier.calls) == 2
    assert all(v.components == {} and v.correct == 1.0 and v.seconds == 0.0 for v in second)


def test_failures_are_tried_again_and_do_not_raise_inline() -> None:
    verifier = Counting()
    service = VerifierService(verifier, VerifyConfig())
    for _ in range(2):
        assert service.verify_all([(prompt(), "bad")])[0].status == Status.ERROR
    assert verifier.calls == ["p:bad"] * 2


def test_the_memo_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.tasks.service.MEMO_ENTRIES", 10)
    service = VerifierService(Exact(), VerifyConfig())
    assert all(v.correct == 0.0 for v in service.verify_all([(prompt(), str(i)) for i in range(35)]))
    assert len(service._memo) == 10
    assert service.verify_all([(prompt(), "42"), (prompt(), "34")])[0].correct == 1.0


def test_a_prompt_that_cannot_be_sent_is_an_error_of_that_item(service: VerifierService) -> None:
    bad = prompt("bad", answer=lambda: None)
    verdicts = service.verify_all([(prompt(), "right/sent"), (bad, "right"), (prompt("q"), "right")])
    assert [v.correct for v in verdicts] == [1.0, None, 1.0]
    assert "cannot be sent" in verdicts[1].detail


def test_texts_of_any_kind_pass(service: VerifierService) -> None:
    texts = ["right/\ud800 lone surrogate", "right/\x00", "right/" + "x" * 3_000_000, "right/é"]
    assert [v.correct for v in service.verify_all([(prompt(), t) for t in texts])] == [1.0] * 4


def write(tmp_path: Path, code: str) -> str:
    path = tmp_path / "reward.py"
    path.write_text(textwrap.dedent(code))
    return f"{path}:score"


@pytest.mark.parametrize(
    ("code", "error", "match"),
    [
        ("def scores(prompt, text): return 1", ConfigError, r"'score'\. Did you mean 'scores'"),
        ("import no_such_module", EngineError, "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit('not today')", EngineError, "SystemExit: not today"),
        ("import os; os._exit(3)", EngineError, "could not be started: exit code 3"),
        ("def broken(:", EngineError, "SyntaxError"),
    ],
)
def test_a_verifier_that_cannot_start_raises_at_the_start(
    tmp_path: Path, code: str, error: type[Exception], match: str
) -> None:
    service = VerifierService(make_verifier(write(tmp_path, code)), VerifyConfig(), 1)
    with pytest.raises(error, match=match):
        service.start()
    assert service._pool is not None
    assert service._pool._pool == []


def test_a_process_that_cannot_be_made_is_an_engine_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(EngineError, match=r"could not be started: .*nonexistent"):
        hostile().verify_all([(prompt(), "right")])


def test_a_start_that_hangs_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "START_LIMIT_S", 0.3)
    monkeypatch.setattr(pool, "MAX_START_FAILURES", 1)
    service = VerifierService(make_verifier(write(tmp_path, "import time; time.sleep(600)")), VerifyConfig(), 1)
    with pytest.raises(EngineError, match=r"not ready after 0\.3 s"):
        service.start()


def test_a_function_that_cannot_be_pickled_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"file\.py:function"):
        VerifierService(lambda prompt, text: 1.0, VerifyConfig())


def test_relative_imports_beside_the_file_work(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 1.0")
    spec = write(tmp_path, "import beside\ndef score(prompt, text): return beside.VALUE")
    service = VerifierService(make_verifier(spec), VerifyConfig(timeout_s=20.0), 1)
    try:
        assert one(service, "x").correct == 1.0
    finally:
        service.close()


def test_a_module_function_is_found_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text("def score(prompt, text): return text == prompt.answer")
    monkeypatch.chdir(tmp_path)
    verifier = make_verifier("python:my_rewards:score")
    assert isinstance(verifier, UserFunction)
    assert verifier.trusted is False
    service = VerifierService(verifier, VerifyConfig(timeout_s=20.0), 1)
    try:
        assert [v.correct for v in service.verify_all([(prompt(), "42"), (prompt(), "43")])] == [1.0, 0.0]
    finally:
        service.close()


SCRIPT = """
import os, sys, time
from trimtab.core.config import VerifyConfig
from trimtab.core.records import Prompt
from trimtab.tasks import VerifierService, make_verifier

ready = VerifierService(make_verifier({target!r}), VerifyConfig(timeout_s={limit}), 1)
p = Prompt("p", "p", (1,))
print(ready.verify_all([(p, "pid")])[0].detail, flush=True)
{then}
"""


def run_script(limit: float, then: str) -> subprocess.Popen[str]:
    code = SCRIPT.format(target=f"{HOSTILE}:score", limit=limit, then=then)  # no main guard: none is needed
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("then", ["", "raise SystemExit(0)"])
def test_no_process_is_left_when_the_interpreter_ends_without_close(then: str) -> None:
    process = run_script(20.0, then)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert eventually(lambda: dead(int(out.strip())))


def test_workers_of_a_killed_trainer_end_even_in_the_middle_of_a_hang() -> None:
    process = run_script(0.5, "ready._pool.limit = 600\nready.verify_all([(p, 'hang in c')])")
    assert process.stdout
    pid = int(process.stdout.readline())
    time.sleep(0.5)
    process.kill()
    process.communicate()
    assert eventually(lambda: dead(pid))
