from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.core.rng import generator, key, keys_tensor, scrambled, uniform, uniforms

INT64 = st.integers(-(2**63), 2**63 - 1)
MASK = 2**64 - 1


def _reference(row_key: int, position: int) -> float:
    """The same number in Python's unbounded integers."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
        return x ^ (x >> 31)

    bits = mix((mix(row_key & MASK) + position * 0x9E3779B97F4A7C15) & MASK)
    return ((bits >> 41) + 0.5) * 2.0**-23


@given(INT64, st.integers(0, 2**62))
def test_uniform_wraps_like_unsigned_64_bit(row_key: int, position: int) -> None:
    drawn = uniform(torch.tensor([row_key]), torch.tensor([position]))
    assert drawn.item() == _reference(row_key, position)


@pytest.mark.parametrize("row_key", [-(2**63), -1, 0, 1, 2**63 - 1])
def test_uniform_is_flat_for_every_key(row_key: int) -> None:
    """Kolmogorov-Smirnov distance below its 1e-6 quantile (2.7 / sqrt(n)); mean and variance follow."""
    n = 100_000
    drawn = uniform(torch.tensor([row_key]), torch.arange(n)).double().sort().values
    steps = torch.arange(1, n + 1, dtype=torch.float64) / n
    assert (drawn - steps).abs().max() < 2.7 / n**0.5


def test_ends_are_never_reached() -> None:
    """The least and the greatest of the 2^23 values, and a million draws."""
    assert torch.tensor(0.5 * 2.0**-23).item() > 0.0
    assert torch.tensor([2**23 - 1]).float().add(0.5).mul(2.0**-23).item() < 1.0
    drawn = uniform(torch.arange(1000)[:, None], torch.arange(1000))
    assert drawn.min().item() > 0.0
    assert drawn.max().item() < 1.0


def test_neighbouring_keys_and_positions_are_uncorrelated() -> None:
    drawn = uniform(torch.arange(400)[:, None], torch.arange(400)).double() - 0.5
    for a, b in ((drawn[1:], drawn[:-1]), (drawn[:, 1:], drawn[:, :-1]), (drawn[1:, 1:], drawn[:-1, :-1])):
        correlation = (a * b).mean() / (1 / 12)
        assert abs(correlation.item()) < 5 / a.numel() ** 0.5


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    keys = keys_tensor([key(7, "p", sample) for sample in range(5)])
    together = uniform(keys[:, None], torch.arange(9))
    for row in range(5):
        assert torch.equal(uniform(keys[row], torch.arange(9)), together[row])


def test_keys_are_signed_64_bit_and_tell_their_parts_apart() -> None:
    keys = {key(seed, prompt, sample) for seed in range(10) for prompt in "ab" for sample in range(50)}
    assert len(keys) == 1000
    assert all(-(2**63) <= k < 2**63 for k in keys)
    assert key("1", "23") != key("12", "3")
    assert torch.equal(keys_tensor([-(2**63), 2**63 - 1]), torch.tensor([-(2**63), 2**63 - 1]))


def test_generator_is_keyed() -> None:
    assert np.array_equal(generator(1, "a").random(4), generator(1, "a").random(4))
    assert not np.array_equal(generator(1, "a").random(4), generator(1, "b").random(4))


def test_numbers_of_prompts_follow_the_prompt_and_the_decision() -> None:
    keys = np.arange(1000, dtype=np.uint64)
    drawn = scrambled(keys, 0, "a")
    assert (scrambled(keys[::-1], 0, "a") == drawn[::-1]).all()
    assert len(np.unique(drawn)) == 1000
    assert (scrambled(keys, 0, "b") != drawn).all()
    assert len(scrambled(keys[:0], 0)) == 0


def test_uniforms_of_prompts_are_uniform() -> None:
    drawn = uniforms(np.arange(100_000, dtype=np.uint64), 3, "u")
    assert ((drawn >= 0) & (drawn < 1)).all()
    counts = np.histogram(drawn, bins=20, range=(0, 1))[0]
    assert abs(counts - 5000).max() < 5 * 5000**0.5
