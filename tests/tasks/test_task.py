from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tasks.plain import BytesTokenizer, ChatTokenizer, TemplateTokenizer

from trimtab.core.config import DataConfig, VerifyConfig
from trimtab.core.errors import ConfigError, DataError, EngineError
from trimtab.core.records import Prompt, Status
from trimtab.pocket import CharTokenizer
from trimtab.tasks import LoadedTask, RawPrompt, load_task
from trimtab.tasks.skips import Skips


class ListTask:
    """A task over given problems."""

    name = "list"

    def __init__(self, raws: list[RawPrompt], held: list[RawPrompt] | None = None, system: str = "") -> None:
        self.raws, self.held, self.system = raws, held or [], system
        self.verifier: Any = Trusted()

    def train(self, num: int, seed: int, skips: Skips) -> list[RawPrompt]:
        return self.raws[:num]

    def heldout(self, num: int, seed: int, skips: Skips) -> list[RawPrompt]:
        return self.held[:num]


class Trusted:
    trusted = True

    def __call__(self, prompt: Prompt, text: str) -> float:
        return float(text == prompt.answer)


def loaded(task: ListTask, tokenizer: Any = None, **data: Any) -> LoadedTask:
    return LoadedTask(task, DataConfig(**data), VerifyConfig(), tokenizer or BytesTokenizer())


def text_of(prompt: Prompt) -> str:
    return bytes(prompt.tokens).decode()


def test_equal_problems_are_different_prompts_with_stable_ids() -> None:
    raws = [RawPrompt("1+1=", "2"), RawPrompt("1+1=", "2"), RawPrompt("1+1=", "3"), RawPrompt("1+1=", "2")]
    first, second = loaded(ListTask(raws)).train, loaded(ListTask(raws)).train
    assert len({p.id for p in first}) == 4
    assert [p.id for p in first] == [p.id for p in second]
    assert {p.text for p in first} == {"1+1="}
    assert loaded(ListTask(raws), system="Be brief.").train[0].id == first[0].id  # the problem, not its dressing


def test_a_skipped_problem_does_not_change_the_ids_of_others() -> None:
    long = RawPrompt("x" * 50, "1")
    a, b = RawPrompt("a", "1"), RawPrompt("b", "1")
    with_long = loaded(ListTask([a, long, b]), max_prompt_tokens=10).train
    assert [p.id for p in with_long] == [p.id for p in loaded(ListTask([a, b])).train]


def test_long_and_empty_and_unencodable_prompts_are_skipped_and_counted() -> None:
    raws = [RawPrompt("12+34=", "46"), *[RawPrompt("1+" * 30 + "=", "x", where=f"row {i}") for i in range(3)]]
    raws += [RawPrompt("", "1", where="row 8"), RawPrompt("Hello", "1", where="row 9")]
    task = loaded(ListTask(raws), CharTokenizer(), max_prompt_tokens=20)
    assert [p.text for p in task.train] == ["12+34="]
    long = "prompt longer than data.max_prompt_tokens = 20"
    assert task.skipped == {long: 3, "empty prompt": 1, "cannot be encoded": 1}
    assert task.skips.first[long] == "row 0 (61 tokens)"
    assert "character 'H'" in task.skips.first["cannot be encoded"]
    assert task.skips.lines()[0] == f"3 x {long}, first at row 0 (61 tokens)"


def test_no_prompt_left_is_an_error_that_says_why() -> None:
    with pytest.raises(
        DataError, match=r"no training prompt is left\. Left out: 1 x prompt longer than .* = 2, first at"
    ):
        loaded(ListTask([RawPrompt("abc", "1")]), max_prompt_tokens=2)
    with pytest.raises(DataError, match="source is empty"):
        loaded(ListTask([]))


def test_heldout_counts_its_own_skips_afresh() -> None:
    held = [RawPrompt("x" * 30, "1"), RawPrompt("b", "1")]
    task = loaded(ListTask([RawPrompt("a", "1")], held), max_prompt_tokens=10)
    for _ in range(2):
        assert [p.text for p in task.heldout(5)] == ["b"]
        assert task.heldout_skips.total == 1
    assert task.skipped == {}
    assert task.heldout(0) == []


MESSAGES = (
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes?"},
    {"role": "user", "content": "1+1"},
)


@pytest.mark.parametrize(
    ("tokenizer", "data", "raw", "expected"),
    [
        (BytesTokenizer, {}, RawPrompt("q"), "q"),
        (BytesTokenizer, {"system": "S"}, RawPrompt("q"), "S\n\nq"),
        (BytesTokenizer, {}, RawPrompt("t", messages=MESSAGES), "hi\n\nyes?\n\n1+1"),
        (ChatTokenizer, {}, RawPrompt("q"), "[user]q[assistant]"),
        (TemplateTokenizer, {}, RawPrompt("q"), "[user]q[assistant]"),
        (ChatTokenizer, {"chat": False}, RawPrompt("q"), "q"),
        (ChatTokenizer, {"system": "S"}, RawPrompt("q"), "[system]S[user]q[assistant]"),
        (ChatTokenizer, {}, RawPrompt("t", messages=MESSAGES), "[user]hi[assistant]yes?[user]1+1[assistant]"),
        (
            ChatTokenizer,
            {"system": "S"},
            RawPrompt("t", messages=({"role": "system", "content": "own"}, *MESSAGES[:1])),
            "[system]own[user]hi[assistant]",
        ),
    ],
)
def test_what_the_model_reads(tokenizer: Any, data: dict[str, Any], raw: RawPrompt, expected: str) -> None:
    prompt = loaded(ListTask([raw]), tokenizer(), **data).train[0]
    assert text_of(prompt) == expected
    assert prompt.text == raw.text
    if tokenizer is not BytesTokenizer and data.get("chat", True):
        assert bytes(tokenizer().apply_chat(prompt.messages)).decode() == expected
    elif not raw.messages:
        assert prompt.messages == ()


def test_the_settings_system_message_goes_before_the_tasks_own() -> None:
    task = ListTask([RawPrompt("q")], system="T")
    assert text_of(loaded(task).train[0]) == "T\n\nq"
    assert text_of(loaded(task, system="S").train[0]) == "S\n\nq"


def test_verify_all_and_close() -> None:
    with loaded(ListTask([RawPrompt("q", "1"), RawPrompt("r", "2")])) as task:
        verdicts = task.verify_all([(p, "2") for p in task.train])
    assert [(v.correct, v.status) for v in verdicts] == [(0.0, Status.OK), (1.0, Status.OK)]


@pytest.mark.parametrize(
    ("spec", "error", "match"),
    [
        ("poket:sums", ConfigError, r"task: unknown name 'poket'\. Did you mean 'pocket'"),
        ("reasoning_gym:chain_sum", ConfigError, "Did you mean 'reasoning-gym'"),
        ("nonsense", ConfigError, r"Allowed: datasets, pocket, reasoning-gym.*\.parquet"),
        ("pocket", ConfigError, "Allowed: countdown, equation, euclid, mix, sums"),
        ("pocket:sum", ConfigError, r"'sum'\. Did you mean 'sums'"),
        ("pocket:sums?term=2", ConfigError, "Did you mean 'terms'"),
        ("pocket:mix?terms=2", ConfigError, "Knobs belong to a single family"),
    ],
)
def test_unknown_tasks_name_the_nearest(spec: str, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        load_task(spec, DataConfig(), VerifyConfig(), CharTokenizer())


def test_a_named_verifier_replaces_the_tasks_own() -> None:
    data = DataConfig(num_prompts=4, verifier="number")
    with load_task("pocket:sums", data, VerifyConfig(), CharTokenizer()) as task:
        verdicts = task.verify_all([(p, f"it is {p.answer}") for p in task.train])
    assert [v.correct for v in verdicts] == [1.0] * 4
    with pytest.raises(DataError, match="holds none of the letters"):
        load_task("pocket:sums", DataConfig(num_prompts=4, verifier="choice"), VerifyConfig(), CharTokenizer())


def test_a_broken_reward_function_fails_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("import no_such_module")
    data = DataConfig(num_prompts=4, verifier=f"{tmp_path / 'reward.py'}:score")
    with pytest.raises(EngineError, match="no_such_module"):
        load_task("pocket:sums", data, VerifyConfig(), CharTokenizer())


def test_importing_loads_neither_torch_nor_the_extras() -> None:
    code = "import sys, trimtab.tasks; print({'torch', 'datasets', 'reasoning_gym', 'pyarrow'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
