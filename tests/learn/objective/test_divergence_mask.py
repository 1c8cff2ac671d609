from __future__ import annotations

import pytest
import torch

from trimtab.core.slots import TopK
from trimtab.learn.objective.divergence_mask import binary_divergence, predicted_change, states, topk_divergence


def at(mu, pi, sampled, ids, vocab_size=5):
    """The one state of these probabilities seen through the top-k ``ids``."""
    mu_V, pi_V, index = torch.tensor(mu).log(), torch.tensor(pi).log(), torch.tensor([ids])
    topk = TopK(index, mu_V[index], pi_V[index], torch.tensor([sampled]), vocab_size)
    return states(topk, len(ids), mu_V[[sampled]], pi_V[[sampled]])


MU, PI = [0.4, 0.3, 0.2, 0.06, 0.04], [0.3, 0.3, 0.2, 0.1, 0.1]


@pytest.mark.parametrize(
    ("sampled", "ids", "mu_tail", "pi_tail", "size"),
    [(0, [0, 1], 0.3, 0.4, 3), (3, [0, 1], 0.24, 0.3, 2), (4, [0, 1, 2, 3], 0, 0, 0)],
)
def test_the_sampled_token_counts_once(sampled, ids, mu_tail, pi_tail, size):
    s = at(MU, PI, sampled, ids)
    assert s.mu_tail.item() == pytest.approx(mu_tail, abs=1e-6)
    assert s.pi_tail.item() == pytest.approx(pi_tail, abs=1e-6)
    assert s.tail_size.item() == size
    assert s.mu[0, -1].item() == pytest.approx(MU[sampled])
    assert (s.mu.sum() + s.mu_tail).item() == pytest.approx(1, abs=1e-6)


def test_masses_that_round_above_one_leave_a_tail_that_is_not_negative():
    topk = TopK(
        torch.tensor([[0, 1]]),
        torch.tensor([[0.6, 0.41]]).log(),
        torch.tensor([[0.6, 0.41]]).log(),
        torch.tensor([0]),
        9,
    )
    s = states(topk, 2, torch.tensor([0.6]).log(), torch.tensor([0.6]).log())
    assert s.mu_tail.item() > 0
    assert topk_divergence(s, "topk-kl").item() == pytest.approx(0, abs=1e-6)


def test_more_top_k_than_asked_for_is_not_read():
    wide = TopK(
        torch.tensor([[0, 1, 2]]),
        torch.tensor(MU)[None, :3].log(),
        torch.tensor(PI)[None, :3].log(),
        torch.tensor([0]),
        5,
    )
    s = states(wide, 2, torch.tensor(MU)[:1].log(), torch.tensor(PI)[:1].log())
    assert torch.equal(s.mu_tail, at(MU, PI, 0, [0, 1]).mu_tail)


def test_a_vanished_token_gives_a_large_finite_divergence():
    topk = TopK(
        torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[-1e-6, -200.0]]), torch.tensor([1]), 2
    )
    s = states(topk, 2, torch.tensor([0.5]).log(), torch.tensor([-200.0]))
    assert 5 < topk_divergence(s, "topk-kl").item() < 100
    assert predicted_change(s, "uniform").isfinite().all()


@pytest.mark.parametrize("kind", ["binary-tv", "binary-kl"])
@pytest.mark.parametrize("mu", [0.0, 0.3, 1.0])
def test_equal_policies_have_no_binary_divergence(kind, mu):
    assert binary_divergence(torch.tensor(mu), torch.tensor(mu), kind).item() == 0
