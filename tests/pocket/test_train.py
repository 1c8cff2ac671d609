from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trimtab.core.errors import DataError
from trimtab.model.transformer import Transformer
from trimtab.pocket.families import FAMILIES, split_of
from trimtab.pocket.tokenizer import CharTokenizer
from trimtab.pocket.train import CONFIG, Run, Step, batch, learning_rate, loss, train

tokenizer = CharTokenizer()
RUN = Run(families=dict.fromkeys(FAMILIES, 1), terms={2: 1, 3: 1}, steps=6, batch=4, warmup=2)


def test_only_the_work_and_its_end_are_trained() -> None:
    tokens_T, lengths, trained_T = batch(replace(RUN, families={"sums": 1}), 0, 0, tokenizer)
    assert sum(lengths) == len(tokens_T) == len(trained_T)
    for row, mask in zip(tokens_T.split(lengths), trained_T.split(lengths), strict=True):
        prompt, work = tokenizer.decode(row[~mask]), tokenizer.decode(row[mask])
        assert prompt.endswith("=")
        assert "=" not in prompt[:-1]
        assert split_of(prompt) == "train"
        assert eval(prompt[:-1]) == int(work.rpartition("#")[2])
        assert int(row[mask][-1]) == tokenizer.eos_id


def test_batches_depend_on_seed_and_step_alone() -> None:
    first = batch(RUN, 1, 5, tokenizer)
    batch(RUN, 1, 6, tokenizer)
    again = batch(RUN, 1, 5, tokenizer)
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], batch(RUN, 2, 5, tokenizer)[0])
    assert not torch.equal(first[0], batch(RUN, 1, 6, tokenizer)[0])


def test_style_b_writes_other_work_for_the_same_problems() -> None:
    run = replace(RUN, families={"sums": 1})
    a, b = (batch(replace(run, style=style), 0, 0, tokenizer) for style in "AB")
    assert tokenizer.decode(a[0][~a[2]]) == tokenizer.decode(b[0][~b[2]])
    assert "u" in tokenizer.decode(b[0][b[2]])
    assert "u" not in tokenizer.decode(a[0][a[2]])


def test_loss_ignores_the_prompt_tokens_as_targets() -> None:
    """Uniform logits cost log V a trained token, however many tokens the prompts have."""
    model = Transformer.init(CONFIG, 0)
    assert model.lm_head is not None
    torch.nn.init.zeros_(model.lm_head.weight)
    value = loss(model, *batch(RUN, 0, 0, tokenizer))
    assert value.item() == pytest.approx(torch.tensor(64.0).log().item(), rel=1e-5)
    tokens_T, lengths, trained_T = batch(RUN, 0, 0, tokenizer)
    value = loss(model, tokens_T, lengths, trained_T & (torch.arange(len(tokens_T)) == 0))
    assert torch.isnan(value)  # nothing trained: the first token of a sequence is never a target


def test_learning_rate_warms_up_then_falls_to_zero() -> None:
    run = Run(families={"sums": 1}, terms={2: 1}, steps=100, warmup=10, lr=1.0)
    rates = [learning_rate(run, step) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.0)
    assert learning_rate(replace(run, last_lr=0.25), 100) == pytest.approx(0.25)
    assert learning_rate(replace(run, last_lr=1.0), 60) == pytest.approx(1.0)


class Killed(Exception):
    pass


def test_a_killed_run_continues_to_the_same_weights(tmp_path: Path) -> None:
    whole, _ = train("student", RUN, 0, tmp_path / "whole.pt")

    def kill(step: Step) -> None:
        if step.step == 5:
            raise Killed

    path = tmp_path / "killed.pt"
    with pytest.raises(Killed):
        train("student", RUN, 0, path, every=2, report=kill)
    seen: list[int] = []
    resumed, seconds = train("student", RUN, 0, path, every=2, report=lambda step: seen.append(step.step))
    assert seen == [5, 6]  # two steps were saved as done four
    assert seconds > 0
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    assert [p.name for p in tmp_path.iterdir() if "tmp" in p.name] == []


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    train("student", replace(RUN, steps=1), 0, path)
    with pytest.raises(DataError, match="another training run"):
        train("student", replace(RUN, steps=1), 1, path)


def test_training_learns(tmp_path: Path) -> None:
    losses: list[float] = []
    run = replace(RUN, families={"sums": 1}, steps=40, batch=8, warmup=5)
    train("student", run, 0, tmp_path / "c.pt", report=lambda step: losses.append(step.loss))
    assert losses[0] == pytest.approx(4.16, abs=0.2)
    assert losses[-1] < 2.6
