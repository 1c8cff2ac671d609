"""AdamW on float32 master weights, whatever the model computes in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class MasterAdamW:
    """AdamW (decoupled weight decay) with gradient clipping and linear warm-up, which refuses an unusable gradient.

    A float32 parameter is its own master. Any other has a float32 copy that is updated and written back: in bfloat16 a
    step of 1e-6 would be rounded away. ``collect`` after each backward pass adds up the gradients in float32.

    Attributes:
        step_count: steps taken.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        grad_clip: float,
        warmup_steps: int,
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.masters = [p if p.dtype == torch.float32 else p.detach().float() for p in self.parameters]
        self.lr, self.grad_clip, self.warmup_steps = lr, grad_clip, warmup_steps
        self.step_count = 0
        self.adamw = torch.optim.AdamW(self.masters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)

    @property
    def next_lr(self) -> float:
        """Learning rate of the next step: rises linearly and reaches ``lr`` at step ``warmup_steps`` (from 1)."""
        return self.lr * min(1.0, (self.step_count + 1) / max(1, self.warmup_steps))

    @property
    def last_lr(self) -> float:
        """Learning rate of the last step."""
        rate: float = self.adamw.param_groups[0]["lr"]
        return rate

    def collect(self) -> None:
        """Add the model's new gradients to those of the masters."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter is not master and parameter.grad is not None:
                master.grad = parameter.grad.float() if master.grad is None else master.grad + parameter.grad
                parameter.grad = None

    def step(self) -> tuple[float, bool]:
        """Clip, update and clear the gradients; returns their norm before clipping, and whether the step was taken.

        With a norm that is not finite, or exactly 0 (momentum and decay alone would move the weights), nothing but the
        gradients changes. Waits for the device once.
        """
        norm = nn.utils.clip_grad_norm_(self.masters, self.grad_clip or math.inf).item()
        taken = math.isfinite(norm) and norm > 0.0
        if taken:
            for group in self.adamw.param_groups:
                group["lr"] = self.next_lr
            self.adamw.step()
            self.step_count += 1
            self._write_back()
        self.clear()
        return norm, taken

    def clear(self) -> None:
        """Forget all gradients."""
        for tensor in (*self.parameters, *self.masters):
            tensor.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Moments, masters that differ from the parameters, and the step count; tensors are shared, not copied."""
        return {"adamw": self.adamw.state_dict(), "masters": self._copies(), "step_count": self.step_count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where :meth:`state_dict` was taken; the model's weights must be loaded separately."""
        self.adamw.load_state_dict(state["adamw"])
        with torch.no_grad():
            for own, saved in zip(self._copies(), state["masters"], strict=True):
                own.copy_(saved)
        self.step_count = state["step_count"]

    def _copies(self) -> list[Tensor]:
        pairs = zip(self.parameters, self.masters, strict=True)
        return [master for parameter, master in pairs if master is not parameter]

    @torch.no_grad()
    def _write_back(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter is not master:
                parameter.copy_(master)
