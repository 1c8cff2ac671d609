from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from tiny import VOCAB, distributions, random_groups, random_prompt, random_rollout, tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trimtab.core.errors import DataError
from trimtab.core.records import Rollout, flatten
from trimtab.core.signals import overlap
from trimtab.learn.teacher import Teacher, TeacherStream

K = 4
STUDENT = tiny_model(seed=1)
TEACHER = tiny_model(seed=7).requires_grad_(False)


def rollouts(width: int = K, lengths: Any = ((3, 5, 1), (4, 2), (6,))) -> list[Rollout]:
    """With the student's top ids where ``width`` is not 0."""
    found = flatten(random_groups(lengths))
    for rollout in found if width else []:
        top = distributions(STUDENT, rollout).detach().topk(width, -1)
        rollout.signals = {"topk_ids": top.indices.numpy().astype(np.int32), "topk_logprobs": top.values.numpy()}
    return found


def test_scores_equal_plain_passes() -> None:
    teacher = Teacher(TEACHER, temperature=1.4, token_budget=14, chunk_tokens=3)
    scored = rollouts()
    teacher.score(scored, topk=K)
    for rollout in scored:
        q = distributions(TEACHER, rollout, 1.4)
        top = q.topk(K, -1)
        student = torch.from_numpy(rollout.signals["topk_ids"]).long()
        shared = [len(set(a) & set(b)) / K for a, b in zip(student.tolist(), top.indices.tolist(), strict=True)]
        expected = {
            "teacher_logprob": q.gather(1, torch.from_numpy(rollout.tokens)[:, None])[:, 0],
            "teacher_topk_ids": top.indices,
            "teacher_topk_logprobs": top.values,
            "teacher_on_student": q.gather(1, student),
            "overlap": torch.tensor(shared),
        }
        for name, value in expected.items():
            np.testing.assert_allclose(rollout.signals[name], value.numpy(), rtol=1e-4, atol=1e-5, err_msg=name)
        rollout.check_aligned()


def test_only_what_is_asked_for() -> None:
    scored = rollouts()
    Teacher(TEACHER).score(scored)
    assert set(scored[0].signals) == {"topk_ids", "topk_logprobs", "teacher_logprob"}
    scored = rollouts(width=0)
    Teacher(TEACHER).score(scored, topk=K)
    assert set(scored[0].signals) == {"teacher_logprob", "teacher_topk_ids", "teacher_topk_logprobs"}


def test_rollouts_with_and_without_student_ids_in_one_call() -> None:
    scored = rollouts()[:2] + rollouts(width=2)[2:4] + rollouts(width=0)[4:]
    Teacher(TEACHER).score(scored, topk=K)
    assert scored[0].signals["teacher_on_student"].shape == (3, K)
    assert scored[3].signals["teacher_on_student"].shape == (4, 2)
    assert "overlap" not in scored[5].signals
    for rollout in scored:
        assert rollout.signals["teacher_topk_ids"].shape == (rollout.length, K)


def test_every_token_is_booked_once() -> None:
    scored = rollouts()
    empty = random_rollout(scored[0].prompt, 0, "empty", seed=1)
    tokens = Teacher(TEACHER).score([*scored, empty], topk=K)
    prompts = {r.prompt.id: len(r.prompt.tokens) for r in scored}
    assert tokens == sum(r.length for r in scored) + sum(prompts.values())
    assert sum(r.cost.scored for r in scored) == tokens
    assert empty.cost.scored == 0
    assert empty.signals == {}


def test_scored_rollouts_are_left_alone() -> None:
    teacher, scored = Teacher(TEACHER), rollouts()
    teacher.score(scored, topk=K)
    before = copy.deepcopy([r.signals for r in scored])
    assert teacher.score(scored, topk=K) == 0
    assert teacher.score(scored) == 0
    assert all(a[n] is not None for a, r in zip(before, scored, strict=True) for n in r.signals)
    scored[0].signals["teacher_logprob"][1] = np.nan  # a resumed prefix the stream did not see
    assert teacher.score(scored, topk=K) == scored[0].length + len(scored[0].prompt.tokens)
    np.testing.assert_allclose(scored[0].signals["teacher_logprob"], before[0]["teacher_logprob"], atol=1e-5)
    assert teacher.score(scored, topk=K + 1) > 0  # a wider list is not there yet


def test_no_rollouts() -> None:
    assert Teacher(TEACHER).score([], topk=K) == 0


@pytest.mark.parametrize(("teacher_words", "student_words"), [(VOCAB + 6, VOCAB), (VOCAB, VOCAB + 6)])
def test_scores_are_normalised_over_the_shared_words(teacher_words: int, student_words: int) -> None:
    model = tiny_model(seed=7, vocab_size=teacher_words)
    (rollout,) = rollouts(lengths=((5,),))
    Teacher(model, vocab_size=student_words).score([rollout], topk=K)
    q = torch.log_softmax(distributions(model, rollout)[:, :VOCAB], -1)
    expected = q.gather(1, torch.from_numpy(rollout.tokens)[:, None])[:, 0]
    np.testing.assert_allclose(rollout.signals["teacher_logprob"], expected.detach().numpy(), rtol=1e-4, atol=1e-5)
    assert rollout.signals["teacher_topk_ids"].max() < VOCAB


def test_a_token_the_teacher_does_not_know_is_named() -> None:
    scored = rollouts(width=0)
    scored[1].tokens[2] = VOCAB + 1
    with pytest.raises(DataError, match=f"rollout p0-1: token id {VOCAB + 1} lies beyond the {VOCAB} words"):
        Teacher(TEACHER, vocab_size=VOCAB + 6).score(scored)


class Widest(TorchDispatchMode):
    """Most rows of any product or softmax as wide as the vocabulary."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            computed = func in (torch.ops.aten.mm.default, torch.ops.aten._log_softmax.default)
            if computed and isinstance(leaf, Tensor) and leaf.shape[1] == VOCAB:
                self.rows = max(self.rows, leaf.shape[0])
        return out


def test_logits_exist_for_a_chunk_at_a_time() -> None:
    teacher, scored = Teacher(TEACHER, chunk_tokens=3), rollouts(lengths=((9, 9, 9),))
    with Widest() as seen:
        teacher.score(scored, topk=K)
    assert seen.rows == 3


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [([1, 2], [2, 1], 1.0), ([1, 2], [3, 4], 0.0), ([1, 2, 3, 4], [4, 9], 0.0), ([1, 2], [2, 9, 1, 7], 0.5)],
)
def test_overlap_of_the_first_ids(a: list[int], b: list[int], expected: float) -> None:
    assert overlap(torch.tensor([a]), torch.tensor([b])).tolist() == [expected]


# ---------------------------------------------------------------- streaming


class Reader:
    """Feeds rollouts to a stream as an engine would: slots, chunks, compaction, refilling."""

    def __init__(self, stream: TeacherStream, num_slots: int) -> None:
        self.stream, self.num_slots = stream, num_slots
        self.running: dict[int, tuple[Rollout, int]] = {}
        self.parts: dict[str, list[dict[str, np.ndarray[Any, Any]]]] = {}

    def admit(self, waiting: list[Rollout]) -> None:
        free = [slot for slot in range(self.num_slots) if slot not in self.running][: len(waiting)]
        taken = [waiting.pop(0) for _ in free]
        if free:
            self.stream.admit(free, [r.prompt.tokens for r in taken])
            self.running |= {slot: (rollout, 0) for slot, rollout in zip(free, taken, strict=True)}

    def read(self, counts: list[int]) -> None:
        """Up to ``counts[i]`` tokens of the i-th running rollout."""
        slots = sorted(self.running)
        take = [
            min(counts[i % len(counts)], self.running[s][0].length - self.running[s][1]) for i, s in enumerate(slots)
        ]
        width = max(take) + 1  # one column of padding
        tokens = torch.full((len(slots), width), 5)
        ids = torch.zeros(len(slots), width, K, dtype=torch.int32)
        for row, (slot, n) in enumerate(zip(slots, take, strict=True)):
            rollout, at = self.running[slot]
            tokens[row, :n] = torch.from_numpy(rollout.tokens[at : at + n])
            ids[row, :n] = torch.from_numpy(rollout.signals["topk_ids"][at : at + n])
        found = self.stream.extend(torch.tensor(slots), tokens, torch.tensor(take), {"topk_ids": ids})
        for row, (slot, n) in enumerate(zip(slots, take, strict=True)):
            rollout, at = self.running[slot]
            self.parts.setdefault(rollout.id, []).append({name: x[row, :n].numpy() for name, x in found.items()})
            assert all(not x[row, n:].any() for x in found.values())
            self.running[slot] = (rollout, at + n)

    def finish(self) -> None:
        self.running = {s: (r, at) for s, (r, at) in self.running.items() if at < r.length}

    def compact(self) -> None:
        movers = [slot for slot in sorted(self.running) if slot >= len(self.running)]
        holes = [slot for slot in range(len(self.running)) if slot not in self.running]
        if movers:
            self.stream.move(movers, holes)
            for src, dst in zip(movers, holes, strict=True):
                self.running[dst] = self.running.pop(src)


@pytest.mark.parametrize("counts", [[1], [3], [2, 0, 1], [100]])
@pytest.mark.parametrize("num_slots", [1, 2, 4])
def test_streaming_gives_the_numbers_of_one_pass(counts: list[int], num_slots: int) -> None:
    teacher = Teacher(TEACHER, temperature=1.2, chunk_tokens=5)
    expected = rollouts(lengths=((3, 5, 1, 7), (4, 2, 6), (6,)))
    stream = TeacherStream(teacher, num_slots, topk=K, max_len=4)
    reader, waiting = Reader(stream, num_slots), list(expected)
    if counts == [2, 0, 1] and num_slots == 1:
        counts = [2]
    with torch.inference_mode():
        while waiting or reader.running:
            reader.admit(waiting)
            reader.read(counts)
            counts = counts[1:] + counts[:1]
            reader.finish()
            reader.compact()
    teacher.score(expected, topk=K)
    for rollout in expected:
        for name in ("teacher_logprob", "teacher_topk_ids", "teacher_topk_logprobs", "teacher_on_student", "overlap"):
            streamed = np.concatenate([part[name] for part in reader.parts[rollout.id]])
            np.testing.assert_allclose(streamed, rollout.signals[name], rtol=1e-4, atol=1e-4, err_msg=name)
    streamed_rollouts = copy.deepcopy(expected)
    for rollout in streamed_rollouts:
        parts = reader.parts[rollout.id]
        rollout.signals |= {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    assert teacher.score(streamed_rollouts, topk=K) == 0  # nothing is scored twice


def test_a_shared_prompt_is_computed_once() -> None:
    of_one = rollouts(lengths=((3, 5, 4),))
    stream = TeacherStream(Teacher(TEACHER), 4, topk=K)
    prompt = of_one[0].prompt.tokens
    stream.admit([0, 1], [prompt, prompt])
    assert stream.tokens == len(prompt)
    stream.extend(torch.tensor([0]), torch.tensor([[3, 4]]), torch.tensor([2]), {})
    stream.admit([2], [prompt])  # copied from a slot that has gone on since
    assert stream.tokens == len(prompt) + 2
    a = stream.extend(torch.tensor([1]), torch.tensor([[3]]), torch.tensor([1]), {})
    b = stream.extend(torch.tensor([2]), torch.tensor([[3]]), torch.tensor([1]), {})
    torch.testing.assert_close(a["teacher_logprob"], b["teacher_logprob"])


def test_a_reused_slot_forgets_its_last_rollout() -> None:
    first, second = random_prompt("a", 5, 1), random_prompt("b", 3, 2)
    used, fresh = TeacherStream(Teacher(TEACHER), 1, topk=K), TeacherStream(Teacher(TEACHER), 1, topk=K)
    used.admit([0], [first.tokens])
    used.extend(torch.tensor([0]), torch.tensor([[3, 4, 5]]), torch.tensor([3]), {})
    for stream in (used, fresh):
        stream.admit([0], [second.tokens])
    tokens = torch.tensor([[7, 8]])
    a = used.extend(torch.tensor([0]), tokens, torch.tensor([2]), {})
    b = fresh.extend(torch.tensor([0]), tokens, torch.tensor([2]), {})
    torch.testing.assert_close(a["teacher_topk_logprobs"], b["teacher_topk_logprobs"])


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="no tokens"):
        TeacherStream(Teacher(TEACHER), 1).admit([0], [()])
