from __future__ import annotations

import numpy as np
import pytest

from trimtab.core.errors import DataError
from trimtab.core.history import prompt_keys
from trimtab.core.table import PromptTable


def table() -> PromptTable:
    return PromptTable(run=np.int32(7), belief=np.array([0.25, 0.75]))


def test_new_prompts_have_the_default_and_known_ones_their_own():
    found = table()
    rows = found.add(prompt_keys(["a", "b"]))
    found["run"][rows] = [1, 2]
    found["belief"][rows[1]] = [1, 0]
    keys = prompt_keys(["b", "x", "a"])
    assert found.values("run", keys).tolist() == [2, 7, 1]
    assert found.values("belief", keys).tolist() == [[1, 0], [0.25, 0.75], [0.25, 0.75]]
    assert found.find(keys).tolist() == [1, -1, 0]
    assert len(found) == 2, "reading enters nobody"


def test_it_grows_and_restores():
    found = table()
    keys = np.random.default_rng(0).integers(0, 2**63, 5000).astype(np.uint64)
    for part in np.split(keys, 10):
        rows = found.add(part)
        found["run"][rows] = part % 1000
    again = table()
    again.load_state_dict(found.state_dict())
    assert (again.values("run", keys) == keys % 1000).all()
    assert (again.find(keys) == found.find(keys)).all()


def test_an_empty_table_restores():
    again = table()
    again.load_state_dict(table().state_dict())
    assert len(again) == 0
    assert again.values("run", prompt_keys(["a"])).tolist() == [7]


def test_another_layout_is_refused():
    state = table().state_dict()
    with pytest.raises(DataError, match="prompt table has"):
        PromptTable(run=np.int32(0)).load_state_dict(state)
    with pytest.raises(DataError, match="belief has shape"):
        PromptTable(run=np.int32(0), belief=np.zeros(3)).load_state_dict(state)
