"""Greedy accuracy of a pocket model on held-out problems, with a plain batched loop."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trimtab.model.transformer import KVCache, Transformer
from trimtab.pocket.families import Problem, problem, verify
from trimtab.pocket.tokenizer import CharTokenizer

MAX_NEW = 208  # the longest written work has 200 tokens


@torch.no_grad()
def greedy(model: Transformer, tokenizer: CharTokenizer, texts: Sequence[str], max_new: int = MAX_NEW) -> list[str]:
    """The greedy continuation of each of the N ``texts``, ended by end of sequence or after ``max_new`` tokens."""
    cache = model.new_cache(len(texts), max(map(len, texts), default=0) + max_new)
    rows = torch.arange(len(texts))
    next_B, length_B = _prefill(model, tokenizer, texts, cache)
    out: list[list[int]] = [[] for _ in texts]
    for _ in range(max_new):
        running = next_B != tokenizer.eos_id
        rows, next_B, length_B = rows[running], next_B[running], length_B[running]
        if not len(rows):
            break
        for row, token in zip(rows.tolist(), next_B.tolist(), strict=True):
            out[row].append(token)
        hidden = model.decode(next_B, length_B, cache, rows, int(length_B.max()) + 1)
        next_B, length_B = model.logits(hidden).argmax(-1), length_B + 1
    return [tokenizer.decode(tokens) for tokens in out]


def _prefill(
    model: Transformer, tokenizer: CharTokenizer, texts: Sequence[str], cache: KVCache
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the prompts into the cache: the first greedy token (N,) and the cached length (N,)."""
    prompts = [tokenizer.encode(text) for text in texts]
    count_N = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64)
    tokens = torch.full((len(prompts), int(count_N.max())), tokenizer.pad_id)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    rows = torch.arange(len(prompts))
    hidden = model.extend(tokens, torch.zeros_like(count_N), count_N, cache, rows)
    return model.logits(hidden[rows, count_N - 1]).argmax(-1), count_N


def accuracy(model: Transformer, problems: Sequence[Problem], chunk: int = 256) -> float:
    """Share of ``problems`` the model answers rightly when decoding greedily; nan for none."""
    tokenizer, right = CharTokenizer(), 0.0
    for start in range(0, len(problems), chunk):
        part = problems[start : start + chunk]
        for one, text in zip(part, greedy(model, tokenizer, [p.text for p in part]), strict=True):
            right += verify(one, text)[0]
    return right / len(problems) if problems else float("nan")


def heldout(name: str, count: int, seed: int = 0, **difficulty: int | None) -> list[Problem]:
    """``count`` held-out problems of a family."""
    return [problem(name, "heldout", seed, index, **difficulty) for index in range(count)]
