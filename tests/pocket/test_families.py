from __future__ import annotations

import hashlib
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.core.errors import ConfigError
from trimtab.pocket import FAMILIES, SPLITS, CharTokenizer, problem, solution, verify
from trimtab.pocket.families import split_of
from trimtab.pocket.families.base import closeness, marked_answer
from trimtab.pocket.families.countdown import evaluate

STYLES = [(name, style) for name, family in FAMILIES.items() for style in family.styles]


def lengths(name: str, style: str = "A", count: int = 600) -> list[int]:
    """Work lengths in tokens, the end of sequence included."""
    return [len(solution(problem(name, "train", 0, i), style)) + 1 for i in range(count)]


def test_there_are_four_families_and_the_default_has_two_styles() -> None:
    assert set(FAMILIES) >= {"sums", "euclid", "countdown", "equation"}
    assert set(FAMILIES["sums"].styles) == {"A", "B"}


@pytest.mark.parametrize(("name", "style"), STYLES)
@given(split=st.sampled_from(SPLITS), seed=st.integers(0, 2**40), index=st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_every_solution_verifies_and_can_be_encoded(name: str, style: str, split: str, seed: int, index: int) -> None:
    drawn = problem(name, split, seed, index)
    work = solution(drawn, style)
    assert verify(drawn, work) == (1.0, True)
    assert verify(drawn, work, graded=True) == (1.0, True)
    assert CharTokenizer().encode(drawn.text + work)
    assert drawn.text not in work


@pytest.mark.parametrize("name", FAMILIES)
def test_a_problem_is_a_pure_function_of_its_key(name: str) -> None:
    forward = [problem(name, "train", 3, i) for i in range(20)]
    backward = [problem(name, "train", 3, i) for i in reversed(range(20))][::-1]
    assert forward == backward
    assert [solution(p) for p in forward] == [solution(p) for p in backward]
    assert [p.text for p in forward] != [problem(name, "train", 4, i).text for i in range(20)]


def test_problems_and_work_stay_what_they_were() -> None:
    """The shipped weights and every recorded run depend on these draws, whatever the Python version."""
    digests = {}
    for name, style in STYLES:
        drawn = [problem(name, split, 0, i) for split in SPLITS for i in range(50)]
        text = "\n".join(p.text + solution(p, style) for p in drawn)
        digests[name, style] = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert digests == {
        ("sums", "A"): "9294382fd91a97c3",
        ("sums", "B"): "29236332e9bf93a2",
        ("euclid", "A"): "adac8da1dbcab0ef",
        ("countdown", "A"): "87ceacb3eca3cd3f",
        ("equation", "A"): "ad9cce71fb14b50c",
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_splits_share_no_problem_text(name: str) -> None:
    texts = {split: {problem(name, split, seed, i).text for seed in (0, 1) for i in range(400)} for split in SPLITS}
    assert not texts["train"] & texts["heldout"]
    assert all(split_of(text) == split for split in SPLITS for text in texts[split])
    assert all(len(texts[split]) > 100 for split in SPLITS)


def test_sums_follow_the_terms_knob_and_mix_all_by_default() -> None:
    assert all(problem("sums", "train", 0, i, terms=4).text.count("+") == 3 for i in range(50))
    counts = Counter(problem("sums", "heldout", 0, i).text.count("+") + 1 for i in range(500))
    assert set(counts) == {2, 3, 4, 5, 6}
    assert min(counts.values()) > 50


def test_the_two_styles_of_a_sum_part_at_once() -> None:
    for i in range(100):
        drawn = problem("sums", "train", 0, i)
        a, b = solution(drawn, "A"), solution(drawn, "B")
        assert a[0] != b[0]
        assert set(b) - set(a) >= set("ut:/&")
    assert min(lengths("sums")) >= 18
    assert max(lengths("sums")) <= 120


def test_euclid_work_is_long_tailed() -> None:
    spread = sorted(lengths("euclid", count=3000))
    assert 10 <= spread[0] < 14
    assert 170 < spread[-1] <= 200
    median = spread[len(spread) // 2]
    assert spread[int(0.99 * len(spread))] > 3 * median  # the tail


def test_countdown_and_equation_work_stays_within_bounds() -> None:
    assert max(lengths("countdown")) <= 200
    assert max(lengths("equation", count=3000)) <= 220


def test_countdown_searches_and_equation_rambles() -> None:
    tries = [solution(problem("countdown", "train", 0, i)).count("?") for i in range(300)]
    wrong = [solution(problem("equation", "train", 0, i)).count(" no ") for i in range(300)]
    assert max(tries) >= 8
    assert sum(t > 0 for t in tries) > 200
    assert max(wrong) >= 5
    assert sum(w > 0 for w in wrong) > 200


def test_only_the_text_after_the_last_marker_counts() -> None:
    drawn = problem("sums", "train", 0, 0)
    right = drawn.answer
    assert verify(drawn, f"#1 no #{right}") == (1.0, True)
    assert verify(drawn, f"#{right} no #1")[0] == 0.0
    assert verify(drawn, f"#{right}  \n") == (1.0, True)
    assert verify(drawn, f"#{right} and more") == (0.0, False)
    assert verify(drawn, right) == (0.0, False)
    assert verify(drawn, f"#{right}#") == (0.0, False)
    assert marked_answer("a#b#c") == "c"


def test_graded_scores_reward_near_misses_below_a_half() -> None:
    drawn = problem("sums", "train", 0, 0)
    answer = int(drawn.answer)
    near, far = (verify(drawn, f"#{answer + d}", graded=True)[0] for d in (1, 100))
    assert 0.0 < far < near < 0.5
    assert verify(drawn, f"#{answer + 1}")[0] == 0.0
    assert closeness(5, 5) == 1.0
    gcd = next(p for p in (problem("euclid", "train", 0, i) for i in range(200)) if p.answer == "12")
    assert verify(gcd, "#6", graded=True) == (0.25, True)
    assert verify(gcd, "#5", graded=True) == (0.0, True)
    assert verify(gcd, "#0", graded=True) == (0.0, True)
    assert verify(gcd, "#-6", graded=True) == (0.0, True)


def test_countdown_takes_any_right_expression_and_no_misuse_of_numbers() -> None:
    family = FAMILIES["countdown"]
    answer = "41 from 8,5,1"
    assert family.verify(answer, "#5*8+1") == (1.0, True)
    assert family.verify(answer, "#1+(8*5)") == (1.0, True)
    assert family.verify(answer, "#41") == (0.0, True)
    assert family.verify(answer, "#8*5+1+1") == (0.0, True)
    assert family.verify(answer, "#8*5-1") == (0.0, True)
    assert family.verify(answer, "#8*5-1", graded=True)[0] == pytest.approx(1 / 2.2)
    assert family.verify(answer, "#8*5+") == (0.0, False)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1+2*3", 7),
        ("(1+2)*3", 9),
        ("9-3-2", 4),
        ("((2))", 2),
        ("2*(3-5)", -4),
        ("", None),
        ("()", None),
        ("(1", None),
        ("1)", None),
        ("1 2", None),
        ("1 + 2", 3),
        ("1234", None),
        ("-1", None),
        ("1//2", None),
        ("2**9", None),
        ("1+x", None),
        ("(" * 40 + "1" + ")" * 23, None),
        ("9*" * 5000 + "9", None),
    ],
)
def test_evaluate(expression: str, value: int | None) -> None:
    found = evaluate(expression)
    assert (found[0] if found else None) == value


@pytest.mark.parametrize("name", FAMILIES)
@given(text=st.one_of(st.text(), st.text(alphabet="0123456789+-*/()#, .=no"), st.from_regex(r"#[-+*()0-9]{0,70}")))
@settings(max_examples=150, deadline=None)
def test_verify_survives_any_text(name: str, text: str) -> None:
    drawn = problem(name, "train", 0, 1)
    for graded in (False, True):
        score, well_formed = verify(drawn, text, graded)
        assert 0.0 <= score <= 1.0
        assert well_formed or score == 0.0


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("reply", [*(c * 10**6 for c in ("(", "9", "9*", "#")), "٣", "１２", "1e9", "\x00", "9**9**9"])
def test_verify_is_quick_on_hostile_text(name: str, reply: str) -> None:
    began = time.monotonic()
    assert verify(problem(name, "train", 0, 1), "#" + reply, graded=True) == (0.0, False)
    assert time.monotonic() - began < 1.0


def test_wrong_arguments_name_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match=r"'sum'.*Did you mean 'sums'"):
        problem("sum", "train", 0, 0)
    with pytest.raises(ConfigError, match=r"split.*'held'.*heldout, train"):
        problem("sums", "held", 0, 0)
    with pytest.raises(ConfigError, match=r"'term'.*Did you mean 'terms'"):
        problem("sums", "train", 0, 0, term=3)
    with pytest.raises(ConfigError, match=r"sums\.terms: 7 .*from 2 to 6"):
        problem("sums", "train", 0, 0, terms=7)
    with pytest.raises(ConfigError, match=r"style.*'C'"):
        solution(problem("sums", "train", 0, 0), "C")
