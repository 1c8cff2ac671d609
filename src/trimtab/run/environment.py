"""Where and with what a run ran: everything needed to read its numbers later."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import trimtab


def environment() -> dict[str, Any]:
    """Versions, machine, command line and start time of this process."""
    return {
        "trimtab": trimtab.__version__,
        "git": checkout(Path(trimtab.__file__).parent),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "device": processor(),
        "accelerators": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "cores": usable_cores(),
        "memory_bytes": memory_bytes(),
        "argv": list(sys.argv),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def checkout(folder: Path) -> dict[str, Any] | None:
    """Commit, and whether the code under ``folder`` differs from it; None where git does not track that code.

    Code that is installed inside somebody else's checkout is not tracked by it, so its commit is not ours.
    """
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit, changes = _git(folder, "rev-parse", "HEAD"), _git(folder, "status", "--porcelain", "--", ".")
    return None if commit is None or changes is None else {"commit": commit, "dirty": bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def processor() -> str:
    """The processor's name, as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Physical memory, or None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
