from __future__ import annotations

import pytest
import torch
from builders import context, group

from trimtab.core.errors import ConfigError
from trimtab.filter.keep.nat import NAT, prefix_probability


def test_probabilities_are_never_zero():
    for length in range(1, 12):
        for least in range(1, 14):
            position = torch.arange(1, length + 1)
            found = prefix_probability(position, torch.full((length,), length), least)
            assert (found > 0).all()
            assert (found <= 1).all()
            assert (found.diff() <= 0).all()


def test_all_rows_are_kept_and_the_divisor_is_left_alone():
    keep = NAT().filter([group([1.0, 0.0], [5, 0])], context())
    assert keep.keep_N.all()
    assert keep.token_mask is None
    assert [len(w) for w in keep.token_weight] == [5, 0]


@pytest.mark.parametrize("knobs", [{"q": 0.0}, {"q": 1.5}, {"min_prefix": 0}])
def test_knobs_out_of_range_are_refused(knobs):
    with pytest.raises(ConfigError):
        NAT(**knobs)
