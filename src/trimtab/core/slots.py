"""The twelve slots of a step, each a small base class with its one verb, and the records that pass between them.

Order of a step (fixed)::

    schedule.admit -> select -> [allocate -> generate (+ stop, replay)] per round -> verify (+ teacher scoring)
    -> reward -> filter -> advantage -> schedule.batches -> objective (+ distill, correct) -> update -> observe

``stop``, ``reward``, ``filter``, ``advantage`` and ``correct`` hold chains of parts (same type in and out, an empty
chain is the identity); the others hold one part, or none, which is the inert setting.
Decisions are returned, never written into the records by a part: the loop writes them, so that inputs are not mutated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from trimtab.core.part import Part
from trimtab.core.records import FloatArray, Group, IntArray, Prompt

if TYPE_CHECKING:
    import torch

    from trimtab.core.history import History, KeyArray
    from trimtab.core.ledger import Ledger
    from trimtab.generate.protocol import Request, StopHook


@dataclass(slots=True)
class StepContext:
    """What every part may know about the step it acts in."""

    seed: int
    step: int
    num_steps: int
    version: int  # policy version that generates
    prompts_per_step: int
    group_size: int
    max_new_tokens: int  # the static response limit of the run
    temperature: float
    eos_ids: frozenset[int]
    history: History
    decode: Any = None  # Callable[[Sequence[int]], str]

    def key(self, *parts: object) -> tuple[object, ...]:
        """Key of a random decision of this step."""
        return (self.seed, self.step, *parts)


@dataclass(slots=True)
class StepRecord:
    """A finished step, as parts observe it."""

    groups: list[Group]
    metrics: dict[str, float]
    ledger: Ledger


# ---------------------------------------------------------------- select


class PromptStream:
    """The training prompts in epoch order. ``take`` consumes; every prompt comes once an epoch.

    The order of each epoch is a seeded permutation, so it depends on (seed, epoch) alone.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        self.pool = list(prompts)
        self.seed, self.epoch, self.cursor = seed, 0, 0
        self._order = self._permutation()
        self._keys: KeyArray | None = None

    @property
    def keys(self) -> KeyArray:
        """Ids of the pool as numbers (P,), see :func:`trimtab.core.history.prompt_keys`; made when first asked for."""
        from trimtab.core.history import prompt_keys

        if self._keys is None:
            self._keys = prompt_keys([prompt.id for prompt in self.pool])
        return self._keys

    def _permutation(self) -> IntArray:
        from trimtab.core.rng import generator

        return generator(self.seed, "epoch", self.epoch).permutation(len(self.pool))

    def take(self, num: int) -> list[int]:
        """The next ``num`` indices into ``pool``, running on into the next epoch where this one ends."""
        taken: list[int] = []
        while len(taken) < num and self.pool:
            if self.cursor >= len(self.pool):  # a pool may be smaller than when the cursor was saved
                self.epoch, self.cursor = self.epoch + 1, 0
                self._order = self._permutation()
            stop = min(self.cursor + num - len(taken), len(self.pool))
            taken += self._order[self.cursor : stop].tolist()
            self.cursor = stop
        return taken

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "cursor": self.cursor}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.cursor = state["epoch"], state["cursor"]
        self._order = self._permutation()


@dataclass(slots=True)
class Selection:
    """Chosen prompts as indices into the pool, with the probability each had, and what was skipped why."""

    index: list[int]
    inclusion: list[float]
    skipped: dict[str, int] = field(default_factory=dict)  # reason -> count


@dataclass(kw_only=True)
class Select(Part):
    """Which prompts to roll out."""

    slot: ClassVar[str] = "select"

    def select(self, stream: PromptStream, num: int, ctx: StepContext) -> Selection:
        """Choose ``num`` prompts; fewer where there are none left, more where the part oversamples on purpose.

        Groups beyond the wanted number that are still trainable after filtering are cut and booked as surplus.
        """
        raise NotImplementedError

    def refill(self, kept: int, wanted: int, draws: int, ctx: StepContext) -> int:
        """How many more prompts to draw in this step, 0 to go on with what there is.

        Asked after every draw has been rolled out, judged and filtered: ``kept`` groups so far have a row in the
        update, ``wanted`` are asked for, ``draws`` counts the draws so far (at least 1).
        """
        return 0


# ---------------------------------------------------------------- allocate


@dataclass(slots=True)
class AllocationRequest:
    """The step so far: prompts, their rollouts of earlier rounds, and what is left to spend (rollouts)."""

    prompts: list[Prompt]
    groups: list[Group]  # same order as prompts; empty in round 0
    round: int
    remaining: int


@dataclass(kw_only=True)
class Allocate(Part):
    """How many rollouts each prompt gets. Asked once a round until it answers all zeros or the budget is spent."""

    slot: ClassVar[str] = "allocate"

    def budget(self, num_prompts: int, ctx: StepContext) -> int:
        """Rollouts that all rounds together may spend on ``num_prompts`` prompts; those of plain GRPO by default."""
        return num_prompts * ctx.group_size

    def plan(self, request: AllocationRequest, ctx: StepContext) -> IntArray:
        """Rollouts to generate now per prompt (P,), non-negative, sum <= ``request.remaining``."""
        raise NotImplementedError


# ---------------------------------------------------------------- generate, stop, replay


@dataclass(kw_only=True)
class Generate(Part):
    """How rollouts are generated: turns wanted samples into engine requests."""

    slot: ClassVar[str] = "generate"

    def requests(self, requests: list[Request], ctx: StepContext) -> list[Request]:
        """The requests to run in place of the plain ones (one a sample, already keyed)."""
        raise NotImplementedError


@dataclass(kw_only=True)
class Stop(Part):
    """When a rollout stops: a limit fixed before the rollout, a hook while it runs, or both."""

    slot: ClassVar[str] = "stop"

    def limit(self, ctx: StepContext) -> int | None:
        """Response-token limit in force for this step, or None to leave it."""
        return None

    def hook(self, ctx: StepContext) -> StopHook | None:
        """The running stopper of this step, or None."""
        return None


@dataclass(kw_only=True)
class Replay(Part):
    """What is reused: may give requests a prefix, hold groups back, and bring earlier ones in."""

    slot: ClassVar[str] = "replay"

    def recall(self, requests: list[Request], ctx: StepContext) -> list[Request]:
        """Requests with reusable prefixes attached."""
        return requests

    def collect(self, groups: list[Group], ctx: StepContext) -> list[Group]:
        """The groups to go on with; what is held back must be kept in the state."""
        return groups


# ---------------------------------------------------------------- reward, filter, advantage


@dataclass(kw_only=True)
class Reward(Part):
    """Shapes rewards. NaN is a missing reward and must stay NaN."""

    slot: ClassVar[str] = "reward"

    def shape(self, groups: Sequence[Group], reward_N: FloatArray, ctx: StepContext) -> FloatArray:
        """New rewards (N,) in the row order of ``flatten(groups)``; the input is not changed."""
        raise NotImplementedError


@dataclass(slots=True)
class Keep:
    """Which rows enter the update. ``token_weight`` and ``token_mask`` hold one array per row, or are None.

    A weight scales a token's loss and leaves the divisor alone; a False in the mask takes the token out of both.
    """

    keep_N: np.ndarray[Any, np.dtype[np.bool_]]
    reason: str = "filtered"
    inclusion_N: FloatArray | None = None
    token_weight: list[FloatArray] | None = None
    token_mask: list[np.ndarray[Any, np.dtype[np.bool_]]] | None = None


@dataclass(kw_only=True)
class Filter(Part):
    """Which rollouts and tokens enter the update."""

    slot: ClassVar[str] = "filter"

    def filter(self, groups: Sequence[Group], ctx: StepContext) -> Keep:
        """Decide for every row of ``flatten(groups)``."""
        raise NotImplementedError


@dataclass(slots=True)
class AdvantageRows:
    """Flat rows of a step for the advantage chain. Missing rewards are NaN and False in ``scored_N``.

    Statistics run over scored rows, kept or not: a rollout that is cut out of the loss still informs the baseline.
    """

    reward_N: torch.Tensor
    correct_N: torch.Tensor
    group_N: torch.Tensor  # int64
    num_groups: int
    length_N: torch.Tensor  # int64, response tokens
    scored_N: torch.Tensor  # bool
    keep_N: torch.Tensor  # bool

    @property
    def row_T(self) -> torch.Tensor:
        """Row index of every response token, rows concatenated (T,)."""
        import torch

        return torch.repeat_interleave(torch.arange(len(self.length_N), device=self.length_N.device), self.length_N)


@dataclass(kw_only=True)
class Advantage(Part):
    """One link from rewards to advantages. The chain starts with the reward itself (REINFORCE).

    A link with ``per_token`` gets and gives one value per response token (T,), rows concatenated; the others one per
    row (N,) and may not follow it. (Which of the two it is cannot be read off the length: N may equal T.)
    """

    slot: ClassVar[str] = "advantage"
    per_token: ClassVar[bool] = False

    def advantage(self, rows: AdvantageRows, advantage: torch.Tensor) -> torch.Tensor:
        """New advantage, (N,), or (T,) with ``per_token``; 0 where the reward is missing."""
        raise NotImplementedError


# ---------------------------------------------------------------- objective, correct, distill, schedule


@dataclass(slots=True)
class TopK:
    """The rollout policy's most likely tokens at every response token and what the current policy gives them, detached.

    ``ids``, ``behaviour`` (log-probs at rollout time) and ``logp`` (current log-probs) are (T, K), K at least what was
    asked for, most likely first; ``token_T`` (T,) is the sampled token, which need not be among them.
    """

    ids: torch.Tensor
    behaviour: torch.Tensor
    logp: torch.Tensor
    token_T: torch.Tensor
    vocab_size: int


@dataclass(slots=True)
class TokenView:
    """Flat response tokens of one micro-batch (whole rows), as the objective sees them.

    ``logp`` carries the gradient; everything else is detached. With candidates (distillation on several ids a
    token) ``logp``, ``old`` and ``advantage`` are (T, K), otherwise (T,).
    """

    logp: torch.Tensor
    old: torch.Tensor  # proximal policy: at the start of this batch's updates
    advantage: torch.Tensor
    behaviour: torch.Tensor  # (T,) under the distribution sampled from; the value of old where it was not scored
    row_T: torch.Tensor  # (T,) row within the micro-batch
    num_rows: int
    mask_T: torch.Tensor  # (T,) bool, tokens in the loss
    reference: torch.Tensor | None = None  # (T,) log-probs under the reference policy
    sampled_logp: torch.Tensor | None = None  # (T,) current log-prob of the sampled token when logp is (T, K)
    topk: TopK | None = None  # when the objective or a correction needs top-k and no distillation brings candidates


@dataclass(slots=True)
class TokenLoss:
    """Per-token loss before weights and aggregation, and detached per-token quantities to log as masked means."""

    loss_T: torch.Tensor
    logged: dict[str, torch.Tensor] = field(default_factory=dict)


AggregationName = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"]


@dataclass(kw_only=True)
class Objective(Part):
    """Ratio, surrogate and clip of the policy loss. Weighting and aggregation are the learner's, once."""

    slot: ClassVar[str] = "objective"

    def aggregation(self) -> tuple[AggregationName, float | None]:
        """How token losses are summed, and the constant of ``constant`` (None: rows times the token limit)."""
        return "token-mean", None

    def whole_rows(self) -> bool:
        """True when a token's loss reads other tokens of its row. Otherwise the learner leaves out the tail of a row
        that carries no gradient (masked, or of weight 0), and the view ends before it."""
        return False

    def token_loss(self, view: TokenView) -> TokenLoss:
        """Loss per token (T,), gradient through ``view.logp`` only."""
        raise NotImplementedError


@dataclass(slots=True)
class Correction:
    """Detached importance weight and mask per token (T,); False leaves the loss but stays in the divisor.

    ``divisor_T`` (T,) bool, None = all True: False rejects the token, which leaves loss and divisor both. Only a part
    with ``whole_batch`` may reject, because the divisor is fixed before the batch is split.
    """

    weight_T: torch.Tensor
    mask_T: torch.Tensor
    logged: dict[str, torch.Tensor] = field(default_factory=dict)
    divisor_T: torch.Tensor | None = None


@dataclass(kw_only=True)
class Correct(Part):
    """Corrects staleness and precision: weights from behaviour (engine) against proximal (learner) log-probs."""

    slot: ClassVar[str] = "correct"

    def whole_batch(self) -> bool:
        """True when the rule takes statistics over tokens of other rows: it then sees the whole optimiser batch in one
        view, at the price of a forward pass without gradient. Otherwise it sees one micro-batch, whole rows."""
        return False

    def whole_rows(self) -> bool:
        """As for objectives: True when a token's correction reads other tokens of its row; implied by whole_batch."""
        return False

    def correct(self, view: TokenView, correction: Correction) -> Correction:
        """The next correction of the chain; starts with all ones and all True. Here ``view.logp`` is detached too."""
        raise NotImplementedError


@dataclass(slots=True)
class DistillView:
    """Flat response tokens of one micro-batch with teacher scores, all detached but ``logp_TK``.

    (T,): ``token_T``, ``behaviour_T``, ``teacher_T`` (teacher log-prob of the sampled token).
    (T, K) when top-k was asked for, else None: student ids and their log-probs at rollout time, the teacher's
    log-probs on these, the teacher's own top-k ids and log-probs.
    """

    token_T: torch.Tensor
    row_T: torch.Tensor
    num_rows: int
    old_T: torch.Tensor  # proximal log-prob of the sampled token
    teacher_T: torch.Tensor
    student_ids: torch.Tensor | None = None
    student_logp: torch.Tensor | None = None
    teacher_on_student: torch.Tensor | None = None
    teacher_ids: torch.Tensor | None = None
    teacher_logp: torch.Tensor | None = None
    mask_T: torch.Tensor | None = None  # bool, tokens in the loss; None = all


@dataclass(kw_only=True)
class Distill(Part):
    """How a teacher's scores become a training signal."""

    slot: ClassVar[str] = "distill"

    def signal(self) -> Literal["sampled", "candidates", "full"]:
        """``sampled``: an advantage per token; ``candidates``: ids and a rule on their log-probs; ``full``: a loss on
        both vocabularies' logits."""
        raise NotImplementedError

    def task_weight(self) -> float:
        """Factor on the task advantage beside the teacher's signal."""
        return 0.0

    def whole_rows(self) -> bool:
        """As for objectives: True when a token's signal reads other tokens of its row."""
        return False

    def token_advantage(self, view: DistillView) -> torch.Tensor:
        """``sampled``: advantage (T,) of the sampled token from the teacher."""
        raise NotImplementedError

    def candidates(self, view: DistillView) -> torch.Tensor:
        """``candidates``: ids (T, K) whose student log-probs the learner is to compute. ``view.old_T`` is not known yet
        (NaN). Ids at tokens outside the loss do not matter."""
        raise NotImplementedError

    def candidate_advantage(self, view: DistillView, ids: torch.Tensor, old: torch.Tensor) -> torch.Tensor | None:
        """``candidates``: advantage (T, K) for the objective, or None when :meth:`candidate_loss` is the loss."""
        raise NotImplementedError

    def candidate_loss(self, view: DistillView, ids: torch.Tensor, logp: torch.Tensor) -> torch.Tensor:
        """``candidates`` without an advantage: loss (T,) with gradient through ``logp`` (T, K)."""
        raise NotImplementedError

    def full_loss(self, student_logp: torch.Tensor, teacher_logp: torch.Tensor) -> torch.Tensor:
        """``full``: loss (C,) of a chunk from log-softmaxed logits (C, V) of both; gradient through the first."""
        raise NotImplementedError


@dataclass(kw_only=True)
class Schedule(Part):
    """When which groups are trained on, and how often."""

    slot: ClassVar[str] = "schedule"

    def batches(self, groups: list[Group], ctx: StepContext) -> Iterator[tuple[list[Group], int, int]]:
        """Yields ``(groups, epochs, minibatches)`` to train on now; may hold groups back in the state."""
        raise NotImplementedError


SLOTS: dict[str, type[Part]] = {
    cls.slot: cls
    for cls in (
        Schedule,
        Select,
        Allocate,
        Generate,
        Stop,
        Replay,
        Reward,
        Filter,
        Advantage,
        Objective,
        Correct,
        Distill,
    )
}
CHAINS = frozenset({"stop", "reward", "filter", "advantage", "correct"})
