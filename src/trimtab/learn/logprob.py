"""Log-probabilities of chosen tokens from hidden states, without logits of all tokens at once.

Logits of T tokens over V words are by far the largest tensor of a training step. Here they exist for ``chunk_tokens``
tokens at a time, and the backward pass computes them anew. All softmaxes run in float32 (float64 for float64 input).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

ChunkLoss = Callable[[Tensor, Tensor], Tensor]


def token_logprobs(hidden: Tensor, head_weight: Tensor, ids: Tensor, temperature: float, chunk_tokens: int) -> Tensor:
    """Log-probs of ``ids`` under softmax(hidden @ head_weight.T / temperature), differentiable in both.

    Beyond inputs, outputs and gradients each pass holds one buffer of ``chunk_tokens`` x V float32, and one more in the
    hidden states' dtype when that is not float32.

    Args:
        hidden: (T, H) state that predicts each token.
        head_weight: (V, H).
        ids: (T,) or (T, K) int64.

    Returns:
        float32, shaped like ``ids``.
    """
    logprob, _ = _TokenLogprobs.apply(hidden, head_weight, ids, temperature, chunk_tokens, False)
    return logprob


def token_logprobs_entropy(
    hidden: Tensor, head_weight: Tensor, ids: Tensor, temperature: float, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """:func:`token_logprobs` and the entropy (T,) in nats of the same distribution, without gradient.

    The entropy takes a second buffer of ``chunk_tokens`` x V.
    """
    logprob, entropy = _TokenLogprobs.apply(hidden, head_weight, ids, temperature, chunk_tokens, True)
    return logprob, entropy


def chunked_loss(
    hidden_student: Tensor,
    head_student: Tensor,
    hidden_teacher: Tensor,
    head_teacher: Tensor,
    loss: ChunkLoss,
    *,
    temperature: float,
    teacher_temperature: float,
    chunk_tokens: int,
) -> Tensor:
    """A loss on the full distributions of student and teacher, chunk by chunk, each computed anew in the backward pass.

    Both distributions are normalised over the words both heads have: their first min(V, V_teacher) rows.

    Args:
        hidden_student, hidden_teacher: (T, H) and (T, H_teacher) states that predict each token.
        head_student, head_teacher: (V, H) and (V_teacher, H_teacher).
        loss: maps log-probs (C, V) of student and teacher to losses (C,).

    Returns:
        (T,), with gradient to the student's hidden states and head only.
    """
    shared = min(len(head_student), len(head_teacher))
    head_student, head_teacher = head_student[:shared], head_teacher[:shared]

    def of_chunk(student: Tensor, teacher: Tensor) -> Tensor:
        student_logp = _log_softmax(student @ head_student.T, temperature)
        with torch.no_grad():
            teacher_logp = _log_softmax(teacher @ head_teacher.T, teacher_temperature)
        return loss(student_logp, teacher_logp)

    losses = [
        checkpoint(of_chunk, student, teacher, use_reentrant=False, preserve_rng_state=False)
        for student, teacher in zip(hidden_student.split(chunk_tokens), hidden_teacher.split(chunk_tokens), strict=True)
    ]
    return torch.cat(losses)


def softmax_dtype(x: Tensor) -> torch.dtype:
    """Float32, or float64 for float64 input."""
    return torch.promote_types(x.dtype, torch.float32)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(logits.to(softmax_dtype(logits)) / temperature, -1)


class _LogitChunks:
    """Scaled logits of successive chunks, all written to one buffer."""

    def __init__(self, hidden: Tensor, head_weight: Tensor, temperature: float, chunk_tokens: int) -> None:
        self.hidden, self.head_t, self.temperature = hidden, head_weight.T, temperature
        rows = min(chunk_tokens, len(hidden))
        self.buffer = torch.empty(rows, len(head_weight), dtype=softmax_dtype(hidden), device=hidden.device)
        self.slices = [slice(start, start + chunk_tokens) for start in range(0, len(hidden), chunk_tokens)]

    def logits(self, chunk: slice) -> Tensor:
        """(C, V), valid until the next call."""
        hidden = self.hidden[chunk]
        out = self.buffer[: len(hidden)]
        if hidden.dtype == out.dtype:
            torch.mm(hidden, self.head_t, out=out)
        else:
            out.copy_(hidden @ self.head_t)
        return out if self.temperature == 1.0 else out.div_(self.temperature)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head_weight: Tensor,
        ids: Tensor,
        temperature: float,
        chunk_tokens: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        ids_TK = ids if ids.dim() == 2 else ids[:, None]
        chunks = _LogitChunks(hidden, head_weight, temperature, chunk_tokens)
        logprob_TK = torch.empty(ids_TK.shape, dtype=chunks.buffer.dtype, device=hidden.device)
        normaliser_T = torch.empty(len(ids), dtype=chunks.buffer.dtype, device=hidden.device)
        entropy_T = torch.zeros_like(normaliser_T)
        for chunk in chunks.slices:
            logits = chunks.logits(chunk)
            largest = logits.amax(-1, keepdim=True)
            logits.sub_(largest)
            logprob_TK[chunk] = logits.gather(1, ids_TK[chunk])
            if with_entropy:
                weighted = logits.exp().mul_(logits).sum(-1)
            total = logits.exp_().sum(-1)
            log_total = total.log()
            logprob_TK[chunk] -= log_total[:, None]
            normaliser_T[chunk] = largest[:, 0] + log_total
            if with_entropy:
                entropy_T[chunk] = log_total - weighted / total
        ctx.save_for_backward(hidden, head_weight, ids_TK, normaliser_T)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.mark_non_differentiable(entropy_T)
        return logprob_TK.view(ids.shape), entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head_weight, ids_TK, normaliser_T = ctx.saved_tensors
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        chunks = _LogitChunks(hidden, head_weight, ctx.temperature, ctx.chunk_tokens)
        grad_TK = grad_logprob.reshape(ids_TK.shape) / ctx.temperature
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_head = torch.zeros_like(head_weight, dtype=chunks.buffer.dtype) if wants_head else None
        for chunk in chunks.slices:
            grad = chunks.logits(chunk)  # becomes d loss / d logits in place
            grad.sub_(normaliser_T[chunk, None]).exp_().mul_(-grad_TK[chunk].sum(-1, keepdim=True))
            grad.scatter_add_(1, ids_TK[chunk], grad_TK[chunk])
            if grad_hidden is not None:
                torch.mm(grad.to(hidden.dtype), head_weight, out=grad_hidden[chunk])
            if grad_head is not None:
                _add_product(grad_head, grad.to(hidden.dtype).T, hidden[chunk])
        if grad_head is not None:
            grad_head = grad_head.to(head_weight.dtype)
        return grad_hidden, grad_head, None, None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b``, in one step where the dtypes allow it."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
