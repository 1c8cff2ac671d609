from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from trimtab.core.errors import ConfigError
from trimtab.core.rng import uniform
from trimtab.generate.protocol import Sampling
from trimtab.generate.sampling import SamplingRows, UniformBlocks, check_sampling, draw

PLAIN = Sampling()
SAMPLINGS = [
    PLAIN,
    Sampling(temperature=0.6),
    Sampling(temperature=1.7),
    Sampling(top_k=1),
    Sampling(top_k=5),
    Sampling(top_k=10_000),
    Sampling(top_p=0.3),
    Sampling(top_p=0.95),
    Sampling(top_p=1e-6),
    Sampling(temperature=0.8, top_p=0.9, top_k=7),
    Sampling(temperature=0.0),
    Sampling(temperature=0.0, top_p=0.1, top_k=3),
]


def _logits(rows: int, size: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * scale


def _draw(logits: torch.Tensor, u: torch.Tensor, samplings: list[Sampling]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = SamplingRows.of(samplings)
    return draw(rows.softmax(logits), u, rows)


def _distribution(logits: torch.Tensor, sampling: Sampling) -> np.ndarray:
    """The distribution in float64 by enumeration: top-k, then the shortest prefix of its ranking with mass >= top-p."""
    if sampling.temperature == 0:
        return np.eye(len(logits))[int(logits.argmax())]
    p = (logits.double() / sampling.temperature).softmax(-1).numpy()
    ranked = np.argsort(-p, kind="stable")[: sampling.top_k or None]
    if sampling.top_p < 1:
        mass = p[ranked].cumsum() / p[ranked].sum()
        ranked = ranked[: int(np.searchsorted(mass, sampling.top_p)) + 1]
    kept = np.zeros_like(p)
    kept[ranked] = p[ranked]
    return kept / kept.sum()


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("size", [7, 256, 257, 1280])
def test_token_is_the_first_whose_exact_cumulative_probability_exceeds_the_uniform(
    sampling: Sampling, size: int
) -> None:
    logits = _logits(1, size, seed=size)
    exact = _distribution(logits[0], sampling)
    u = (torch.arange(3_000) + 0.5) / 3_000
    token, logprob = _draw(logits.expand(len(u), -1), u, [sampling])
    boundary = exact.cumsum()
    expected = np.searchsorted(boundary, u.double().numpy(), side="right")
    near = np.abs(boundary - u.double().numpy()[:, None]).min(1) < 2e-6  # float32 may fall on either side
    assert near.mean() < 0.25
    assert np.array_equal(token.numpy()[~near], expected[~near])
    reference = exact if sampling.temperature else logits[0].double().softmax(-1).numpy()
    assert np.allclose(logprob.numpy(), np.log(reference[token.numpy()]), atol=1e-5)
    assert np.abs(token.numpy() - expected).max() <= size - 1


@pytest.mark.parametrize("size", [40, 1000])
@pytest.mark.parametrize("sampling", [PLAIN, Sampling(top_p=0.9), Sampling(top_k=20)], ids=str)
def test_the_token_always_has_positive_probability(size: int, sampling: Sampling) -> None:
    """Impossible tokens everywhere, first and last included, and the uniforms at the ends of their range."""
    logits = _logits(600, size)
    logits[torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) < 0.9] = -torch.inf
    logits[:, 0] = logits[:, -1] = -torch.inf
    logits[:, size // 2] = 0.0
    for u in (2.0**-24, 0.5, 1 - 2.0**-24):
        token, logprob = _draw(logits, torch.full((600,), u), [sampling])
        assert torch.isfinite(logits.gather(1, token[:, None])).all()
        assert torch.isfinite(logprob).all()


def test_a_single_possible_token() -> None:
    logits = torch.full((3, 700), -torch.inf)
    logits[:, 699] = -5.0
    token, logprob = _draw(logits, torch.tensor([2.0**-24, 0.5, 1 - 2.0**-24]), [PLAIN])
    assert token.tolist() == [699] * 3
    assert logprob.tolist() == [0.0] * 3


def test_top_p_beyond_the_first_candidates_is_exact() -> None:
    """A flat distribution, whose nucleus holds more tokens than are looked at first."""
    logits = _logits(1, 3000, scale=0.1)
    exact = _distribution(logits[0], Sampling(top_p=0.9))
    assert 256 < (exact > 0).sum() < 2900
    u = (torch.arange(1000) + 0.5) / 1000
    token, logprob = _draw(logits.expand(1000, -1), u, [Sampling(top_p=0.9)])
    near = np.abs(exact.cumsum() - u.double().numpy()[:, None]).min(1) < 1e-5
    expected = np.searchsorted(exact.cumsum(), u.double().numpy(), side="right")
    assert np.array_equal(token.numpy()[~near], expected[~near])
    assert np.allclose(logprob.numpy(), np.log(exact[token.numpy()]), atol=1e-4)


def test_tokens_tied_with_the_last_kept_one_are_kept() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]]).expand(200, -1)
    token, _ = _draw(logits, (torch.arange(200) + 0.5) / 200, [Sampling(top_k=2)])
    assert set(token.tolist()) == {0, 1, 2, 3}


def test_greedy_takes_the_first_of_equals_with_its_log_prob_at_temperature_1() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    token, logprob = _draw(logits, torch.tensor([0.99]), [Sampling(temperature=0.0, top_k=1)])
    assert token.item() == 1
    assert logprob.item() == pytest.approx(logits.log_softmax(-1)[0, 1].item(), abs=1e-6)


@pytest.mark.parametrize("size", [40, 1500])
def test_a_row_does_not_depend_on_the_batch(size: int) -> None:
    """Rows of every sampling side by side give what each gives alone; order does not matter."""
    logits = _logits(len(SAMPLINGS) * 8, size)
    samplings = SAMPLINGS * 8
    u = uniform(torch.arange(len(samplings)), torch.tensor(3))
    token, logprob = _draw(logits, u, samplings)
    order = torch.randperm(len(samplings), generator=torch.Generator().manual_seed(0))
    shuffled, _ = _draw(logits[order], u[order], [samplings[i] for i in order.tolist()])
    assert torch.equal(shuffled, token[order])
    for row, sampling in enumerate(samplings):
        alone, alone_logprob = _draw(logits[row : row + 1], u[row : row + 1], [sampling])
        assert alone.item() == token[row].item(), sampling
        assert alone_logprob.item() == pytest.approx(logprob[row].item(), abs=1e-5)


def test_pick_follows_the_rows_and_equal_rows_collapse() -> None:
    rows = SamplingRows.of(SAMPLINGS)
    index = torch.tensor([3, 0, 11])
    picked = rows.pick(index)
    assert picked.top_k_B.tolist() == rows.top_k_B[index].tolist()
    assert picked.greedy_B.tolist() == [False, False, True]
    assert picked.temperature_B.shape == (3, 1)
    same = SamplingRows.of([Sampling(top_p=0.5)] * 9)
    assert same.pick(index) is same
    assert len(same.top_p_B) == 1


def test_nothing_is_truncated_scaled_or_greedy_unless_asked() -> None:
    plain = SamplingRows.of([PLAIN] * 3)
    assert (plain.truncated, plain.scaled, plain.greedy) == (False, False, False)
    greedy = SamplingRows.of([Sampling(temperature=0.0, top_p=0.5)])
    assert (greedy.truncated, greedy.scaled, greedy.greedy) == (False, False, True)


def test_half_precision_logits_are_summed_in_float32() -> None:
    logits = torch.zeros(1, 4096, dtype=torch.bfloat16)
    _, logprob = _draw(logits, torch.tensor([0.5]), [PLAIN])
    assert logprob.item() == pytest.approx(-np.log(4096), abs=1e-5)


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        (Sampling(temperature=-0.1), "temperature"),
        (Sampling(temperature=1e-30), "temperature"),
        (Sampling(temperature=float("nan")), "temperature"),
        (Sampling(top_p=0.0), "top_p"),
        (Sampling(top_p=1.1), "top_p"),
        (Sampling(top_k=-1), "top_k"),
    ],
)
def test_values_out_of_range_are_named(sampling: Sampling, named: str) -> None:
    with pytest.raises(ConfigError, match=rf"request r: sampling\.{named}.*{getattr(sampling, named)}"):
        check_sampling(sampling, "request r: sampling")
    for fine in SAMPLINGS:
        check_sampling(dataclasses.replace(fine), "x")


@pytest.mark.parametrize("size", [1, 4, 32])
def test_uniform_blocks_follow_key_and_response_index_through_admission_and_moves(size: int) -> None:
    key_N, first_N = torch.tensor([11, 22, 33, 44]), torch.tensor([0, 5, 0, 2])
    blocks = UniformBlocks(key_N, first_N, num_slots=3, size=size)
    blocks.admit(torch.tensor([0, 1]), torch.tensor([0, 1]), time=0)
    at = {0: (0, 0), 1: (1, 0)}  # slot -> (request, time of its first token)
    for time in range(25):
        if time == 6:
            blocks.admit(torch.tensor([2]), torch.tensor([2]), time)
            at[2] = (2, time)
        if time == 11:  # slot 0 ends, slot 2 moves there, and slot 2 is refilled
            blocks.move(torch.tensor([2]), torch.tensor([0]))
            blocks.admit(torch.tensor([2]), torch.tensor([3]), time)
            at[0], at[2] = at[2], (3, time)
        drawn = blocks.at(time, 3)
        for slot, (row, born) in at.items():
            expected = uniform(key_N[row], first_N[row] + time - born)
            assert drawn[slot] == expected, (time, slot)
