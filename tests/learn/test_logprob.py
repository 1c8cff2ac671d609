from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trimtab.learn.logprob import chunked_loss, token_logprobs, token_logprobs_entropy

T, H, V = 13, 5, 31


def tensors(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.randn(V, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, head


def full_logprobs(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(hidden @ head.T / temperature, -1)


def ids_of(*shape: int) -> Tensor:
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("chunk_tokens", [1, 4, 13, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("width", [None, 1, 3])
def test_equals_the_full_computation(chunk_tokens: int, temperature: float, width: int | None) -> None:
    hidden, head = tensors()
    ids = ids_of(T) if width is None else ids_of(T, width)
    upstream = torch.randn(ids.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    logp = token_logprobs(hidden, head, ids, temperature, chunk_tokens)
    full = full_logprobs(hidden, head, temperature).gather(1, ids.view(T, -1)).view(ids.shape)
    torch.testing.assert_close(logp, full, rtol=1e-12, atol=1e-12)
    got = torch.autograd.grad((logp * upstream).sum(), (hidden, head))
    expected = torch.autograd.grad((full * upstream).sum(), (hidden, head))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_repeated_candidate_ids_add_their_gradients() -> None:
    hidden, head = tensors()
    ids = ids_of(T)[:, None].expand(T, 3)
    (got,) = torch.autograd.grad(token_logprobs(hidden, head, ids, 1.0, 4).sum(), hidden)
    (once,) = torch.autograd.grad(token_logprobs(hidden, head, ids[:, 0], 1.0, 4).sum(), hidden)
    torch.testing.assert_close(got, 3 * once)


def test_entropy_equals_the_full_computation_and_carries_no_gradient() -> None:
    hidden, head = tensors()
    ids = ids_of(T)
    logp, entropy = token_logprobs_entropy(hidden, head, ids, 0.7, 4)
    full = full_logprobs(hidden, head, 0.7)
    torch.testing.assert_close(entropy, -(full.exp() * full).sum(-1))
    torch.testing.assert_close(logp, token_logprobs(hidden, head, ids, 0.7, 4))
    assert not entropy.requires_grad
    assert logp.requires_grad


def test_large_logits_stay_finite() -> None:
    hidden, head = tensors(torch.float32)
    logp, entropy = token_logprobs_entropy(hidden * 1e4, head, ids_of(T), 1.0, 4)
    assert torch.isfinite(logp).all()
    assert torch.isfinite(entropy).all()


def test_only_wanted_gradients_are_computed() -> None:
    hidden, head = tensors()
    token_logprobs(hidden, head.detach(), ids_of(T), 1.0, 4).sum().backward()
    assert head.grad is None
    assert hidden.grad is not None
    hidden.grad = None
    token_logprobs(hidden.detach(), head, ids_of(T), 1.0, 4).sum().backward()
    assert hidden.grad is None
    assert head.grad is not None


def test_low_precision_input_gives_float32_and_its_own_gradient_dtype() -> None:
    hidden, head = tensors(torch.bfloat16)
    logp = token_logprobs(hidden, head, ids_of(T), 1.0, 4)
    assert logp.dtype == torch.float32
    logp.sum().backward()
    assert hidden.grad is not None
    assert head.grad is not None
    assert (hidden.grad.dtype, head.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    expected = full_logprobs(hidden.float(), head.float(), 1.0).gather(1, ids_of(T)[:, None])[:, 0]
    torch.testing.assert_close(logp, expected, rtol=0.05, atol=0.05)


def test_no_tokens() -> None:
    hidden, head = tensors()
    logp = token_logprobs(hidden[:0], head, ids_of(0), 1.0, 4)
    assert logp.shape == (0,)
    logp.sum().backward()
    assert head.grad is not None
    assert not head.grad.any()


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor any operation gave out."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.largest = max(self.largest, *sizes, 0) if sizes else self.largest
        return out


@pytest.mark.parametrize("entropy", [False, True])
def test_nothing_larger_than_a_chunk_of_logits_is_allocated(entropy: bool) -> None:
    tokens, vocabulary, chunk = 64, 1000, 8
    hidden = torch.randn(tokens, 4, requires_grad=True)
    head = torch.randn(vocabulary, 4, requires_grad=True)
    ids = torch.randint(vocabulary, (tokens,))
    with LargestTensor() as seen:
        if entropy:
            logp, _ = token_logprobs_entropy(hidden, head, ids, 0.9, chunk)
        else:
            logp = token_logprobs(hidden, head, ids, 0.9, chunk)
        logp.sum().backward()
    assert seen.largest == chunk * vocabulary


def reverse_kl(student_logp: Tensor, teacher_logp: Tensor) -> Tensor:
    return (student_logp.exp() * (student_logp - teacher_logp)).sum(-1)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
def test_chunked_loss_equals_the_full_computation(chunk_tokens: int) -> None:
    hidden, head = tensors(seed=0)
    hidden_t, head_t = tensors(seed=3)
    settings = {"temperature": 0.8, "teacher_temperature": 1.3, "chunk_tokens": chunk_tokens}
    loss_T = chunked_loss(hidden, head, hidden_t, head_t, reverse_kl, **settings)
    full_T = reverse_kl(full_logprobs(hidden, head, 0.8), full_logprobs(hidden_t, head_t, 1.3).detach())
    torch.testing.assert_close(loss_T, full_T)
    weight_T = torch.arange(T, dtype=torch.float64)
    got = torch.autograd.grad((loss_T * weight_T).sum(), (hidden, head, hidden_t, head_t), allow_unused=True)
    expected = torch.autograd.grad((full_T * weight_T).sum(), (hidden, head))
    torch.testing.assert_close(got[:2], expected)
    assert got[2:] == (None, None)


def test_chunked_loss_keeps_no_full_vocabulary_tensor_between_the_passes() -> None:
    tokens, vocabulary, chunk = 64, 1000, 8
    hidden, head = torch.randn(tokens, 4, requires_grad=True), torch.randn(vocabulary, 4, requires_grad=True)
    saved: list[int] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x.numel())
        return x

    with LargestTensor() as seen, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss_T = chunked_loss(
            hidden, head, hidden, head, reverse_kl, temperature=1.0, teacher_temperature=1.0, chunk_tokens=chunk
        )
        kept = sum(saved)
        loss_T.sum().backward()
    assert seen.largest == chunk * vocabulary
    assert kept < chunk * vocabulary


def test_chunked_loss_works_on_the_words_both_have() -> None:
    hidden, head = tensors(seed=0)
    hidden_t, head_t = tensors(seed=3)
    loss_T = chunked_loss(
        hidden, head, hidden_t, head_t[: V - 6], reverse_kl, temperature=1.0, teacher_temperature=1.0, chunk_tokens=4
    )
    expected = reverse_kl(full_logprobs(hidden, head[: V - 6], 1.0), full_logprobs(hidden_t, head_t[: V - 6], 1.0))
    torch.testing.assert_close(loss_T, expected)


def test_equal_student_and_teacher_have_no_loss_and_no_gradient() -> None:
    hidden, head = tensors()
    settings = {"temperature": 1.0, "teacher_temperature": 1.0, "chunk_tokens": 4}
    loss_T = chunked_loss(hidden, head, hidden, head, reverse_kl, **settings)
    assert loss_T.abs().max() < 1e-12
    (gradient,) = torch.autograd.grad(loss_T.sum(), hidden)
    assert gradient.abs().max() < 1e-12
