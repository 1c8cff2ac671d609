"""verl's rollout dumps."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from doctor.readers import files

from trimtab.doctor import diagnose, read_log


def test_fields_are_read_in_order_of_steps(tmp_path: Path) -> None:
    log = read_log(files.verl(tmp_path))
    assert np.array_equal(log.step_N, np.repeat(np.arange(1, files.STEPS + 1), files.ROWS))
    assert np.array_equal(log.values["reward"], files.rewards().ravel().astype(np.float32))
    assert diagnose(log).at("critical") == []


def test_nan_scores_are_found(tmp_path: Path) -> None:
    """Python's JSON writes NaN, which is not JSON."""
    score = files.rewards()
    score[12:, :8] = np.nan
    found = diagnose(read_log(files.verl(tmp_path, score=score)))
    assert found.top[0].symptom.row == 33
    assert found.top[0].since == 13


def test_repetition_is_found_in_the_texts(tmp_path: Path) -> None:
    found = diagnose(read_log(files.verl(tmp_path, loop=True)))
    assert found.top[0].symptom.row == 32
    assert found.top[0].since == 1


def test_acc_is_correctness_of_any_type(tmp_path: Path) -> None:
    acc = [[bool(row % 2) for row in range(files.ROWS)] for _ in range(files.STEPS)]
    log = read_log(files.verl(tmp_path, acc=acc))
    assert log.values["correct"][:4].tolist() == [0, 1, 0, 1]


def test_fields_of_changing_type_do_not_matter(tmp_path: Path) -> None:
    mixed = [[7 if row % 2 else ["7", {"a": 1}] for row in range(files.ROWS)] for _ in range(files.STEPS)]
    assert len(read_log(files.verl(tmp_path, gts=mixed))) == files.STEPS * files.ROWS


def test_a_hundred_thousand_rollouts_are_quick(tmp_path: Path) -> None:
    """A million take about ten seconds of one core; the bound is generous."""
    rng = np.random.default_rng(0)
    bodies = ["".join(rng.choice(list("abcdefgh    "), 400)) for _ in range(200)]
    lines = [
        f'{{"input": "question {i // 8}", "output": "{bodies[i % 200]} {i}", "score": {i * 7 % 3 % 2}, "step": STEP}}'
        for i in range(2000)
    ]
    block = "\n".join(lines) + "\n"
    for step in range(50):
        (tmp_path / f"{step}.jsonl").write_text(block.replace("STEP", str(step)))
    start = time.perf_counter()
    found = diagnose(read_log(tmp_path))
    assert found.rollouts == 100_000
    assert time.perf_counter() - start < 20
