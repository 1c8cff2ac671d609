"""Where prompts come from and how responses are verified. Importing this loads no torch."""

from __future__ import annotations

from trimtab.tasks.service import VerifierService
from trimtab.tasks.task import LoadedTask, RawPrompt, Task, load_task, make_task
from trimtab.tasks.verifiers import VERIFIERS, Verifier, make_verifier

__all__ = [
    "VERIFIERS",
    "LoadedTask",
    "RawPrompt",
    "Task",
    "Verifier",
    "VerifierService",
    "load_task",
    "make_task",
    "make_verifier",
]
