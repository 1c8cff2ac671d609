"""Comparisons: what is run, that nothing finished is lost, and what is said about it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from compare_world import tiny_plan, tiny_runs, tiny_work

from trimtab.core.errors import ConfigError, DataError
from trimtab.run import checkpoint, comparison
from trimtab.run.compare import Budget, execute, expand, plan, train_run
from trimtab.run.comparison import Finished, compare, curve, result, waste, write_result
from trimtab.run.environment import environment
from trimtab.run.rundir import RunDir
from trimtab.run.statistics import NO_SEED, ONE_SEED, WITHIN_NOISE

__all__ = ["tiny_runs"]
TOKENS = Budget("tokens", 1000)
CLEAN = {"commit": "c0ffee", "dirty": False}

# ---------------------------------------------------------------- what is run


def names(item: str, *overrides: str) -> list[str]:
    return [variant.name for variant in expand(item, overrides)]


def test_lists_of_values_become_variants() -> None:
    assert names("grpo", "learner.lr=1e-4") == ["grpo"]
    assert names("grpo", "learner.lr=1e-4,2e-4") == ["grpo[learner.lr=1e-4]", "grpo[learner.lr=2e-4]"]
    assert names("grpo", "a=1,2", "b=3,4") == ["grpo[a=1 b=3]", "grpo[a=1 b=4]", "grpo[a=2 b=3]", "grpo[a=2 b=4]"]
    assert names("prune-opd[stop.form=streaming]", "seed=3") == ["prune-opd[stop.form=streaming]"]
    assert names("esr[stop.cutoff=8,16]") == ["esr[stop.cutoff=8]", "esr[stop.cutoff=16]"]
    assert names("grpo", "drop_layers=[1,2]", 'data.system="a, b"') == ["grpo"]
    swept = list(expand("grpo", ["learner.lr=1e-4,2e-4", "seed=3"]))
    assert [dict(v.overrides) for v in swept] == [{"seed": 3, "learner.lr": 1e-4}, {"seed": 3, "learner.lr": 2e-4}]


@pytest.mark.parametrize(
    ("recipes", "overrides", "message"),
    [
        (["grpo"], [], "two or more"),
        (["grpo", "grpo"], [], "twice"),
        (["grpo", "rloo"], ["steps=3"], "--steps"),
        (["grpo", "rloo"], ["budget.tokens=3"], "--tokens"),
        (["grpo", "rloo"], ["output.dir=x"], "--out"),
        (["grpo", "rloo[output.dir=x]"], [], "--out"),
        (["grpo", "rloo"], ["seed=1,2"], "--seeds"),
        (["grpo", "rloo[seed=1]"], [], "--seeds"),
        (["grpo"], ["learner.lr=1e-4,,2e-4"], "one comma"),
        (["grpo", "rlo"], [], "rloo"),
        (["grpo", "rloo"], ["learner.lrr=1"], "lr"),
        (["grpo", "rloo[task=pocket:countdown]"], [], "task differs"),
        (["grpo", "rloo[model=pocket:teacher]"], [], "model differs"),
        (["grpo", "rloo[eval.samples=4]"], [], "eval differs"),
        (["grpo", "esr"], ["stop.cutoff=3"], "stop"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, recipes: list[str], overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(recipes, overrides, TOKENS, 2, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_every_variant_runs_with_every_seed_under_the_same_terms(tmp_path: Path) -> None:
    found = plan(
        ["opd", "esr[sampling.max_new_tokens=64]"],
        ["seed=4", "group_size=2", "eval.max_new_tokens=0"],
        TOKENS,
        3,
        tmp_path,
    )
    assert [(r.variant.recipe, r.seed) for r in found.runs] == [(n, s) for n in ("opd", "esr") for s in (4, 5, 6)]
    settings = [run.resolved.settings for run in found.runs]
    assert {(s.budget.tokens, s.steps >= 10**6, s.group_size, s.output.report) for s in settings} == {
        (1000, True, 2, False)
    }
    assert {s.eval.max_new_tokens for s in settings} == {256}  # the longest, for all of them
    assert len({run.path for run in found.runs}) == 6


def test_each_budget_bounds_the_run(tmp_path: Path) -> None:
    def first(budget: Budget) -> Any:
        return plan(["grpo", "rloo"], [], budget, 1, tmp_path).runs[0].resolved.settings

    assert first(Budget("steps", 7)).steps == 7
    assert first(Budget("seconds", 1.5)).budget.seconds == 1.5
    assert first(Budget("trained_tokens", 99)).budget.trained_tokens == 99
    with pytest.raises(ConfigError, match="above 0"):
        first(Budget("tokens", 0))


def test_the_same_comparison_has_the_same_folder() -> None:
    def folder(*overrides: str, seeds: int = 1, budget: Budget = TOKENS) -> Path:
        return plan(["grpo", "rloo"], overrides, budget, seeds).folder

    assert folder() == folder(seeds=3)
    assert folder() not in (folder("group_size=4"), folder(budget=Budget("tokens", 2000)))


# ---------------------------------------------------------------- running


@pytest.mark.usefixtures("tiny_runs")
def test_a_comparison_from_runs_to_result_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tiny_plan(tmp_path / "c")
    said: list[str] = []
    assert execute(made, 1, say=lambda run, error: said.append(run.name)) == {}
    assert said == ["grpo, seed 0", "grpo, seed 1", "rloo, seed 0", "rloo, seed 1"]
    found = compare(made, {})
    assert list(found["results"]) == ["grpo", "rloo"]
    for one in found["results"].values():
        assert one["seeds"] == [0, 1]
        assert one["final_accuracy"]["n"] == 2
        assert one["final_accuracy"]["low"] < one["final_accuracy"]["mean"] < one["final_accuracy"]["high"]
        assert None not in one["curve"]["mean"]
        assert one["curve"]["tokens"][-1] == 150
        assert min(one["spent"]["generated_tokens"]["values"]) >= 150
        assert one["spent"]["tokens_overspent"]["mean"] == one["spent"]["generated_tokens"]["mean"] - 150
        assert one["trained_share"]["mean"] + sum(row["share"] for row in one["waste"]) == pytest.approx(1)
    same_start = [[run["curve"]["accuracy"][0] for run in one["runs"]] for one in found["results"].values()]
    assert same_start[0] == same_start[1]
    assert found["results"]["rloo"]["difference"]["verdict"] in (WITHIN_NOISE, "higher", "lower")
    assert found["results"]["grpo"]["difference"] is None

    monkeypatch.setattr(comparison, "environment", lambda: environment() | {"git": CLEAN})
    for run in made.runs:
        stamp(run.path, CLEAN)
    path = write_result(tmp_path / "results", made, found, allow_dirty=False)
    record = json.loads(path.read_text())
    assert record["publishable"] is True
    assert record["git"] == CLEAN
    assert record["configurations"]["rloo"]["settings"]["budget"]["tokens"] == 150
    assert record["versions"]["torch"]
    assert [run["curve"]["accuracy"] for run in record["results"]["grpo"]["runs"]]


def stamp(path: Path, git: dict[str, Any] | None) -> None:
    file = path / "environment.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"git": git}))


@pytest.mark.usefixtures("tiny_runs")
def test_finished_runs_are_kept_and_half_finished_ones_go_on(tmp_path: Path) -> None:
    made = tiny_plan(tmp_path / "c")
    execute(made, 1)
    before = compare(made, {})
    half, kept = made.runs[1], made.runs[0]
    older, newer = checkpoint.steps(half.path / "checkpoints")  # as a kill leaves it: an older checkpoint, no summary
    shutil.rmtree(checkpoint.folder_of(half.path / "checkpoints", newer))
    RunDir.open(half.path).truncate_after(older)
    stillborn = made.runs[2].path
    shutil.rmtree(stillborn)
    (stillborn / "checkpoints").mkdir(parents=True)
    time = (kept.path / "summary.json").stat().st_mtime_ns
    worked: list[Path] = []

    def work(config: dict[str, Any], path: Path) -> None:
        worked.append(path)
        train_run(config, path)

    assert execute(tiny_plan(tmp_path / "c"), 1, work=work) == {}
    assert worked == [half.path, stillborn]
    assert (kept.path / "summary.json").stat().st_mtime_ns == time
    after = compare(made, {})
    for name in ("grpo", "rloo"):
        for a, b in zip(before["results"][name]["runs"], after["results"][name]["runs"], strict=True):
            assert a["curve"]["accuracy"] == b["curve"]["accuracy"]
    more = tiny_plan(tmp_path / "c", seeds=3)
    assert [run.seed for run in more.runs if not run.finished] == [2, 2]
    with pytest.raises(ConfigError, match=r"settings\.learner\.lr=0\.03"):
        tiny_plan(tmp_path / "c", "learner.lr=0.5")


def test_a_failed_run_is_named_and_loses_no_other(tmp_path: Path) -> None:
    made = tiny_plan(tmp_path / "c")

    def work(config: dict[str, Any], path: Path) -> None:
        if path == made.runs[0].path:
            raise DataError("the disk is full")
        if path == made.runs[1].path:
            raise ZeroDivisionError("a fault")
        path.mkdir(parents=True)
        (path / "done").touch()

    errors = execute(made, 1, work=work)
    assert errors["grpo, seed 0"] == "the disk is full"
    assert errors["grpo, seed 1"].startswith("ZeroDivisionError: a fault (traceback in ")
    assert "in work" in made.runs[1].path.with_name("seed-1.error.txt").read_text()
    assert [(run.path / "done").exists() for run in made.runs] == [False, False, True, True]
    found = compare(made, errors)
    assert found["failed"] == errors
    assert found["target"]["accuracy"] is None
    assert all(one["seeds"] == [] for one in found["results"].values())


def test_a_process_that_is_killed_loses_no_other(tmp_path: Path) -> None:
    made = tiny_plan(tmp_path / "c", "threads=2", seeds=1, tokens=80)
    errors = execute(made, 2, work=tiny_work)
    assert list(errors) == ["rloo, seed 0"]
    assert "-9" in errors["rloo, seed 0"]
    assert [run.finished for run in made.runs] == [True, False]
    found = compare(made, errors)["results"]
    assert (found["grpo"]["seeds"], found["rloo"]["seeds"]) == ([0], [])
    assert found["rloo"]["difference"]["verdict"] == NO_SEED
    assert RunDir.open(made.runs[0].path).config()["settings"]["threads"] == 1


# ---------------------------------------------------------------- what is said


def finished(seed: int, accuracy: list[float | None], tokens: list[int] | None = None, **ledger: Any) -> Finished:
    tokens = tokens or [100 * i for i in range(len(accuracy))]
    evals = [
        {"step": i, "tokens_generated": n, "tokens_trained": n, "train_s": n / 10, "accuracy": a, "accuracy_se": 0.1,
         "mean_length": 9.0, "tokens": 5, "pass_at_k": {"1": a, "2": 0.9}}
        for i, (n, a) in enumerate(zip(tokens, accuracy, strict=True))
    ]  # fmt: skip
    account = {"inflow": {"sampled": 200}, "trained": 100, "buffered": 0, "dropped": {}, "cost": {}} | ledger
    summary = {"tokens_generated": tokens[-1], "tokens_trained": tokens[-1], "steps": len(tokens) - 1}
    return Finished(seed, Path("x"), evals, summary, account, {})


def test_a_target_that_is_never_reached_is_counted_not_dropped() -> None:
    baseline = [finished(s, [0.0, 0.2, top]) for s, top in enumerate([0.4, 0.4, 0.4, 0.3, 0.3])]
    runs = [finished(s, [0.0, top, top]) for s, top in enumerate([0.4, 0.4, 0.3, 0.4, 0.3])]
    found = result(runs, baseline, 0.4, [0, 200], False)["tokens_to_target"]
    assert found["by_seed"] == {"0": 100, "1": 100, "2": None, "3": 100, "4": None}
    assert (found["reached"], found["runs"], found["mean"]) == (3, 5, 100)
    assert found["ratio"] | {"low": 0, "high": 0, "mean": 0} == {
        "mean": 0, "low": 0, "high": 0, "n": 2, "pairs": 5, "baseline_never": 1, "recipe_never": 1, "neither": 1,
        "at_start": 0,
    }  # fmt: skip
    assert found["ratio"]["mean"] == pytest.approx(0.5)


def test_ratios_pair_seeds_and_leave_out_a_target_met_before_training() -> None:
    baseline = [finished(s, [0.0, 0.2, 0.4]) for s in (0, 1, 2)]
    runs = [finished(2, [0.0, 0.4, 0.4]), finished(1, [0.5, 0.5, 0.5]), finished(7, [0, 1, 1])]
    found = result(runs, baseline, 0.4, [0], False)["seconds_to_target"]["ratio"]
    assert (found["pairs"], found["n"], found["at_start"]) == (2, 1, 1)
    assert found["mean"] == pytest.approx(0.5)


def test_curves_average_the_same_seeds_everywhere() -> None:
    runs = [finished(0, [0.0, 0.4]), finished(1, [0.2, 0.4, 0.6]), finished(2, [0.1, None, 0.5])]
    found = curve(runs, [0, 50, 100, 200])
    assert found["mean"] == [pytest.approx(0.1), pytest.approx((0.2 + 0.3 + 0.2) / 3), pytest.approx(1.1 / 3), None]
    assert curve([], [0, 1])["mean"] == [None, None]


def test_one_seed_has_no_interval_and_says_so() -> None:
    found = result([finished(0, [0.0, 0.5])], [finished(0, [0.0, 0.4])], 0.4, [0], False)
    assert found["difference"]["verdict"] == ONE_SEED
    assert found["difference"]["low"] is None
    assert found["pass_at_k"]["2"] == {"mean": 0.9, "low": None, "high": None, "n": 1}


def test_waste_is_by_cause_and_part_over_all_seeds() -> None:
    runs = [
        finished(0, [0.0], dropped={"truncated": {"overlong": 60}, "constant_group": {"": 20}}, buffered=20),
        finished(1, [0.0], dropped={"truncated": {"overlong": 100}}),
    ]
    assert [(row["cause"], row["part"], row["share"]) for row in waste(runs)] == [
        ("truncated", "overlong", pytest.approx(0.4)),
        ("constant_group", "", pytest.approx(0.05)),
        ("held_back", "", pytest.approx(0.05)),
    ]


@pytest.mark.parametrize(
    ("here", "there", "message"),
    [
        (None, CLEAN, "unknown"),
        ({"commit": "c0ffee", "dirty": True}, CLEAN, "not committed"),
        (CLEAN, {"commit": "c0ffee", "dirty": True}, "not committed"),
        (CLEAN, {"commit": "beef", "dirty": False}, "different commits"),
        (CLEAN, None, "unknown"),
    ],
)
def test_numbers_without_a_clean_commit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Any, there: Any, message: str
) -> None:
    made = tiny_plan(tmp_path / "c", seeds=1)
    for run in made.runs:
        RunDir.create(run.path, run.resolved.to_dict(), "x").write_summary({"steps": 1})
        stamp(run.path, there)
    monkeypatch.setattr(comparison, "environment", lambda: environment() | {"git": here})
    with pytest.raises(ConfigError, match=message) as caught:
        write_result(tmp_path / "results", made, {"results": {}}, allow_dirty=False)
    assert "--allow-dirty" in str(caught.value)
    assert str(made.folder) in str(caught.value)
    assert not (tmp_path / "results").exists()
    path = write_result(tmp_path / "results", made, {"results": {}}, allow_dirty=True)
    record = json.loads(path.read_text())
    assert record["publishable"] is False
    assert message in " ".join(record["unpublishable_because"])
