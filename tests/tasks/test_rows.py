from __future__ import annotations

from typing import Any

import pytest

from trimtab.core.config import DataConfig
from trimtab.core.errors import DataError
from trimtab.tasks.rows import Row, RowsTask, rows_task
from trimtab.tasks.skips import Skips


def rows(values: list[Any]) -> list[Row]:
    return [Row(f"line {number}", value) for number, value in enumerate(values, 1)]


def good(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"q{i}", "answer": str(i)} for i in range(start, start + count)]


def task(values: list[Any], test: list[Any] | None = None, **data: Any) -> RowsTask:
    return rows_task("t", rows(values), None if test is None else rows(test), DataConfig(**data))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (ValueError("x"), "unreadable row (ValueError)"),
        ([1, 2], "row is no object with fields"),
        ("text", "row is no object with fields"),
        ({"answer": "1"}, "no field 'prompt'"),
        ({"prompt": "q"}, "no field 'answer'"),
        ({"prompt": "  ", "answer": "1"}, "empty prompt"),
        ({"prompt": None, "answer": "1"}, "prompt is neither text nor chat messages (NoneType)"),
        ({"prompt": 3, "answer": "1"}, "prompt is neither text nor chat messages (int)"),
        ({"prompt": "q", "answer": None}, "empty answer in field 'answer'"),
        ({"prompt": "q", "answer": ""}, "empty answer in field 'answer'"),
        ({"prompt": "q", "answer": " "}, "the answer is blank"),
        ({"prompt": "q \ud800", "answer": "1"}, "half a surrogate pair, which is no character"),
        ({"prompt": "q", "answer": "\udc00"}, "half a surrogate pair, which is no character"),
        ({"prompt": [], "answer": "1"}, "empty prompt"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, "a chat message lacks a role or a content that is text"),
        ({"prompt": ["hi"], "answer": "1"}, "a chat message lacks a role or a content that is text"),
        ({"prompt": [{"role": "user", "content": " "}], "answer": "1"}, "empty prompt"),
        (
            {"prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "answer": "1"},
            "the last chat message is the assistant's",
        ),
    ],
)
def test_a_bad_row_is_skipped_counted_and_its_place_named(bad: Any, reason: str) -> None:
    made = task([*good(3), bad, bad, *good(3, 3)], holdout=0.0)
    assert made.skips.counts == {reason: 2}
    assert made.skips.first == {reason: "line 4"}
    skips = Skips()
    assert [r.text for r in made.train(1, 0, skips)] == [f"q{i}" for i in range(6)]
    assert skips.counts == {reason: 2}


def test_half_bad_is_bearable_and_more_is_not() -> None:
    assert len(task([*good(2), {}, {}], holdout=0.0).rows) == 2
    with pytest.raises(DataError, match=r"task 't': 3 of 5 rows are bad"):
        task([*good(2), {}, {}, {}])


def test_the_error_names_place_key_fields_and_the_nearest() -> None:
    wrong = [{"prompts": "q", "anwser": "1", "id": 3}] * 4
    with pytest.raises(DataError) as caught:
        task(wrong)
    message = str(caught.value)
    for part in ("4 of 4", "no field 'prompt'", "first at line 1", "prompts, anwser, id"):
        assert part in message
    assert "Set data.prompt_key=prompts?" in message
    assert "Set data.answer_key=anwser?" in message
    with pytest.raises(DataError, match=r"Set data\.prompt_key to one of them, not 'prompt'"):
        task([{"zz": 1}])


def test_no_rows_at_all_is_an_error() -> None:
    with pytest.raises(DataError, match="no rows"):
        task([])


def test_messages_and_other_fields_are_kept() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q", "name": "dropped"}]
    made = task([{"prompt": messages, "answer": "1", "level": 3}], holdout=0.0).rows[0]
    assert made.messages == ({"role": "system", "content": "s"}, {"role": "user", "content": "q"})
    assert (made.text, made.meta, made.where) == ("s\n\nq", {"level": 3}, "line 1")


def test_fields_may_stand_inside_others() -> None:
    row = {"q": {"en": "hello"}, "reward_model": {"ground_truth": "1"}, "a.b": "2"}
    made = task([row], prompt_key="q.en", answer_key="reward_model.ground_truth", holdout=0.0).rows[0]
    assert (made.text, made.answer) == ("hello", "1")
    assert task([row], prompt_key="q.en", answer_key="a.b", holdout=0.0).rows[0].answer == "2"


def test_the_verifier_says_which_answers_are_bad_and_whether_one_is_needed() -> None:
    values = [{"prompt": "q", "answer": "12"}, {"prompt": "r", "answer": "many"}, *good(2)]
    assert task(values, verifier="number", holdout=0.0).skips.counts == {"the answer 'many' holds no number": 1}
    assert task([{"prompt": "q"}], verifier=f"{__file__}:score", holdout=0.0).rows[0].answer is None


def test_the_holdout_depends_on_the_text_alone() -> None:
    values = good(400)
    made = task(values, holdout=0.25)
    held = {r.text for r in made.held}
    assert 60 < len(held) < 140
    assert not held & {r.text for r in made.rows}
    assert len(made.rows) + len(made.held) == 400
    longer = task([*good(100, 1000), *reversed(values)], holdout=0.25)
    assert {r.text for r in longer.held} & {f"q{i}" for i in range(400)} == held
    smaller = {r.text for r in task(values, holdout=0.1).held}
    assert smaller < held


def test_equal_texts_stay_on_one_side() -> None:
    made = task([*good(30), *good(30)], holdout=0.3)
    held = {r.text for r in made.held}
    assert len(made.held) == 2 * len(held) > 0
    assert not held & {r.text for r in made.rows}


def test_a_small_file_still_holds_one_out_and_none_when_told_so() -> None:
    made = task(good(3), holdout=0.01)
    assert (len(made.rows), len(made.held)) == (2, 1)
    assert task(good(3), holdout=0.0).held == []
    assert len(task(good(1), holdout=0.5).rows) == 1


def test_heldout_is_a_stable_order_of_which_fewer_are_a_subset() -> None:
    made, skips = task(good(200), holdout=0.5), Skips()
    all_held = made.heldout(1000, 0, skips)
    assert made.heldout(7, 0, skips) == all_held[:7]
    assert [r.text for r in all_held] != sorted(r.text for r in all_held)


def test_a_test_split_is_used_and_its_prompts_leave_the_training_rows() -> None:
    made = task(good(5), test=[*good(2, 4), {}], holdout=0.5)
    assert [r.text for r in made.rows] == ["q0", "q1", "q2", "q3"]
    assert {r.text for r in made.held} == {"q4", "q5"}
    assert made.skips.counts == {"prompt is in the test split too": 1}
    skips = Skips()
    made.heldout(2, 0, skips)
    assert skips.counts == {"no field 'prompt'": 1}
