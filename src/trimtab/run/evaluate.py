"""Held-out evaluation, and the estimate of tokens that control saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trimtab.core.config import EvalConfig
from trimtab.core.records import Prompt, StopReason
from trimtab.core.rng import key
from trimtab.generate.protocol import Engine, Request, Sampling
from trimtab.run.statistics import pass_at_k


@dataclass(slots=True)
class Evaluation:
    """What an evaluation found. ``accuracy`` is over verified responses; failures of the verifier are counted apart."""

    accuracy: float
    accuracy_se: float  # standard error over problems
    scored: int
    failed: int
    mean_length: float
    truncated_share: float
    tokens: int
    pass_at_k: dict[str, float] = field(default_factory=dict)  # k as text, as JSON keeps it; empty with one sample
    lengths: list[int] = field(repr=False, default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        names = ("accuracy", "accuracy_se", "scored", "failed", "mean_length", "truncated_share", "tokens", "pass_at_k")
        return {name: getattr(self, name) for name in names}


def evaluate(
    engine: Engine,
    prompts: Sequence[Prompt],
    task: Any,
    config: EvalConfig,
    *,
    max_new_tokens: int,
    decode: Callable[[Sequence[int]], str],
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Answer every held-out prompt ``config.samples`` times and verify; training state is not touched.

    The random keys depend on the prompt and sample alone, so that before and after are compared on the same draws.
    """
    limit = config.max_new_tokens or max_new_tokens
    sampling = Sampling(temperature=config.temperature)
    requests = [
        Request(f"eval-{p.id}-{s}", p, s, key("eval", p.id, s), limit, sampling)
        for p in prompts
        for s in range(config.samples)
    ]
    completions = engine.generate(requests, progress=progress)
    answers = [(r.prompt, decode(c.tokens.tolist())) for r, c in zip(requests, completions, strict=True)]
    verdicts = task.verify_all(answers)
    correct = np.array([np.nan if v.correct is None else v.correct for v in verdicts], dtype=np.float64)
    per_problem = correct.reshape(len(prompts), config.samples) if prompts else correct.reshape(0, 1)
    means = np.array([np.mean(row[~np.isnan(row)]) for row in per_problem if not np.isnan(row).all()])
    lengths = [len(c.tokens) for c in completions]
    cut = [c.stop.reason != StopReason.EOS for c in completions]
    return Evaluation(
        accuracy=float(means.mean()) if len(means) else float("nan"),
        accuracy_se=float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else float("nan"),
        scored=int((~np.isnan(correct)).sum()),
        failed=int(np.isnan(correct).sum()),
        mean_length=float(np.mean(lengths)) if lengths else 0.0,
        truncated_share=float(np.mean(cut)) if cut else 0.0,
        tokens=sum(c.cost.sampled for c in completions),
        pass_at_k=pass_curve(per_problem) if config.samples > 1 else {},
        lengths=lengths,
    )


def pass_curve(correct: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float]:
    """Mean pass@k over problems from verdicts (P, samples; NaN = not verified), for k = 1, 2, 4 ... and all samples.

    A sample passes when it is fully correct. A problem with fewer than k verified samples has no pass@k.
    """
    scored_P, passed_P = (~np.isnan(correct)).sum(1).tolist(), (correct >= 1).sum(1).tolist()
    samples = correct.shape[1]
    sizes = sorted({2**i for i in range(samples.bit_length()) if 2**i <= samples} | {samples})
    found: dict[str, float] = {}
    for k in sizes:
        values = [pass_at_k(n, c, k) for n, c in zip(scored_P, passed_P, strict=True) if n >= k]
        if values:
            found[str(k)] = float(np.mean(values))
    return found


class ResidualLength:
    """Expected tokens a response would still have had when it was cut after ``t``: the mean residual life.

    Read off natural lengths (responses of the untrained policy under the static limit), so tokens saved are an estimate
    and said to be one; an audit measures them.
    """

    def __init__(self, natural_lengths: Sequence[int]) -> None:
        self.sorted = np.sort(np.asarray(natural_lengths, dtype=np.int64))
        self.suffix = np.concatenate([np.cumsum(self.sorted[::-1])[::-1], [0]])

    def saved(self, cut_lengths: Sequence[int]) -> float:
        """Estimated tokens not generated because responses were cut at these lengths."""
        cut = np.asarray(cut_lengths, dtype=np.int64)
        first = np.searchsorted(self.sorted, cut, side="right")
        count = len(self.sorted) - first
        mean = np.divide(self.suffix[first], count, out=cut.astype(np.float64), where=count > 0)
        return float(np.maximum(mean - cut, 0.0).sum())
