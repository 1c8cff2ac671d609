"""The indicators of the diagnostic index: each a pure function of a :class:`~trimtab.doctor.view.View`.

An indicator returns readings by step with their intervals, or the reason why the log cannot answer. Rates carry
Wilson's interval over the window; means are exponential means, which are their own interval. Fewer than 16 observations
are no reading. S steps, P groups, N rollouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trimtab.doctor import statistics as st
from trimtab.doctor.log import Bool, Float, Int, Key, Values
from trimtab.doctor.view import EPSILON, REFERENCE_STEPS, Groups, View

MIN_OBSERVATIONS = 16
TREND_STEPS = 20
EPOCHS = 3


class Unknown(Exception):
    """The log does not hold what an indicator needs; the message says what."""


@dataclass(frozen=True, slots=True)
class Readings:
    """An indicator by step: value, interval and number of observations (S,); NaN where there is no reading.

    ``thresholds`` replaces those of the row where a row has two indicators; ``detail`` adds what a reader should know.
    """

    value_S: Float
    low_S: Float
    high_S: Float
    count_S: Float
    detail: str = ""
    thresholds: tuple[float, float] | None = None


Indicator = Callable[[View], list[Readings]]


def need(view: View, *names: str) -> tuple[Values, ...]:
    """The named fields. Raises Unknown when one is not in the log."""
    missing = [name for name in names if not view.log.has(name)]
    if missing:
        raise Unknown(f"no {' and no '.join(missing)} in the log")
    return tuple(view.log.values[name] for name in names)


def groups_needed(view: View) -> None:
    """Raises Unknown unless the log has groups of two and more."""
    if view.log.group_N is None:
        raise Unknown("the log does not say which rollouts share a prompt")
    if not view.grouped:
        raise Unknown("one rollout a prompt")


def rate(k_S: Float, n_S: Float, detail: str = "") -> Readings:
    """Readings of a rate from windowed counts."""
    low, high = st.wilson(k_S, n_S)
    with np.errstate(invalid="ignore", divide="ignore"):
        value = k_S / n_S
    return _enough(value, low, high, n_S, detail)


def mean(value_S: Float, count_S: Float, detail: str = "", thresholds: tuple[float, float] | None = None) -> Readings:
    """Readings of a running mean; ``count_S`` observations in the window."""
    average = st.running_mean(value_S)
    return _enough(average, average, average, count_S, detail, thresholds)


def _enough(
    value: Float, low: Float, high: Float, n: Float, detail: str, thresholds: tuple[float, float] | None = None
) -> Readings:
    few = n < MIN_OBSERVATIONS
    value, low, high = (np.where(few, np.nan, column) for column in (value, low, high))
    return Readings(value, low, high, n, detail, thresholds)


def share_of(view: View, flag_N: Values, among_N: Bool | None = None, detail: str = "") -> Readings:
    """Rate of a flag over the window, among the rollouts that have it."""
    known = np.isfinite(flag_N) if among_N is None else among_N & np.isfinite(flag_N)
    hits, all_S = view.per_step(known & (flag_N != 0)), view.per_step(known)
    return rate(view.windowed(hits), view.windowed(all_S), detail)


def flagged(name: str, answered: bool = True) -> Indicator:
    """Indicator of the share of rollouts with a flag; ``answered``: only those whose evaluator answered."""

    def indicator(view: View) -> list[Readings]:
        (flag,) = need(view, name)
        return [share_of(view, flag, ~view.failed_N if answered else None)]

    return indicator


# ---------------------------------------------------------------- groups


def constant_at(end: float) -> Indicator:
    """Share of groups with every score at the floor (0) or at the ceiling (1)."""

    def indicator(view: View) -> list[Readings]:
        groups = _outcomes(view)
        whole = groups.size_P > 1
        at_end = whole & (np.abs(groups.low_P - end) < EPSILON) & (np.abs(groups.high_P - end) < EPSILON)
        k, n = view.count_groups(groups, at_end), view.count_groups(groups, whole)
        return [rate(view.windowed(k), view.windowed(n))]

    return indicator


def _outcomes(view: View) -> Groups:
    groups_needed(view)
    if view.outcomes is None:
        if view.log.has("reward"):
            raise Unknown("graded rewards without known floor and ceiling; map 'correct'")
        raise Unknown("no reward in the log")
    return view.outcomes


def boundary(view: View) -> list[Readings]:
    """Share of prompts that are solved at a rate in [0.2, 0.8]."""
    groups = _outcomes(view)
    whole = groups.size_P > 1
    inside = whole & (groups.mean_P >= 0.2 - EPSILON) & (groups.mean_P <= 0.8 + EPSILON)
    k, n = view.count_groups(groups, inside), view.count_groups(groups, whole)
    return [rate(view.windowed(k), view.windowed(n))]


def duplicates(view: View) -> list[Readings]:
    """Mean over groups of the sum of squared shares of equal answers; equal texts where answers were not logged."""
    groups_needed(view)
    log = view.log
    if log.answer_N is not None:
        key, detail = log.answer_N, ""
    elif log.text_N is not None:
        key, detail = log.text_N, "equal texts: a lower bound"
    else:
        raise Unknown("no answer and no text in the log")
    alone = np.arange(len(log), dtype=np.uint64)  # rollouts without an answer do not agree with each other
    share_P, step_P, size_P = _squared_shares(view, np.where(key == 0, alone, key))
    whole = size_P > 1
    count = np.bincount(step_P[whole], minlength=len(view.steps)).astype(float)
    total = np.bincount(step_P[whole], weights=share_P[whole], minlength=len(view.steps))
    rollouts = np.bincount(step_P[whole], weights=size_P[whole].astype(float), minlength=len(view.steps))
    n = view.windowed(rollouts.astype(float))
    return [mean(total / np.where(count, count, np.nan), n, detail)]


def _squared_shares(view: View, key_N: Key) -> tuple[Float, Int, Int]:
    """Sum of squared shares of equal keys by group (P,), with the group's step and size."""
    order = np.lexsort((key_N, view.group_N))
    group, key = view.group_N[order], key_N[order]
    new = np.ones(len(order), dtype=bool)
    new[1:] = (group[1:] != group[:-1]) | (key[1:] != key[:-1])
    starts = np.flatnonzero(new)
    counts = np.diff(np.append(starts, len(order))).astype(float)
    squares = np.bincount(group[starts], weights=counts**2)
    size = np.bincount(group)
    return squares / size**2, view.group_step_P, size


def narrowing(view: View) -> list[Readings]:
    """(pass@K - pass@1) relative to the start."""
    groups = _outcomes(view)
    gain_S = view.mean_groups(groups, (groups.high_P > 1 - EPSILON) - groups.mean_P)
    return [_relative(view, gain_S, view.score_N)]


def wasted(view: View) -> list[Readings]:
    """Share of tokens that stand in groups without variance."""
    groups_needed(view)
    (length,) = need(view, "length")
    name = next((name for name in ("reward", "correct", "advantage") if view.log.has(name)), None)
    if name is None:
        raise Unknown("no reward and no advantage in the log")
    value = view.log.values[name]
    order, starts, group_N = view.grouping
    usable = (np.isfinite(value) & ~view.failed_N)[order]
    low = np.minimum.reduceat(np.where(usable, value[order], np.inf), starts)
    high = np.maximum.reduceat(np.where(usable, value[order], -np.inf), starts)
    flat_N = ~(high - low >= EPSILON)[group_N]
    known = np.isfinite(length)
    tokens, lost = view.per_step(known, length), view.per_step(known & flat_N, length)
    n = view.windowed(view.per_step(known))
    return [mean(lost / np.where(tokens > 0, tokens, np.nan), n, _unit(view))]


def starvation(view: View) -> list[Readings]:
    """Share of the prompts met so far that were not seen for three epochs. An epoch is as many groups as prompts."""
    if view.log.prompt_N is None:
        raise Unknown("the log does not tell prompts apart")
    order, starts, _ = view.grouping
    _, prompt_P = np.unique(view.log.prompt_N[order[starts]], return_inverse=True)
    groups, prompts = len(prompt_P), int(prompt_P.max()) + 1
    patience = EPOCHS * prompts
    if groups <= patience:
        raise Unknown(f"fewer than {EPOCHS} epochs in the log")
    by_prompt = np.argsort(prompt_P, kind="stable")
    following = np.full(groups, groups)
    same = prompt_P[by_prompt][1:] == prompt_P[by_prompt][:-1]
    following[by_prompt[:-1][same]] = by_prompt[1:][same]
    gone = np.arange(groups) + patience
    late = gone < following
    change = np.bincount(gone[late], minlength=groups + 1) - np.bincount(following[late], minlength=groups + 1)
    first = np.unique(prompt_P, return_index=True)[1]
    seen = np.cumsum(np.bincount(first, minlength=groups))
    last = np.cumsum(np.bincount(view.group_step_P, minlength=len(view.steps))) - 1
    reading = rate(np.cumsum(change)[last].astype(float), seen[last].astype(float))
    early = last < patience
    value, low, high = (np.where(early, np.nan, c) for c in (reading.value_S, reading.low_S, reading.high_S))
    return [Readings(value, low, high, reading.count_S)]


# ---------------------------------------------------------------- relative to the start


def _relative(view: View, value_S: Float, counted_N: Values | None, detail: str = "") -> Readings:
    """Running mean of a step value over its median in the first 20 steps; no reading before those are over."""
    if len(view.steps) <= REFERENCE_STEPS:
        raise Unknown(f"no reference: the log has {len(view.steps)} steps, and the first {REFERENCE_STEPS} are it")
    early = value_S[:REFERENCE_STEPS]
    early = early[np.isfinite(early)]
    reference = float(np.median(early)) if len(early) else float("nan")
    if not reference > 0:
        raise Unknown("no reference: the value is not positive in the first steps")
    counted = np.ones(len(view.log), dtype=bool) if counted_N is None else np.isfinite(counted_N)
    average = st.running_mean(value_S) / reference
    average[:REFERENCE_STEPS] = np.nan
    return _enough(average, average, average, view.windowed(view.per_step(counted)), detail)


def entropy(view: View) -> list[Readings]:
    """Mean token entropy relative to the start; minus the sampled log-prob is its estimate without bias."""
    for name, detail in (("entropy", ""), ("surprise", "estimated from sampled log-probs")):
        if view.log.has(name):
            value = view.log.values[name]
            weight = view.log.values.get("length")
            known = np.isfinite(value) if weight is None else np.isfinite(value) & (weight > 0)
            tokens = view.per_step(known, weight) if weight is not None else view.per_step(known)
            total = view.per_step(known, value * weight if weight is not None else value)
            return [_relative(view, total / np.where(tokens > 0, tokens, np.nan), value, detail)]
    raise Unknown("no entropy and no log-probs in the log")


def _median_length(view: View) -> tuple[Values, Float]:
    (length,) = need(view, "length")
    known = np.flatnonzero(np.isfinite(length))
    order = known[np.lexsort((length[known], view.step_N[known]))]
    count = np.bincount(view.step_N[known], minlength=len(view.steps))
    start = np.cumsum(count) - count
    value = np.append(length[order], np.float32(np.nan)).astype(float)
    middle_low, middle_high = start + np.maximum(count - 1, 0) // 2, start + count // 2
    middle_high = np.where(count % 2 == 0, start + np.maximum(count // 2, 0), middle_low)
    median = (value[np.minimum(middle_low, len(order))] + value[np.minimum(middle_high, len(order))]) / 2
    return length, np.where(count > 0, median, np.nan)


def _length_ratio(view: View) -> Readings:
    length, median_S = _median_length(view)
    if view.accuracy_rose_S is None:
        raise Unknown("no accuracy in the log to hold the length against")
    return _relative(view, median_S, length, _unit(view))


def inflation(view: View) -> list[Readings]:
    """Growth of the median length; none is counted while accuracy has risen."""
    return [_where_not_rising(view, _length_ratio(view), -1.0, np.minimum)]


def shrinkage(view: View) -> list[Readings]:
    """Median length relative to the start; no loss is counted while accuracy has risen."""
    return [_where_not_rising(view, _length_ratio(view), 0.0, np.maximum)]


def _where_not_rising(view: View, ratio: Readings, shift: float, harmless: Callable[[Float, float], Float]) -> Readings:
    assert view.accuracy_rose_S is not None
    value = ratio.value_S + shift
    value = np.where(view.accuracy_rose_S, harmless(value, 1.0 + shift), value)
    return Readings(value, value, value, ratio.count_S, ratio.detail)


def _unit(view: View) -> str:
    return "" if view.log.length_unit == "tokens" else f"in {view.log.length_unit}"


# ---------------------------------------------------------------- lengths


def bubble(view: View) -> list[Readings]:
    """Idle share of a step whose rollouts wait for the longest."""
    (length,) = need(view, "length")
    known = np.isfinite(length)
    count, total = view.per_step(known), view.per_step(known, length)
    longest = np.zeros(len(view.steps))
    order = np.argsort(view.step_N[known], kind="stable")
    step = view.step_N[known][order]
    if len(step):
        starts = np.flatnonzero(np.append(True, step[1:] != step[:-1]))
        longest[step[starts]] = np.maximum.reduceat(length[known][order], starts)
    idle = np.where(longest > 0, 1 - total / np.maximum(count, 1) / np.where(longest > 0, longest, 1), np.nan)
    return [mean(idle, view.windowed(count), _unit(view))]


def overthinking(view: View) -> list[Readings]:
    """Share of a response that comes after its first stable answer."""
    position, length = need(view, "settled_at", "length")
    known = np.isfinite(position) & (length > 0)
    rest = np.where(known, (length - position) / np.where(length > 0, length, 1), np.nan).astype(np.float32)
    count = view.per_step(known)
    return [mean(view.per_step(known, rest) / np.where(count, count, np.nan), view.windowed(count))]


# ---------------------------------------------------------------- evaluators


def failures(view: View) -> list[Readings]:
    """Share of rollouts whose evaluator failed; says how many of them carry a reward all the same."""
    (failed,) = need(view, "failed")
    reward = view.log.values.get("reward")
    read = 0 if reward is None else int((view.failed_N & np.isfinite(reward)).sum())
    return [share_of(view, failed, detail=f"{read} of them carry a reward all the same" if read else "")]


def verifier_noise(view: View) -> list[Readings]:
    """J of the verifier over all audits so far; its interval adds those of both error rates."""
    (audit,) = need(view, "audit")
    if view.score_N is None:
        raise Unknown("audits, but no verdict to hold against them")
    score = view.score_N
    known = np.isfinite(audit) & np.isfinite(score) & ~view.failed_N
    said, true = score >= 0.5, audit >= 0.5
    wrong, right = (np.cumsum(view.per_step(known & mask)) for mask in (~true, true))
    false_positive = st.wilson(np.cumsum(view.per_step(known & ~true & said)), wrong)
    false_negative = st.wilson(np.cumsum(view.per_step(known & true & ~said)), right)
    with np.errstate(invalid="ignore", divide="ignore"):
        fp = np.cumsum(view.per_step(known & ~true & said)) / wrong
        fn = np.cumsum(view.per_step(known & true & ~said)) / right
    low, high = (1 - false_positive[i] - false_negative[i] for i in (1, 0))
    return [_enough(1 - fp - fn, low, high, wrong + right, "")]


def hacking(view: View) -> list[Readings]:
    """Slope of the reward minus slope of its audits over the last 20 steps, in pooled standard errors."""
    audit, reward = need(view, "audit", "reward")
    known, seen = np.isfinite(audit), np.isfinite(reward) & ~view.failed_N
    audits = view.per_step(known)
    audit_S = view.per_step(known, audit) / np.where(audits, audits, np.nan)
    count = view.per_step(seen)
    reward_S = view.per_step(seen, reward) / np.where(count, count, np.nan)
    value = np.full(len(view.steps), np.nan)
    time = view.steps.astype(float)
    for end in range(TREND_STEPS, len(view.steps) + 1):
        part = slice(end - TREND_STEPS, end)
        up, error_up = st.slope(time[part], reward_S[part])
        true, error_true = st.slope(time[part], audit_S[part])
        pooled = float(np.hypot(error_up, error_true))
        value[end - 1] = (up - true) / pooled if pooled > 0 else np.nan
    return [_enough(value, value, value, np.cumsum(audits), "")]


def judge_bias(view: View) -> list[Readings]:
    """Share of verdicts that flip with the order, and the correlation of the judge's score with length."""
    found = []
    if view.log.has("judge_flip"):
        found.append(share_of(view, view.log.values["judge_flip"]))
    if view.log.has("judge", "length"):
        judge, length = view.log.values["judge"], view.log.values["length"]
        known = np.isfinite(judge) & np.isfinite(length)
        value = np.abs(_by_window(view, known, lambda rows: st.correlation(judge[rows], length[rows])))
        n = view.windowed(view.per_step(known))
        found.append(_enough(value, value, value, n, "correlation with length", (0.3, 0.5)))
    if not found:
        raise Unknown("no judge and no judge_flip in the log")
    return found


def process_score(view: View) -> list[Readings]:
    """Area under the curve of the mean step score against the outcome."""
    (process,) = need(view, "process")
    if view.score_N is None:
        raise Unknown("a process score, but no outcome to hold it against")
    right = view.score_N >= 0.5
    known = np.isfinite(process) & np.isfinite(view.score_N) & ~view.failed_N
    value = _by_window(view, known, lambda rows: st.area_under_curve(process[rows], right[rows]))
    return [_enough(value, value, value, view.windowed(view.per_step(known)), "")]


def _by_window(view: View, known_N: Bool, measure: Callable[[Int], float]) -> Float:
    """A measure over the known rollouts of each step's window (S,). A loop over steps, not over rollouts."""
    rows = np.flatnonzero(known_N)
    rows = rows[np.argsort(view.step_N[rows], kind="stable")]
    edge = np.searchsorted(view.step_N[rows], np.arange(len(view.steps) + 1))
    starts = edge[view.window_start_S]
    return np.array([measure(rows[a:b]) if b > a else np.nan for a, b in zip(starts, edge[1:], strict=True)])


# ---------------------------------------------------------------- updates


def domination(view: View) -> list[Readings]:
    """Effective sample size over n of |advantage| times importance weight; rows without signal are not counted."""
    (advantage,) = need(view, "advantage")
    if view.log.group_N is not None and not view.grouped:
        raise Unknown("one rollout a prompt")
    weight = np.abs(advantage)
    if "weight" in view.log.values:
        weight = weight * np.nan_to_num(view.log.values["weight"], nan=1.0)
    known = np.isfinite(weight) & (weight > 0)
    value = _by_window(view, known, lambda rows: st.effective_share(weight[rows]))
    return [_enough(value, value, value, view.windowed(view.per_step(known)), "")]


def staleness(view: View) -> list[Readings]:
    """Share of tokens outside the clip range; the 95th percentile of the version lag where that is not logged.

    The age of replays is row 26's.
    """
    log = view.log
    lag = log.values.get("lag", np.full(len(log), np.nan, np.float32))
    fresh = np.isfinite(lag) & (log.values.get("replayed", np.zeros(len(log), np.float32)) != 1)
    if log.has("clipped"):
        clipped = log.values["clipped"]
        known = np.isfinite(clipped)
        count = view.per_step(known)
        old = f"95th percentile of the version lag: {np.percentile(lag[fresh], 95):.3g}" if fresh.any() else ""
        return [mean(view.per_step(known, clipped) / np.where(count, count, np.nan), view.windowed(count), old)]
    if not log.has("lag"):
        raise Unknown("no clipped tokens and no policy versions in the log")
    value = _by_window(view, fresh, lambda rows: float(np.percentile(lag[rows], 95)))
    n = view.windowed(view.per_step(fresh))
    return [_enough(value, value, value, n, "version lag, 95th percentile", (8.0, 32.0))]


def mismatch(view: View) -> list[Readings]:
    """Mean distance of the two log-probs; says so when it is nearly all on one side, which noise never is."""
    (gap,) = need(view, "gap")
    known = np.isfinite(gap)
    count = view.per_step(known)
    signed = view.log.values["gap_signed"]
    side = float(np.nanmean(signed)) / max(float(np.nanmean(gap)), 1e-12)
    detail = ""
    if abs(side) > 0.9:
        detail = f"the trainer is {'above' if side > 0 else 'below'} on nearly every token: another distribution"
    return [mean(view.per_step(known, gap) / np.where(count, count, np.nan), view.windowed(count), detail)]


def replay(view: View) -> list[Readings]:
    """Share of replayed rollouts, and their median age in policy versions."""
    (replayed,) = need(view, "replayed")
    found = [share_of(view, replayed)]
    if view.log.has("lag"):
        lag = view.log.values["lag"]
        known = np.isfinite(lag) & (replayed == 1)
        value = _by_window(view, known, lambda rows: float(np.median(lag[rows])))
        n = view.windowed(view.per_step(known))
        found.append(_enough(value, value, value, n, "median age in versions", (8.0, 32.0)))
    return found


# ---------------------------------------------------------------- guidance and agents


def hint_dependence(view: View) -> list[Readings]:
    """Success with a hint minus success without, over groups that hold both."""
    (hinted,) = need(view, "hinted")
    if view.score_N is None:
        raise Unknown("no reward in the log")
    groups_needed(view)
    with_hint = view.groups(np.where(hinted == 1, view.score_N, np.nan).astype(np.float32))
    without = view.groups(np.where(hinted == 0, view.score_N, np.nan).astype(np.float32))
    key = [g.prompt_P.astype(np.uint64) ^ (g.step_P.astype(np.uint64) << np.uint64(40)) for g in (with_hint, without)]
    _, first, second = np.intersect1d(key[0], key[1], return_indices=True)
    gap = (with_hint.mean_P[first] - without.mean_P[second]).astype(float)
    step = with_hint.step_P[first]
    count = np.bincount(step, minlength=len(view.steps)).astype(float)
    total = np.bincount(step, weights=gap, minlength=len(view.steps))
    return [mean(total / np.where(count, count, np.nan), view.windowed(count))]


def environment_drift(view: View) -> list[Readings]:
    """Two-proportion z of the tool error rate, this window against the one before it."""
    (broken,) = need(view, "tool_error")
    known = np.isfinite(broken)
    k, n = view.windowed(view.per_step(known & (broken != 0))), view.windowed(view.per_step(known))
    before = view.window_start_S - 1
    earlier = np.maximum(before, 0)
    k0, n0 = np.where(before < 0, np.nan, k[earlier]), np.where(before < 0, np.nan, n[earlier])
    with np.errstate(invalid="ignore", divide="ignore"):
        pooled = (k + k0) / (n + n0)
        error = np.sqrt(pooled * (1 - pooled) * (1 / n + 1 / n0))
        value = np.where(error > 0, np.abs(k / n - k0 / n0) / error, np.where(np.isfinite(pooled), 0.0, np.nan))
    return [_enough(value, value, value, np.minimum(n, np.nan_to_num(n0)), "")]


def repeated_calls(view: View) -> list[Readings]:
    """Repeated tool calls over tool calls."""
    repeated, calls = need(view, "repeated_calls", "calls")
    known = np.isfinite(repeated) & (calls > 0)
    return [rate(view.windowed(view.per_step(known, repeated)), view.windowed(view.per_step(known, calls)))]


INDICATORS: dict[int, Indicator] = {
    1: constant_at(0.0),
    2: constant_at(1.0),
    3: boundary,
    4: entropy,
    5: entropy,
    6: duplicates,
    7: narrowing,
    8: inflation,
    9: flagged("truncated", answered=False),
    10: bubble,
    11: flagged("malformed"),
    12: verifier_noise,
    13: failures,
    14: hacking,
    15: judge_bias,
    16: process_score,
    17: domination,
    18: staleness,
    19: mismatch,
    20: wasted,
    21: starvation,
    22: flagged("premature"),
    23: overthinking,
    24: flagged("twin"),
    25: hint_dependence,
    26: replay,
    27: flagged("corrupt", answered=False),
    28: flagged("drifted", answered=False),
    29: environment_drift,
    30: repeated_calls,
    31: shrinkage,
    32: flagged("repetitive", answered=False),
    33: flagged("invalid", answered=False),
}
