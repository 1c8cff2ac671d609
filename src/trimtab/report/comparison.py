"""A comparison in words, for the terminal and the page, and its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trimtab.core.files import write_text
from trimtab.report.curves import rounded
from trimtab.report.page import render
from trimtab.run.format import MISSING, duration, number, percent

KINDS = {"tokens": "generated tokens", "trained_tokens": "trained tokens", "seconds": "seconds", "steps": "steps"}
Found = Mapping[str, Any]


def write_page(found: Found, path: Path) -> Path:
    """Write the page of a comparison (the object :func:`trimtab.run.comparison.compare` gives) to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, build_page(found))
    return path


def build_page(found: Found) -> str:
    """The page of a comparison as HTML: curves with bands, the table, and waste by cause."""
    head, *rows = table(found)
    page = {
        "header": {"title": " · ".join(found["results"]), "facts": facts(found)},
        "head": head,
        "rows": rows,
        "notes": notes(found),
        "waste": [(name, waste_rows(result)) for name, result in found["results"].items()],
        "failed": list(found["failed"].items()),
    }
    return render("compare", page, {"curves": curves(found), "waste": shares(found)})


def facts(found: Found) -> list[tuple[str, str]]:
    """The terms of the comparison."""
    budget, target, seeds = found["budget"], found["target"], found["seeds"]
    return [
        ("Budget of a run", f"{number(budget['amount'])} {KINDS[budget['kind']]}"),
        ("Seeds", f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else str(seeds[0])),
        ("Baseline", found["baseline"]),
        ("Target accuracy", f"{percent(target['accuracy'])} ({target['from']})"),
    ]


def table(found: Found) -> list[list[str]]:
    """Heading and one row a variant."""
    results = found["results"].values()
    sizes = sorted({k for result in results for k in result["pass_at_k"]}, key=int)[1:]  # pass@1 is the accuracy
    head = ["recipe", "seeds", "final accuracy", "to baseline", "tokens to target", "ratio", "seconds to target"]
    head += ["ratio", *(f"pass@{k}" for k in sizes), "mean length", "tokens", "trained", "wasted most by"]
    rows = []
    for name, result in found["results"].items():
        row = [name, str(len(result["seeds"])), spread(result["final_accuracy"], percent)]
        row += [difference_text(result["difference"])]
        for axis, shown in (("tokens_to_target", number), ("seconds_to_target", duration)):
            row += [target_text(result[axis], shown), ratio_text(result[axis]["ratio"])]
        row += [spread(result["pass_at_k"].get(k), percent) for k in sizes]
        row += [spread(result["mean_length"], number), number(result["spent"]["generated_tokens"]["mean"])]
        row += [percent(result["trained_share"]["mean"]), _most_wasted(result)]
        rows.append(row)
    return [head, *rows]


def spread(estimate: Found | None, shown: Any) -> str:
    """``31.2% (29.0% to 33.4%)``; without an interval the mean alone."""
    if not estimate or estimate["mean"] is None:
        return MISSING
    interval = f" ({shown(estimate['low'])} to {shown(estimate['high'])})" if estimate["low"] is not None else ""
    return shown(estimate["mean"]) + interval


def difference_text(difference: Found | None) -> str:
    """The difference to the baseline in points, and what it allows to say."""
    if difference is None:
        return "baseline"
    if difference["mean"] is None:
        return str(difference["verdict"])
    return f"{spread(difference, _points)}: {difference['verdict']}"


def _points(value: float) -> str:
    return f"{100 * value:+.1f}"


def target_text(reached: Found, shown: Any) -> str:
    """Cost to the target; seeds that never reached it are counted, not left out silently."""
    if reached["reached"] == reached["runs"]:
        return spread(reached, shown)
    if not reached["reached"]:
        return f"never (0 of {reached['runs']})"
    return f"{spread(reached, shown)}, {reached['reached']} of {reached['runs']} seeds"


def ratio_text(ratio: Found | None) -> str:
    """``0.62 (0.55 to 0.70)`` of the baseline's cost, and the pairs that have no ratio."""
    if ratio is None:
        return MISSING
    without = [
        f"{ratio[key]} {words}"
        for key, words in (
            ("baseline_never", "only the recipe reached"),
            ("recipe_never", "only the baseline reached"),
            ("neither", "neither reached"),
            ("at_start", "at the target before training"),
        )
        if ratio[key]
    ]
    text = spread(ratio, number)
    return f"{text} in {ratio['n']} of {ratio['pairs']} pairs; {', '.join(without)}" if without else text


def notes(found: Found) -> list[str]:
    """What must be known to read the table."""
    lines = [
        f"Intervals are {100 * found['level']:.0f} % Student t intervals over seeds, differences and ratios by seed."
    ]
    if any(
        result["tokens_to_target"]["reached"] < result["tokens_to_target"]["runs"]
        for result in found["results"].values()
    ):
        lines.append(
            "Some runs never reached the target within the budget. Their cost is only known to be larger than what was "
            "spent; means and ratios of costs are over the others and favour whoever missed it."
        )
    lines.append("Cost is what was spent in training: cut, pruned and dropped tokens count, evaluations do not.")
    return lines


def waste_rows(result: Found) -> list[tuple[str, str, str]]:
    """Cause, part and share of the tokens that trained nothing."""
    return [(str(row["cause"]).replace("_", " "), row["part"], percent(row["share"])) for row in result["waste"]]


def _most_wasted(result: Found) -> str:
    rows = waste_rows(result)
    return f"{rows[0][0]} {rows[0][2]}" if rows else MISSING


def curves(found: Found) -> list[dict[str, Any]]:
    """The band of each variant, and its seeds."""
    return [
        {
            "name": name,
            **{key: _rounded(values) for key, values in result["curve"].items()},
            "runs": [
                {"seed": run["seed"]} | {k: _rounded(run["curve"][k]) for k in ("tokens_generated", "accuracy")}
                for run in result["runs"]
            ],
        }
        for name, result in found["results"].items()
        if result["runs"]
    ]


def _rounded(values: Sequence[Any]) -> list[Any]:
    return [rounded(value) for value in values]


def shares(found: Found) -> dict[str, Any] | None:
    """Share of tokens by fate, for stacked bars: trained, then every cause, each over all variants."""
    results = {name: result for name, result in found["results"].items() if result["runs"]}
    if not results:
        return None
    causes: dict[str, dict[str, float]] = {"trained": {n: r["trained_share"]["mean"] or 0 for n, r in results.items()}}
    for name, result in results.items():
        for row in result["waste"]:
            by_name = causes.setdefault(row["cause"], {})
            by_name[name] = by_name.get(name, 0) + row["share"]
    return {
        "names": list(results),
        "series": {cause: [rounded(by_name.get(n, 0)) for n in results] for cause, by_name in causes.items()},
    }
