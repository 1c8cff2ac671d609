from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from fabricate import CONFIG, TOKENIZER, fabricate, rollout
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.cli import main
from trimtab.core.errors import DataError
from trimtab.core.records import Group, Prompt
from trimtab.report import build_report, write_report
from trimtab.report.accounts import flow, ledger_steps
from trimtab.report.curves import MAX_POINTS, cards, latest, learning_curve, progress, thin
from trimtab.report.responses import effective_length, examples, length_histogram, overlap_by_position, spaced
from trimtab.report.text import embed, visible
from trimtab.run.rundir import RunDir

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "`${alert(1)}`",
    "nul \x00 end",
    "\u202egnp.exe\u202c",
    "<!-- <script>",
    "]]>\u2028\u2029",
    "' onmouseover='alert(1)",
    '" autofocus onfocus="alert(1)',
    "{{ 7 * 7 }}{% raw %}",
    "\ud800 lone",
]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page(HTMLParser):
    """Elements, attributes and scripts, as a browser finds them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.words: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script" and self.cdata_elem == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)
        else:
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))

    @property
    def data(self) -> Any:
        (found,) = [text for attributes, text in self.scripts if attributes.get("type") == "application/json"]
        return json.loads(found)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return fabricate(tmp_path_factory.mktemp("runs") / "run", steps=12)


@pytest.fixture(scope="module")
def html(run: RunDir) -> str:
    return build_report(run.path)


# ---------------------------------------------------------------- the whole page


def test_the_page_says_what_ran_and_how_it_went(html: str) -> None:
    page = Page(html)
    recipe = CONFIG["recipe"]
    for expected in (recipe["title"], recipe["paper"], "arXiv:2605.07804", "pocket:student", "pocket:sums"):
        assert expected in page.text
    assert "31.0% → 83.0%" in page.text
    assert "+52.0 points, standard error 2.3" in page.text
    assert "finished, 12 steps" in page.text
    plots = [attributes["data-plot"] for _, attributes in page.tags if "data-plot" in attributes]
    assert plots == ["curve", "histogram", "lengths", "ledger", "overlap", "effective", "metric"]
    assert all(page.data[name] for name in page.data)


def test_nothing_is_loaded_from_anywhere(html: str) -> None:
    page = Page(html)
    loading = {"src", "href", "srcset", "action", "formaction", "data", "poster", "background", "ping"}
    assert [(tag, a) for tag, a in page.tags if loading & set(a)] == []
    assert {tag for tag, _ in page.tags} & {"link", "img", "iframe", "object", "embed", "base", "a", "video"} == set()
    assert len(page.scripts) == 3  # data, plotly, report
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    (policy,) = [a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a]
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.partition("style-src")[0]


def test_plotly_may_not_offer_to_upload(html: str) -> None:
    """Plotly shows a button that sends a chart to its makers unless it is told not to."""
    script = Page(html).scripts[-1][1]
    assert "showSendToCloud: false" in script
    assert 'plotlyServerURL: ""' in script


def test_the_report_reads_only(run: RunDir) -> None:
    def state() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}

    before = state()
    assert build_report(run.path) == build_report(run.path)
    assert state() == before


# ---------------------------------------------------------------- hostile and missing content


def hostile_run(path: Path) -> RunDir:
    """Every text of a run directory that comes from outside, hostile."""
    everything = " ".join(HOSTILE)
    recipe = dict.fromkeys(CONFIG["recipe"], everything)
    settings = {**CONFIG["settings"], "model": everything, "task": everything, "teacher": everything}
    run = RunDir.create(
        path, {"recipe": recipe, "settings": settings, "parts": {everything: [{"part": everything}]}}, "x"
    )
    run.append_eval({"step": 0, "tokens_generated": 0, "accuracy": 0.5, "name": everything})
    run.append_metrics({"step": 1, "tokens_generated": 9, everything: 1.0, f"ledger/dropped/{everything}": 3.0})
    run.append_metrics({"step": 2, "ledger/trained": 1.0, "ledger/sampled": 4.0, f"ledger/dropped/{everything}": 3.0})
    rng, groups = np.random.default_rng(0), []
    for index, text in enumerate(HOSTILE):
        prompt = Prompt(f"{index}{text}", text, (1,), answer=1, task=text)
        item = rollout(rng, prompt, 0, 1, 2)
        item.text, item.stop.part, item.signals["overlap"] = text, text, np.ones(item.length, np.float32)
        item.drop(text, text)
        groups.append(Group(prompt, [item]))
    run.write_rollouts(1, groups, lambda ids: HOSTILE[ids[0] % len(HOSTILE)])
    dropped = {everything: {everything: 3}}
    run.write_ledger({"inflow": {"sampled": 4, everything: 1}, "trained": 2, "dropped": dropped, "buffered": 0})
    return run


def test_no_text_of_a_run_becomes_markup_or_code(tmp_path: Path, html: str) -> None:
    hostile = build_report(hostile_run(tmp_path / "run").path)
    page, tame = Page(hostile), Page(html)
    assert {tag for tag, _ in page.tags} == {tag for tag, _ in tame.tags}
    assert len(page.scripts) == len(tame.scripts)
    assert page.scripts[1:] == tame.scripts[1:]
    names = {name for _, attributes in page.tags for name in attributes}
    assert names == {name for _, attributes in tame.tags for name in attributes}
    assert not any(name.startswith("on") for name in names)
    shown = hostile.replace(page.scripts[0][1], "")
    for character in ("\x00", "\u202e", "\u202c", "\ud800"):
        assert character not in shown
    assert "‹U+202E›" in shown
    assert "{{ 7 * 7 }}" in page.text  # not evaluated by the template either
    first = page.data["examples"][0]
    assert first["prompt"] in HOSTILE  # and yet it arrives as it was
    assert set(first["rollouts"][0]["pieces"]) <= {text.replace("\ud800", "?") for text in HOSTILE}


@settings(max_examples=50)
@given(st.recursive(st.text() | st.floats() | st.none(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)))
def test_embedded_data_cannot_leave_its_script(value: Any) -> None:
    text = embed(value)
    assert re.fullmatch(r"[\x20-\x7e]*", text)
    assert not set("<>&") & set(text)
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_visible_keeps_text_and_names_what_hides() -> None:
    assert visible("a\tb\n<é 数 👍>") == "a\tb\n<é 数 👍>"
    assert visible("a\x00\u202eb\u2066") == "a‹U+0000›‹U+202E›b‹U+2066›"


def test_a_run_that_has_just_begun_has_a_calm_report(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", {}, "grpo")
    page = Page(build_report(run.path))
    assert "not finished, 0 of – steps" in page.text
    assert "No token has been booked yet." in page.text
    assert [name for name, section in page.data.items() if section] == []


def test_rollout_files_without_optional_columns_give_what_they_can(tmp_path: Path) -> None:
    run = fabricate(tmp_path / "run", steps=2)
    for file in (run.path / "rollouts").iterdir():
        table = pq.read_table(file)
        pq.write_table(table.select(["id", "step", "prompt_id", "length", "pieces"]), file)
    data = Page(build_report(run.path)).data
    assert data["histogram"] is not None
    assert data["overlap"] is None
    assert data["effective"] is None
    assert data["examples"][0]["rollouts"][0]["values"] == {}


def test_a_run_killed_in_the_middle_has_a_report(tmp_path: Path) -> None:
    run = fabricate(tmp_path / "run", steps=8)
    run.truncate_after(5)
    (run.path / "ledger.json").unlink()
    with (run.path / "metrics.jsonl").open("ab") as handle:
        handle.write(b'{"step": 6, "rew')
    page = Page(build_report(run.path))
    assert "not finished, 5 of 24 steps" in page.text
    assert page.data["ledger"]["step"] == [1, 2, 3, 4, 5]
    assert "constant group" in page.text


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a run directory"):
        build_report(tmp_path)


# ---------------------------------------------------------------- what is computed


def test_the_account_adds_up_and_names_the_parts(run: RunDir) -> None:
    found = flow(run.ledger(), run.metrics())
    assert found is not None
    assert sum(row["share"] for row in found["inflow"]) == pytest.approx(1)
    assert sum(row["share"] for row in found["outflow"]) == pytest.approx(1)
    assert {"constant-groups", "prune-opd"} <= {row["part"] for row in found["outflow"]}
    summed = flow({}, run.metrics())
    assert summed is not None
    assert summed["total"] == found["total"]
    trained = [next(row for row in x["outflow"] if row["cause"] == "trained")["share"] for x in (found, summed)]
    assert trained[0] == pytest.approx(trained[1])


def test_ledger_steps_hold_the_identity_and_what_is_held_back() -> None:
    record = {
        "step": 1,
        "ledger/sampled": 10.0,
        "ledger/trained": 4.0,
        "ledger/dropped": 3.0,
        "ledger/dropped/masked": 1.0,
    }
    more = {"ledger/dropped/truncated": 2.0, "ledger/buffered": 3.0}
    found = ledger_steps([record | more])
    assert found is not None
    assert list(found["series"]) == ["trained", "truncated", "masked", "held back"]
    assert sum(values[0] for values in found["series"].values()) == 10
    assert ledger_steps([{"step": 1}]) is None


def test_overlap_by_position_is_the_mean_over_the_responses_that_reach_it(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", CONFIG, "x")
    rng, prompt = np.random.default_rng(0), Prompt("p", "1+1=", (1,), answer=2)
    signals = {1: [[1.0, 0.5], [0.0]], 2: [None, []], 3: [[0.25, np.nan, 1.0]]}
    for step, arrays in signals.items():
        group = Group(prompt)
        for sample, values in enumerate(arrays):
            item = rollout(rng, prompt, sample, 1, 2)
            item.signals = {} if values is None else {"overlap": np.array(values, np.float32)}
            group.rollouts.append(item)
        run.write_rollouts(step, [group], TOKENIZER.decode)
    found = overlap_by_position(run)
    assert found is not None
    first, last = found["parts"]
    assert (first["name"], first["mean"], first["count"].tolist()) == ("step 1", [0.5, 0.5], [2, 1])
    assert (last["name"], last["mean"], last["count"].tolist()) == ("step 3", [0.25, None, 1.0], [1, 0, 1])


def test_effective_length_is_what_a_part_logged_else_tokens_with_weight(run: RunDir) -> None:
    counted = effective_length(run, run.metrics())
    assert counted is not None
    rows = run.rollouts([4], ["token_weight"])["token_weight"].to_pylist()
    assert counted["mean"][3] == pytest.approx(sum(w > 0 for row in rows for w in row) / len(rows), rel=1e-5)
    logged = effective_length(run, [{"step": 1, "prune-opd/effective_length": 12.5}, {"step": 2}])
    assert logged == {"step": [1], "mean": [12.5], "from": "as prune-opd reports it"}


def test_the_histogram_counts_every_response_once(run: RunDir) -> None:
    found = length_histogram(run)
    assert found is not None
    assert [part["name"] for part in found["parts"]] == ["step 1", "step 12"]
    assert [part["share"].sum() for part in found["parts"]] == pytest.approx([1, 1], abs=1e-3)
    assert len(set(np.diff(found["edges"]))) == 1


def test_examples_show_first_middle_and_last_step_with_cut_and_colours(run: RunDir) -> None:
    found = examples(run)
    assert [group["name"].split(",")[0] for group in found] == ["step 1"] * 3 + ["step 7"] * 3 + ["step 12"] * 3
    rollouts = [item for group in found for item in group["rollouts"]]
    assert any(item["stop_reason"] == "part" and item["stop_part"] == "prune-opd" for item in rollouts)
    for item in rollouts:
        assert set(item["values"]) == {"logprob", "entropy", "overlap", "weight", "advantage"}
        assert {len(values) for values in item["values"].values()} == {item["length"]} == {len(item["pieces"])}


def test_a_long_response_shows_both_ends(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", CONFIG, "x")
    item = rollout(np.random.default_rng(0), Prompt("p", "1+1=", (1,), answer=2), 0, 1, 2)
    item.tokens = np.arange(5000) % 40 + 2
    item.logprobs, item.advantage = np.arange(5000, dtype=np.float32), 0.5
    run.write_rollouts(1, [Group(item.prompt, [item])], TOKENIZER.decode)
    (group,) = examples(run)
    assert group["answer"] == "2"
    (shown,) = group["rollouts"]
    logprobs = shown["values"]["logprob"]
    assert (logprobs[0], logprobs[shown["head"] - 1], logprobs[shown["head"]]) == (0, shown["head"] - 1, 5000 - 80)
    assert len(shown["pieces"]) + shown["gap"] == 5000
    assert set(shown["values"]["advantage"]) == {0.5}
    assert shown["values"]["overlap"][-1] is None  # an array that is too short colours nothing


def test_an_evaluation_that_was_made_again_counts_once() -> None:
    evals = [{"step": 0, "name": "before"}, {"step": 4, "name": "after", "a": 1}, {"step": 4, "name": "after", "a": 2}]
    assert latest(evals) == [evals[0], evals[2]]


def test_cards_of_a_run_without_a_summary_show_where_it_stands() -> None:
    metrics = [{"step": 3, "tokens_generated": 300, "tokens_saved": 100.0, "tokens_trained": 150}]
    values = [card["value"] for card in cards(metrics, [{"step": 0, "accuracy": 0.25, "wall_s": 5.0}], {})]
    assert values == ["25.0% → –", "300", "100", "50.0%", "5.0 s"]
    assert [card["value"] for card in cards([], [], {})] == ["– → –", "–", "–", "–", "–"]
    assert progress({"settings": {"steps": 9}}, metrics, {}) == "not finished, 3 of 9 steps"


def test_reward_is_drawn_apart_only_where_it_differs_from_accuracy() -> None:
    records = [{"step": 1, "accuracy": 0.1625, "reward": float(np.float32(0.1625001))}, {"step": 2, "reward": None}]
    curve = learning_curve(records, [])
    assert curve is not None
    assert curve["same"]
    curve = learning_curve([*records, {"step": 3, "accuracy": 0.5, "reward": 0.4}], [])
    assert curve is not None
    assert not curve["same"]
    assert learning_curve([], []) is None


def test_thinning_keeps_both_ends() -> None:
    records = [{"step": step} for step in range(10_000)]
    thinned = thin(records)
    assert len(thinned) == MAX_POINTS
    assert [thinned[0], thinned[-1]] == [records[0], records[-1]]
    assert thin(records[:5]) == records[:5]
    assert spaced([1, 2, 3, 4, 5], 3) == [1, 3, 5]


# ---------------------------------------------------------------- the command, and a browser


def test_the_command_writes_the_report(run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "report.html"
    assert main(["report", str(run.path), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(out)}
    assert out.read_text(encoding="utf-8") == build_report(run.path)
    assert main(["report", str(tmp_path)]) == 2
    assert "not a run directory" in capsys.readouterr().err


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_draws_every_plot_and_runs_nothing_else(tmp_path: Path) -> None:
    path = write_report(hostile_run(tmp_path / "run").path)
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync --virtual-time-budget=2000 --enable-logging=stderr --dump-dom"
    command = [CHROMIUM or "", *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()]
    done = subprocess.run(command, capture_output=True, timeout=120)
    errors = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if "CONSOLE" in line]
    assert errors == []
    page = Page(done.stdout.decode("utf-8", "replace"))
    assert not any(name.startswith("on") for tag, attributes in page.tags for name in attributes)
    drawn = [attributes for _, attributes in page.tags if "data-plot" in attributes]
    assert all("js-plotly-plot" in (a["class"] or "") or "blank" in (a["class"] or "") for a in drawn)
    assert sum("js-plotly-plot" in (a["class"] or "") for a in drawn) >= 5
    assert sum("token" in (attributes.get("class") or "").split() for _, attributes in page.tags) > 10
