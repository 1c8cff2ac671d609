"""A character tokenizer: one token a character, 64 ids, nothing to download."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from trimtab.core.errors import DataError

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz \n+-*/=()#,;:.?!<>&|^_'%\"~"
PAD, EOS = "<pad>", "<eos>"
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class CharTokenizer:
    """Ids 0 and 1 are padding and end of sequence; the 62 characters of :data:`CHARACTERS` follow."""

    name = "pocket-char"
    pad_id = 0
    eos_id = 1
    eos_ids = frozenset({1})
    vocab_size = 2 + len(CHARACTERS)

    def __init__(self) -> None:
        self._id_of = {character: index + 2 for index, character in enumerate(CHARACTERS)}

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without an end of sequence. Raises DataError naming a character it does not know."""
        try:
            return [self._id_of[character] for character in text]
        except KeyError as error:
            raise self._unknown(text, error.args[0]) from None

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``; padding and end of sequence decode to nothing. Raises DataError for an id out of range."""
        characters = []
        for raw in ids:
            index = int(raw)
            if not 0 <= index < self.vocab_size:
                raise DataError(f"token id {index} is not in the {self.name} vocabulary (0 to {self.vocab_size - 1})")
            characters.append(CHARACTERS[index - 2] if index >= 2 else "")
        return "".join(characters)

    def apply_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of the contents of all messages, joined: the pocket models know no roles."""
        return self.encode("".join(message["content"] for message in messages))

    def save(self, folder: str | Path) -> None:
        """Write Hugging Face tokenizer files, so that other loaders read a pocket model too."""
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

        from trimtab.model.tokenizer import HFTokenizer

        backend = Tokenizer(models.WordLevel({PAD: self.pad_id, EOS: self.eos_id, **self._id_of}, unk_token=PAD))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        backend.decoder = decoders.Fuse()
        backend.add_special_tokens([PAD, EOS])
        HFTokenizer(backend, self.eos_ids, self.pad_id, _CHAT_TEMPLATE, name=self.name).save(folder)

    def _unknown(self, text: str, character: str) -> DataError:
        hint = f" Write {character.lower()!r} instead." if character.lower() in self._id_of else ""
        return DataError(
            f"character {character!r} at position {text.index(character)} is not in the {self.name} vocabulary.{hint} "
            f"Allowed: {CHARACTERS!r}"
        )
