"""Runs any part of any slot on made-up inputs and gives back what it decided, keyed so that order does not matter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from builders import EOS, context, prompt, record, verdict

from trimtab.core.history import History
from trimtab.core.ledger import Ledger
from trimtab.core.records import Group, Rollout, StopReason, StopRecord, flatten, prompt_id
from trimtab.core.registry import slots_of
from trimtab.core.rng import key as random_key
from trimtab.core.slots import (
    AdvantageRows,
    AllocationRequest,
    Correction,
    DistillView,
    PromptStream,
    StepContext,
    StepRecord,
    TokenView,
    TopK,
)
from trimtab.generate.protocol import ChunkView, Request

VOCABULARY, K = 40, 16
Outcome = dict[str, Any]


# ------------------------------------------------------------ inputs


def distributions(length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Student and teacher log-probs (T, V), close to each other at first and drifting apart."""
    g = torch.Generator().manual_seed(seed)
    base, other = torch.randn(2, length, VOCABULARY, generator=g)
    drift = torch.linspace(0, 1, length)[:, None] if length else torch.zeros(0, 1)
    return torch.log_softmax(2 * base, -1), torch.log_softmax(2 * ((1 - drift) * base + drift * other), -1)


def signals(tokens: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """Every signal engine and teacher can give."""
    student, teacher = distributions(len(tokens), seed)
    logp, ids = student.topk(K)
    teacher_logp, teacher_ids = teacher.topk(K)
    found = {
        "entropy": -(student.exp() * student).sum(-1),
        "margin": logp[:, 0] - logp[:, 1],
        "topk_ids": ids,
        "topk_logprobs": logp,
        "teacher_logprob": teacher.gather(1, torch.from_numpy(tokens)[:, None])[:, 0],
        "teacher_topk_ids": teacher_ids,
        "teacher_topk_logprobs": teacher_logp,
        "teacher_on_student": teacher.gather(1, ids),
        "overlap": (ids[:, :, None] == teacher_ids[:, None, :]).any(-1).float().mean(-1),
    }
    return {name: value.numpy() for name, value in found.items()}


def make_rollout(name: str, length: int, correct: float | None, reason: StopReason, of: Any) -> Rollout:
    seed = random_key("contract", name) % (2**31)
    tokens = np.random.default_rng(seed).integers(2, VOCABULARY, length)
    if length and reason == StopReason.EOS:
        tokens[-1] = EOS
    student, _ = distributions(length, seed)
    return Rollout(
        id=name,
        prompt=of,
        sample=int(name.rsplit("-", 1)[1]),
        tokens=tokens,
        logprobs=student.gather(1, torch.from_numpy(tokens)[:, None])[:, 0].numpy(),
        stop=StopRecord(reason, length - 1),
        verdict=verdict(correct),
        reward=correct,
        signals=signals(tokens, seed),
        text=" ".join(map(str, tokens.tolist())),
        advantage=None if correct is None else correct - 0.5,
    )


def make_group(name: str, corrects: Sequence[float | None], lengths: Sequence[int]) -> Group:
    owner = prompt(prompt_id(name))
    ends = [StopReason.EOS, StopReason.LIMIT]
    return Group(
        owner,
        [
            make_rollout(f"{name}-{i}", length, correct, ends[i % 3 == 2], owner)
            for i, (correct, length) in enumerate(zip(corrects, lengths, strict=True))
        ],
    )


def ordinary(step: int = 0) -> list[Group]:
    """Ragged groups: mixed, graded, constant, partly unscored, of one."""
    return [
        make_group(f"a{step}", [1.0, 0.0, 0.0, 1.0], [30, 12, 64, 7]),
        make_group(f"b{step}", [0.25, 1.0, 0.5], [20, 21, 9]),
        make_group(f"c{step}", [1.0, 1.0, 1.0, 1.0], [5, 5, 6, 8]),
        make_group(f"d{step}", [None, 0.0, 1.0, None, 0.0], [3, 40, 2, 17, 28]),
        make_group(f"e{step}", [1.0], [33]),
    ]


AWKWARD = {
    "nothing": list,
    "empty groups": lambda: [make_group("a", [], []), make_group("b", [], [])],
    "one rollout": lambda: [make_group("a", [1.0], [4])],
    "groups of one": lambda: [make_group("a", [1.0], [4]), make_group("b", [0.0], [6])],
    "no variance": lambda: [make_group("a", [1.0] * 3, [4, 4, 4]), make_group("b", [0.0] * 2, [4, 4])],
    "nothing scored": lambda: [make_group("a", [None] * 3, [4, 5, 6])],
    "empty responses": lambda: [make_group("a", [0.0, 0.0, 1.0], [0, 0, 1])],
}


def make_context(groups: Sequence[Group] = (), step: int = 0) -> StepContext:
    history = History()
    history.observe(groups, step=step, version=step, epoch=0)
    return context(history=history, step=step, decode=lambda ids: " ".join(map(str, ids)), max_new_tokens=64)


def make_record(groups: Sequence[Group]) -> StepRecord:
    return StepRecord(list(groups), record(groups).metrics, Ledger())


# ------------------------------------------------------------ one runner a slot


def by_row(rollouts: Sequence[Rollout], values: Sequence[Any]) -> Outcome:
    return {r.id: value for r, value in zip(rollouts, values, strict=True)}


def run_filter(part: Any, groups: list[Group], ctx: StepContext) -> Outcome:
    keep, rollouts = part.filter(groups, ctx), flatten(groups)
    ones = [np.ones(r.length, dtype=np.float32) for r in rollouts]
    assert keep.keep_N.dtype == bool
    return {
        "keep": by_row(rollouts, keep.keep_N.tolist()),
        "weight": by_row(rollouts, ones if keep.token_weight is None else keep.token_weight),
        "mask": by_row(rollouts, [x == 1 for x in ones] if keep.token_mask is None else keep.token_mask),
    }


def run_reward(part: Any, groups: list[Group], ctx: StepContext) -> Outcome:
    rollouts = flatten(groups)
    reward = np.array([np.nan if r.reward is None else r.reward for r in rollouts], dtype=np.float32)
    shaped = part.shape(groups, reward, ctx)
    assert shaped.dtype == reward.dtype
    assert (np.isnan(shaped) == np.isnan(reward)).all(), "a missing reward must stay missing"
    return by_row(rollouts, np.nan_to_num(shaped).tolist())


def make_rows(groups: list[Group], dtype: torch.dtype) -> AdvantageRows:
    from builders import advantage_rows

    rows = advantage_rows(groups)
    rows.reward_N, rows.correct_N = rows.reward_N.to(dtype), rows.correct_N.to(dtype)
    return rows


def run_advantage(part: Any, groups: list[Group], ctx: StepContext, dtype: torch.dtype = torch.float32) -> Outcome:
    rows, rollouts = make_rows(groups, dtype), flatten(groups)
    value = torch.where(rows.scored_N, rows.reward_N, torch.zeros_like(rows.reward_N))
    if part.per_token:
        value = value[rows.row_T]
    found = part.advantage(rows, value)
    assert found.dtype == dtype
    assert found.shape == value.shape
    if not part.per_token:
        return by_row(rollouts, [np.full(r.length, x) for r, x in zip(rollouts, found.tolist(), strict=True)])
    return by_row(rollouts, [x.numpy() for x in found.split(rows.length_N.tolist())])


def run_stop(part: Any, groups: list[Group], ctx: StepContext) -> Outcome:
    hook, rollouts = part.hook(ctx), [r for r in flatten(groups) if r.length]
    found: Outcome = {"limit": part.limit(ctx), "hook": hook is not None}
    if hook is None or not rollouts:
        return found
    width = max(r.length for r in rollouts)

    def padded(array: np.ndarray) -> np.ndarray:
        return np.concatenate([array, np.repeat(array[-1:], width - len(array), axis=0)])

    view = ChunkView(
        token_BC=torch.tensor(np.stack([padded(r.tokens) for r in rollouts])),
        count_B=torch.tensor([r.length for r in rollouts]),
        index_B=torch.zeros(len(rollouts), dtype=torch.int64),
        row_B=torch.arange(len(rollouts)),
        signals={
            name: torch.tensor(np.stack([padded(r.signals[name]) for r in rollouts])) for name in rollouts[0].signals
        }
        | {"logprobs": torch.tensor(np.stack([padded(r.logprobs) for r in rollouts]))},
    )
    start = hook.start(len(rollouts), torch.device("cpu"))
    state, last = hook.step(start, view)
    assert all(len(value) == len(rollouts) for value in state.values())
    assert ((last >= -1) & (last < view.count_B)).all()
    return found | {"last": by_row(rollouts, last.tolist())}


def run_select(part: Any, groups: list[Group], ctx: StepContext) -> Outcome:
    stream = PromptStream([g.prompt for g in ordinary()] + [prompt(f"q{i}") for i in range(20)], seed=0)
    chosen = part.select(stream, 6, ctx)
    assert len(chosen.index) == len(chosen.inclusion) == len(set(chosen.index))
    return {"index": chosen.index, "inclusion": chosen.inclusion, "refill": part.refill(1, 6, 1, ctx)}


def run_allocate(part: Any, groups: list[Group], ctx: StepContext) -> Outcome:
    total, rounds = part.budget(len(groups), ctx), []
    planned, remaining = [Group(g.prompt) for g in groups], total
    for number in range(8):
        counts = part.plan(AllocationRequest([g.prompt for g in groups], planned, number, remaining), ctx)
        assert (counts >= 0).all()
        assert counts.sum() <= remaining
        if not counts.any():
            break
        rounds.append({g.prompt.id: int(n) for g, n in zip(groups, counts, strict=True)})
        remaining -= int(counts.sum())
        for group, full, n in zip(planned, groups, counts.tolist(), strict=True):
            group.rollouts += (full.rollouts * (n + 1))[:n]
    return {"rounds": rounds}


def make_requests(groups: list[Group]) -> list[Request]:
    return [
        Request(id=r.id, prompt=r.prompt, sample=r.sample, key=random_key(r.id), max_new_tokens=64)
        for r in flatten(groups)
    ]


def run_generate(part: Any, groups: list[Group], ctx: StepContext) -> Outcome:
    return {request.id: request for request in part.requests(make_requests(groups), ctx)}


def run_replay(part: Any, groups: list[Group], ctx: StepContext) -> Outcome:
    recalled = {request.id: request for request in part.recall(make_requests(groups), ctx)}
    collected = {group.prompt.id: sorted(r.id for r in group.rollouts) for group in part.collect(groups, ctx)}
    return {"recalled": recalled, "collected": collected}


def run_schedule(part: Any, groups: list[Group], ctx: StepContext) -> Outcome:
    given = [(sorted(r.id for r in flatten(batch)), e, m) for batch, e, m in part.batches(groups, ctx)]
    return {"batches": given}


def make_topk(rollouts: Sequence[Rollout]) -> TopK:
    """The rollouts' top-k, the current policy a little flatter."""
    signals = [r.signals for r in rollouts]
    behaviour = torch.from_numpy(
        np.concatenate([s["topk_logprobs"] for s in signals] or [np.zeros((0, K), np.float32)])
    )
    return TopK(
        ids=torch.from_numpy(np.concatenate([s["topk_ids"] for s in signals] or [np.zeros((0, K), np.int64)])),
        behaviour=behaviour,
        logp=0.9 * behaviour - 0.1,
        token_T=torch.from_numpy(np.concatenate([r.tokens for r in rollouts] or [np.zeros(0, np.int64)])),
        vocab_size=VOCABULARY,
    )


def make_view(rollouts: Sequence[Rollout]) -> TokenView:
    """One micro-batch: current and proximal log-probs a little apart, every fifth token masked."""
    behaviour = torch.cat([torch.from_numpy(r.logprobs) for r in rollouts]) if rollouts else torch.zeros(0)
    lengths = torch.tensor([r.length for r in rollouts], dtype=torch.int64)
    position = torch.cat([torch.arange(r.length) for r in rollouts]) if rollouts else lengths
    advantage = torch.tensor([0.0 if r.advantage is None else float(r.advantage) for r in rollouts])
    old = behaviour + 0.05 * torch.sin(position.float())
    scores = make_topk(rollouts)
    return TokenView(
        logp=(old + 0.1 * torch.cos(position.float())).requires_grad_(),
        old=old,
        advantage=torch.repeat_interleave(advantage, lengths),
        behaviour=behaviour,
        row_T=torch.repeat_interleave(torch.arange(len(rollouts)), lengths),
        num_rows=len(rollouts),
        mask_T=position % 5 != 4,
        reference=behaviour - 0.1,
        topk=scores,
    )


def split_rows(rollouts: Sequence[Rollout], values: torch.Tensor) -> Outcome:
    return by_row(rollouts, [x.numpy() for x in values.detach().split([r.length for r in rollouts])])


def run_objective(part: Any, groups: list[Group], ctx: StepContext) -> Outcome:
    rollouts = flatten(groups)
    view = make_view(rollouts)
    found = part.token_loss(view)
    assert not any(value.requires_grad for value in found.logged.values())
    (gradient,) = torch.autograd.grad(found.loss_T.sum(), view.logp, allow_unused=True)
    assert gradient[~view.mask_T].abs().sum() == 0, "a masked token must have no gradient"
    return {"loss": split_rows(rollouts, found.loss_T), "gradient": split_rows(rollouts, gradient)}


def run_correct(part: Any, groups: list[Group], ctx: StepContext) -> Outcome:
    rollouts = flatten(groups)
    view = make_view(rollouts)
    view.logp = view.logp.detach()
    found = part.correct(view, Correction(torch.ones_like(view.old), torch.ones_like(view.mask_T)))
    assert not found.weight_T.requires_grad
    assert found.divisor_T is None or part.whole_batch(), "only a part that sees the whole batch may reject"
    divisor = torch.ones_like(found.mask_T) if found.divisor_T is None else found.divisor_T
    decided = {"weight": found.weight_T, "mask": found.mask_T, "divisor": divisor}
    return {name: split_rows(rollouts, value) for name, value in decided.items()}


def make_distill_view(rollouts: Sequence[Rollout]) -> DistillView:
    view = make_view(rollouts)

    def joined(name: str) -> torch.Tensor:
        shape = (0, K) if "topk" in name or "student" in name else (0,)
        arrays = [torch.from_numpy(r.signals[name]) for r in rollouts]
        return (
            torch.cat(arrays) if arrays else torch.zeros(shape, dtype=torch.int64 if "ids" in name else torch.float32)
        )

    return DistillView(
        token_T=torch.cat([torch.from_numpy(r.tokens) for r in rollouts] or [torch.zeros(0, dtype=torch.int64)]),
        row_T=view.row_T,
        num_rows=view.num_rows,
        old_T=view.old,
        teacher_T=joined("teacher_logprob"),
        student_ids=joined("topk_ids"),
        student_logp=joined("topk_logprobs"),
        teacher_on_student=joined("teacher_on_student"),
        teacher_ids=joined("teacher_topk_ids"),
        teacher_logp=joined("teacher_topk_logprobs"),
        mask_T=view.mask_T,
    )


def run_distill(part: Any, groups: list[Group], ctx: StepContext) -> Outcome:
    rollouts = flatten(groups)
    view, mode = make_distill_view(rollouts), part.signal()
    both = [distributions(r.length, random_key("contract", r.id) % (2**31)) for r in rollouts]
    student = torch.cat([s for s, _ in both] or [torch.zeros(0, VOCABULARY)])
    teacher = torch.cat([t for _, t in both] or [torch.zeros(0, VOCABULARY)])
    found: Outcome = {"task_weight": part.task_weight(), "mode": mode}
    if mode == "sampled":
        advantage = part.token_advantage(view)
        assert not advantage.requires_grad
        return found | {"advantage": split_rows(rollouts, advantage)}
    if mode == "full":
        return found | {"loss": split_rows(rollouts, part.full_loss(student, teacher))}
    ids = part.candidates(view)
    logp = student.gather(1, ids)
    advantage = part.candidate_advantage(view, ids, logp)
    value = part.candidate_loss(view, ids, logp) if advantage is None else advantage.sum(-1)
    return found | {"value": split_rows(rollouts, value)}


RUNNERS = {
    "select": run_select,
    "allocate": run_allocate,
    "generate": run_generate,
    "stop": run_stop,
    "replay": run_replay,
    "reward": run_reward,
    "filter": run_filter,
    "advantage": run_advantage,
    "objective": run_objective,
    "correct": run_correct,
    "distill": run_distill,
    "schedule": run_schedule,
}


def run(part: Any, groups: list[Group], ctx: StepContext) -> Outcome:
    """What a part decides in all its slots."""
    return {slot: RUNNERS[slot](part, groups, ctx) for slot in slots_of(type(part))}


# ------------------------------------------------------------ what an empty slot does


def absent(slot: str, groups: list[Group], ctx: StepContext) -> Outcome:
    """The outcome of a slot without a part, written down from the loop's own defaults."""
    rollouts = flatten(groups)
    ones = [np.ones(r.length, dtype=np.float32) for r in rollouts]
    true = [np.ones(r.length, dtype=bool) for r in rollouts]
    reward = [0.0 if r.reward is None else r.reward for r in rollouts]
    if slot == "select":
        stream = PromptStream([g.prompt for g in ordinary()] + [prompt(f"q{i}") for i in range(20)], seed=0)
        return {"index": stream.take(6), "inclusion": [1.0] * 6, "refill": 0}
    if slot == "allocate":
        return {"rounds": [{g.prompt.id: ctx.group_size for g in groups}]}
    if slot == "generate":
        return {request.id: request for request in make_requests(groups)}
    if slot == "stop":
        return {"limit": None, "hook": False}
    if slot == "replay":
        collected = {g.prompt.id: sorted(r.id for r in g.rollouts) for g in groups}
        return {"recalled": {request.id: request for request in make_requests(groups)}, "collected": collected}
    if slot == "reward":
        return by_row(rollouts, [float(np.float32(x)) for x in reward])
    if slot == "filter":
        return {
            "keep": by_row(rollouts, [True] * len(rollouts)),
            "weight": by_row(rollouts, ones),
            "mask": by_row(rollouts, true),
        }
    if slot == "advantage":
        return by_row(rollouts, [np.full(r.length, np.float32(x)) for r, x in zip(rollouts, reward, strict=True)])
    if slot == "correct":
        return {"weight": by_row(rollouts, ones), "mask": by_row(rollouts, true), "divisor": by_row(rollouts, true)}
    if slot == "distill":
        zeros = [np.zeros(r.length, dtype=np.float32) for r in rollouts]
        return {"task_weight": 1.0, "mode": "sampled", "advantage": by_row(rollouts, zeros)}
    assert slot == "schedule", f"an empty slot {slot!r} trains on nothing"
    return {"batches": [(sorted(r.id for r in rollouts), 1, 1)]}
