"""Recipes: one YAML a method, the paper's combination of parts and knobs; and their resolution with overrides.

A recipe file::

    title: Early Stopping Rollout
    paper: "Less is More: Early Stopping Rollout for On-Policy Distillation"
    arxiv: "2605.27028"
    year: 2026
    maturity: numbers-checked        # card, numbers-checked, learns-pocket, paper-scale
    summary: Generate and distil only the first N tokens.
    settings: {group_size: 4, sampling: {max_new_tokens: 8192}}
    parts:
      stop: {part: esr, cutoff: 100}
      distill: {part: opd, variant: full}
    pocket: {stop.cutoff: 24}        # the same keys as overrides; applied when the policy is a pocket model

A part that fills several slots is one object: name it in each slot, give its knobs once, at the first.
Values are laid over each other in this order: defaults of the code, ``settings``, ``pocket``, the user's overrides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml

from trimtab.core.config import RunConfig
from trimtab.core.errors import ConfigError, DataError, invalid, unknown
from trimtab.core.part import Needs, Part, build_dataclass, check_knobs, knob
from trimtab.core.registry import lookup, slots_of
from trimtab.core.slots import CHAINS, SLOTS

Maturity = Literal["card", "numbers-checked", "learns-pocket", "paper-scale"]
PartSpec = dict[str, Any]
Parts = dict[str, list[PartSpec]]


@dataclass(kw_only=True)
class Recipe:
    """The contents of one recipe file."""

    name: str = knob("", "slug; the file's name")
    title: str = knob("", "the method's name as the paper writes it")
    paper: str = knob("", "title of the paper, or lineage")
    arxiv: str = knob("", "arXiv id; empty when there is none")
    year: int = knob(0, "year of the paper")
    maturity: Maturity = knob("card", "how far the method is proven here")
    summary: str = knob("", "one line")
    deviations: list[str] = knob(list, "where this differs from the paper", factory=True)
    settings: dict[str, Any] = knob(dict, "run settings of the paper", factory=True)
    parts: dict[str, Any] = knob(dict, "slot to part or chain of parts", factory=True)
    pocket: dict[str, Any] = knob(dict, "overrides for the embedded models", factory=True)

    def __post_init__(self) -> None:
        check_knobs(self, f"recipe {self.name}")

    @property
    def slots(self) -> list[str]:
        """Slots this recipe fills, in step order."""
        return [slot for slot in SLOTS if self.parts.get(slot) not in (None, "none", [])]


@cache
def shipped() -> dict[str, Path]:
    """Slug to path of every recipe in the package."""
    folder = Path(str(resources.files("trimtab") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load(name_or_path: str) -> Recipe:
    """A shipped recipe by slug, or a YAML file by path."""
    path = shipped().get(name_or_path)
    if path is None:
        path = Path(name_or_path)
        if path.suffix not in (".yaml", ".yml"):
            raise unknown("recipe", name_or_path, shipped(), "Or give the path of a .yaml file.")
    return _read(path)


def _read(path: Path) -> Recipe:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"recipe {path}: cannot be read ({error})") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"recipe {path}: not valid YAML: {str(error).replace(chr(10), ' ')}") from error
    if not isinstance(values, dict):
        raise invalid(f"recipe {path}", values, "a mapping with title, parts, settings ...")
    recipe: Recipe = build_dataclass(Recipe, {"name": path.stem, **values}, f"recipe {path.stem}")
    return recipe


def parse_overrides(items: Iterable[str]) -> dict[str, Any]:
    """``["steps=3", "stop.threshold=0.6"]`` as a mapping; values are YAML."""
    parsed: dict[str, Any] = {}
    for item in items:
        key, sign, value = item.partition("=")
        if not sign or not key.strip():
            raise invalid("override", item, "key=value, for example steps=3 or stop.threshold=0.6")
        try:
            parsed[key.strip()] = yaml.load(value, _Loader)
        except yaml.YAMLError as error:
            raise invalid(key.strip(), value, "a YAML value", str(error).splitlines()[0]) from error
    return parsed


class _Loader(yaml.SafeLoader):
    """YAML as people write it: ``1e-4`` is a number, ``2026-01-01`` is text, and a key stands once.

    YAML 1.1 reads the first as text and the second as a date, and lets the last of two equal keys win without a word.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012, an attribute of the base class
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                problem = f"the key {key.value!r} stands twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


@dataclass
class Resolved:
    """A recipe with settings and knobs in force: what a run is built from, and what re-reads to the same object."""

    recipe: Recipe
    settings: RunConfig
    parts: dict[str, list[Any]]  # slot -> its parts, each of the slot's class
    spec: Parts = field(repr=False)

    def all_parts(self) -> list[Part]:
        """Every part once, in step order."""
        seen: dict[int, Part] = {}
        for slot in SLOTS:
            for part in self.parts[slot]:
                seen.setdefault(id(part), part)
        return list(seen.values())

    def needs(self) -> Needs:
        """What all parts together ask of the run."""
        total = Needs()
        for part in self.all_parts():
            total |= part.needs()
        return total

    def one(self, slot: str) -> Any:
        """The part of a single-part slot, or None when it is inert."""
        return self.parts[slot][0] if self.parts[slot] else None

    def to_dict(self) -> dict[str, Any]:
        """The resolved configuration; :func:`from_dict` gives the same object back."""
        parts: dict[str, Any] = {}
        first: dict[int, str] = {}
        for slot in SLOTS:
            specs = []
            for part in self.parts[slot]:
                shared = id(part) in first
                first.setdefault(id(part), slot)
                specs.append({"part": part.slug} if shared else {"part": part.slug, **part.knobs()})
            if specs:
                parts[slot] = specs
        meta = {
            f.name: getattr(self.recipe, f.name)
            for f in fields(Recipe)
            if f.name not in ("settings", "parts", "pocket")
        }
        return {"recipe": meta, "settings": self.settings.to_dict(), "parts": parts}


def from_dict(values: Mapping[str, Any]) -> Resolved:
    """The object a resolved configuration was written from."""
    recipe: Recipe = build_dataclass(Recipe, {**values["recipe"], "parts": values["parts"]}, "recipe")
    return _build(recipe, RunConfig.build(values["settings"]), normalise(values["parts"], "parts"))


def resolve(recipe: Recipe | str, overrides: Mapping[str, Any] | None = None) -> Resolved:
    """Lay settings, pocket scaling and overrides over each other, build the parts and check that they fit."""
    recipe = load(recipe) if isinstance(recipe, str) else recipe
    overrides = dict(overrides or {})
    where = f"recipe {recipe.name}"
    settings: dict[str, Any] = RunConfig().to_dict()
    RunConfig.build(recipe.settings)  # errors under their own key path
    _merge(settings, recipe.settings)
    spec = normalise(recipe.parts, f"{where}.parts")
    model = overrides.get("model", settings["model"])
    if str(model).startswith("pocket:"):
        _apply(recipe.pocket, settings, spec, f"{where}.pocket.")
    _apply(overrides, settings, spec, "")
    return _build(recipe, RunConfig.build(settings), spec)


def normalise(parts: Mapping[str, Any], path: str) -> Parts:
    """Every slot as a list of mappings with the key ``part``."""
    spec: Parts = {slot: [] for slot in SLOTS}
    for slot, value in parts.items():
        if slot not in SLOTS:
            raise unknown(f"{path}.{slot}", slot, SLOTS)
        spec[slot] = _links(slot, value, f"{path}.{slot}")
    return spec


def _links(slot: str, value: Any, path: str) -> list[PartSpec]:
    if value is None or value == "none":
        return []
    items = value if isinstance(value, list) else [value]
    if len(items) > 1 and slot not in CHAINS:
        raise invalid(path, value, f"one part (only {', '.join(sorted(CHAINS))} take a chain)")
    links = []
    for item in items:
        link = {"part": item} if isinstance(item, str) else item
        if not isinstance(link, Mapping) or not isinstance(link.get("part"), str):
            raise invalid(path, item, "a part's name, or a mapping with the key 'part' and its knobs")
        links.append(dict(link))
    return links


def _merge(base: dict[str, Any], extra: Mapping[str, Any]) -> None:
    for name, value in extra.items():
        if isinstance(value, Mapping) and isinstance(base.get(name), dict):
            _merge(base[name], value)
        else:
            base[name] = value


def _apply(overrides: Mapping[str, Any], settings: dict[str, Any], spec: Parts, path: str) -> None:
    """Whole slots first (``stop=esr``), then knobs and settings, so that their order on the command line is free."""
    for key in overrides:
        if not isinstance(key, str):
            raise invalid(f"{path}{key}", key, "a key of the settings or slot.knob, as text")
    whole = {key: value for key, value in overrides.items() if key in SLOTS}
    for slot, value in whole.items():
        spec[slot] = _links(slot, value, f"{path}{slot}")
    for key, value in overrides.items():
        if key in whole:
            continue
        head, _, rest = key.partition(".")
        if head in SLOTS:
            _set_knob(head, rest, value, spec, f"{path}{key}")
        else:
            _set_setting(key, value, settings, f"{path}{key}")


def _set_setting(key: str, value: Any, settings: dict[str, Any], path: str) -> None:
    node = settings
    *parents, leaf = key.split(".")
    for name in parents:
        if not isinstance(node.get(name), dict):
            raise unknown(path, name, [k for k, v in node.items() if isinstance(v, dict)] + list(SLOTS))
        node = node[name]
    if leaf not in node:
        raise unknown(path, leaf, list(node) + (list(SLOTS) if node is settings else []))
    if isinstance(node[leaf], dict) and "name" in node[leaf] and isinstance(value, str):
        value = {"name": value}  # engine=http is short for engine.name=http
    if isinstance(node[leaf], dict) and not isinstance(value, Mapping):
        raise invalid(path, value, f"a mapping with {', '.join(node[leaf])}")
    if isinstance(value, Mapping) and isinstance(node[leaf], dict):
        _merge(node[leaf], value)
    else:
        node[leaf] = value


def _set_knob(slot: str, rest: str, value: Any, spec: Parts, path: str) -> None:
    """``slot.knob`` where one link has the knob, else ``slot.part.knob``."""
    links = spec[slot]
    if not links:
        raise ConfigError(
            f"{path}: the slot {slot!r} is empty in this recipe. Fill it first, for example {slot}=<part>."
        )
    head, _, tail = rest.partition(".")
    named = [link for link in links if link["part"] == head]
    if tail and named:
        links, rest = named, tail
    owners = [link for link in links if rest in _knob_names(slot, link, path)]
    if not owners:
        names = sorted({name for link in links for name in _knob_names(slot, link, path)})
        raise unknown(path, rest, names)
    if len(owners) > 1:
        options = ", ".join(f"{slot}.{link['part']}.{rest}" for link in owners)
        raise ConfigError(f"{path}: several parts have the knob {rest!r}. Name one: {options}.")
    _knob_home(slot, owners[0], spec)[rest] = value


def _knob_names(slot: str, link: PartSpec, path: str) -> list[str]:
    return [f.name for f in fields(lookup(slot, link["part"], path))]


def _knob_home(slot: str, link: PartSpec, spec: Parts) -> PartSpec:
    """The link that carries the knobs: for a part in several slots, its first."""
    cls = lookup(slot, link["part"], slot)
    for other in slots_of(cls):
        for candidate in spec[other]:
            if candidate["part"] == link["part"]:
                return candidate
    return link


def _build(recipe: Recipe, settings: RunConfig, spec: Parts) -> Resolved:
    parts: dict[str, list[Any]] = {slot: [] for slot in SLOTS}
    shared: dict[type[Part], tuple[str, Part]] = {}
    for slot in SLOTS:
        for link in spec[slot]:
            path = f"{slot}.{link['part']}" if slot in CHAINS else slot
            cls = lookup(slot, link["part"], path)
            knobs = {name: value for name, value in link.items() if name != "part"}
            if cls in shared and shared[cls][0] != slot:
                if knobs:
                    raise ConfigError(
                        f"{path}: {link['part']!r} also stands in {shared[cls][0]!r}; give its knobs there."
                    )
                parts[slot].append(shared[cls][1])
                continue
            part = cls.build(knobs, path)
            shared[cls] = (slot, part)
            parts[slot].append(part)
    resolved = Resolved(recipe, settings, parts, spec)
    check_fit(resolved)
    return resolved


def check_fit(resolved: Resolved) -> None:
    """Refuse a run whose parts ask for what it does not have, or contradict each other."""
    settings = resolved.settings
    for part in resolved.all_parts():
        needs = part.needs()
        if (needs.teacher or needs.teacher_topk) and not settings.teacher:
            raise ConfigError(
                f"{part.slug}: needs a teacher and none is set. Set teacher=pocket:teacher or a model folder."
            )
        if needs.min_group > settings.group_size and not resolved.parts["allocate"]:
            raise invalid("group_size", settings.group_size, f"at least {needs.min_group}, which {part.slug!r} needs")
        for slot in slots_of(type(part)):
            if slot in part.required_slots() and not any(other is part for other in resolved.parts[slot]):
                raise ConfigError(
                    f"{part.slug}: must also stand in the slot {slot!r}: add {slot}: {part.slug} to the recipe."
                )
        part.check(resolved.parts, settings)
    check_advantage_order(resolved.parts["advantage"])
    if not resolved.parts["objective"] and not resolved.parts["distill"]:
        raise ConfigError("parts: nothing to learn from. Fill the slot 'objective' or 'distill'.")
    if settings.sampling.top_p < 1 or settings.sampling.top_k > 0:
        raise ConfigError(
            "sampling: top_p < 1 or top_k > 0 cuts the distribution that the learner differentiates; the gradient "
            "would be biased without a sign of it. Train with top_p=1 and top_k=0 (evaluation is not affected)."
        )


def check_advantage_order(chain: list[Any]) -> None:
    """Refuse a link that works on rollouts behind one that works on tokens."""
    first: str = ""
    for part in chain:
        if first and not part.per_token:
            raise ConfigError(
                f"advantage.{part.slug}: takes one value per rollout and stands behind {first!r}, which gives one per "
                f"token. Put {part.slug!r} before it."
            )
        first = first or (part.slug if part.per_token else "")
