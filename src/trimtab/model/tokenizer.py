"""Tokenizers: the interface every part uses, and its implementation over the `tokenizers` library.

End of sequence is a set: a chat model usually stops at its turn marker as well as at its document end, and a rollout
that runs past either is wasted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from trimtab.core.errors import DataError, unknown
from trimtab.core.files import read_object, write_text
from trimtab.core.lazy import lazy

if TYPE_CHECKING:
    import jinja2
    import tokenizers
else:
    tokenizers = lazy("tokenizers")

Message = Mapping[str, str]

# Control tokens that end a generation whatever the metadata calls them; GGUF files name only one id.
_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "</s>")
_GGUF_CONTROL, _GGUF_USER_DEFINED = 3, 4

# How text is cut before byte-pair merging, by the name llama.cpp stores in `tokenizer.ggml.pre`.
_GPT2_NAMES = ("default", "gpt-2")
_DIGIT_NAMES = ("smollm", "starcoder", "refact")
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_QWEN_NAMES = ("qwen2",)
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back.

    Attributes:
        name: for reports and run records.
        eos_ids: ids that end a generation.
        pad_id: id for filler that no result depends on.
        vocab_size: one more than the largest id.
    """

    @property
    def name(self) -> str: ...
    @property
    def eos_ids(self) -> frozenset[int]: ...
    @property
    def pad_id(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; no special tokens are added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens left out."""
        ...

    def apply_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation of `{"role": ..., "content": ...}`, ending where the assistant is to speak."""
        ...

    def save(self, folder: str | Path) -> None:
        """Write the files from which a Hugging Face loader, and ours, rebuild this tokenizer."""
        ...


class HFTokenizer:
    """A Hugging Face fast tokenizer with its chat template, without the `transformers` package."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eos_ids: Iterable[int],
        pad_id: int | None = None,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        name: str = "tokenizer",
    ) -> None:
        """
        Args:
            backend: the `tokenizers` object.
            eos_ids: at least one id.
            pad_id: None takes the smallest end-of-sequence id.
            chat_template: Jinja source.
            special_tokens: `bos_token`, `eos_token` and the like, as chat templates name them.

        Raises:
            DataError: no end-of-sequence id, or an id outside the vocabulary.
        """
        backend.no_truncation()  # some tokenizer.json files carry limits of their training, which would cut prompts
        backend.no_padding()
        self.backend = backend
        self.eos_ids = frozenset(eos_ids)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not self.eos_ids:
            raise DataError(f"tokenizer {name!r} names no end-of-sequence token, so no rollout could end")
        self.pad_id = min(self.eos_ids) if pad_id is None else pad_id
        outside = [i for i in (*self.eos_ids, self.pad_id) if not 0 <= i < self.vocab_size]
        if outside:
            raise DataError(f"tokenizer {name!r}: special token id {outside[0]} is outside 0..{self.vocab_size - 1}")
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})
        self.name = name

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; no special tokens are added, but those spelled out in `text` are recognised."""
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens left out."""
        return str(self.backend.decode(list(ids), skip_special_tokens=True))

    def apply_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation, ending with the generation prompt.

        Raises:
            DataError: the tokenizer has no chat template, or the template refuses the messages.
        """
        import jinja2

        try:
            text = self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self.special_tokens,
            )
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template of {self.name!r} refused the messages: {error}") from error
        return self.encode(text)

    @cached_property
    def _template(self) -> jinja2.Template:
        if self.chat_template is None:
            raise DataError(f"tokenizer {self.name!r} has no chat template; give prompts as text instead of messages")
        return _environment().from_string(self.chat_template)

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and generation_config.json, each atomically."""
        folder = Path(folder)
        eos_token = self.special_tokens.get("eos_token", self.backend.id_to_token(min(self.eos_ids)))
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.special_tokens,
            "eos_token": eos_token,
            "pad_token": self.backend.id_to_token(self.pad_id),
        }
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        generation = {"eos_token_id": sorted(self.eos_ids), "pad_token_id": self.pad_id}
        write_text(folder / "tokenizer.json", self.backend.to_str())
        write_text(folder / "tokenizer_config.json", json.dumps(config, indent=2, ensure_ascii=False))
        write_text(folder / "generation_config.json", json.dumps(generation, indent=2))

    @classmethod
    def from_folder(cls, folder: str | Path) -> HFTokenizer:
        """Read a Hugging Face model folder.

        The end-of-sequence set is the union of those named by generation_config.json, config.json and
        tokenizer_config.json.

        Raises:
            DataError: tokenizer.json is missing or unreadable, or no end-of-sequence token is named.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise DataError(f"{folder} has no tokenizer.json; only fast tokenizers are supported")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise DataError(f"{path} is not a tokenizer the installed `tokenizers` can read: {error}") from error
        config = _optional_json(folder / "tokenizer_config.json")
        model, generation = _optional_json(folder / "config.json"), _optional_json(folder / "generation_config.json")
        special = _special_tokens(config)
        eos_ids = [i for source in (generation, model) for i in _ids(source.get("eos_token_id"))]
        eos_ids += _ids(_id_of(backend, special.get("eos_token")))
        pads = [_id_of(backend, special.get("pad_token")), generation.get("pad_token_id"), model.get("pad_token_id")]
        pad_id = next((i for i in pads if i is not None and i >= 0), None)
        return cls(backend, eos_ids, pad_id, _chat_template(folder, config), special, folder.name)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], name: str = "gguf") -> HFTokenizer:
        """Build a byte-level BPE tokenizer from GGUF metadata.

        The end-of-sequence set holds the ids the metadata names and the control tokens that llama.cpp also ends at.

        Raises:
            DataError: the metadata holds no vocabulary or merges.
            ConfigError: another kind of tokenizer, or an unknown way of cutting text.
        """
        kind = metadata.get("tokenizer.ggml.model")
        if kind != "gpt2":
            raise unknown("tokenizer.ggml.model", kind, ["gpt2"], "Use the model's safetensors folder instead.")
        tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
        if not tokens or merges is None:
            raise DataError("the GGUF metadata holds no tokenizer.ggml.tokens or no tokenizer.ggml.merges")
        types = metadata.get("tokenizer.ggml.token_type") or []
        backend = _byte_level_bpe(tokens, merges, str(metadata.get("tokenizer.ggml.pre", "default")))
        control = [token for token, type_ in zip(tokens, types, strict=False) if type_ == _GGUF_CONTROL]
        user = [token for token, type_ in zip(tokens, types, strict=False) if type_ == _GGUF_USER_DEFINED]
        backend.add_special_tokens([tokenizers.AddedToken(t, normalized=False, special=True) for t in control])
        backend.add_tokens([tokenizers.AddedToken(t, normalized=False, special=False) for t in user])
        ids = {key: metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "eot", "eom", "padding")}
        eos_ids = {i for i in (ids["eos"], ids["eot"], ids["eom"]) if i is not None}
        eos_ids |= {i for i, token in enumerate(tokens) if token in _END_TOKENS and token in control}
        special = {f"{key}_token": tokens[ids[key]] for key in ("bos", "eos") if ids[key] is not None}
        return cls(backend, eos_ids, ids["padding"], metadata.get("tokenizer.chat_template"), special, name)


def _byte_level_bpe(tokens: Sequence[str], merges: Sequence[str], pre: str) -> tokenizers.Tokenizer:
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, pairs, ignore_merges=pre in _LLAMA3_NAMES))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(_cuts(pre))
    backend.decoder = tokenizers.decoders.ByteLevel()
    if pre in _QWEN_NAMES:
        backend.normalizer = tokenizers.normalizers.NFC()
    return backend


def _cuts(pre: str) -> list[Any]:
    cut = tokenizers.pre_tokenizers
    if pre in _GPT2_NAMES:
        return [cut.ByteLevel(add_prefix_space=False, use_regex=True)]
    if pre in _DIGIT_NAMES:
        return [cut.Digits(individual_digits=True), cut.ByteLevel(add_prefix_space=False, use_regex=True)]
    if pre in _LLAMA3_NAMES or pre in _QWEN_NAMES:
        digits = r"\p{N}{1,3}" if pre in _LLAMA3_NAMES else r"\p{N}"
        pattern = tokenizers.Regex(_SPLIT.format(digits=digits))
        return [cut.Split(pattern, behavior="isolated"), cut.ByteLevel(add_prefix_space=False, use_regex=False)]
    raise unknown("tokenizer.ggml.pre", pre, (*_GPT2_NAMES, *_DIGIT_NAMES, *_LLAMA3_NAMES, *_QWEN_NAMES))


def _environment() -> jinja2.Environment:
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    # A chat template is code from a model's author: it runs without access to anything of ours.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _optional_json(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The `*_token` entries; older files spell a token as a dictionary with its content."""
    found = {key: value.get("content") if isinstance(value, dict) else value for key, value in config.items()}
    return {key: value for key, value in found.items() if key.endswith("_token") and isinstance(value, str)}


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _id_of(backend: tokenizers.Tokenizer, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]
