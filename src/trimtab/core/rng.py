"""Counter-based random numbers keyed by what they are for, never by the order of consumption.

A draw is a pure function of ``(seed, step, prompt, sample, part, position)``: the same rollout gets the same numbers
whatever batch it runs in, wherever it is placed and however many workers there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trimtab.core.lazy import lazy

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # as signed int64
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def key(*parts: object) -> int:
    """A signed 64-bit key from any printable parts (seed, step, prompt id, sample, part name)."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def generator(*parts: object) -> np.random.Generator:
    """A numpy generator owned by one decision (selection, tie breaking), keyed like everything else."""
    return np.random.Generator(np.random.Philox(key=key(*parts) & (2**64 - 1)))


def scrambled(keys: np.ndarray[Any, np.dtype[np.uint64]], *parts: object) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """One random number a prompt (P,) for one decision, from prompt keys and what the decision is for.

    The number depends on the prompt and not on its place, so that ties settled by it fall alike in any order. Equal
    keys get equal numbers.
    """
    x = keys ^ np.uint64(key(*parts) & (2**64 - 1))
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor & (2**64 - 1))
    mixed: np.ndarray[Any, np.dtype[np.uint64]] = x ^ (x >> np.uint64(31))
    return mixed


def uniforms(keys: np.ndarray[Any, np.dtype[np.uint64]], *parts: object) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The same as numbers in [0, 1), float64 (P,)."""
    return (scrambled(keys, *parts) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # logical shift: torch's >> on int64 is arithmetic


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The splitmix64 finaliser (Steele, Lea and Flood 2014), elementwise on int64 with wrap-around."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform(key_B: torch.Tensor, position_B: torch.Tensor) -> torch.Tensor:
    """Uniforms in (0, 1), float32, one per row: ``key_B`` and ``position_B`` are int64 and broadcast together.

    Both ends are excluded, so that an inverse-CDF draw never lands on an outcome of probability zero at either end.
    """
    bits = _mix(_mix(key_B) + position_B * _GOLDEN)
    return (_shift_right(bits, 41).to(torch.float32) + 0.5) * 2.0**-23


def keys_tensor(keys: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """Row keys as an int64 tensor (B,)."""
    return torch.tensor(list(keys), dtype=torch.int64, device=device)
