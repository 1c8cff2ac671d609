from __future__ import annotations

from builders import context, group

from trimtab.control.schedule.minibatches import Minibatches


def test_all_groups_at_once_with_the_counts():
    groups = [group([1, 0])]
    assert list(Minibatches(epochs=2, minibatches=4).batches(groups, context())) == [(groups, 2, 4)]
