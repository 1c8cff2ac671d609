from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tiny import distributions, random_groups, random_prompt, random_rollout, tiny_model
from torch import Tensor

from trimtab.core.errors import MismatchError
from trimtab.core.records import Rollout, Source
from trimtab.core.slots import Objective
from trimtab.learn.learner import Learner, LearnerConfig
from trimtab.learn.selfcheck import SelfCheck, kept_mass
from trimtab.model.transformer import Transformer

TEMPERATURE = 0.6
TOLERANCE = 0.01
MODEL = tiny_model(scale=25.0)


@dataclass(kw_only=True)
class Unused(Objective):
    slug: ClassVar[str] = "unused"


def learner(temperature: float = TEMPERATURE) -> Learner:
    config = LearnerConfig(logprob_chunk=5)
    return Learner(MODEL, config, objective=Unused(), temperature=temperature, max_new_tokens=8)


def truncated(logp_TV: Tensor, top_p: float, top_k: int) -> Tensor:
    """Renormalised log-probs (T, V) of the truncated distributions, -inf outside, token by token."""
    out = torch.full_like(logp_TV, -torch.inf)
    for row, logp in zip(out, logp_TV, strict=True):
        order = logp.argsort(descending=True)[: top_k or None]
        share = logp[order].exp() / logp[order].exp().sum()
        kept = order[share.cumsum(0) - share < top_p]
        row[kept] = logp[kept] - logp[kept].logsumexp(0)
    return out


def sample(
    engine_temperature: float = TEMPERATURE, top_p: float = 1.0, top_k: int = 0, model: Transformer = MODEL
) -> list[Rollout]:
    """Rollouts drawn token by token from the engine's distribution, with its log-probs."""
    generator = torch.Generator().manual_seed(1)
    owner, rollouts = random_prompt("p", 4, seed=0), []
    for i, length in enumerate((6, 9, 4, 8, 7, 5)):
        rollout = random_rollout(owner, length, f"r{i}", seed=i)
        for t in range(length):
            with torch.no_grad():
                logp_TV = truncated(distributions(model, rollout, engine_temperature), top_p, top_k)
            rollout.tokens[t] = int(torch.multinomial(logp_TV[t].exp(), 1, generator=generator))
            rollout.logprobs[t] = logp_TV[t, rollout.tokens[t]]
        rollouts.append(rollout)
    return rollouts


def verdict(rollouts: list[Rollout], temperature: float = TEMPERATURE, **options: Any) -> str:
    with pytest.raises(MismatchError) as error:
        learner(temperature).self_check(rollouts, TOLERANCE, **options)
    found = re.search(r"Most likely: (.*?)\. Mean", str(error.value))
    assert found
    return found.group(1)


def test_agreement_passes_with_its_numbers() -> None:
    check = learner().self_check(sample(), TOLERANCE)
    assert check.tokens == 39
    assert check.mean_gap <= check.max_gap < 1e-4


def test_temperature_not_applied() -> None:
    assert "'temperature not applied'" in verdict(sample(engine_temperature=1.0))


def test_temperature_applied_twice() -> None:
    assert "'temperature applied twice'" in verdict(sample(engine_temperature=TEMPERATURE**2))


@pytest.mark.parametrize("temperature", [1.0, TEMPERATURE])
@pytest.mark.parametrize(("top_p", "top_k", "named"), [(0.7, 0, "top-p = 0.7"), (1.0, 3, "top-k = 3 ")])
def test_unordered_truncation(temperature: float, top_p: float, top_k: int, named: str) -> None:
    found = verdict(sample(temperature, top_p, top_k), temperature)
    assert named in found
    assert "truncated distribution renormalised" in found


def test_ordered_truncation_agrees() -> None:
    check = learner().self_check(sample(top_p=0.8, top_k=4), TOLERANCE, top_p=0.8, top_k=4)
    assert check.max_gap < 1e-4


def test_truncated_without_renormalising() -> None:
    rollouts = sample(top_p=0.6)
    for rollout in rollouts:
        with torch.no_grad():
            logp_TV = distributions(MODEL, rollout, TEMPERATURE)
        rollout.logprobs = logp_TV.gather(1, torch.from_numpy(rollout.tokens)[:, None])[:, 0].numpy()
    assert "'truncated distribution not renormalised'" in verdict(rollouts, top_p=0.6)


@pytest.mark.parametrize(("shift", "named"), [(1, "later"), (-1, "earlier")])
def test_shifted_by_one_token(shift: int, named: str) -> None:
    rollouts = sample()
    for rollout in rollouts:
        rollout.logprobs = np.roll(rollout.logprobs, shift)
    with pytest.raises(MismatchError, match=rf"fit 'shifted by one token \({named}\)' best") as error:
        learner().self_check(rollouts, TOLERANCE)
    left = re.search(rf"shifted by one token \({named}\) ([\d.e-]+)", str(error.value))
    assert left
    assert float(left.group(1)) < 1e-4  # the tokens at the edges are left out


def test_other_weights() -> None:
    assert "different weights" in verdict(sample(model=tiny_model(seed=3, scale=25.0)))


def test_the_error_holds_the_numbers() -> None:
    with pytest.raises(MismatchError, match=r"39 sampled tokens: mean \|difference\| .*tolerance 0.01.*twice"):
        learner().self_check(sample(engine_temperature=1.0), TOLERANCE)


def test_nan_from_the_model_is_a_mismatch() -> None:
    broken = tiny_model()
    with torch.no_grad():
        broken.norm.weight.fill_(torch.nan)
    checker = Learner(broken, LearnerConfig(), objective=Unused(), temperature=1.0, max_new_tokens=8)
    with pytest.raises(MismatchError, match="different weights"):
        checker.self_check(sample(), TOLERANCE)


def test_only_freshly_sampled_scored_tokens_are_compared() -> None:
    rollouts = sample()
    for rollout in rollouts:
        rollout.source = np.full(rollout.length, Source.SAMPLED)
        rollout.source[0], rollout.logprobs[0] = Source.REUSED, 5.0
        rollout.logprobs[1] = np.nan
    assert learner().self_check(rollouts, TOLERANCE).tokens == 39 - 12


def test_nothing_to_compare() -> None:
    unscored = [rollout for group in random_groups() for rollout in group.rollouts]
    assert learner().self_check(unscored, TOLERANCE) == SelfCheck(0, 0.0, 0.0)
    assert learner().self_check([], TOLERANCE) == SelfCheck(0, 0.0, 0.0)
    assert learner().self_check([random_rollout(random_prompt("p", 2, 0), 0, "r", 0)], TOLERANCE).tokens == 0


def test_kept_mass_takes_top_k_first() -> None:
    sorted_CV = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    assert kept_mass(sorted_CV, 0.5, 0).item() == pytest.approx(0.7)
    assert kept_mass(sorted_CV, 0.39, 0).item() == pytest.approx(0.4)
    assert kept_mass(sorted_CV, 1.0, 3).item() == pytest.approx(0.9)
    assert kept_mass(sorted_CV, 0.5, 2).item() == pytest.approx(0.4)  # 0.4 / 0.7 alone reaches a half
