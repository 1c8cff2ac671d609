from __future__ import annotations

import time
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.tasks.answers import final_answer, last_line, last_number, normalise, same_number, tagged_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so <answer> 4 </answer>.", "4"),
        ("<answer>3</answer> no, <answer>4</answer>", "4"),
        ("<answer>4</answer> then <answer>5", "4"),
        ("<answer>4</answer> stray </answer>", "4"),
        ("<answer></answer>", ""),
        ("<answer>a\nb</answer>", "a\nb"),
        ("<answer>4", None),
        ("4</answer>", None),
        ("", None),
    ],
)
def test_tagged_answer(text: str, answer: str | None) -> None:
    assert tagged_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"thus \boxed{\frac{1}{2}} holds", r"\frac{1}{2}"),
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{never closed", None),
        ("work 3+4=7\n#### 7\nbye", "7"),
        ("#### 1\n#### 2", "2"),
        (r"\boxed{1} <answer>2</answer>", "2"),
        ("plain", None),
    ],
)
def test_final_answer(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("the answer is 42.", "42"),
        ("1, 2, 3", "3"),
        ("1,234,567 dollars", "1234567"),
        ("12,34", "34"),
        ("-5", "-5"),
        ("− 3 is −3", "-3"),
        ("8-3", "3"),
        ("(8)-3", "3"),
        ("x=-3", "-3"),
        ("3.50", "3.5"),
        (".5", "0.5"),
        ("-.5", "-0.5"),
        ("6.02e23", "6.02e23"),
        ("2e5x", "5"),
        ("3/4", "0.75"),
        ("-3 / 4", "-0.75"),
        ("1/0", None),
        ("none", None),
        ("٣ and １２", None),
        ("9" * 500, None),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


@given(st.integers(-(10**30), 10**30), st.text(alphabet="abc ,.\n-", max_size=20))
def test_any_whole_number_is_read_back(value: int, before: str) -> None:
    assert last_number(f"{before} is {value}") == value
    assert last_number(f"{before} is {value:,}") == value


def test_numbers_are_tolerant_only_where_one_is_not_whole() -> None:
    big = Decimal(10**12)
    assert not same_number(big, big + 1, 1e-6)
    assert same_number(Decimal("0.3333333"), Decimal(1) / Decimal(3), 1e-6)
    assert same_number(Decimal("5.0"), Decimal(5), 0.0)
    assert not same_number(Decimal("0.333"), Decimal(1) / Decimal(3), 1e-6)


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (" Paris. ", "paris", True),
        ("ＡＢ", "ab", True),
        ("a  b\n c", "A B C", True),
        ("$x$", "x", True),
        ("ab", "a b", False),
    ],
)
def test_normalise(left: str, right: str, equal: bool) -> None:
    assert (normalise(left) == normalise(right)) is equal


def test_last_line() -> None:
    assert last_line("a\n b \n\n") == "b"
    assert last_line(" \n ") is None


@pytest.mark.parametrize(
    "hostile",
    [
        "<answer>",
        r"\boxed{",
        "{",
        "####",
        "1,111",
        "9",
        "-",
        "1/",
        ".",
        "answer ",
        "answer:  ",
        "A ",
        "((((",
        "1e",
        "\ufdfa",
    ],
)
def test_time_is_linear_in_hostile_text(hostile: str) -> None:
    """Quadratic behaviour would take minutes at this length."""
    text = hostile * (200_000 // len(hostile))
    began = time.monotonic()
    for function in (final_answer, last_number, normalise, last_line):
        function(text)
    assert time.monotonic() - began < 5.0
