"""The plan of a run, derived from its settings and printed before the first token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trimtab.core.config import BudgetConfig
from trimtab.core.recipe import Resolved
from trimtab.core.records import Prompt

_SUFFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def short(number: float) -> str:
    """12_300_000 as ``12.3M``."""
    for size, suffix in _SUFFIXES:
        if number >= size:
            return f"{number / size:.3g}{suffix}"
    return f"{number:.0f}"


def memory_bytes(resolved: Resolved, policy: Any, teacher: Any, prompts: Sequence[Prompt]) -> dict[str, float]:
    """Estimated peak bytes by purpose: weights with gradients and Adam moments, KV slots, one micro-batch, teacher."""
    s, c = resolved.settings, policy.config
    width = {"float32": 4, "bfloat16": 2}[s.dtype]
    longest = max((len(prompt.tokens) for prompt in prompts), default=1)
    context = min(c.max_positions, longest + s.sampling.max_new_tokens)
    rollouts = s.prompts_per_step * s.group_size
    slots = min(s.engine.slots, rollouts)
    tokens = min(s.learner.micro_batch_tokens, s.prompts_per_step * longest + rollouts * s.sampling.max_new_tokens)
    per_token = width * c.num_layers * (8 * c.hidden_size + 4 * c.intermediate_size + 2 * c.num_heads * c.head_dim)
    chunk = min(s.learner.logprob_chunk, tokens) * c.vocab_size * 4 * 3
    return {
        "training": policy.num_parameters() * (width * 2 + 8),
        "kv cache": slots * context * c.num_layers * 2 * c.num_kv_heads * c.head_dim * width,
        "micro-batch": tokens * per_token + chunk,
        "teacher": teacher.model.num_parameters() * width if teacher is not None else 0,
    }


def plan_lines(resolved: Resolved, policy: Any, teacher: Any, task: Any) -> list[tuple[str, str]]:
    """Rows of the plan: what runs, how many tokens a step at most, how much memory."""
    s = resolved.settings
    rollouts = s.prompts_per_step * s.group_size
    memory = memory_bytes(resolved, policy, teacher, task.train)
    uses = ", ".join(f"{name} {short(size)}B" for name, size in memory.items() if size)
    parts = [f"{slot}: {' > '.join(p.slug for p in chain)}" for slot, chain in resolved.parts.items() if chain]
    lines = [
        ("recipe", f"{resolved.recipe.name} ({resolved.recipe.title})"),
        ("policy", f"{s.model}, {short(policy.num_parameters())} parameters, {policy.config.num_layers} layers"),
        ("teacher", f"{s.teacher}, {short(teacher.model.num_parameters())} parameters" if teacher else "none"),
        ("task", f"{s.task}, {len(task.train)} prompts" + skipped_text(task.skipped)),
        ("parts", "; ".join(parts)),
        (
            "tokens a step",
            f"at most {short(rollouts * s.sampling.max_new_tokens)} = {s.prompts_per_step} prompts x {s.group_size} "
            f"rollouts x {s.sampling.max_new_tokens} tokens",
        ),
        ("steps", f"{s.steps}, seed {s.seed}"),
        ("budget", budget_text(s.budget)),
        ("memory", f"about {short(sum(memory.values()))}B ({uses})"),
    ]
    return [line for line in lines if line[1] != "none"]


def budget_text(budget: BudgetConfig) -> str:
    """The bounds beside the steps, or ``none``."""
    found = [(budget.tokens, "generated tokens"), (budget.trained_tokens, "trained tokens"), (budget.seconds, "s")]
    return " or ".join(f"{short(amount)} {unit}" for amount, unit in found if amount) or "none"


def skipped_text(skipped: dict[str, int]) -> str:
    """Counted skips, or nothing."""
    found = [f"{count} {reason}" for reason, count in skipped.items() if count]
    return f" (skipped: {', '.join(found)})" if found else ""
