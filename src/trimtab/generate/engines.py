"""The rollout engine a run asks for."""

from __future__ import annotations

from typing import Any

import torch

from trimtab.core.config import RunConfig
from trimtab.core.errors import invalid
from trimtab.core.part import Needs
from trimtab.generate.external import check_signals
from trimtab.generate.http_engine import HttpEngine
from trimtab.generate.protocol import Engine
from trimtab.generate.torch_engine import TorchEngine
from trimtab.generate.vllm_engine import VLLMEngine
from trimtab.model.transformer import Transformer


def build_engine(
    settings: RunConfig, policy: Transformer, tokenizer: Any, device: torch.device, needs: Needs | None = None
) -> Engine:
    """The engine of ``settings.engine``, with the policy's weights.

    What a run would fail at later is refused here: a signal that the engine cannot give, a server that takes no new
    weights. ``needs`` are those of the recipe's parts.

    Raises:
        ConfigError: settings that contradict each other.
        EngineError: the server cannot be reached, or cannot take new weights although the run trains.
        MissingExtraError: a package is missing.
    """
    config = settings.engine
    needs = needs or Needs()
    if config.url and config.name != "http":
        raise invalid("engine.url", config.url, "nothing unless engine.name=http", f"engine.name is {config.name!r}.")
    max_context = policy.config.max_positions
    if config.name == "torch":
        return TorchEngine(
            policy,
            eos_ids=tokenizer.eos_ids,
            pad_id=tokenizer.pad_id,
            num_slots=config.slots,
            prefill_tokens=config.prefill_tokens,
        )
    check_signals(config.name, needs.signals, max(needs.topk, needs.teacher_topk))
    if config.name == "vllm":
        return VLLMEngine(policy, tokenizer, config, eos_ids=tokenizer.eos_ids, max_context=max_context, device=device)
    engine = HttpEngine(
        config,
        tokenizer=tokenizer,
        eos_ids=tokenizer.eos_ids,
        vocab_size=policy.config.vocab_size,
        max_context=max_context,
        device=device,
    )
    if settings.steps:
        engine.check_updates()
        engine.sync(policy, 0)  # the server's weights are unknown until it has taken ours
    return engine
