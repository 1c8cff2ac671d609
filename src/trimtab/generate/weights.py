"""Weights handed to another program through the file system, and whether they arrived."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from safetensors.torch import save_file

from trimtab.core.errors import EngineError
from trimtab.core.records import Prompt
from trimtab.generate.protocol import Engine, Request, Sampling
from trimtab.generate.torch_engine import TorchEngine
from trimtab.model.load import save_pretrained
from trimtab.model.tokenizer import Tokenizer
from trimtab.model.transformer import Transformer

_PROMPTS, _LENGTH = 4, 8  # of a comparison
LARGEST_NOISE = 0.25  # nats on average; more is another model, not another precision
LEAST_NOISE = 2e-4


class WeightFolders:
    """One Hugging Face folder a version under ``root`` (empty = a temporary folder); only the newest is kept.

    Each version has a folder of its own, so that a reader on another machine cannot see a cached mixture of two. The
    newest stays, as servers remember the path they loaded from. A tied output layer is written out as well, for engines
    that were told to hold it apart.
    """

    def __init__(self, root: str = "") -> None:
        self._scratch = None if root else tempfile.TemporaryDirectory(prefix="trimtab-weights-")
        self._root = Path(self._scratch.name if self._scratch else root).absolute()
        self._newest: Path | None = None

    def save(self, model: Transformer, tokenizer: Tokenizer | None, label: str) -> Path:
        """Write the folder ``label`` and drop the one before it."""
        folder = self._root / label
        save_pretrained(model, tokenizer, folder)
        if model.config.tie_embeddings:
            head = {"lm_head.weight": model.head_weight.detach().to("cpu", copy=True)}
            save_file(head, folder / "model-head.safetensors", metadata={"format": "pt"})
        if self._newest not in (None, folder):
            shutil.rmtree(str(self._newest), ignore_errors=True)
        self._newest = folder
        return folder


def weight_gap(engine: Engine, model: Transformer) -> float:
    """Mean absolute difference (nats) of the log-probs that ``engine`` and ``model`` give a few greedy tokens."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, model.config.vocab_size, size=(_PROMPTS, _LENGTH)).tolist()
    requests = [
        Request(f"compare-{i}", Prompt(f"compare-{i}", "", tuple(tokens)), 0, i, _LENGTH, Sampling(temperature=0.0))
        for i, tokens in enumerate(prompts)
    ]
    done = engine.generate(requests)
    ours = TorchEngine(model, eos_ids=(), pad_id=0).score(prompts, [c.tokens.tolist() for c in done])
    gaps = np.concatenate([np.abs(mine - c.logprobs) for mine, c in zip(ours, done, strict=True)])
    return float(np.nanmean(gaps))


class WeightCheck:
    """Watches that an engine's log-probs follow the policy's from update to update.

    An engine may load an update in part without a word (an output layer it keeps a packed copy of, tensors it does not
    know): training would go on with wrong importance ratios. The first comparison measures what precision alone makes
    different; a later one that differs much more is an update that did not arrive.
    """

    def __init__(self) -> None:
        self.noise: float | None = None

    def check(self, engine: Engine, model: Transformer, version: int) -> None:
        """Compare once; raise EngineError when the weights are others."""
        gap = weight_gap(engine, model)
        if self.noise is None:
            if not gap <= LARGEST_NOISE:
                raise EngineError(
                    f"the {engine.name} engine has other weights than the policy: the log-probs of the same tokens "
                    f"differ by {gap:.3g} nats on average. {_hint(model)}"
                )
            self.noise = gap
        elif not gap <= max(4 * self.noise, LEAST_NOISE):
            raise EngineError(
                f"the weights of version {version} did not arrive whole at the {engine.name} engine: the log-probs of "
                f"the same tokens differ by {gap:.3g} nats on average, {self.noise:.3g} at the start. {_hint(model)}"
            )


def _hint(model: Transformer) -> str:
    if not model.config.tie_embeddings:
        return "Does it serve the same architecture?"
    return (
        "Does it serve the same architecture? vLLM's CPU build keeps an old copy of an output layer that is tied to "
        "the embedding: serve a folder that trimtab wrote, with --hf-overrides '{\"tie_word_embeddings\": false}'."
    )
