"""What acts on a symptom: the levers of each row, cheapest first, with the parts of this installation that pull them.

Cost classes: a bookkeeping and masks, b selection and budgets, c decoding, d hints and replay, e verifier and reward,
f optimiser. A lever names methods by slug. Only those that are registered are shown, so that the list grows with the
methods; a lever with none stays as advice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.core import registry
from trimtab.core.recipe import shipped

CLASSES = {
    "a": "bookkeeping",
    "b": "selection and budget",
    "c": "decoding",
    "d": "hints and replay",
    "e": "verifier and reward",
    "f": "optimiser",
}


@dataclass(frozen=True, slots=True)
class Lever:
    """One thing to do: ``methods`` are slugs that do it, ``settings`` overrides of what every recipe has.

    A setting may name a fact of the log in braces; without that fact it is left out.
    """

    cost: str
    action: str
    methods: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Remedy:
    """A lever as it stands in this installation. ``lines`` go into a recipe, or behind ``trimtab train RECIPE``."""

    cost: str
    action: str
    lines: tuple[str, ...]
    recipes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "class": self.cost,
            "kind": CLASSES[self.cost],
            "action": self.action,
            "lines": list(self.lines),
            "recipes": list(self.recipes),
        }


def remedies(row: int, facts: Mapping[str, int] | None = None) -> tuple[Remedy, ...]:
    """Levers of a row, cheapest class first; within a class, those that something in this installation pulls.

    ``facts`` are numbers of the log: ``twice_longest`` (tokens) and ``twice_group`` (rollouts).
    """
    found = [_installed(lever, facts or {}) for lever in LEVERS[row]]
    return tuple(sorted(found, key=lambda remedy: (remedy.cost, not remedy.lines)))


def _installed(lever: Lever, facts: Mapping[str, int]) -> Remedy:
    lines = [line for slug in lever.methods for line in part_lines(slug)]
    for setting in lever.settings:
        try:
            lines.append(setting.format_map(facts))
        except KeyError:
            continue
    return Remedy(lever.cost, lever.action, tuple(lines), tuple(slug for slug in lever.methods if slug in shipped()))


def part_lines(slug: str) -> list[str]:
    """One line for each slot the part fills, as a recipe or an override spells it; none where it is not installed."""
    if slug not in registry.modules():
        return []
    slots = dict.fromkeys(slot for cls in registry.classes(slug) for slot in registry.slots_of(cls))
    return [f"{slot}={slug}" for slot in slots]


_DROP = Lever("b", "draw further prompts in place of groups without variance", ("dynamic-sampling",))
_SKIP = Lever("b", "skip prompts whose history says that all rollouts will agree", ("greso", "dps", "depo", "hive"))
_KEEP = Lever("a", "leave groups without variance out of the update", ("zero-variance",))
_ROUNDS = Lever("b", "extend groups in rounds where it pays", ("vigor", "ar3po", "aero", "dars", "xrpo"))
_SHORT = Lever("e", "penalise length near the limit", ("soft-overlong",))
_EXIT = Lever("c", "stop where nothing is gained any more", ("esr", "prune-opd", "espo", "step-grpo", "deer"))
_IS = Lever("a", "truncate or mask importance weights", ("old-logit", "m2po", "divergence-mask", "pnpo"))
_TAIL = Lever("b", "issue more than needed and resume the rest later", ("april", "copris", "seer", "roll-flash"))
_FEWER = Lever("f", "fewer updates a batch", settings=("schedule=minibatches", "schedule.minibatches=1"))
_CLIP_HIGH = Lever("f", "a wider upper clip range", settings=("objective.eps_high=0.28",))
_AUDIT = Lever("e", "check a sample of rollouts with a second verifier")
_STATUS = Lever("a", "give failed evaluations a status of their own and drop them before group statistics")
_AGE = Lever("a", "cap the age of what is trained on", ("dora", "sat", "async-webrl"))

LEVERS: dict[int, tuple[Lever, ...]] = {
    1: (
        _DROP,
        _SKIP,
        _ROUNDS,
        Lever("d", "hints or exemplars, faded out", ("nudge-rl", "repo-rephrase", "p2o")),
        Lever("e", "a signal for the process, not only the outcome", ("opd", "elpo")),
    ),
    2: (
        _KEEP,
        _DROP,
        _SKIP,
        Lever("b", "fewer rollouts for solved prompts", ("ar3po", "aero", "vigor", "coba-rl")),
        _SHORT,
    ),
    3: (_DROP, Lever("b", "choose prompts of middling success", ("dots", "hive", "depo", "dps", "pilot-commit"))),
    4: (
        Lever("c", "a higher temperature", settings=("sampling.temperature=1.2",)),
        Lever("c", "branch where the next token is open", ("latr", "branch-grpo")),
        _CLIP_HIGH,
    ),
    5: (
        Lever("c", "a lower temperature", settings=("sampling.temperature=0.8",)),
        Lever("f", "a KL term to the reference policy", settings=("objective.kl_coef=0.01",)),
        Lever("f", "a lower learning rate"),
    ),
    6: (
        Lever("c", "a higher temperature", settings=("sampling.temperature=1.2",)),
        Lever("c", "another strategy for every rollout", ("nudge-rl", "latr", "3po")),
        Lever("e", "weigh novelty", ("meds",)),
    ),
    7: (
        Lever("a", "keep rare successes: weigh them by down-sampling the rest", ("shuffle-r1", "d3s")),
        Lever("b", "more rollouts for rarely solved prompts", ("dars", "brorl", "xrpo")),
        _CLIP_HIGH,
    ),
    8: (
        Lever("b", "a length budget that swings or adapts", ("siri", "prune-opd", "duet")),
        _EXIT,
        Lever("e", "penalise length", ("soft-overlong", "dler", "step-pruner", "drpo")),
    ),
    9: (
        Lever("a", "mask cut-off responses instead of scoring them wrong", ("overlong",)),
        Lever("b", "resume cut-off responses in a later step", ("april", "copris")),
        Lever("b", "a longer limit", settings=("sampling.max_new_tokens={twice_longest}",)),
        _SHORT,
    ),
    10: (_TAIL, Lever("b", "one token budget for a step", ("duet", "trajectory-budget")), _EXIT),
    11: (
        Lever("a", "repair the parser: read the formats the model writes"),
        Lever("c", "decode under a grammar or a schema"),
        Lever("e", "a small reward for the format"),
    ),
    12: (
        Lever("a", "abstain where verifiers disagree, and check again"),
        _AUDIT,
        Lever("e", "correct the reward, r' = (r - fp) / J", ("fapo",)),
    ),
    13: (_STATUS, Lever("a", "retry evaluations that timed out")),
    14: (
        Lever("a", "audit the rollouts with the highest reward", ("fapo",)),
        Lever("e", "cap shaped terms, add tests, use several judges"),
        Lever("f", "go back to the checkpoint before the slopes part"),
    ),
    15: (
        Lever("a", "judge both orders and average, a flip being a tie"),
        Lever("b", "more votes"),
        Lever("e", "recalibrate the judge"),
    ),
    16: (
        Lever("a", "fall back to the outcome"),
        Lever("b", "estimate step values by continuing from prefixes", ("elpo",)),
        Lever("e", "train the scorer again"),
    ),
    17: (
        _IS,
        Lever("a", "clip how far one sample can move the policy", ("clip",)),
        Lever("b", "larger groups", settings=("group_size={twice_group}",)),
        Lever("f", "whiten advantages over the batch", ("whiten",)),
    ),
    18: (_AGE, Lever("f", "correct for importance", ("old-logit", "m2po", "pnpo")), _FEWER),
    19: (
        _IS,
        Lever(
            "c",
            "one precision, one kernel and one temperature on both sides; check what the log-probs are of",
            ("pr2",),
        ),
    ),
    20: (
        _KEEP,
        _DROP,
        _SKIP,
        Lever("b", "probe with a few rollouts, then extend", ("vigor", "aero", "pilot-commit", "duet")),
    ),
    21: (Lever("b", "a floor for exploring and a bonus for age", ("greso", "dps")),),
    22: (
        Lever("a", "calibrate the stop rule by length"),
        Lever("b", "a later first check, more patience, a stricter threshold"),
    ),
    23: (_EXIT, Lever("e", "penalise length", ("soft-overlong", "step-pruner", "drpo"))),
    24: (
        Lever("a", "cap children and prune twins"),
        Lever("b", "branch where the policy is unsure", ("latr", "branch-grpo")),
    ),
    25: (
        Lever("a", "strip the hint and compute log-probs again", ("scope",)),
        Lever("b", "a share of rollouts without hint"),
        Lever("d", "fade hints out", ("nudge-rl",)),
    ),
    26: (
        Lever("a", "let weights fall with age and cap reuse"),
        Lever("b", "a quota of fresh rollouts", ("spec-rl", "dots")),
    ),
    27: (Lever("a", "evict what fails the current verifier; quarantine its source"),),
    28: (
        Lever("a", "cap the depth of lineages"),
        Lever("b", "cap the generated share, verified tasks only"),
        Lever("d", "anchors from outside"),
    ),
    29: (Lever("a", "keep faults of the environment out of the reward"), Lever("c", "snapshots, caches, retries")),
    30: (
        Lever("b", "stop loops", ("turn-control",)),
        Lever("c", "choose what stays in memory", ("resum", "echo-memory")),
    ),
    31: (
        Lever("e", "check whether the reward pays for short or empty answers"),
        Lever("e", "weaken the length penalty"),
        Lever(
            "f",
            "a mean over tokens, so that short responses do not weigh more",
            settings=("objective.aggregate=token-mean",),
        ),
    ),
    32: (
        Lever("a", "mask cut-off responses: loops end at the limit", ("overlong",)),
        Lever("c", "stop drifted responses while they run", ("prune-opd", "espo", "short-opd")),
        Lever("f", "a KL term to the reference policy", ("stable-opd",), ("objective.kl_coef=0.01",)),
    ),
    33: (
        Lever("a", "find the first such rollout; log-probs must be log-probs (not their negatives) and finite"),
        Lever("a", "a dtype that does not overflow for log-probs and loss", settings=("dtype=float32",)),
        Lever("f", "clip gradients harder", settings=("learner.grad_clip=0.5",)),
    ),
}
