from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from trimtab.report.comparison import build_page, ratio_text, spread, table, target_text, write_page
from trimtab.run.format import percent

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "x</script><img src=x onerror=alert(1)>\u202e"


def interval(mean: float, reach: float = 0.02, n: int = 3) -> dict[str, Any]:
    return {"mean": mean, "low": mean - reach, "high": mean + reach, "n": n}


def one(name: str, top: float, base: bool) -> dict[str, Any]:
    ratio = interval(0.6) | {"pairs": 3, "baseline_never": 1, "recipe_never": 0, "neither": 0, "at_start": 0}
    reached = interval(900.0) | {"by_seed": {"0": 900, "1": None}, "reached": 2, "runs": 3}
    raw = {"tokens_generated": [0, 500, 1000], "accuracy": [0.1, None, top]}
    return {
        "recipe": name,
        "overrides": {},
        "seeds": [0, 1, 2],
        "final_accuracy": interval(top),
        "difference": None if base else interval(0.1) | {"verdict": "higher"},
        "tokens_to_target": reached | {"ratio": None if base else ratio},
        "seconds_to_target": reached | {"ratio": None if base else ratio},
        "pass_at_k": {"1": interval(top), "4": interval(0.9)},
        "mean_length": interval(40.0, 3.0),
        "spent": {"generated_tokens": interval(1000.0)},
        "trained_share": interval(0.7),
        "waste": [{"cause": name, "part": HOSTILE, "share": 0.2}, {"cause": "held_back", "part": "", "share": 0.1}],
        "curve": {"tokens": [0, 500, 1000], "mean": [0.1, 0.2, top], "low": [0.0, 0.1, 0.2], "high": [0.2, 0.3, 0.6]},
        "runs": [{"seed": seed, "curve": raw} for seed in range(3)],
    }


def comparison() -> dict[str, Any]:
    return {
        "budget": {"kind": "tokens", "amount": 1000},
        "baseline": "grpo",
        "seeds": [0, 1, 2],
        "level": 0.95,
        "target": {"accuracy": 0.4, "from": "mean final accuracy of grpo"},
        "failed": {f"{HOSTILE}, seed 1": HOSTILE},
        "results": {"grpo": one("truncated", 0.4, True), HOSTILE: one(HOSTILE, 0.5, False)},
    }


def test_what_was_not_reached_is_said() -> None:
    reached = interval(900.0) | {"reached": 2, "runs": 3}
    assert target_text(reached, percent).endswith(", 2 of 3 seeds")
    assert target_text(reached | {"reached": 0}, percent) == "never (0 of 3)"
    counted = {"pairs": 3, "baseline_never": 1, "recipe_never": 0, "neither": 0, "at_start": 1}
    text = ratio_text({"mean": 0.5, "low": None, "high": None, "n": 1} | counted)
    assert text == "0.5 in 1 of 3 pairs; 1 only the recipe reached, 1 at the target before training"
    assert spread({"mean": 0.5, "low": None, "high": None, "n": 1}, percent) == "50.0%"


def test_the_table_has_a_row_a_recipe() -> None:
    head, *rows = table(comparison())
    assert [len(row) for row in rows] == [len(head)] * 2
    cells = dict(zip(head, rows[1], strict=True))
    assert cells["to baseline"] == "+10.0 (+8.0 to +12.0): higher"
    assert cells["pass@4"] == "90.0% (88.0% to 92.0%)"
    assert rows[0][head.index("to baseline")] == "baseline"


def test_nothing_in_a_name_can_run(tmp_path: Path) -> None:
    html = build_page(comparison())
    assert "<img" not in html.lower().split("plotly", 1)[0]
    page = html[: html.index("<script>")]
    assert "onerror=alert" not in re.sub(r"&lt;.*?&gt;", "", page).split('<script type="application/json"')[0]
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    assert data is not None
    assert json.loads(data[1])["curves"][1]["name"] == HOSTILE


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_draws_the_page(tmp_path: Path) -> None:
    path = write_page(comparison(), tmp_path / "compare.html")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync --virtual-time-budget=2000 --enable-logging=stderr --dump-dom"
    command = [CHROMIUM or "", *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()]
    done = subprocess.run(command, capture_output=True, timeout=120)
    assert [x for x in done.stderr.decode("utf-8", "replace").splitlines() if "CONSOLE" in x] == []
    dom = done.stdout.decode("utf-8", "replace")
    assert dom.count("js-plotly-plot") >= 2
    assert "<img" not in dom[dom.index("<body") : dom.index("<script")]
