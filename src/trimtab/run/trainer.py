"""The step loop: prompts, groups and records pass from slot to slot in the documented order."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trimtab.core.errors import NothingToTrainError
from trimtab.core.history import History
from trimtab.core.ledger import Ledger
from trimtab.core.recipe import Resolved
from trimtab.core.records import DropReason, Group, Prompt, Rollout, StopReason, flatten, group_ids
from trimtab.core.slots import AdvantageRows, Keep, PromptStream, Select, StepContext, StepRecord
from trimtab.generate.protocol import Engine
from trimtab.learn.learner import Learner, UpdateResult
from trimtab.learn.teacher import Teacher
from trimtab.run import checkpoint
from trimtab.run.display import Display
from trimtab.run.evaluate import Evaluation, ResidualLength, evaluate
from trimtab.run.extent import Counters, Extent
from trimtab.run.rounds import Rounds, limits_reached
from trimtab.run.rundir import RunDir
from trimtab.run.tensorboard import TensorBoard

GIVE_UP_AFTER = 8  # consecutive steps with nothing to train on
SELF_CHECK_TOLERANCE = 2e-3


@dataclass
class Trainer:
    """A run: everything it is made of, and the loop."""

    resolved: Resolved
    policy: Any  # Transformer
    tokenizer: Any
    task: Any
    engine: Engine
    learner: Learner
    teacher: Teacher | None
    rounds: Rounds
    run_dir: RunDir
    display: Display
    train_prompts: Sequence[Prompt]
    heldout: Sequence[Prompt]
    save_model: Callable[[Path], None]
    counters: Counters = field(default_factory=Counters)
    history: History = field(default_factory=History)
    ledger: Ledger = field(default_factory=Ledger)
    first_evaluation: Evaluation | None = None
    last_evaluation: Evaluation | None = None
    natural: ResidualLength = field(default_factory=lambda: ResidualLength([]))

    def __post_init__(self) -> None:
        self.settings = self.resolved.settings
        self.parts = self.resolved.parts
        self.needs = self.resolved.needs()
        self.extent = Extent.of(self.settings)
        self.before = self.counters  # as they stood before the last step
        self.stream = PromptStream(self.train_prompts, self.settings.seed)
        self.select: Select | None = self.resolved.one("select")
        distill = self.resolved.one("distill")
        self.uses_task = distill is None or distill.task_weight() > 0
        self.phases: dict[str, float] = {}
        self.board: TensorBoard | None = None

    # ------------------------------------------------------------ the run

    def run(self) -> dict[str, Any]:
        """Train until the steps or the budget are used and return the summary; resumes where the counters stand."""
        started = time.perf_counter() - self.counters.wall_s
        if self.settings.output.tensorboard:
            self.board = TensorBoard(self.run_dir.path / "tensorboard", self.counters.step)
        if self.first_evaluation is None:
            self.first_evaluation = self.evaluate("before")
        while not self.extent.reached(self.counters):
            self.step()
            self.counters.wall_s = time.perf_counter() - started
            self.after_step()
        self.last_evaluation = self.evaluate("after") if self.settings.steps else self.first_evaluation
        self.counters.wall_s = time.perf_counter() - started
        return self.finish()

    def step(self) -> None:
        """One step, as in the figure."""
        started, self.before = time.perf_counter(), replace(self.counters)
        self.phases = {}
        ctx = self.context()
        generated = self.collect(ctx)
        replay = self.resolved.one("replay")
        groups = replay.collect(generated, ctx) if replay else generated
        self.advantages(groups, ctx)
        result, given = self.update(groups, ctx)
        self.book(generated, groups, given, result, ctx)
        self.counters.step += 1
        self.counters.train_s += time.perf_counter() - started

    def context(self) -> StepContext:
        """What parts may know about this step."""
        s = self.settings
        return StepContext(
            seed=s.seed,
            step=self.counters.step,
            num_steps=self.extent.expected_steps(self.counters),
            version=self.counters.version,
            prompts_per_step=s.prompts_per_step,
            group_size=s.group_size,
            max_new_tokens=s.sampling.max_new_tokens,
            temperature=s.sampling.temperature,
            eos_ids=frozenset(self.tokenizer.eos_ids),
            history=self.history,
            decode=self.tokenizer.decode,
        )

    # ------------------------------------------------------------ select ... filter

    def collect(self, ctx: StepContext) -> list[Group]:
        """Draw prompts, roll them out, judge them; draw again while the selector asks for more."""
        groups: list[Group] = []
        drawn: Counter[str] = Counter()
        self.rounds.overrun = {}
        wanted, draws = ctx.prompts_per_step, 0
        need = wanted
        while need > 0:
            prompts, inclusion = self.choose(need, ctx)
            if not prompts:
                break
            with self.timed("generate"):
                fresh = self.rounds.run(prompts, inclusion, ctx, drawn)
            self.judge(fresh, ctx)
            groups, draws = groups + fresh, draws + 1
            kept = sum(any(r.keep for r in group.rollouts) for group in groups)
            need = self.select.refill(kept, wanted, draws, ctx) if self.select else 0
        self.cut_surplus(groups, wanted)
        return groups

    def choose(self, need: int, ctx: StepContext) -> tuple[list[Prompt], list[float]]:
        """Prompts to roll out and the probability each had."""
        with self.timed("select"):
            if self.select is None:
                index = self.stream.take(need)
                return [self.stream.pool[i] for i in index], [1.0] * len(index)
            chosen = self.select.select(self.stream, need, ctx)
            return [self.stream.pool[i] for i in chosen.index], chosen.inclusion

    def judge(self, groups: list[Group], ctx: StepContext) -> None:
        """Teacher scores, rewards and filters of freshly generated groups."""
        rollouts = flatten(groups)
        if self.teacher is not None and (self.needs.teacher or self.needs.teacher_topk):
            with self.timed("teacher"):
                self.teacher.score(rollouts, topk=self.needs.teacher_topk)
        self.rewards(groups, ctx)
        for part in self.parts["filter"]:
            apply_keep(rollouts, part.filter(groups, ctx), part.slug)

    def rewards(self, groups: list[Group], ctx: StepContext) -> None:
        """Verdicts through the reward chain; a missing reward stays missing and cannot train a task objective."""
        rollouts = flatten(groups)
        reward_N = np.array([np.nan if r.verdict.correct is None else r.verdict.correct for r in rollouts], np.float32)
        for part in self.parts["reward"]:
            reward_N = part.shape(groups, reward_N, ctx)
        for rollout, reward in zip(rollouts, reward_N.tolist(), strict=True):
            rollout.reward = None if np.isnan(reward) else reward
            if rollout.reward is None and self.uses_task:
                rollout.drop(DropReason.UNSCORED, "verify")

    def cut_surplus(self, groups: list[Group], wanted: int) -> None:
        """Keep exactly ``wanted`` trainable groups when redrawing brought more."""
        trainable = [group for group in groups if any(r.keep for r in group.rollouts)]
        for group in trainable[wanted:]:
            for rollout in group.rollouts:
                rollout.drop(DropReason.SURPLUS, "select")

    # ------------------------------------------------------------ advantage, update, observe

    def advantages(self, groups: list[Group], ctx: StepContext) -> None:
        """The advantage chain over all rows of the step, written back to the rollouts."""
        rollouts = flatten(groups)
        if not rollouts or not self.uses_task:
            return
        rows = advantage_rows(groups)
        advantage, per_token = torch.where(rows.scored_N, rows.reward_N, 0.0), False
        for part in self.parts["advantage"]:
            if part.per_token and not per_token:
                advantage, per_token = advantage[rows.row_T], True
            advantage = part.advantage(rows, advantage)
        if not per_token:
            for rollout, value in zip(rollouts, advantage.tolist(), strict=True):
                rollout.advantage = value
            return
        for rollout, values in zip(rollouts, advantage.split(rows.length_N.tolist()), strict=True):
            rollout.advantage = values.numpy()

    def update(self, groups: list[Group], ctx: StepContext) -> tuple[UpdateResult, list[Group]]:
        """Train on what the schedule gives out now; the joint result, and the groups that were given out."""
        schedule = self.resolved.one("schedule")
        batches = schedule.batches(groups, ctx) if schedule else iter([(groups, 1, 1)])
        results: list[UpdateResult] = []
        given: list[Group] = []
        for batch, epochs, minibatches in batches:
            given += batch
            if self.counters.version == 0:
                self.learner.self_check([r for r in flatten(batch) if r.keep], SELF_CHECK_TOLERANCE)
            with self.timed("update"):
                results.append(self.learner.update(batch, epochs=epochs, minibatches=minibatches, ctx=ctx))
            self.counters.version += results[-1].outcome == "updated"
        self.engine.sync(self.policy, self.counters.version)
        return UpdateResult.joined(results), given

    def book(
        self,
        generated: list[Group],
        groups: list[Group],
        given: list[Group],
        result: UpdateResult,
        ctx: StepContext,
    ) -> None:
        """Ledger, history, parts and files learn about the finished step.

        ``generated`` in this step, ``groups`` after replay, ``given`` to the learner: what was generated and not given
        is held back; what was given and not generated comes from an earlier step.
        """
        fresh = {r.id for r in flatten(generated)}
        trained_on = {r.id for r in flatten(given)}
        everything = {r.id: r for r in flatten([*generated, *groups, *given])}
        self.ledger.book(
            list(everything.values()),
            overruns=self.rounds.overrun,
            buffered=everything.keys() - trained_on,
            released=everything.keys() - fresh,
            trained=result.outcome == "updated",
            distilled=self.resolved.one("distill") is not None,
        )
        for phase, seconds in self.phases.items():
            self.ledger.add_seconds(phase, seconds)
        self.ledger.balance()
        rollouts = flatten(generated)
        self.counters.tokens_generated += sum(r.cost.sampled for r in rollouts)
        self.counters.tokens_trained += result.trained_tokens
        saved = self.natural.saved([r.length for r in rollouts if r.stop.part])
        self.counters.tokens_saved += saved
        self.history.observe(generated, step=ctx.step, version=ctx.version, epoch=self.stream.epoch)
        metrics = self.metrics(generated, result, saved)
        record = StepRecord(generated, metrics, self.ledger)
        for part in self.resolved.all_parts():
            part.observe(record, ctx)
            metrics |= {f"{part.slug}/{name}": value for name, value in part.metrics().items()}
        self.watch_for_nothing(generated, result, ctx)
        self.run_dir.append_metrics(metrics)
        if self.board is not None:
            self.board.write(ctx.step + 1, metrics)
        if self.settings.output.rollouts:
            self.run_dir.write_rollouts(ctx.step + 1, generated, self.tokenizer.decode)
        self.display.step(metrics)

    def metrics(self, groups: list[Group], result: UpdateResult, saved: float) -> dict[str, Any]:
        """The step's numbers, flat names."""
        rollouts = flatten(groups)
        rewards = [r.reward for r in rollouts if r.reward is not None]
        correct = [r.verdict.correct for r in rollouts if r.verdict.correct is not None]
        limit, _ = self.rounds.limit(self.context())
        return {
            "step": self.counters.step + 1,
            "tokens_generated": self.counters.tokens_generated,
            "tokens_trained": self.counters.tokens_trained,
            "tokens_saved": self.counters.tokens_saved,
            "reward": float(np.mean(rewards)) if rewards else None,
            "accuracy": float(np.mean(correct)) if correct else None,
            "length/mean": float(np.mean([r.length for r in rollouts])) if rollouts else 0.0,
            "length/max": max((r.length for r in rollouts), default=0),
            "length/limit": limit,
            "length/saved_estimate": saved,
            "rollouts": len(rollouts),
            "rollouts/truncated_share": limits_reached(groups),
            "rollouts/unscored": sum(r.reward is None for r in rollouts),
            "groups": len(groups),
            "groups/constant_share": sum(g.constant() for g in groups) / len(groups) if groups else 0.0,
            "update/outcome": result.outcome,
            **teacher_metrics(rollouts),
            **{f"update/{name}": value for name, value in result.metrics.items()},
            **{f"seconds/{name}": value for name, value in self.phases.items()},
            **self.ledger.step_record(),
        }

    def watch_for_nothing(self, groups: list[Group], result: UpdateResult, ctx: StepContext) -> None:
        """Name a step without a trained token, and give up when it keeps happening."""
        if result.outcome != "nothing_to_train":
            self.counters.empty_steps = 0
            return
        self.counters.empty_steps += 1
        message = f"step {ctx.step + 1}: nothing to train on: {explain_nothing(groups, self.rounds.limit(ctx))}"
        self.display.warn(message)
        if self.counters.empty_steps >= GIVE_UP_AFTER:
            raise NothingToTrainError(f"{message} ({GIVE_UP_AFTER} steps in a row; the last checkpoint is kept)")

    # ------------------------------------------------------------ evaluation, checkpoints, end

    def evaluate(self, name: str) -> Evaluation:
        """Held-out accuracy now, written to the run directory."""
        self.display.phase(f"evaluate ({name})")
        found = evaluate(
            self.engine,
            self.heldout,
            self.task,
            self.settings.eval,
            max_new_tokens=self.settings.sampling.max_new_tokens,
            decode=self.tokenizer.decode,
            progress=self.display.generation_progress,
        )
        if name == "before":
            self.natural = ResidualLength(found.lengths)
        position = ("step", "tokens_generated", "tokens_trained", "train_s", "wall_s")
        record = {"name": name} | {counter: getattr(self.counters, counter) for counter in position}
        self.run_dir.append_eval(record | found.to_dict())
        self.display.evaluation(name, found.to_dict())
        return found

    def after_step(self) -> None:
        """Evaluation and checkpoint when they are due."""
        step, s = self.counters.step, self.settings
        last = self.extent.reached(self.counters)
        if not last and self.extent.evaluation_due(s.eval, self.before, self.counters):
            self.evaluate(f"step {step}")
        if last or (s.output.checkpoint_every and step % s.output.checkpoint_every == 0):
            self.save()

    def save(self) -> Path:
        """Checkpoint of everything that changes."""
        self.display.phase("checkpoint")
        assert self.first_evaluation is not None
        state = {
            "counters": vars(self.counters),
            "optimiser": self.learner.optimiser.state_dict(),
            "parts": [{"slug": part.slug, "state": part.state_dict()} for part in self.resolved.all_parts()],
            "stream": self.stream.state_dict(),
            "history": self.history.state_dict(),
            "ledger": self.ledger.state_dict(),
            "first_evaluation": self.first_evaluation.to_dict() | {"lengths": self.first_evaluation.lengths},
        }
        return checkpoint.save(self.run_dir.path / "checkpoints", self.counters.step, state, self.save_model)

    def restore(self) -> int:
        """Continue from the newest whole checkpoint; from the start when there is none. Returns the step."""
        root = self.run_dir.path / "checkpoints"
        saved = checkpoint.steps(root)
        self.run_dir.truncate_after(saved[-1] if saved else -1)
        if not saved:
            return 0
        state = checkpoint.load_state(root, saved[-1])
        self.counters = Counters(**state["counters"])
        self.learner.optimiser.load_state_dict(state["optimiser"])
        for part, entry in zip(self.resolved.all_parts(), state["parts"], strict=True):
            part.load_state_dict(entry["state"])
        self.stream.load_state_dict(state["stream"])
        self.history.load_state_dict(state["history"])
        self.ledger.load_state_dict(state["ledger"])
        self.first_evaluation = Evaluation(**state["first_evaluation"])
        self.natural = ResidualLength(self.first_evaluation.lengths)
        self.engine.sync(self.policy, self.counters.version)
        return self.counters.step

    def finish(self) -> dict[str, Any]:
        """The summary, written to the run directory."""
        assert self.first_evaluation is not None
        assert self.last_evaluation is not None
        c = self.counters
        summary = {
            "recipe": self.resolved.recipe.name,
            "steps": c.step,
            "accuracy_before": self.first_evaluation.accuracy,
            "accuracy_after": self.last_evaluation.accuracy,
            "accuracy_se": self.last_evaluation.accuracy_se,
            "mean_length_before": self.first_evaluation.mean_length,
            "mean_length_after": self.last_evaluation.mean_length,
            "tokens_generated": c.tokens_generated,
            "tokens_saved": round(c.tokens_saved),
            "tokens_trained": c.tokens_trained,
            **{f"{name}_overspent": round(value, 3) for name, value in self.extent.overspent(c).items()},
            "wall_s": round(c.wall_s, 3),
            "run_dir": str(self.run_dir.path),
        }
        self.run_dir.write_ledger(self.ledger.totals())
        self.run_dir.write_summary(summary)
        return summary

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds wall seconds to a phase of this step."""
        self.display.phase(phase)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - start


def apply_keep(rollouts: Sequence[Rollout], keep: Keep, slug: str) -> None:
    """Write a filter's decision into the records: drops keep their first reason, weights multiply, masks intersect."""
    for i, rollout in enumerate(rollouts):
        if not keep.keep_N[i]:
            rollout.drop(keep.reason, slug, 0.0 if keep.inclusion_N is None else float(keep.inclusion_N[i]))
        if keep.token_weight is not None:
            weight = keep.token_weight[i]
            rollout.token_weight = weight if rollout.token_weight is None else rollout.token_weight * weight
        if keep.token_mask is not None:
            mask = keep.token_mask[i]
            rollout.token_mask = mask if rollout.token_mask is None else rollout.token_mask & mask


def advantage_rows(groups: Sequence[Group]) -> AdvantageRows:
    """The flat rows of a step."""
    rollouts = flatten(groups)
    reward = torch.tensor([float("nan") if r.reward is None else r.reward for r in rollouts])
    correct = torch.tensor([float("nan") if r.verdict.correct is None else r.verdict.correct for r in rollouts])
    return AdvantageRows(
        reward_N=reward,
        correct_N=correct,
        group_N=torch.from_numpy(group_ids(groups)),
        num_groups=len(groups),
        length_N=torch.tensor([r.length for r in rollouts], dtype=torch.int64),
        scored_N=~reward.isnan(),
        keep_N=torch.tensor([r.keep for r in rollouts], dtype=torch.bool),
    )


def teacher_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """What the teacher's scores say: reverse KL on the student's own tokens (nats a token) and mean top-k overlap."""
    scored = [r for r in rollouts if r.keep and "teacher_logprob" in r.signals]
    if not sum(r.length for r in scored):
        return {}
    gap = np.concatenate([r.logprobs - r.signals["teacher_logprob"] for r in scored])
    found = {"teacher/reverse_kl": float(np.nanmean(gap))} if not np.isnan(gap).all() else {}
    if all("overlap" in r.signals for r in scored):
        found["teacher/overlap"] = float(np.nanmean(np.concatenate([r.signals["overlap"] for r in scored])))
    return found


def explain_nothing(groups: Sequence[Group], limit: tuple[int, str]) -> str:
    """Why a step has no trained token, with the likely cap."""
    rollouts = flatten(groups)
    if not rollouts:
        return "no rollouts were generated."
    reasons = Counter(r.dropped or "no gradient" for r in rollouts)
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    cut = [r for r in rollouts if r.stop.reason in (StopReason.LIMIT, StopReason.CONTEXT)]
    constant = sum(group.constant() for group in groups)
    text = f"{len(rollouts)} rollouts ({counts}), {constant} of {len(groups)} groups constant."
    if all(r.stop.reason == StopReason.CONTEXT for r in rollouts):
        return text + " Every rollout filled the model's context: shorter prompts (data.max_prompt_tokens) leave room."
    if len(cut) == len(rollouts):
        knob = f"the limit of {limit[1]}" if limit[1] else "sampling.max_new_tokens"
        text += f" Every rollout was cut off at {limit[0]} tokens: {knob} is the likely cap; raise it."
    return text
