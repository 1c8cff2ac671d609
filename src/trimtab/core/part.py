"""The base of every part: typed knobs, explicit state, few verbs.

A part is a keyword-only dataclass. Its fields are its knobs, each made with :func:`knob`, which holds the default, the
paper's symbol and the allowed range in one place. What changes while a run goes on lives in one plain object,
``self.state``, an instance of the class attribute ``State``; the base saves and loads it, so no part can forget it.
"""

from __future__ import annotations

import dataclasses
import operator
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args, get_origin

from trimtab.core.errors import ConfigError, invalid, unknown

if TYPE_CHECKING:
    from trimtab.core.config import RunConfig
    from trimtab.core.slots import StepContext, StepRecord

SIGNALS = ("entropy", "topk", "margin")  # what the engine can compute per token, on demand


@dataclass(frozen=True, slots=True)
class Needs:
    """What a part asks of the run; checked when the recipe is built, before the first token."""

    signals: frozenset[str] = frozenset()  # per-token engine signals, out of SIGNALS
    topk: int = 0  # student top-k ids and log-probs per token
    teacher: bool = False
    teacher_topk: int = 0  # teacher top-k ids per token, and teacher log-probs on the student's top-k
    reference: bool = False
    min_group: int = 1
    verdicts: bool = False  # uses correctness or reward

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            signals=self.signals | other.signals,
            topk=max(self.topk, other.topk),
            teacher=self.teacher or other.teacher,
            teacher_topk=max(self.teacher_topk, other.teacher_topk),
            reference=self.reference or other.reference,
            min_group=max(self.min_group, other.min_group),
            verdicts=self.verdicts or other.verdicts,
        )


@dataclass
class NoState:
    """The state of a part that keeps none."""


def knob(
    default: Any,
    doc: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    factory: bool = False,
) -> Any:
    """One knob: its default (the paper's), what it is with the paper's symbol, and its range."""
    metadata = {"doc": doc, "ge": ge, "gt": gt, "le": le, "lt": lt}
    if factory:
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class Part:
    """Base of all parts. Subclass a slot class of :mod:`trimtab.core.slots`, not this."""

    slug: ClassVar[str] = ""  # the module's file name with dashes (of a third-party part, its entry point's name)
    State: ClassVar[type] = NoState
    # Knob values under which the part does nothing, bit for bit; None where only an empty slot does nothing.
    inert: ClassVar[dict[str, object] | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.slug = cls.__module__.rpartition(".")[2].replace("_", "-")

    def __post_init__(self) -> None:
        check_knobs(self, self.slug)
        self.state: Any = self.State()

    def needs(self) -> Needs:
        """What this part asks of the run under its present knobs."""
        return Needs()

    def required_slots(self) -> tuple[str, ...]:
        """Slots this part must stand in under its present knobs, of those it can fill."""
        return ()

    def check(self, parts: Mapping[str, list[Part]], settings: RunConfig) -> None:
        """Refuse, with the reason, a combination with these parts and settings that contradicts this one."""

    def observe(self, record: StepRecord, ctx: StepContext) -> None:
        """Look at a finished step. Called once a step for every part, in slot order."""

    def metrics(self) -> dict[str, float]:
        """Numbers to log, names relative to the part."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values and tensors."""
        return {f.name: getattr(self.state, f.name) for f in fields(self.state)}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave; refuses a state of another shape."""
        names = {f.name for f in fields(self.State)}
        if set(values) != names:
            raise ConfigError(f"{self.slug}: checkpoint state has {sorted(values)}, this version has {sorted(names)}")
        self.state = self.State(**values)

    def knobs(self) -> dict[str, Any]:
        """Present knob values by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def build(cls, values: Mapping[str, Any], path: str) -> Self:
        """An instance from a mapping; ``path`` is the key path used in errors."""
        return build_dataclass(cls, values, path)


def build_dataclass(cls: type[Any], values: Mapping[str, Any], path: str) -> Any:
    """Build a knob dataclass from a mapping with every error naming the full key path."""
    names = [f.name for f in fields(cls)]
    for name in values:
        if name not in names:
            raise unknown(f"{path}.{name}", name, names, "See its page for the knobs.")
    hints = typing.get_type_hints(cls)
    converted = {name: convert(value, hints[name], f"{path}.{name}") for name, value in values.items()}
    for f in fields(cls):  # checked under the full key path before the constructor checks again under the slug
        if f.name in converted:
            check_range(f, converted[f.name], f"{path}.{f.name}")
    return cls(**converted)


def convert(value: Any, hint: Any, path: str) -> Any:
    """``value`` as the annotated type, or a ConfigError. Widens int to float; never guesses otherwise."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        if value not in args:
            raise unknown(path, value, [str(a) for a in args])
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        for option in (a for a in args if a is not type(None)):
            try:
                return convert(value, option, path)
            except ConfigError:
                continue
        raise invalid(path, value, " or ".join(_type_name(a) for a in args))
    if origin in (list, tuple):
        if not isinstance(value, (list, tuple)):
            raise invalid(path, value, "a list")
        inner = args[0] if args else Any
        return origin(convert(v, inner, f"{path}.{i}") for i, v in enumerate(value))
    if origin is dict or hint is dict:
        if not isinstance(value, Mapping):
            raise invalid(path, value, "a mapping")
        return dict(value)
    if hint is Any:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        if not isinstance(value, Mapping):
            raise invalid(path, value, "a mapping")
        return build_dataclass(hint, value, path)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise invalid(path, value, _type_name(hint))
    return value


def _type_name(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    return names.get(hint, str(getattr(hint, "__name__", hint)))


def check_range(f: dataclasses.Field[Any], value: Any, path: str) -> None:
    """Refuse a number outside the bounds its knob declares."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    if value != value:
        raise invalid(path, value, "a number, not NaN")
    tests = {"ge": (">=", operator.ge), "gt": (">", operator.gt), "le": ("<=", operator.le), "lt": ("<", operator.lt)}
    for name, (sign, holds) in tests.items():
        bound = f.metadata.get(name)
        if bound is not None and not holds(value, bound):
            raise invalid(path, value, f"a value {sign} {bound}", f.metadata.get("doc", ""))


def check_knobs(instance: Any, path: str) -> None:
    """Types and ranges of all knobs of an instance, however it was made."""
    hints = typing.get_type_hints(type(instance))
    for f in fields(instance):
        value = convert(getattr(instance, f.name), hints[f.name], f"{path}.{f.name}")
        check_range(f, value, f"{path}.{f.name}")
        if value is not getattr(instance, f.name):
            object.__setattr__(instance, f.name, value)
