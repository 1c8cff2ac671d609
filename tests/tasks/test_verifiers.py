from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.core.errors import ConfigError, MissingExtraError
from trimtab.core.records import Prompt, Status, Verdict
from trimtab.tasks.verifiers import VERIFIERS, judge, make_verifier, to_verdict


def found(name: str, answer: Any, text: str, graded: bool = False) -> tuple[float | None, Status]:
    verdict = judge(make_verifier(name), Prompt("p", "p", (1,), answer=answer), text, graded)
    return verdict.correct, verdict.status


OK, BAD = Status.OK, Status.MALFORMED


@pytest.mark.parametrize(
    ("name", "answer", "text", "expected"),
    [
        ("exact", "Paris", " paris.", (1.0, OK)),
        ("exact", "Paris", "It is <answer>Paris</answer>", (1.0, OK)),
        ("exact", "Paris", "It is Paris", (0.0, OK)),
        ("exact", "work #### 7", "7", (1.0, OK)),
        ("exact", ["colour", "color"], "Color", (1.0, OK)),
        ("exact", 7, "7", (1.0, OK)),
        ("exact", True, "true", (1.0, OK)),
        ("exact", "x", "", (0.0, BAD)),
        ("exact", "x", " .\n", (0.0, BAD)),
        ("number", "42", "so 40 + 2 = 42", (1.0, OK)),
        ("number", 42, "42.0", (1.0, OK)),
        ("number", "1/3", "0.33333333", (1.0, OK)),
        ("number", "... #### 1,200", r"\boxed{1200}", (1.0, OK)),
        ("number", "42", "42 and then 43", (0.0, OK)),
        ("number", "42", "<answer>no idea</answer> 42", (0.0, BAD)),
        ("number", "42", "forty-two", (0.0, BAD)),
        ("number?tolerance=0.1", "100.5", "99", (1.0, OK)),
        ("number", "100.5", "99", (0.0, OK)),
        ("contains", "new york", "I say: New  York!", (1.0, OK)),
        ("contains", "10", "100 or 010", (0.0, OK)),
        ("contains", "10", "100, 10", (1.0, OK)),
        ("contains", ["a b", "c"], "x c", (1.0, OK)),
        ("contains", "x", "", (0.0, BAD)),
        ("regex", r"^\s*4\d$", " 42", (1.0, OK)),
        ("regex", r"^4\d$", "142", (0.0, OK)),
        ("choice", "B", "The answer is (B). A dog barks.", (1.0, OK)),
        ("choice", "(B)", "<answer>B</answer>", (1.0, OK)),
        ("choice", "B", "A or B? I take B", (1.0, OK)),
        ("choice", "B", "answer: **C**", (0.0, OK)),
        ("choice", "B", "BANANA", (0.0, BAD)),
        ("choice?letters=XYZ", "Y", "Y", (1.0, OK)),
    ],
)
def test_named_verifiers(name: str, answer: Any, text: str, expected: tuple[float, Status]) -> None:
    assert found(name, answer, text) == expected


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        (r"\frac{1}{2}", r"thus \boxed{0.5}", (1.0, OK)),
        ("x^2 + 1", r"\boxed{1 + x^2}", (1.0, OK)),
        ("x^2 + 1", "<answer>$x^2+2$</answer>", (0.0, OK)),
        ("x^2 + 1", "so it is $1 + x^2$.", (1.0, OK)),
        ("x^2 + 1", "so it is 1", (0.0, OK)),
        ("12", "the total is 12", (1.0, OK)),
        (r"... \boxed{12}", "12", (1.0, OK)),
        ("12", "no idea", (0.0, BAD)),
    ],
)
def test_math(answer: str, text: str, expected: tuple[float, Status]) -> None:
    pytest.importorskip("math_verify")
    assert found("math", answer, text) == expected


def test_math_blames_an_unreadable_reference_on_the_data() -> None:
    pytest.importorskip("math_verify")
    assert found("math", "", "12") == (None, Status.ERROR)


def test_math_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'trimtab\[tasks\]'"):
        make_verifier("math")


@pytest.mark.parametrize(
    ("name", "answer", "complaint"),
    [
        ("exact", " . ", "blank"),
        ("contains", "", "blank"),
        ("math", " ", "blank"),
        ("number", "many", "'many' holds no number"),
        ("number", ["1", "many"], "'many' holds no number"),
        ("regex", "(", "no regular expression"),
        ("choice", "maybe", "none of the letters ABCDEFGH"),
    ],
)
def test_a_reference_nothing_could_match_is_refused(name: str, answer: Any, complaint: str) -> None:
    assert complaint in make_verifier(name).check(answer)


@pytest.mark.parametrize("name", VERIFIERS)
def test_good_references_pass_and_only_bounded_verifiers_are_trusted(name: str) -> None:
    verifier = make_verifier(name)
    assert verifier.check("B 12") == ""
    assert verifier.trusted == (name not in ("regex", "math"))
    assert verifier.needs_answer


@pytest.mark.parametrize("name", [name for name, cls in VERIFIERS.items() if cls.trusted])
@given(text=st.text())
def test_trusted_verifiers_survive_any_text(name: str, text: str) -> None:
    correct, status = found(name, "B 12", text)
    assert correct in (0.0, 1.0)
    assert status in (OK, BAD)


@pytest.mark.parametrize("name", [name for name, cls in VERIFIERS.items() if cls.trusted])
@pytest.mark.parametrize("hostile", ["<answer>", r"\boxed{", "1,", "answer ", "answer:   ", "B 1", "B 12x", "((("])
def test_trusted_verifiers_are_quick_on_hostile_text(name: str, hostile: str) -> None:
    began = time.monotonic()
    assert found(name, "B 12", hostile * (600_000 // len(hostile)))[0] is not None
    assert time.monotonic() - began < 5.0


def test_without_grading_only_one_is_right() -> None:
    assert to_verdict(0.999, graded=False).correct == 0.0
    assert to_verdict(0.999, graded=True).correct == 0.999
    partial = Verdict(0.5, Status.OK, "", {"style": 0.5})
    assert (to_verdict(partial, graded=False).correct, partial.correct) == (0.0, 0.5)
    assert to_verdict((0.5, False), graded=True).status == Status.MALFORMED


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("exakt", r"data\.verifier: unknown name 'exakt'\. Did you mean 'exact'.*python:module:function"),
        ("number?tolerence=1", r"'tolerence'\. Did you mean 'tolerance'"),
        ("number?tolerance=-1", r"data\.verifier\.tolerance: -1\.0 is not valid"),
        ("number?tolerance=abc", r"data\.verifier\.tolerance: 'abc'"),
        ("choice?letters=abc", r"data\.verifier\.letters: 'abc'"),
        ("python:module", r"'python:module' is not valid. Allowed: python:module:function"),
        ("hostil.py:score", r"no file .*hostil\.py'\. Did you mean 'hostile\.py'"),
        ("hostile.py:", r"Allowed: file\.py:function"),
    ],
)
def test_bad_spellings_name_the_way_out(spec: str, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    with pytest.raises(ConfigError, match=match):
        make_verifier(spec)
