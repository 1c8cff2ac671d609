"""Teacher scores of student rollouts: in one pass afterwards, or chunk by chunk while they are generated.

Signals, per response token (T, ...), all under the teacher's distribution at its own temperature:

- ``teacher_logprob`` (T,): log-prob of the rollout's token;
- ``teacher_topk_ids``, ``teacher_topk_logprobs`` (T, K): its K most likely tokens, most likely first;
- ``teacher_on_student`` (T, K'): its log-probs of the student's top tokens, the rollout's ``topk_ids``;
- ``overlap`` (T,): share of ids that the first min(K, K') of both lists have in common.

Student and teacher must read the same token ids; the number of rows in their heads may differ (padding). Scores are
normalised over the rows both have, min(V, V_teacher); a token that only one of them has cannot be scored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from trimtab.core.errors import DataError
from trimtab.core.records import Rollout
from trimtab.core.signals import overlap
from trimtab.learn.batch import MicroBatch, Rows
from trimtab.learn.logprob import softmax_dtype
from trimtab.model.transformer import Transformer


class Teacher:
    """Scores rollouts with a frozen model.

    Args:
        temperature: by which the teacher's logits are divided.
        vocab_size: rows of the student's head; None = as many as the teacher's.
        token_budget: packed tokens of one forward pass.
        chunk_tokens: tokens whose logits exist at once.
    """

    def __init__(
        self,
        model: Transformer,
        temperature: float = 1.0,
        *,
        vocab_size: int | None = None,
        token_budget: int = 16384,
        chunk_tokens: int = 1024,
    ) -> None:
        self.model, self.temperature = model, temperature
        self.token_budget, self.chunk_tokens = token_budget, chunk_tokens
        self.vocab_size = vocab_size or model.config.vocab_size
        self.head_weight = model.head_weight.detach()[: self.vocab_size]

    def score(self, rollouts: Sequence[Rollout], topk: int = 0) -> int:
        """Write the signals into the rollouts and book the tokens in their cost; returns the tokens forwarded.

        Rollouts whose tokens all have the wanted signals already (from a :class:`TeacherStream`) are left as they are.
        A prompt shared by several rollouts is forwarded and booked once, with the first of them.

        Args:
            topk: K of the teacher's top list; 0 = only ``teacher_logprob``.

        Raises:
            DataError: a token the teacher has no row for.
        """
        by_width: dict[int, list[Rollout]] = {}
        for rollout in rollouts:
            if rollout.length and not _scored(rollout, topk):
                by_width.setdefault(_student_width(rollout, topk), []).append(rollout)
        return sum(self._score(group, topk) for group in by_width.values())

    @torch.no_grad()
    def _score(self, rollouts: list[Rollout], topk: int) -> int:
        rows = Rows.from_rollouts(rollouts)
        ids = torch.from_numpy(np.concatenate([_ids(rollout, topk) for rollout in rollouts]))
        self._check_ids(ids, rollouts)
        return sum(self._score_micro(rollouts, micro, ids, topk) for micro in rows.micro_batches(self.token_budget))

    def _score_micro(self, rollouts: list[Rollout], micro: MicroBatch, ids: Tensor, topk: int) -> int:
        device = self.model.device
        hidden = micro.hidden(self.model, micro.plan(device))
        signals = {name: x.cpu() for name, x in self.signals(hidden, ids[micro.index_T].to(device), topk).items()}
        prompts_booked: set[int] = set()
        for place, (row, prompt) in enumerate(zip(micro.row_N.tolist(), micro.prompt_of_row, strict=True)):
            start = sum(micro.lengths[:place])
            part = slice(start, start + micro.lengths[place])
            rollouts[row].signals |= {name: x[part].numpy() for name, x in signals.items()}
            rollouts[row].cost.scored += micro.lengths[place]
            if prompt not in prompts_booked:
                rollouts[row].cost.scored += micro.prompt_lengths[prompt]
                prompts_booked.add(prompt)
        return len(micro.tokens)

    def signals(self, hidden: Tensor, ids: Tensor, topk: int) -> dict[str, Tensor]:
        """Signals of tokens predicted by ``hidden`` (T, H); ``ids`` (T, 1 + K') the token, then the student's top ones.

        Logits exist for ``chunk_tokens`` tokens at a time.
        """
        chunks = [
            self._signals_of_chunk(part, wanted, topk)
            for part, wanted in zip(hidden.split(self.chunk_tokens), ids.split(self.chunk_tokens), strict=True)
        ]
        return {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}

    def _signals_of_chunk(self, hidden: Tensor, ids: Tensor, topk: int) -> dict[str, Tensor]:
        logits = hidden @ self.head_weight.T
        logprob = torch.log_softmax(logits.to(softmax_dtype(logits)) / self.temperature, -1)
        wanted = logprob.gather(1, ids)
        found = {"teacher_logprob": wanted[:, 0]}
        if topk:
            top = logprob.topk(topk, -1)
            found |= {"teacher_topk_ids": top.indices, "teacher_topk_logprobs": top.values}
        if topk and ids.shape[1] > 1:
            found |= {"teacher_on_student": wanted[:, 1:], "overlap": overlap(ids[:, 1:], top.indices)}
        return found

    def _check_ids(self, ids: Tensor, rollouts: list[Rollout]) -> None:
        rows = len(self.head_weight)
        bad_T = (ids >= rows).any(-1)
        if bad_T.any():
            token = int(bad_T.nonzero()[0, 0])
            row = int(np.searchsorted(np.cumsum([r.length for r in rollouts]), token, side="right"))
            raise DataError(
                f"rollout {rollouts[row].id}: token id {int(ids[token].max())} lies beyond the {rows} words that both "
                "student and teacher have; they must share one vocabulary"
            )


class TeacherStream:
    """A teacher that reads along: the signals of :meth:`Teacher.score`, chunk by chunk, from a cache per slot.

    Attributes:
        tokens: forwarded so far, prompts included. A prompt that some slot holds already is copied, not computed.
    """

    def __init__(self, teacher: Teacher, num_slots: int, topk: int = 0, max_len: int = 256) -> None:
        self.teacher, self.topk = teacher, topk
        model = teacher.model
        self.cache = model.new_cache(num_slots, max_len)
        # What predicts the next token, and what predicted the first: a slot with the same prompt starts from that.
        self.last_BH = torch.zeros(num_slots, model.config.hidden_size, dtype=model.dtype, device=model.device)
        self.first_BH = self.last_BH.clone()
        self.length = [0] * num_slots
        self.context: list[tuple[int, ...]] = [()] * num_slots
        self.tokens = 0

    @torch.no_grad()
    def admit(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Start new rollouts in these slots with these context tokens (prompt, plus prefix on resume)."""
        contexts = [tuple(prompt) for prompt in prompts]
        if not all(contexts):
            raise DataError("a rollout's prompt has no tokens; at least one is needed to predict its first token")
        taken = set(slots)
        home = {context: slot for slot, context in enumerate(self.context) if slot not in taken}
        fresh: dict[tuple[int, ...], int] = {}
        for slot, context in zip(slots, contexts, strict=True):
            if context not in home:
                fresh.setdefault(context, slot)
        self._prefill(fresh)
        for slot, context in zip(slots, contexts, strict=True):
            source = fresh[context] if context in fresh else home[context]
            if source != slot:
                self.cache.copy_slots([source], [slot], len(context))
                self.first_BH[slot] = self.first_BH[source]
            self.last_BH[slot] = self.first_BH[slot]
            self.length[slot], self.context[slot] = len(context), context

    @torch.no_grad()
    def extend(
        self, slot_B: Tensor, token_BC: Tensor, count_B: Tensor, signals: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Signals (B, C) or (B, C, K) of the new tokens, 0 at padding; ``signals`` may hold ``topk_ids`` (B, C, K')."""
        slots, counts = slot_B.tolist(), count_B.tolist()
        valid_BC = torch.arange(token_BC.shape[1], device=token_BC.device) < count_B[:, None]
        hidden = self._append(slots, slot_B, token_BC, counts, count_B)
        predicts = torch.cat([self.last_BH[slot_B, None], hidden[:, :-1]], 1)[valid_BC]
        grown_B = count_B > 0
        newest = hidden[torch.arange(len(slots), device=hidden.device), (count_B - 1).clamp(min=0)]
        self.last_BH[slot_B] = torch.where(grown_B[:, None], newest, self.last_BH[slot_B])
        ids = token_BC[..., None]
        if self.topk and "topk_ids" in signals:
            ids = torch.cat([ids, signals["topk_ids"].long()], -1)
        found = self.teacher.signals(predicts, ids[valid_BC], self.topk) if len(predicts) else {}
        return {name: _spread(x, valid_BC) for name, x in found.items()}

    def move(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """What slots ``src`` hold goes to slots ``dst``."""
        self.cache.copy_slots(src, dst, max((self.length[slot] for slot in src), default=0))
        for state in (self.last_BH, self.first_BH):
            state[list(dst)] = state[list(src)]
        lengths, contexts = [self.length[s] for s in src], [self.context[s] for s in src]
        for slot, length, context in zip(dst, lengths, contexts, strict=True):
            self.length[slot], self.context[slot] = length, context

    def _prefill(self, fresh: dict[tuple[int, ...], int]) -> None:
        if not fresh:
            return
        device = self.cache.k.device
        slots, counts = list(fresh.values()), [len(context) for context in fresh]
        tokens = np.zeros((len(fresh), max(counts)), dtype=np.int64)
        for row, context in enumerate(fresh):
            tokens[row, : len(context)] = context
        for slot in slots:
            self.length[slot] = 0
        slot_B, count_B = torch.tensor(slots, device=device), torch.tensor(counts, device=device)
        hidden = self._append(slots, slot_B, torch.from_numpy(tokens).to(device), counts, count_B)
        self.first_BH[slot_B] = hidden[torch.arange(len(slots), device=device), count_B - 1]

    def _append(self, slots: list[int], slot_B: Tensor, token_BC: Tensor, counts: list[int], count_B: Tensor) -> Tensor:
        """Run the new tokens through the model; their hidden states (B, C, H)."""
        starts = [self.length[slot] for slot in slots]
        needed = max((start + count for start, count in zip(starts, counts, strict=True)), default=0)
        if needed > self.cache.max_len:
            self.cache.grow(max(needed, 2 * self.cache.max_len))
        start_B = torch.tensor(starts, dtype=torch.int64, device=token_BC.device)
        hidden = self.teacher.model.extend(token_BC, start_B, count_B, self.cache, slot_B)
        for slot, count in zip(slots, counts, strict=True):
            self.length[slot] += count
        self.tokens += sum(counts)
        return hidden


def _spread(x: Tensor, valid_BC: Tensor) -> Tensor:
    out = x.new_zeros(*valid_BC.shape, *x.shape[1:])
    out[valid_BC] = x
    return out


def _student_width(rollout: Rollout, topk: int) -> int:
    ids = rollout.signals.get("topk_ids") if topk else None
    return 0 if ids is None else ids.shape[1]


def _ids(rollout: Rollout, topk: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """The rollout's tokens, then the student's top ids, (T, 1 + K')."""
    token = np.asarray(rollout.tokens, dtype=np.int64)[:, None]
    if not _student_width(rollout, topk):
        return token
    return np.concatenate([token, np.asarray(rollout.signals["topk_ids"], dtype=np.int64)], axis=1)


def _wanted(rollout: Rollout, topk: int) -> Iterator[tuple[str, int]]:
    """Names of the signals to compute, with their width (0: one number a token)."""
    yield "teacher_logprob", 0
    if topk:
        yield from (("teacher_topk_ids", topk), ("teacher_topk_logprobs", topk))
    if width := _student_width(rollout, topk):
        yield from (("teacher_on_student", width), ("overlap", 0))


def _scored(rollout: Rollout, topk: int) -> bool:
    """Whether all tokens have all wanted signals; a resumed rollout's prefix may lack them (NaN)."""
    for name, width in _wanted(rollout, topk):
        value = rollout.signals.get(name)
        shape = (rollout.length, width) if width else (rollout.length,)
        if value is None or value.shape != shape or np.isnan(value).any():
            return False
    return True
