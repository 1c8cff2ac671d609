from __future__ import annotations

import math

import torch

from trimtab.model.attention import plan_sequences
from trimtab.model.transformer import Transformer
from trimtab.pocket.evaluate import accuracy, greedy, heldout
from trimtab.pocket.tokenizer import CharTokenizer
from trimtab.pocket.train import CONFIG

tokenizer = CharTokenizer()


def slow_greedy(model: Transformer, text: str, max_new: int) -> str:
    """The same with a full forward pass for every token."""
    tokens = tokenizer.encode(text)
    start = len(tokens)
    while len(tokens) < start + max_new:
        hidden = model(torch.tensor(tokens), plan_sequences([len(tokens)]))
        token = int(model.logits(hidden[-1]).argmax())
        if token == tokenizer.eos_id:
            break
        tokens.append(token)
    return tokenizer.decode(tokens[start:])


def test_greedy_equals_a_full_forward_pass_for_every_token() -> None:
    model = Transformer.init(CONFIG, 5).double()
    with torch.no_grad():
        model.lm_head.weight.mul_(50)  # type: ignore[union-attr]
        texts = ["1+2=", "gcd(84,36)=", "9 from 6,6,5,2:"]
        assert greedy(model, tokenizer, texts, 24) == [slow_greedy(model, text, 24) for text in texts]


def test_rows_that_end_early_leave_the_others_alone() -> None:
    model = Transformer.init(CONFIG, 5).double()
    with torch.no_grad():
        model.lm_head.weight.mul_(50)  # type: ignore[union-attr]
        texts = [f"{n}+{n + 1}=" for n in range(10, 40)]
        free = greedy(model, tokenizer, texts, 12)
        tokenizer_ending = CharTokenizer()
        tokenizer_ending.eos_id = tokenizer.encode(free[0][4])[0]  # any frequent character ends a row
        cut = greedy(model, tokenizer_ending, texts, 12)
    stop = free[0][4]
    assert cut == [text.partition(stop)[0] for text in free]
    assert len({len(text) for text in cut}) > 1


def test_no_texts_and_no_problems() -> None:
    assert math.isnan(accuracy(Transformer.init(CONFIG, 0), []))


def test_heldout_problems_are_heldout_and_follow_the_difficulty() -> None:
    assert all(p.text.count("+") == 2 for p in heldout("sums", 20, terms=3))
    assert heldout("sums", 5) == heldout("sums", 5)
    assert heldout("sums", 5) != heldout("sums", 5, seed=1)
