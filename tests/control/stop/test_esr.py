from __future__ import annotations

import numpy as np
import pytest
from builders import context, group
from hypothesis import given
from hypothesis import strategies as st

from trimtab.control.stop.esr import ESR
from trimtab.core.errors import ConfigError
from trimtab.core.recipe import resolve


def test_the_stopping_form_limits_generation():
    assert ESR(cutoff=100).limit(context(max_new_tokens=256)) == 100
    assert ESR(cutoff=256).limit(context(max_new_tokens=256)) is None
    assert ESR(cutoff=100, form="mask").limit(context(max_new_tokens=256)) is None
    assert ESR().hook(context()) is None


@given(lengths=st.lists(st.integers(0, 30), max_size=8), cutoff=st.integers(1, 30))
def test_the_mask_keeps_exactly_the_first_tokens(lengths, cutoff):
    keep = ESR(cutoff=cutoff, form="mask").filter([group([0.0] * len(lengths), lengths)], context())
    assert keep.keep_N.all()
    masks = keep.token_mask or [np.ones(length, dtype=bool) for length in lengths]
    assert [mask.tolist() for mask in masks] == [[t < cutoff for t in range(length)] for length in lengths]


def test_the_slot_each_form_needs():
    assert ESR().required_slots() == ("stop",)
    assert ESR(form="mask").required_slots() == ("filter",)
    with pytest.raises(ConfigError, match="esr: must also stand in the slot 'filter'"):
        resolve("esr", {"filter": "none", "stop.form": "mask"})
    resolve("esr", {"filter": "none"})
