from __future__ import annotations

import pytest

from trimtab.core.config import DataConfig, VerifyConfig
from trimtab.core.records import Status
from trimtab.pocket import FAMILIES, CharTokenizer, solution
from trimtab.tasks import LoadedTask, load_task
from trimtab.tasks.pocket import to_problem


def loaded(spec: str, seed: int = 0, graded: bool = False, num: int = 40) -> LoadedTask:
    return load_task(spec, DataConfig(num_prompts=num), VerifyConfig(graded=graded), CharTokenizer(), seed)


@pytest.mark.parametrize("spec", [*(f"pocket:{name}" for name in FAMILIES), "pocket:mix"])
def test_solutions_verify_and_splits_are_apart(spec: str) -> None:
    task = loaded(spec)
    held = task.heldout(30)
    assert (len(task.train), len(held), task.skipped) == (40, 30, {})
    assert not {p.text for p in task.train} & {p.text for p in held}
    verdicts = task.verify_all([(p, solution(to_problem(p))) for p in [*task.train, *held]])
    assert all((v.correct, v.status) == (1.0, Status.OK) for v in verdicts)


def test_mix_takes_all_families_in_turn() -> None:
    tasks = [p.task for p in loaded("pocket:mix").train]
    assert tasks[: len(FAMILIES)] == [f"pocket:{name}" for name in FAMILIES]
    assert tasks[: len(FAMILIES)] * (40 // len(FAMILIES)) == tasks


def test_training_follows_the_seed_and_the_heldout_set_does_not() -> None:
    first, again, other = loaded("pocket:sums"), loaded("pocket:sums"), loaded("pocket:sums", seed=1)
    assert first.train == again.train
    assert {p.text for p in first.train} != {p.text for p in other.train}
    assert first.heldout(10) == other.heldout(10)
    assert first.heldout(10)[:5] == first.heldout(5)
    assert loaded("pocket:sums", num=10).train == first.train[:10]


def test_equal_problems_drawn_twice_are_different_prompts() -> None:
    train = loaded("pocket:euclid", num=3000).train
    assert len({p.text for p in train}) < 3000
    assert len({p.id for p in train}) == 3000


def test_grading_and_malformed_answers() -> None:
    graded, plain = loaded("pocket:sums", graded=True), loaded("pocket:sums?terms=2")
    p, q = graded.train[0], plain.train[0]
    assert q.text.count("+") == 1
    near = graded.verify_all([(p, f"#{int(p.answer) + 1}")])[0]
    assert near.correct is not None
    assert 0.0 < near.correct < 0.5
    wrong, none = plain.verify_all([(q, f"#{int(q.answer) + 1}"), (q, "47 +85")])
    assert (wrong.correct, wrong.status) == (0.0, Status.OK)
    assert (none.correct, none.status) == (0.0, Status.MALFORMED)
