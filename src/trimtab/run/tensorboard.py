"""TensorBoard events beside metrics.jsonl, when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.core.errors import missing_extra


class TensorBoard:
    """Writes the numbers of each step under ``<run>/tensorboard``; a resumed run goes on from its step.

    Raises:
        MissingExtraError: the package is not installed.
    """

    def __init__(self, folder: Path, resumed_after: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing_extra("tensorboard", "tensorboard", "output.tensorboard=true") from error
        # purge_step hides the events of steps that a killed run had written beyond its last checkpoint
        self._writer: Any = SummaryWriter(str(folder), purge_step=resumed_after + 1)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """All numbers of a step."""
        for name, value in metrics.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()
