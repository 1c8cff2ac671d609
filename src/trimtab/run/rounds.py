"""Plan, generate, score, plan again: the rounds of one step, within a conserved budget of rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from trimtab.core.errors import ConfigError, DataError
from trimtab.core.records import (
    DropReason,
    Group,
    IntArray,
    Prompt,
    Rollout,
    Source,
    StopReason,
    Verdict,
    flatten,
)
from trimtab.core.rng import key
from trimtab.core.slots import Allocate, AllocationRequest, Generate, Replay, StepContext, Stop
from trimtab.generate.protocol import Completion, Engine, Request, Sampling, StreamScorer


@dataclass
class Rounds:
    """Runs the rollouts of a step. Parts that are None are inert."""

    engine: Engine
    verify: Callable[[Sequence[tuple[Prompt, str]]], list[Verdict]]
    decode: Callable[[Sequence[int]], str]
    allocate: Allocate | None
    generate: Generate | None
    replay: Replay | None
    stop: list[Stop]
    signals: frozenset[str]
    topk: int
    scorer: Callable[[], StreamScorer] | None = None
    progress: Callable[[int, int], None] | None = None
    overrun: dict[str, int] = field(default_factory=dict)  # rollout id -> tokens sampled past a cut, this step

    def run(
        self, prompts: Sequence[Prompt], inclusion: Sequence[float], ctx: StepContext, drawn: Counter[str]
    ) -> list[Group]:
        """All groups of these prompts, verified. ``drawn`` counts samples per prompt id in this step, across calls."""
        groups = [Group(p, inclusion=q) for p, q in zip(prompts, inclusion, strict=True)]
        remaining, number = self.budget(len(prompts), ctx), 0
        while remaining > 0:
            counts = self.plan(AllocationRequest(list(prompts), groups, number, remaining), ctx)
            if not counts.any():
                break
            self.fill(groups, counts, ctx, drawn)
            remaining -= int(counts.sum())
            number += 1
        return groups

    def budget(self, num_prompts: int, ctx: StepContext) -> int:
        """Rollouts to spend: ``group_size`` a prompt unless the allocator has its own."""
        return num_prompts * ctx.group_size if self.allocate is None else self.allocate.budget(num_prompts, ctx)

    def plan(self, request: AllocationRequest, ctx: StepContext) -> IntArray:
        """This round's rollouts per prompt; without an allocator everyone gets ``group_size`` in the first round."""
        if self.allocate is None:
            return np.full(len(request.prompts), ctx.group_size if request.round == 0 else 0, dtype=np.int64)
        counts = np.asarray(self.allocate.plan(request, ctx), dtype=np.int64)
        if counts.shape != (len(request.prompts),) or (counts < 0).any() or counts.sum() > request.remaining:
            raise ConfigError(
                f"allocate.{self.allocate.slug}: planned {counts.sum()} rollouts for {len(counts)} prompts; allowed "
                f"are non-negative counts for {len(request.prompts)} prompts within {request.remaining} rollouts."
            )
        return counts

    def fill(self, groups: list[Group], counts: IntArray, ctx: StepContext, drawn: Counter[str]) -> None:
        """Generate and verify ``counts`` new rollouts per group."""
        limit, limiter = self.limit(ctx)
        requests, owner = [], []
        for index, (group, count) in enumerate(zip(groups, counts.tolist(), strict=True)):
            first = drawn[group.prompt.id]
            drawn[group.prompt.id] += count
            requests += [self.request(group.prompt, sample, limit, ctx) for sample in range(first, first + count)]
            owner += [index] * count
        home = {request.id: index for request, index in zip(requests, owner, strict=True)}
        if self.generate is not None:
            requests = self.generate.requests(requests, ctx)
        if self.replay is not None:
            requests = self.replay.recall(requests, ctx)
        rollouts = self.complete(requests, limit, limiter, ctx)
        for rollout in rollouts:
            groups[home[rollout.id]].rollouts.append(rollout)

    def limit(self, ctx: StepContext) -> tuple[int, str]:
        """The response limit in force and the part that set it ("" = the static limit)."""
        limit, part = ctx.max_new_tokens, ""
        for stop in self.stop:
            asked = stop.limit(ctx)
            if asked is not None and asked < limit:
                limit, part = asked, stop.slug
        return limit, part

    def request(self, prompt: Prompt, sample: int, limit: int, ctx: StepContext) -> Request:
        """The plain request of one sample."""
        return Request(
            id=f"{ctx.step}-{prompt.id}-{sample}",
            prompt=prompt,
            sample=sample,
            key=key(ctx.seed, ctx.step, prompt.id, sample),
            max_new_tokens=limit,
            sampling=Sampling(temperature=ctx.temperature),
        )

    def complete(self, requests: Sequence[Request], limit: int, limiter: str, ctx: StepContext) -> list[Rollout]:
        """Rollouts of these requests, in their order."""
        hooks = [hook for stop in self.stop if (hook := stop.hook(ctx)) is not None]
        streaming = self.scorer is not None and any("teacher" in hook.signals for hook in hooks)
        completions = self.engine.generate(
            requests,
            hooks=hooks,
            signals=self.signals,
            topk=self.topk,
            scorer=self.scorer() if streaming and self.scorer else None,
            progress=self.progress,
        )
        rollouts = [self.record(r, c, limit, limiter) for r, c in zip(requests, completions, strict=True)]
        good = [rollout for rollout in rollouts if rollout.keep]
        for rollout, verdict in zip(good, self.verify([(r.prompt, r.text) for r in good]), strict=True):
            rollout.verdict = verdict
        return rollouts

    def record(self, request: Request, completion: Completion, limit: int, limiter: str) -> Rollout:
        """A rollout from a completion; arrays that do not line up quarantine it, they never shift."""
        source = None
        if request.prefix:
            source = np.zeros(len(completion.tokens), dtype=np.int64)
            source[: len(request.prefix)] = Source.REUSED
        rollout = Rollout(
            id=request.id,
            prompt=request.prompt,
            sample=request.sample,
            tokens=completion.tokens,
            logprobs=completion.logprobs,
            stop=completion.stop,
            source=source,
            version=completion.version,
            signals=completion.signals,
            text=self.decode(completion.tokens.tolist()),
            cost=completion.cost,
        )
        if completion.overrun:
            self.overrun[rollout.id] = completion.overrun
        if rollout.stop.reason == StopReason.LIMIT and request.max_new_tokens == limit:
            rollout.stop.part = limiter
        try:
            rollout.check_aligned()
        except DataError as error:
            self.quarantine(rollout, str(error))
        return rollout

    def quarantine(self, rollout: Rollout, why: str) -> None:
        """Keep the tokens for the ledger, none of the arrays for the learner."""
        rollout.logprobs = np.full(rollout.length, np.nan, dtype=np.float32)
        rollout.source, rollout.signals = None, {}
        rollout.stop.detail = why
        rollout.drop(DropReason.QUARANTINED, "engine")


def limits_reached(groups: Sequence[Group]) -> float:
    """Share of rollouts that did not end by themselves."""
    rollouts = flatten(groups)
    return sum(r.truncated for r in rollouts) / len(rollouts) if rollouts else 0.0
