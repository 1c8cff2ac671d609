"""Builds a run from a resolved recipe: models, task, engine, learner, trainer."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trimtab.core.config import RunConfig
from trimtab.core.errors import ConfigError, DataError, invalid
from trimtab.core.recipe import Resolved, from_dict
from trimtab.core.records import Prompt
from trimtab.generate.engines import build_engine
from trimtab.generate.protocol import Engine, StreamScorer
from trimtab.learn.learner import Learner
from trimtab.learn.teacher import Teacher, TeacherStream
from trimtab.model.load import load_model, load_weights, save_pretrained
from trimtab.model.tokenizer import Tokenizer
from trimtab.model.transformer import Transformer, drop_layers
from trimtab.run import checkpoint
from trimtab.run.display import Display
from trimtab.run.plan import plan_lines
from trimtab.run.rounds import Rounds
from trimtab.run.rundir import RunDir
from trimtab.run.trainer import Trainer
from trimtab.tasks import load_task

_COMPARED_PROMPTS = 32


def resolve_device(name: str) -> torch.device:
    """``auto`` is the first GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise invalid("device", name, "auto, cpu, cuda or cuda:<number>") from error


def load_any(spec: str, settings: RunConfig, device: torch.device) -> tuple[Transformer, Tokenizer]:
    """A model and its tokenizer from any spelling of ``model``."""
    if spec.startswith("pocket:"):
        from trimtab import pocket

        loaded: tuple[Transformer, Tokenizer] = pocket.load(spec.removeprefix("pocket:"))
    else:
        loaded = load_model(spec)
    return loaded[0].to(device=device, dtype=getattr(torch, settings.dtype)), loaded[1]


def build_trainer(resolved: Resolved, display: Display, resumed: RunDir | None = None) -> Trainer:
    """Everything a run needs, built and checked before the first token; ``resumed`` continues from its last checkpoint.

    A new run directory is made last, so that a bad setting leaves nothing behind.
    """
    settings = resolved.settings
    torch.set_num_threads(settings.threads or os.cpu_count() or 1)
    device = resolve_device(settings.device)
    policy, tokenizer = load_any(settings.model, settings, device)
    if settings.drop_layers:
        policy = shorten(policy, settings.drop_layers)
    needs = resolved.needs()
    reference = load_reference(settings, policy, device) if needs.reference else None
    if resumed and (saved := checkpoint.steps(resumed.path / "checkpoints")):
        load_weights(policy, checkpoint.folder_of(resumed.path / "checkpoints", saved[-1]))
    longest = min(settings.data.max_prompt_tokens, policy.config.max_positions - 1)  # room for one response token
    data = replace(settings.data, max_prompt_tokens=longest)
    task = load_task(settings.task, data, settings.verify, tokenizer, seed=settings.seed)
    needs_teacher = needs.teacher or needs.teacher_topk > 0
    teacher = load_teacher(resolved, tokenizer, policy.config.vocab_size, task.train, device) if needs_teacher else None
    heldout = task.heldout(settings.eval.num_problems)
    engine = build_engine(settings, policy, tokenizer, device, needs)
    learner = Learner(
        policy,
        settings.learner,
        objective=resolved.one("objective"),
        correct=resolved.parts["correct"],
        distill=resolved.one("distill"),
        teacher=teacher,
        reference=reference,
        temperature=settings.sampling.temperature,
        max_new_tokens=settings.sampling.max_new_tokens,
        device=device,
    )
    run_dir = resumed or RunDir.create(settings.output.dir, resolved.to_dict(), resolved.recipe.name)
    trainer = Trainer(
        resolved=resolved,
        policy=policy,
        tokenizer=tokenizer,
        task=task,
        engine=engine,
        learner=learner,
        teacher=teacher,
        rounds=build_rounds(resolved, engine, task, tokenizer, teacher, display),
        run_dir=run_dir,
        display=display,
        train_prompts=task.train,
        heldout=heldout,
        save_model=lambda folder: save_pretrained(policy, tokenizer, folder),
    )
    bounded = any(vars(settings.budget).values())
    display.plan(plan_lines(resolved, policy, teacher, task), steps=0 if bounded else settings.steps)
    if resumed:
        trainer.restore()
    return trainer


def shorten(policy: Transformer, removed: list[int]) -> Transformer:
    """The policy without some of its layers (compressed-model recovery)."""
    count = policy.config.num_layers
    if any(not 0 <= layer < count for layer in removed) or len(set(removed)) >= count:
        raise invalid("drop_layers", removed, f"layer numbers from 0 to {count - 1}, leaving at least one")
    return drop_layers(policy, [layer for layer in range(count) if layer not in removed])


def load_teacher(
    resolved: Resolved, tokenizer: Any, vocab_size: int, prompts: Sequence[Prompt], device: torch.device
) -> Teacher:
    """The teacher, refused when it does not read the same token ids."""
    settings = resolved.settings
    model, teacher_tokenizer = load_any(settings.teacher, settings, device)
    for prompt in prompts[:_COMPARED_PROMPTS]:
        if tokenizer.encode(prompt.text) != teacher_tokenizer.encode(prompt.text):
            raise ConfigError(
                f"teacher: {settings.teacher!r} and the model {settings.model!r} encode {prompt.text!r} differently; a "
                "teacher must read the same token ids. Choose a teacher with the same tokenizer."
            )
    temperature = getattr(resolved.one("distill"), "teacher_temperature", 1.0)
    return Teacher(
        model.requires_grad_(False),
        temperature=temperature,
        vocab_size=vocab_size,
        token_budget=settings.learner.micro_batch_tokens,
    )


def load_reference(settings: RunConfig, policy: Transformer, device: torch.device) -> Transformer:
    """The frozen reference policy: the one named, or a copy of the starting policy."""
    model = load_any(settings.reference, settings, device)[0] if settings.reference else copy.deepcopy(policy)
    return model.requires_grad_(False)


def build_rounds(
    resolved: Resolved, engine: Engine, task: Any, tokenizer: Any, teacher: Teacher | None, display: Display
) -> Rounds:
    """The rollout driver with this recipe's parts."""
    needs = resolved.needs()
    scorer: Callable[[], StreamScorer] | None = None
    if teacher is not None:
        slots = resolved.settings.engine.slots

        def scorer() -> StreamScorer:
            return TeacherStream(teacher, num_slots=slots, topk=needs.teacher_topk)

    return Rounds(
        engine=engine,
        verify=task.verify_all,
        decode=tokenizer.decode,
        allocate=resolved.one("allocate"),
        generate=resolved.one("generate"),
        replay=resolved.one("replay"),
        stop=resolved.parts["stop"],
        signals=needs.signals,
        topk=max(needs.topk, needs.teacher_topk),
        scorer=scorer,
        progress=display.generation_progress,
    )


def start(resolved: Resolved, display: Display) -> Trainer:
    """A new run in a new directory."""
    return build_trainer(resolved, display)


def resume(path: Path, display: Display) -> Trainer:
    """Continue a run where its last checkpoint stands."""
    run_dir = RunDir.open(path)
    try:
        resolved = from_dict(run_dir.config())
    except (KeyError, TypeError) as error:
        raise DataError(f"{path}: config.yaml is not a resolved configuration ({error!r})") from error
    return build_trainer(resolved, display, run_dir)
