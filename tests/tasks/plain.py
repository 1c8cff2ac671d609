"""Tokenizers of a few lines, with and without a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


class BytesTokenizer:
    """One token a byte; id 0 is padding and end of sequence."""

    name = "bytes"
    eos_ids = frozenset({0})
    pad_id = 0
    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i).decode(errors="replace")

    def apply_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode("".join(f"[{m['role']}]{m['content']}" for m in messages) + "[assistant]")

    def save(self, folder: str | Path) -> None:
        raise NotImplementedError


class ChatTokenizer(BytesTokenizer):
    has_chat_template = True


class TemplateTokenizer(BytesTokenizer):
    chat_template = "{{ messages }}"
