"""Errors a user can meet, each with what was set, what is allowed and what to do.

One root, a few categories, each also a standard-library class so that callers may catch either. Invariants of our own
are ``assert``; these classes are for users.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimtab.generate.protocol import Completion


class TrimtabError(Exception):
    """Root of every error Trimtab raises on purpose."""


class ConfigError(TrimtabError, ValueError):
    """A recipe, a knob or an override is wrong. Raised before any token is generated."""


class DataError(TrimtabError, ValueError):
    """A data file, a checkpoint or a weight file cannot be read as what it claims to be."""


class MissingExtraError(TrimtabError, ImportError):
    """An optional package is needed; the message holds the exact ``pip install`` line."""


class EngineError(TrimtabError, RuntimeError):
    """A rollout engine failed: it died, timed out or answered nonsense.

    ``completions`` holds what was done by then, in request order; what was not finished ended with reason ``error``.
    Empty when the engine failed outside of a generation call.
    """

    def __init__(self, message: str, completions: Sequence[Completion] = ()) -> None:
        super().__init__(message)
        self.completions = list(completions)


class MismatchError(TrimtabError, RuntimeError):
    """Engine and learner disagree on a log-probability convention; training on it would be silently wrong."""


class NothingToTrainError(TrimtabError, RuntimeError):
    """A step holds no trained token. Raised before the optimiser moves; the trainer records the step as skipped."""


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """The allowed name closest to ``name``, or None when nothing is near."""
    found = difflib.get_close_matches(name.lower(), [str(a) for a in allowed], n=1, cutoff=0.5)
    return found[0] if found else None


def unknown(key: str, value: object, allowed: Iterable[str], hint: str = "") -> ConfigError:
    """A four-part error for a name that is not known: key path, value, what is allowed, nearest valid name."""
    names = sorted(str(a) for a in allowed)
    near = nearest(str(value), names)
    suggestion = f" Did you mean {near!r}?" if near else ""
    listed = ", ".join(names) if names else "nothing"
    return ConfigError(f"{key}: unknown name {value!r}.{suggestion} Allowed: {listed}.{' ' + hint if hint else ''}")


def invalid(key: str, value: object, allowed: str, hint: str = "") -> ConfigError:
    """A four-part error for a value of the wrong type or out of range."""
    return ConfigError(f"{key}: {value!r} is not valid. Allowed: {allowed}.{' ' + hint if hint else ''}")


def missing_extra(package: str, extra: str, purpose: str) -> MissingExtraError:
    """The error for an absent optional package."""
    return MissingExtraError(
        f"{purpose} needs the package {package!r}. Install it with: pip install 'trimtab[{extra}]'"
    )
