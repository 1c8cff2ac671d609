from __future__ import annotations

from builders import EOS, context, prompt, rollout

from trimtab.core.records import DropReason, Group, StopReason
from trimtab.filter.keep.overlong import Overlong


def test_only_rollouts_that_ended_by_themselves_stay():
    rollouts = [rollout(reason=reason) for reason in StopReason]
    found = Overlong().filter([Group(prompt(), rollouts)], context())
    assert [r.stop.reason for r, keep in zip(rollouts, found.keep_N, strict=True) if keep] == [StopReason.EOS]
    assert found.reason == DropReason.TRUNCATED


def test_the_last_token_does_not_decide():
    cut = rollout(reason=StopReason.LIMIT)
    cut.tokens[-1] = EOS
    assert not Overlong().filter([Group(prompt(), [cut])], context()).keep_N.any()


def test_an_empty_step():
    assert len(Overlong().filter([Group(prompt())], context()).keep_N) == 0
