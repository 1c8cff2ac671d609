from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.learn.correct.fp8_rollout import K1_TESTS, UPPER_TESTS, interval, normalised, passes

ROWS = st.lists(
    st.lists(st.tuples(st.floats(-1, 1, width=32), st.booleans()), max_size=6), min_size=1, max_size=4
).filter(lambda rows: any(rows))


def flat(rows):
    log = torch.tensor([x for row in rows for x, _ in row])
    mask = torch.tensor([m for row in rows for _, m in row])
    return log, torch.tensor([i for i, row in enumerate(rows) for _ in row]), len(rows), mask


def statistic(test, values, own):
    """One test's statistic at one token, written out."""
    over, k = test.rsplit("_", 1)
    of = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}[k]
    found = [of(x) for x in values]
    total = {"token": lambda: of(own), "seq_sum": lambda: sum(found), "seq_max": lambda: max(found)}
    total["seq_mean"] = lambda: sum(found) / len(found)
    value = total[over]()
    return math.exp(value) if k == "k1" else value


@pytest.mark.parametrize("test", K1_TESTS + UPPER_TESTS)
@settings(max_examples=30, deadline=None)
@given(rows=ROWS, bound=st.floats(1.01, 3))
def test_equals_a_plain_loop_over_the_rows(test, rows, bound):
    bound = bound if test in K1_TESTS else bound - 1
    low, high = interval(test, bound)
    log_T, row_T, num_rows, mask_T = flat(rows)
    found = passes(torch.where(mask_T, log_T, 0.0), test, (low, high), row_T, num_rows, mask_T).tolist()
    place = 0
    for row in rows:
        values = [x for x, m in row if m]
        for x, m in row:
            if m:
                value = statistic(test, values, x)
                assert found[place] == (low <= value <= high) or min(abs(value - low), abs(value - high)) < 1e-4
            place += 1


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, by_row=st.booleans())
def test_normalised_weights_have_mean_one(rows, by_row):
    log_T, row_T, num_rows, mask_T = flat(rows)
    weight_T = log_T.exp() if not by_row else (row_T + 1.0)
    found = normalised(weight_T, by_row, row_T, num_rows, mask_T)
    if not mask_T.any():
        assert torch.equal(found, weight_T)
        return
    values = {int(r): w for r, w in zip(row_T[mask_T], found[mask_T], strict=True)}
    mean = torch.stack(list(values.values())).mean() if by_row else found[mask_T].mean()
    assert mean.item() == pytest.approx(1, rel=1e-5)
