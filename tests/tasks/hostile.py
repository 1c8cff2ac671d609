"""A reward function that does what the response text says: every way a user's function can go wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.core.records import Prompt, Status, Verdict


def hang_in_c() -> None:
    re.match(r"(a+)+$", "a" * 64 + "b")  # holds the interpreter lock: no Python-level timeout gets through


def child_that_outlives() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(os.environ["HOSTILE_PID_FILE"]).write_text(str(child.pid))
    time.sleep(600)


def stray_thread() -> float:
    threading.Thread(target=time.sleep, args=(600,)).start()
    return 1.0


def print_a_lot() -> float:
    print("noise " * 50_000)
    print("noise " * 50_000, file=sys.stderr)
    os.write(1, b"\x80\x04raw bytes on the descriptor")
    os.system("echo from a child")
    return 1.0


def close_everything() -> None:
    os.closerange(0, 64)


def recurse() -> float:
    return recurse()


class Unpicklable(Verdict):
    def __reduce__(self) -> Any:
        raise TypeError("no")


ACTIONS: dict[str, Any] = {
    "right": lambda: 1.0,
    "wrong": lambda: 0,
    "half": lambda: 0.5,
    "true": lambda: True,
    "numpy": lambda: np.float32(1.0),
    "numpy bool": lambda: np.bool_(True),
    "numpy scalar": lambda: np.array(1.0),
    "malformed": lambda: (0.0, False),
    "well formed": lambda: (1.0, True),
    "verdict": lambda: Verdict(1.0, Status.OK, "fine\nand more", {"style": np.float64(0.25)}),
    "own error": lambda: Verdict(None, Status.ERROR, "judge offline"),
    "unpicklable": lambda: Unpicklable(1.0, Status.OK),
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "none": lambda: None,
    "text": lambda: "1.0",
    "two": lambda: 2.0,
    "minus": lambda: -0.25,
    "list": lambda: [1.0],
    "vector": lambda: np.ones(1),
    "complex": lambda: 1j,
    "decimal": lambda: Decimal(1),
    "triple": lambda: (1.0, True, 3),
    "bad component": lambda: Verdict(1.0, Status.OK, "", {"style": float("nan")}),
    "raise": lambda: 1 / 0,
    "recurse": recurse,
    "sys exit": lambda: sys.exit("bye"),
    "exit": lambda: os._exit(7),
    "hang": lambda: time.sleep(600),
    "hang in c": hang_in_c,
    "child": child_that_outlives,
    "thread": stray_thread,
    "print": print_a_lot,
    "input": lambda: float(len(input())),
    "close": close_everything,
    "pid": lambda: Verdict(1.0, Status.OK, str(os.getpid())),
}


def score(prompt: Prompt, text: str) -> Any:
    return ACTIONS[text.partition("/")[0]]()
