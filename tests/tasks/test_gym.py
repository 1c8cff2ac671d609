from __future__ import annotations

import sys
from typing import Any

import pytest
from tasks.plain import BytesTokenizer, ChatTokenizer

from trimtab.core.config import DataConfig, VerifyConfig
from trimtab.core.errors import ConfigError, MissingExtraError
from trimtab.core.records import Prompt, Status
from trimtab.tasks import LoadedTask, load_task, make_task
from trimtab.tasks.gym import SYSTEM, GymVerifier, extract, split_of
from trimtab.tasks.skips import Skips
from trimtab.tasks.task import RawPrompt

pytest.importorskip("reasoning_gym")


def drawn(spec: str, num: int = 50, seed: int = 0) -> tuple[list[RawPrompt], list[RawPrompt], Skips]:
    task, skips = make_task(f"reasoning-gym:{spec}", DataConfig()), Skips()
    return task.train(num, seed, skips), task.heldout(num, seed, skips), skips


@pytest.mark.parametrize("spec", ["chain_sum", "chain_sum?min_terms=2&max_terms=2&max_digits=1", "gsm_symbolic"])
def test_splits_share_no_question_and_follow_the_seed(spec: str) -> None:
    train, held, skips = drawn(spec)
    assert len(train) == 50
    assert skips.total == 0
    assert not {r.text for r in train} & {r.text for r in held}
    assert len({r.text for r in held}) == len(held) > 10
    assert drawn(spec)[:2] == (train, held)
    other, _, _ = drawn(spec, seed=1)
    assert [r.text for r in other] != [r.text for r in train]
    assert all(split_of(r.text) == "train" for r in other)


def test_neighbouring_seeds_share_no_stretch_of_questions() -> None:
    """The data sets seed item i with seed + i, so that seeds 0 and 1 taken as they are would overlap all but once."""
    first, second = ({r.text for r in drawn("chain_sum", seed=seed)[0]} for seed in (0, 1))
    assert len(first & second) < 10


def test_a_small_question_space_gives_fewer_heldout_questions() -> None:
    _, held, _ = drawn("chain_sum?min_terms=2&max_terms=2&max_digits=1", num=1000)
    assert 10 < len(held) < 200


def test_no_more_items_are_announced_than_the_strictest_data_set_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    task, sizes = make_task("reasoning-gym:word_ladder", DataConfig()), []
    monkeypatch.setattr("trimtab.tasks.gym._create", lambda name, options: sizes.append(options["size"]) or [])
    assert task.train(4096, 0, Skips()) == []
    assert sizes == [20_000]


def verdict_of(spec: str, text: str, index: int = 0) -> tuple[float, bool]:
    raw = drawn(spec, num=index + 1)[0][index]
    prompt = Prompt("p", raw.text, (1,), raw.answer, meta=raw.meta)
    name = spec.partition("?")[0]
    return GymVerifier(name, {})(prompt, text.format(answer=raw.answer))


def test_answers_are_scored_by_the_data_set() -> None:
    assert verdict_of("chain_sum", "hm <answer>{answer}</answer>") == (1.0, True)
    assert verdict_of("chain_sum", "it is {answer}") == (1.0, True)
    assert verdict_of("chain_sum", "no number") == (0.0, False)
    assert verdict_of("chain_sum", "<answer></answer>") == (0.0, False)
    partial, well_formed = verdict_of("letter_counting", "<answer>x {answer}</answer>")
    assert 0.0 < partial < 1.0
    assert well_formed


def test_an_answer_a_data_set_cannot_convert_is_malformed_not_an_evaluator_failure() -> None:
    assert verdict_of("prime_factorization", "<answer>two times three</answer>") == (0.0, False)


def test_a_reference_that_cannot_be_scored_stays_an_evaluator_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def score_answer(self, answer: Any, entry: Any) -> float:
            raise ValueError("out of order")

    monkeypatch.setitem(sys.modules["trimtab.tasks.gym"]._scorers, "broken", Broken())
    with pytest.raises(ValueError, match="out of order"):
        GymVerifier("broken", {})(Prompt("p", "q", (1,), "4", meta={"metadata": {}}), "4")


def test_data_sets_without_a_single_answer_are_scored_too() -> None:
    raw = drawn("graph_color", num=1)[0][0]
    prompt = Prompt("p", raw.text, (1,), raw.answer, meta=raw.meta)
    assert raw.answer is None
    assert GymVerifier("graph_color", {})(prompt, "no colours")[0] == 0.0


@pytest.mark.parametrize(
    ("text", "reference", "answer"),
    [
        ("<answer> 4 </answer> or 5", "4", "4"),
        ("first 3\nthen 1,004 apples", "7", "1004"),
        ("nothing", "7", None),
        ("thinking\n  the cat \n\n", "dog", "the cat"),
        ("", "dog", None),
        ("x\n[1, 2]", None, "[1, 2]"),
    ],
)
def test_extract(text: str, reference: Any, answer: str | None) -> None:
    assert extract(text, reference) == answer


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("chain_sums", r"task: unknown name 'chain_sums'\. Did you mean 'chain_sum'"),
        ("chain_sum?min_term=3", r"task\.chain_sum: unknown name 'min_term'\. Did you mean 'min_terms'"),
        ("chain_sum?seed=3", "unknown name 'seed'"),
        ("chain_sum?min_terms=9&max_terms=3", "refused 'chain_sum'.*max_terms must be >= min_terms"),
        ("chain_sum?max_terms=few", "refused 'chain_sum'.*few"),
    ],
)
def test_bad_spellings(spec: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_task(f"reasoning-gym:{spec}", DataConfig())


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.delitem(sys.modules, "reasoning_gym.factory", raising=False)
    with pytest.raises(MissingExtraError, match=r"pip install 'trimtab\[tasks\]'"):
        make_task("reasoning-gym:chain_sum", DataConfig())


def test_a_generator_that_fails_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Flaky:
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index % 2:
                raise RuntimeError("no puzzle found")
            return {"question": f"q{index}", "answer": "1", "metadata": {}}

    task = make_task("reasoning-gym:chain_sum", DataConfig())
    monkeypatch.setattr("trimtab.tasks.gym._create", lambda name, options: Flaky())
    skips = Skips()
    assert len(task.train(10, 0, skips)) == 10
    assert skips.counts["the generator failed"] >= 9
    assert "RuntimeError: no puzzle found" in skips.first["the generator failed"]


def load(tokenizer: BytesTokenizer, system: str = "") -> LoadedTask:
    data = DataConfig(num_prompts=6, system=system)
    return load_task("reasoning-gym:chain_sum", data, VerifyConfig(timeout_s=30.0), tokenizer)


def test_end_to_end_through_worker_processes() -> None:
    with load(ChatTokenizer()) as task:
        assert bytes(task.train[0].tokens).decode().startswith(f"[system]{SYSTEM}[user]State the final answer")
        texts = ["<answer>{}</answer>", "{}", "<answer>1e9</answer>", "", "well", "<answer>x{}</answer>"]
        items = [(p, text.format(p.answer)) for p, text in zip(task.train, texts, strict=True)]
        found = [(v.correct, v.status) for v in task.verify_all(items)]
    ok, malformed = Status.OK, Status.MALFORMED
    assert found == [(1.0, ok), (1.0, ok), (0.0, ok), (0.0, malformed), (0.0, malformed), (0.0, ok)]
