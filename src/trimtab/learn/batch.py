"""From groups to what the learner computes on: flat rows without padding, cut into micro-batches by token budget.

``Rows`` knows tokens only and serves whoever runs a model over rollouts (learner, teacher, reference). ``Batch`` adds
what the loss needs. All per-token tensors share one flat axis T, row after row; a micro-batch is an index into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.core.errors import DataError
from trimtab.core.records import Group, IntArray, Rollout, Source, flatten
from trimtab.model.attention import AttentionPlan, plan_shared_prompts
from trimtab.model.transformer import Transformer

IN_LOSS = (Source.SAMPLED, Source.REUSED)  # tokens the policy chose itself; others carry no policy gradient
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some rows, packed: every prompt they need once, then their responses.

    Attributes:
        row_N: (n,) rows of the whole, in packed order.
        index_T: (t,) places of the packed response tokens on the whole's flat token axis.
        tokens: (m,) packed ids, prompts then responses.
        prompt_lengths: tokens of each packed prompt.
        prompt_of_row: packed prompt of each packed row.
        lengths: response tokens of each packed row.
    """

    row_N: IntArray
    index_T: Tensor
    tokens: Tensor
    prompt_lengths: list[int]
    prompt_of_row: list[int]
    lengths: list[int]

    @property
    def row_T(self) -> Tensor:
        """(t,) int64 row within the micro-batch of every response token."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths, dtype=torch.int64))

    def plan(self, device: torch.device | str) -> AttentionPlan:
        """How the packed tokens attend to each other."""
        return plan_shared_prompts(self.prompt_lengths, self.prompt_of_row, self.lengths, device)

    def hidden(self, model: Transformer, plan: AttentionPlan) -> Tensor:
        """(t, H) states that predict the response tokens; one forward pass of ``model``."""
        return model(self.tokens.to(model.device), plan).index_select(0, plan.predict_index)


@dataclass(frozen=True, slots=True)
class Rows:
    """Responses and their prompts, equal prompts held once.

    Attributes:
        prompts: token ids of each distinct prompt (P of them).
        prompt_N: (N,) prompt of each row.
        length_N: (N,) response tokens of each row.
        computed_N: (N,) leading response tokens of each row that micro-batches hold.
        token_T: (T,) response tokens, row after row.
    """

    prompts: list[IntArray]
    prompt_N: IntArray
    length_N: IntArray
    computed_N: IntArray
    token_T: Tensor

    @classmethod
    def from_rollouts(cls, rollouts: Sequence[Rollout]) -> Rows:
        """The rows of these rollouts, in order.

        Raises:
            DataError: a rollout's prompt has no tokens, so nothing predicts its first token.
        """
        index: dict[tuple[int, ...], int] = {}
        prompt_N = np.empty(len(rollouts), dtype=np.int64)
        for row, rollout in enumerate(rollouts):
            if not rollout.prompt.tokens:
                raise DataError(
                    f"rollout {rollout.id}: its prompt {rollout.prompt.id} has no tokens; at least one needed"
                )
            prompt_N[row] = index.setdefault(tuple(rollout.prompt.tokens), len(index))
        length_N = np.array([rollout.length for rollout in rollouts], dtype=np.int64)
        return cls(
            prompts=[np.array(tokens, dtype=np.int64) for tokens in index],
            prompt_N=prompt_N,
            length_N=length_N,
            computed_N=length_N,
            token_T=_concatenate([rollout.tokens for rollout in rollouts], np.int64),
        )

    @property
    def num_rows(self) -> int:
        return len(self.length_N)

    @property
    def row_T(self) -> Tensor:
        """(T,) int64 row of every response token."""
        return torch.from_numpy(np.repeat(np.arange(self.num_rows), self.length_N))

    def micro_batches(self, token_budget: int, rows: IntArray | None = None) -> list[MicroBatch]:
        """These rows (all by default) in micro-batches of at most ``token_budget`` packed tokens, prompts included.

        Rows are never split: one that is larger alone forms its own micro-batch. The rows of a prompt stay together
        where they fit, so that it is computed once. Largest first, so that memory runs out at once or not at all.
        """
        chosen = np.arange(self.num_rows) if rows is None else rows
        units = sorted(self._units(chosen, token_budget), key=lambda unit: (-unit[0], unit[1]))
        room: list[int] = []
        bins: list[list[int]] = []
        for size, unit in units:
            place = next((i for i, left in enumerate(room) if size <= left), len(bins))
            if place == len(bins):
                room.append(token_budget)
                bins.append([])
            room[place] -= size
            bins[place] += unit
        return [self._pack(np.array(rows_of_bin)) for rows_of_bin in bins]

    def _units(self, rows: IntArray, token_budget: int) -> Iterable[tuple[int, list[int]]]:
        """Rows of one prompt that go together, with their packed tokens; the longest rows first."""
        by_prompt: dict[int, list[int]] = {}
        for row in sorted(rows.tolist(), key=lambda row: (-self.computed_N[row], row)):
            by_prompt.setdefault(int(self.prompt_N[row]), []).append(row)
        for prompt, members in by_prompt.items():
            base = len(self.prompts[prompt])
            size, unit = base, list[int]()
            for row in members:
                length = int(self.computed_N[row])
                if unit and size + length > token_budget:
                    yield size, unit
                    size, unit = base, []
                size += length
                unit.append(row)
            yield size, unit

    def _pack(self, rows: IntArray) -> MicroBatch:
        prompts, prompt_of_row = np.unique(self.prompt_N[rows], return_inverse=True)
        start_N = np.cumsum(self.length_N) - self.length_N
        index_T = _concatenate([np.arange(start_N[row], start_N[row] + self.computed_N[row]) for row in rows], np.int64)
        prompt_tokens = _concatenate([self.prompts[prompt] for prompt in prompts], np.int64)
        return MicroBatch(
            row_N=rows,
            index_T=index_T,
            tokens=torch.cat([prompt_tokens, self.token_T[index_T]]),
            prompt_lengths=[len(self.prompts[prompt]) for prompt in prompts],
            prompt_of_row=prompt_of_row.tolist(),
            lengths=self.computed_N[rows].tolist(),
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """Kept rollouts as the loss sees them; every tensor (T,) on the flat token axis of ``rows``, on the CPU.

    Attributes:
        ids: rollout id of each row.
        behaviour_T: float32 log-probs under the distribution sampled from; NaN = not scored.
        advantage_T: float32 task advantage; 0 where there is none.
        weight_T: float32 factor on the token's loss (rollout weight x token weight).
        mask_T: bool, tokens in the loss: not masked by a filter, and sampled or reused.
        signals: per-token signals (T, ...) by name; 0 at tokens outside the loss.
    """

    rows: Rows
    ids: list[str]
    behaviour_T: Tensor
    advantage_T: Tensor
    weight_T: Tensor
    mask_T: Tensor
    signals: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def from_groups(cls, groups: Sequence[Group], signals: Sequence[str] = ()) -> Batch:
        """Rows of all kept rollouts with at least one response token, in the order of ``flatten(groups)``.

        A missing advantage counts as 0: the row adds no gradient and stays in the divisor until a filter drops it.
        Values at tokens outside the loss are set to 0, so that garbage there (NaN) cannot reach a gradient.

        Args:
            signals: names of rollout signals to take along.

        Raises:
            DataError: per-token arrays do not line up, a rollout lacks a wanted signal, or a token in the loss has a
                value that is not a number; the message names the rollout.
        """
        rollouts = [rollout for rollout in flatten(groups) if rollout.keep and rollout.length]
        for rollout in rollouts:
            rollout.check_aligned()
        mask = [_loss_mask(rollout) for rollout in rollouts]
        return cls(
            rows=Rows.from_rollouts(rollouts),
            ids=[rollout.id for rollout in rollouts],
            behaviour_T=_concatenate([r.logprobs for r in rollouts], np.float32),
            advantage_T=_concatenate(
                [_masked(r, m, "advantage", _advantage(r)) for r, m in zip(rollouts, mask, strict=True)], np.float32
            ),
            weight_T=_concatenate(
                [_masked(r, m, "weight", _weight(r)) for r, m in zip(rollouts, mask, strict=True)], np.float32
            ),
            mask_T=_concatenate(mask, np.bool_),
            signals={name: _signal(rollouts, mask, name) for name in signals},
        )

    def without_tails(self) -> Batch:
        """The same batch whose micro-batches end each row at its last token of weight (at its first if it has none).

        A causal model gives the tokens before it the same log-probs. The token axis, and so every divisor, stays.
        """
        live_T = (self.mask_T & (self.weight_T != 0)).numpy()
        start_N = np.cumsum(self.rows.length_N) - self.rows.length_N
        place_T = np.arange(len(live_T)) - np.repeat(start_N, self.rows.length_N)
        computed_N = np.ones(self.rows.num_rows, dtype=np.int64)
        np.maximum.at(computed_N, self.rows.row_T.numpy()[live_T], place_T[live_T] + 1)
        return replace(self, rows=replace(self.rows, computed_N=computed_N))

    def minibatches(self, num: int, generator: np.random.Generator) -> list[IntArray]:
        """The rows in ``num`` parts whose sizes differ by at most one, prompts in random order, none of them empty.

        The rows of a prompt stay neighbours, so that few prompts are computed in two parts.
        """
        place_P = generator.permutation(len(self.rows.prompts))
        order = np.argsort(place_P[self.rows.prompt_N], kind="stable")
        return [part for part in np.array_split(order, num) if len(part)]


def _concatenate(arrays: Sequence[Any], dtype: Any) -> Tensor:
    if not arrays:
        return torch.from_numpy(np.zeros(0, dtype=dtype))
    return torch.from_numpy(np.concatenate(arrays).astype(dtype, copy=False))


def _loss_mask(rollout: Rollout) -> Array:
    mask = np.ones(rollout.length, dtype=bool) if rollout.token_mask is None else np.asarray(rollout.token_mask, bool)
    return mask if rollout.source is None else mask & np.isin(rollout.source, IN_LOSS)


def _advantage(rollout: Rollout) -> Array:
    value = np.asarray(0.0 if rollout.advantage is None else rollout.advantage, dtype=np.float32)
    if value.ndim and len(value) != rollout.length:
        raise DataError(f"rollout {rollout.id}: advantage has {len(value)} entries for {rollout.length} tokens")
    return np.broadcast_to(value, (rollout.length,))


def _weight(rollout: Rollout) -> Array:
    token_weight = np.ones(rollout.length) if rollout.token_weight is None else rollout.token_weight
    return np.asarray(rollout.weight * token_weight, dtype=np.float32)


def _masked(rollout: Rollout, mask: Array, name: str, value: Array) -> Array:
    """``value`` (T, ...) with 0 outside the loss; refuses NaN inside it."""
    bad = np.flatnonzero(np.isnan(value).any(axis=tuple(range(1, value.ndim))) & mask)
    if len(bad):
        raise DataError(
            f"rollout {rollout.id}: {name} of token {bad[0]} is not a number, but the token is in the loss; "
            "drop the rollout, mask the token, or score it"
        )
    return np.where(mask.reshape(-1, *[1] * (value.ndim - 1)), value, np.zeros((), dtype=value.dtype))


def _signal(rollouts: Sequence[Rollout], mask: Sequence[Array], name: str) -> Tensor:
    for rollout in rollouts:
        if name not in rollout.signals:
            known = ", ".join(sorted(rollout.signals)) or "none"
            raise DataError(f"rollout {rollout.id}: signal {name!r} is missing; it has: {known}")
    values = [_masked(r, m, name, np.asarray(r.signals[name])) for r, m in zip(rollouts, mask, strict=True)]
    widths = {value.shape[1:] for value in values}
    if len(widths) > 1:
        raise DataError(f"signal {name!r} has different widths from rollout to rollout: {sorted(widths)}")
    integer = bool(values) and values[0].dtype.kind in "iu"
    return _concatenate(values, np.int64 if integer else np.float32)
