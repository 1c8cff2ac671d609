"""What the doctor works on: one number a rollout and field, however the log was written.

Texts and per-token arrays are reduced while a log is read (:mod:`trimtab.doctor.reduce`), so that a million rollouts
stay a table of numbers. N rollouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Float = np.ndarray[Any, np.dtype[np.float64]]
Values = np.ndarray[Any, np.dtype[np.float32]]
Bool = np.ndarray[Any, np.dtype[np.bool_]]
Int = np.ndarray[Any, np.dtype[np.int64]]
Key = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True, slots=True)
class Field:
    """A field a log may have. ``kind`` says what is read: a number, a flag, a key, a text, or numbers per token."""

    kind: str
    doc: str


FIELDS: dict[str, Field] = {
    "step": Field("number", "training step"),
    "prompt": Field("key", "the prompt, or its id"),
    "group": Field("key", "group of the rollout within its step (default: rollouts of one prompt)"),
    "text": Field("text", "the response"),
    "length": Field("number", "response tokens"),
    "reward": Field("number", "reward"),
    "correct": Field("number", "what the verifier found, 0 to 1"),
    "failed": Field("flag", "the evaluator timed out or raised"),
    "malformed": Field("flag", "no answer could be read"),
    "truncated": Field("flag", "ended by the length cap; a finish reason will do"),
    "answer": Field("key", "the answer given in the response"),
    "advantage": Field("tokens", "advantage, or one a token"),
    "weight": Field("tokens", "importance weight, or one a token"),
    "entropy": Field("tokens", "entropy of the policy in nats, mean or one a token"),
    "logprobs": Field("tokens", "log-probs of the engine that sampled, one a token"),
    "trainer_logprobs": Field("tokens", "log-probs of the trainer at the same version, one a token"),
    "clipped": Field("tokens", "share of tokens outside the clip range, or a flag a token"),
    "loss_mask": Field("tokens", "tokens of the response that are trained, one flag a token"),
    "version": Field("number", "policy version that sampled"),
    "trainer_version": Field("number", "policy version that was trained on this step"),
    "replayed": Field("flag", "came out of a buffer"),
    "audit": Field("number", "verdict of a second checker, 0 to 1"),
    "judge": Field("number", "score of a learned judge"),
    "judge_flip": Field("flag", "the judge changed its mind when the order was swapped"),
    "process": Field("number", "mean step score of a process reward"),
    "premature": Field("flag", "stopped early, and the audit says it would have succeeded"),
    "settled_at": Field("number", "token position of the first stable answer"),
    "twin": Field("flag", "tree sibling with equal answer and overlap above .8"),
    "hinted": Field("flag", "generated with a hint"),
    "corrupt": Field("flag", "replayed item that fails the current verifier"),
    "drifted": Field("flag", "generated task that fails an independent check"),
    "tool_error": Field("flag", "a tool or the environment failed"),
    "repeated_calls": Field("number", "tool calls that repeat an earlier one"),
    "calls": Field("number", "tool calls"),
}


@dataclass(slots=True)
class Log:
    """Rollouts of a run as columns.

    Args:
        step_N: training step of each rollout.
        prompt_N: hash of the prompt; None when the log does not tell prompts apart.
        group_N: hash of the group; rollouts of one group share step and group.
        values: field to numbers (N,), NaN where missing. Fields the log lacks are absent. Beside :data:`FIELDS`:
            ``gap`` and ``gap_signed`` (trainer minus engine, nats a token), ``surprise`` (minus the mean sampled
            log-prob), ``repetitive`` (1 where the text ends in a loop), ``invalid`` (1 where a number is NaN,
            infinite or impossible) and ``lag`` (versions).
        text_N: hash of the response; 0 = not logged.
        answer_N: hash of the answer given; 0 = none.
        length_unit: ``tokens``, or ``characters`` where only texts were logged.
        evals: (step, held-out accuracy) in order.
        notes: what a reader of the diagnosis should know about the log.
    """

    step_N: Int
    prompt_N: Key | None = None
    group_N: Key | None = None
    values: dict[str, Values] = field(default_factory=dict)
    text_N: Key | None = None
    answer_N: Key | None = None
    length_unit: str = "tokens"
    evals: list[tuple[int, float]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.step_N)

    def has(self, *names: str) -> bool:
        """True when every field is there with at least one number."""
        return all(name in self.values and bool(np.isfinite(self.values[name]).any()) for name in names)


def concatenate(parts: Iterable[Mapping[str, np.ndarray[Any, Any]]]) -> dict[str, np.ndarray[Any, Any]]:
    """Columns of all parts one after the other; a column that a part lacks is NaN there (0 for keys)."""
    chunks = list(parts)
    names = list(dict.fromkeys(name for chunk in chunks for name in chunk))
    sizes = [len(next(iter(chunk.values()))) for chunk in chunks]
    columns: dict[str, np.ndarray[Any, Any]] = {}
    for name in names:
        dtype = next(chunk[name].dtype for chunk in chunks if name in chunk)
        missing = np.nan if dtype.kind == "f" else 0
        filled = [
            chunk.pop(name) if name in chunk else np.full(size, missing, dtype)  # type: ignore[attr-defined]
            for chunk, size in zip(chunks, sizes, strict=True)
        ]
        columns[name] = np.concatenate(filled)
    return columns
