"""The step loop end to end: determinism, exact resume, accounting, and steps with nothing to train on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import group
from world import build, graded, rollouts, tiny

from trimtab.core.errors import ConfigError, MismatchError, MissingExtraError, NothingToTrainError
from trimtab.core.records import DropReason, Group, Status, StopReason, Verdict, flatten
from trimtab.core.slots import Replay, Schedule
from trimtab.generate.protocol import Sampling
from trimtab.run import checkpoint, setup
from trimtab.run.display import Display
from trimtab.run.rundir import RunDir
from trimtab.run.trainer import explain_nothing

__all__ = ["tiny"]
pytestmark = pytest.mark.usefixtures("tiny")


def same_weights(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("grpo", {}),
        ("dr-grpo", {}),
        ("rloo", {}),
        ("gspo", {}),
        ("dapo", {"select.max_draws": 2, "select.on_exhausted": "short", "reward.buffer": 4}),
        ("reinforce-pp", {}),
        ("reinforce-pp-baseline", {}),
        ("opd", {"teacher": "tiny:2"}),
        ("opd", {"teacher": "tiny:2", "distill.variant": "sampled"}),
        ("opd", {"teacher": "tiny:2", "distill.variant": "full"}),
        ("esr", {"teacher": "tiny:2", "stop.cutoff": 5}),
        ("prune-opd", {"teacher": "tiny:2", "stop.init_len": 8, "stop.min_len": 4, "stop.max_len": 12}),
        (
            "prune-opd",
            {"teacher": "tiny:2", "stop.form": "streaming", "stop.w_drop": 0.5, "stop.init_len": 12, "stop.min_len": 4,
             "stop.max_len": 12, "stop.chunk": 3},
        ),
    ],
)  # fmt: skip
def test_every_recipe_runs_twice_the_same(tmp_path: Path, recipe: str, overrides: dict[str, Any]) -> None:
    trainers = [graded(build(tmp_path / name, recipe, {"steps": 2, **overrides})) for name in ("a", "b")]
    start = {name: value.clone() for name, value in trainers[0].policy.state_dict().items()}
    summaries = [trainer.run() for trainer in trainers]
    assert summaries[0]["tokens_generated"] == summaries[1]["tokens_generated"] > 0
    assert same_weights(trainers[0].policy, trainers[1].policy)
    assert rollouts(tmp_path / "a") == rollouts(tmp_path / "b")
    assert any(not torch.equal(start[name], value) for name, value in trainers[0].policy.state_dict().items())
    trainers[0].ledger.balance()
    totals = trainers[0].ledger.totals()
    assert totals["inflow"]["sampled"] == summaries[0]["tokens_generated"]


def test_engine_slots_do_not_change_a_run(tmp_path: Path) -> None:
    trainers = [graded(build(tmp_path / str(n), "grpo", {"engine.slots": n, "steps": 1})) for n in (1, 5)]
    for trainer in trainers:
        trainer.run()
    a, b = rollouts(tmp_path / "1"), rollouts(tmp_path / "5")
    assert [r["id"] for r in a] == [r["id"] for r in b]
    assert [r["tokens"] for r in a] == [r["tokens"] for r in b]
    logprobs = [np.concatenate([r["logprobs"] for r in rows]) for rows in (a, b)]
    np.testing.assert_allclose(*logprobs, atol=1e-5)


def test_every_prompt_comes_once_an_epoch(tmp_path: Path) -> None:
    trainer = graded(build(tmp_path / "run", "grpo", {"steps": 7}))
    trainer.run()
    used = [r["prompt_id"] for r in rollouts(tmp_path / "run") if r["sample"] % 2 == 0]
    assert len(used) == 21
    assert sorted(used) == sorted([p.id for p in trainer.train_prompts] * 3)


@pytest.mark.parametrize("stop_after", [0, 1, 3])
def test_resume_equals_the_uninterrupted_run(tmp_path: Path, stop_after: int) -> None:
    overrides = {"teacher": "tiny:2", "stop.init_len": 8, "stop.min_len": 4, "stop.max_len": 12}
    whole = graded(build(tmp_path / "whole", "prune-opd", overrides))
    whole.run()
    part = graded(build(tmp_path / "part", "prune-opd", {**overrides, "output.checkpoint_every": 2}))
    part.first_evaluation = part.evaluate("before")
    for _ in range(stop_after):
        part.step()
        part.after_step()
    del part
    resumed = graded(setup.resume(tmp_path / "part", Display(quiet=True)))
    assert resumed.counters.step == stop_after // 2 * 2
    resumed.run()
    assert same_weights(whole.policy, resumed.policy)
    assert rollouts(tmp_path / "whole") == rollouts(tmp_path / "part")
    assert whole.ledger.totals()["inflow"] == resumed.ledger.totals()["inflow"]
    states = [[part.state_dict() for part in trainer.resolved.all_parts()] for trainer in (whole, resumed)]
    assert states[0] == states[1]
    steps = [m["step"] for m in RunDir.open(tmp_path / "part").metrics()]
    assert steps == [1, 2, 3, 4]


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import world
world.setup.load_any = world.load_tiny
trainer = world.graded(world.build(Path(sys.argv[1]), "grpo", {"steps": 12}))
print("started", flush=True)
trainer.run()
"""


def test_kill_minus_nine_then_resume(tmp_path: Path) -> None:
    whole = graded(build(tmp_path / "whole", "grpo", {"steps": 12}))
    whole.run()
    tests = str(Path(__file__).parents[1])
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "killed"), tests], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline().strip() == b"started"
    folder = tmp_path / "killed" / "checkpoints"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(checkpoint.steps(folder)) < 2:
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.wait(timeout=30)
    resumed = graded(setup.resume(tmp_path / "killed", Display(quiet=True)))
    assert resumed.counters.step > 0
    resumed.run()
    assert same_weights(whole.policy, resumed.policy)
    assert rollouts(tmp_path / "whole") == rollouts(tmp_path / "killed")


def test_missing_rewards_train_nothing_and_are_no_zeros(tmp_path: Path) -> None:
    trainer = build(tmp_path / "run", "grpo", {"steps": 1})

    def mixed(items: Any) -> list[Verdict]:
        scores = [1.0, None]
        found = [scores[i % 2] for i in range(len(items))]
        return [Verdict(None, Status.TIMEOUT) if s is None else Verdict(s, Status.OK) for s in found]

    trainer.rounds.verify = mixed
    before = {name: value.clone() for name, value in trainer.policy.state_dict().items()}
    trainer.run()
    rows = rollouts(tmp_path / "run")
    assert {r["reward"] for r in rows} == {1.0, None}
    assert {r["dropped"] for r in rows if r["reward"] is None} == {DropReason.UNSCORED}
    assert all(torch.equal(before[name], value) for name, value in trainer.policy.state_dict().items())
    assert trainer.ledger.totals()["trained"] == 0


def test_a_run_that_is_all_cut_off_is_named_with_its_cap(tmp_path: Path) -> None:
    overrides = {"steps": 20, "filter": ["overlong"], "sampling.max_new_tokens": 3}
    trainer = build(tmp_path / "run", "grpo", overrides)
    trainer.rounds.verify = lambda items: [Verdict(0.0, Status.OK) for _ in items]
    with pytest.raises(NothingToTrainError, match=r"cut off at 3 tokens: sampling\.max_new_tokens is the likely cap"):
        trainer.run()
    assert trainer.counters.version == 0


def test_misaligned_arrays_quarantine_the_rollout(tmp_path: Path) -> None:
    trainer = graded(build(tmp_path / "run", "grpo", {"steps": 1}))
    generate = trainer.engine.generate

    def broken(requests: Any, **options: Any) -> Any:
        completions = generate(requests, **options)
        if requests[0].id.startswith("0-"):
            completions[0].logprobs = completions[0].logprobs[:-1]
        return completions

    trainer.engine.generate = broken
    trainer.run()
    rows = rollouts(tmp_path / "run")
    assert [r["dropped"] for r in rows].count(DropReason.QUARANTINED) == 1
    assert rows[0]["dropped"] == DropReason.QUARANTINED
    assert len(rows) == 6


def test_the_first_batch_finds_an_engine_that_ignores_the_temperature(tmp_path: Path) -> None:
    trainer = graded(build(tmp_path / "run", "grpo", {"sampling.temperature": 0.5}))
    generate = trainer.engine.generate

    def deaf(requests: Any, **options: Any) -> Any:
        return generate([replace(r, sampling=Sampling(temperature=1.0)) for r in requests], **options)

    trainer.engine.generate = deaf
    with pytest.raises(MismatchError, match="temperature"):
        trainer.run()
    assert trainer.counters.version == 0


@dataclass(kw_only=True)
class Late(Schedule):
    """Trains on the groups of the step before."""

    def batches(self, groups: list[Group], ctx: Any) -> Any:
        held, self.held = getattr(self, "held", []), groups
        yield held, 1, 1


@dataclass(kw_only=True)
class Hold(Replay):
    """Keeps the first group back for a step."""

    def collect(self, groups: list[Group], ctx: Any) -> list[Group]:
        held, self.held = getattr(self, "held", []), groups[:1]
        return [*groups[1:], *held]


@pytest.mark.parametrize(("slot", "part"), [("schedule", Late), ("replay", Hold)])
def test_what_is_held_back_is_buffered_and_leaves_the_buffer_when_trained(tmp_path: Path, slot: str, part: Any) -> None:
    trainer = graded(build(tmp_path / "run", "grpo", {"steps": 3}))
    trainer.resolved.parts[slot] = [part()]
    trainer.run()
    trainer.ledger.balance()
    rows = rollouts(tmp_path / "run")
    last = {r.id for r in flatten(trainer.resolved.parts[slot][0].held)}
    totals = trainer.ledger.totals()
    assert totals["inflow"]["sampled"] == sum(r["length"] for r in rows)
    assert totals["buffered"] == sum(r["length"] for r in rows if r["id"] in last) > 0
    assert totals["inflow"]["reused"] == 0


def test_equal_prompts_in_one_step_are_different_rollouts(tmp_path: Path) -> None:
    trainer = graded(build(tmp_path / "run", "grpo", {"data.num_prompts": 1, "steps": 1}))
    groups = trainer.collect(trainer.context())
    ids = [r.id for r in flatten(groups)]
    assert len(groups) == 3
    assert len(set(ids)) == len(ids) == 6


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"sampling.top_p": 0.9}, "top_p"),
        ({"drop_layers": [7]}, "drop_layers"),
        ({"device": "abacus"}, "device"),
        ({"task": "pocket:sumz"}, "sums"),
    ],
)
def test_bad_settings_leave_no_directory(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(tmp_path / "run", "grpo", overrides)
    assert not (tmp_path / "run").exists()


def test_tokens_saved_are_estimated_from_natural_lengths(tmp_path: Path) -> None:
    from trimtab.run.evaluate import ResidualLength

    natural = ResidualLength([2, 4, 10, 10])
    assert natural.saved([3]) == pytest.approx((4 + 10 + 10) / 3 - 3)
    assert natural.saved([10, 50]) == 0.0
    assert natural.saved([]) == 0.0
    assert ResidualLength([]).saved([3]) == 0.0


def test_prompts_beyond_the_context_are_skipped_and_counted_and_the_batch_stays_full(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    long = "1+" * 70 + "1="
    lines = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(10, 30)] + [{"prompt": long, "answer": "1"}]
    data.write_text("\n".join(json.dumps(line) for line in lines))
    trainer = graded(build(tmp_path / "run", "grpo", {"task": str(data), "steps": 1, "data.holdout": 0.0}))
    assert sum(trainer.task.skipped.values()) == 1
    assert len(trainer.train_prompts) == 20
    trainer.run()
    assert len(rollouts(tmp_path / "run")) == 6


def test_tensorboard_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    trainer = graded(build(tmp_path / "run", "grpo", {"output.tensorboard": True}))
    with pytest.raises(MissingExtraError, match=r"pip install 'trimtab\[tensorboard\]'"):
        trainer.run()


def test_tensorboard_events_are_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    graded(build(tmp_path / "run", "grpo", {"output.tensorboard": True, "steps": 1})).run()
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))


def test_a_full_context_is_not_blamed_on_the_token_limit() -> None:
    full = group([0.0, 0.0], reason=StopReason.CONTEXT)
    text = explain_nothing([full], (64, ""))
    assert "data.max_prompt_tokens" in text
    assert "sampling.max_new_tokens" not in text
