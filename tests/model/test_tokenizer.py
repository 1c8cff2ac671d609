from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from trimtab.core.errors import ConfigError, DataError
from trimtab.model.load import SMOLLM2, resolve
from trimtab.model.tokenizer import HFTokenizer, Tokenizer
from trimtab.model.transformer import Transformer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = ["the cat sat", "Hello  World\n\n x=3.14", "naïve — 北京 🙂", "", " leading", "tabs\tand 12345"]
MESSAGES = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]


def small_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the cat sat on the mat " * 20, "user assistant system"], trainer)
    return backend


def small() -> HFTokenizer:
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    return HFTokenizer(small_backend(), [2, 0], chat_template=CHATML, special_tokens=special, name="small")


def folder_with(folder: Path, **files: dict[str, Any]) -> Path:
    small_backend().save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_it_fits_the_protocol() -> None:
    assert isinstance(small(), Tokenizer)


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_and_no_special_token_is_added(text: str) -> None:
    tokenizer = small()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & {0, 1, 2}


def test_special_tokens_are_left_out_of_decoded_text() -> None:
    tokenizer = small()
    assert tokenizer.decode([1, *tokenizer.encode("cat"), 2]) == "cat"
    assert tokenizer.encode("cat<|im_end|>")[-1] == 2


def test_chat_ends_where_the_assistant_speaks() -> None:
    tokenizer = small()
    text = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\nsat<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat(MESSAGES) == tokenizer.encode(text)


def test_save_and_load_give_the_same_tokenizer(tmp_path: Path) -> None:
    tokenizer = small()
    tokenizer.save(tmp_path)
    again = HFTokenizer.from_folder(tmp_path)
    assert (again.eos_ids, again.pad_id, again.vocab_size) == (frozenset({0, 2}), 0, tokenizer.vocab_size)
    assert again.apply_chat(MESSAGES) == tokenizer.apply_chat(MESSAGES)
    assert [again.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    assert again.name == tmp_path.name


def test_transformers_reads_what_we_save(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = small()
    tokenizer.save(tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert reference.eos_token_id == 2
    assert [reference.encode(t, add_special_tokens=False) for t in TEXTS] == [tokenizer.encode(t) for t in TEXTS]
    chat = reference.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert tokenizer.apply_chat(MESSAGES) == reference.encode(chat, add_special_tokens=False)


def test_limits_stored_in_the_file_do_not_cut_or_pad_text(tmp_path: Path) -> None:
    backend = small_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    tokenizer = HFTokenizer.from_folder(tmp_path)
    assert tokenizer.decode(tokenizer.encode("the cat sat on the mat")) == "the cat sat on the mat"
    assert tokenizer.encode("") == []


@pytest.mark.parametrize(
    ("files", "eos_ids", "pad_id"),
    [
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, {2}, 2),
        ({"tokenizer_config": {"eos_token": {"content": "<|im_end|>"}, "pad_token": "<|endoftext|>"}}, {2}, 0),
        ({"config": {"eos_token_id": 0}, "tokenizer_config": {"eos_token": "<|im_end|>"}}, {0, 2}, 0),
        ({"generation_config": {"eos_token_id": [0, 2], "pad_token_id": 1}, "config": {"eos_token_id": 2}}, {0, 2}, 1),
    ],
)
def test_the_end_is_the_union_of_all_that_name_one(
    tmp_path: Path, files: dict[str, Any], eos_ids: set[int], pad_id: int
) -> None:
    tokenizer = HFTokenizer.from_folder(folder_with(tmp_path, **files))
    assert tokenizer.eos_ids == eos_ids
    assert tokenizer.pad_id == pad_id


def test_chat_template_files_and_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "cat"}]
    config = {"eos_token": "<|im_end|>", "chat_template": named}
    folder_with(tmp_path, tokenizer_config=config)
    assert HFTokenizer.from_folder(tmp_path).chat_template == "cat"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    tokenizer = HFTokenizer.from_folder(tmp_path)
    assert tokenizer.apply_chat(MESSAGES) == tokenizer.encode("the cat<|im_end|>")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{{ raise_exception('only user turns') }}", "only user turns"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{% if %}", "refused the messages"),
    ],
)
def test_templates_that_refuse_or_misbehave(template: str | None, message: str) -> None:
    tokenizer = HFTokenizer(small_backend(), [2], chat_template=template, name="small")
    with pytest.raises(DataError, match=message):
        tokenizer.apply_chat(MESSAGES)


def test_incomplete_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no tokenizer.json"):
        HFTokenizer.from_folder(tmp_path)
    with pytest.raises(DataError, match="names no end-of-sequence token"):
        HFTokenizer.from_folder(folder_with(tmp_path))
    with pytest.raises(DataError, match=r"special token id 5000 is outside 0\.\."):
        HFTokenizer.from_folder(folder_with(tmp_path, config={"eos_token_id": 5000}))
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(DataError, match="is not a tokenizer"):
        HFTokenizer.from_folder(tmp_path)


def metadata(pre: str, **more: Any) -> dict[str, Any]:
    content = json.loads(small_backend().to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in content["merges"]],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHATML,
        **more,
    }


def test_gguf_metadata_gives_the_tokenizer_it_came_from() -> None:
    tokenizer, original = HFTokenizer.from_gguf(metadata("gpt-2")), small()
    assert [tokenizer.encode(text) for text in TEXTS] == [original.encode(text) for text in TEXTS]
    assert tokenizer.apply_chat(MESSAGES) == original.apply_chat(MESSAGES)
    assert tokenizer.decode([2, *tokenizer.encode("cat")]) == "cat"
    assert tokenizer.eos_ids == {0, 2}  # the id named, and the document end that llama.cpp also stops at
    assert HFTokenizer.from_gguf(metadata("gpt-2", **{"tokenizer.ggml.padding_token_id": 1})).pad_id == 1


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "abc 12345\n", ["abc", "Ġ12345", "Ċ"]),
        ("smollm", "abc 12345\n", ["abc", "Ġ", "1", "2", "3", "4", "5", "Ċ"]),
        ("qwen2", "I'LL pay 12345!\n\n", ["I", "'LL", "Ġpay", "Ġ", "1", "2", "3", "4", "5", "!ĊĊ"]),
        ("llama-bpe", "I'LL pay 12345!\n\n", ["I", "'LL", "Ġpay", "Ġ", "123", "45", "!ĊĊ"]),
    ],
)
def test_each_way_of_cutting_text(pre: str, text: str, pieces: list[str]) -> None:
    backend = HFTokenizer.from_gguf(metadata(pre)).backend
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_unsupported_gguf_tokenizers_are_named() -> None:
    with pytest.raises(ConfigError, match=r"tokenizer.ggml.pre.*'tekken'.*smollm"):
        HFTokenizer.from_gguf(metadata("tekken"))
    with pytest.raises(ConfigError, match=r"tokenizer.ggml.model.*'llama'.*gpt2.*safetensors"):
        HFTokenizer.from_gguf({**metadata("gpt-2"), "tokenizer.ggml.model": "llama"})
    with pytest.raises(DataError, match=r"no tokenizer.ggml.tokens"):
        HFTokenizer.from_gguf({"tokenizer.ggml.model": "gpt2"})


def test_smollm2_encodes_as_transformers_does(smollm2: tuple[Transformer, Tokenizer]) -> None:
    transformers = pytest.importorskip("transformers")
    path = resolve(SMOLLM2)
    reference = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer = smollm2[1]
    texts = [*TEXTS, "def f(x):\n    return x ** 2  # 1,000.5", "<|im_start|>user\nHi<|im_end|>\n", "It's 2024-06-30"]
    assert [tokenizer.encode(text) for text in texts] == [
        reference.encode(text, add_special_tokens=False) for text in texts
    ]
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in TEXTS)


def test_smollm2_chat_and_ends(smollm2: tuple[Transformer, Tokenizer], tmp_path: Path) -> None:
    tokenizer = smollm2[1]
    assert tokenizer.eos_ids == {0, 2}
    assert tokenizer.vocab_size == 49152
    ids = tokenizer.apply_chat([{"role": "user", "content": "Hi"}])
    expected = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids == tokenizer.encode(expected)
    tokenizer.save(tmp_path)
    again = HFTokenizer.from_folder(tmp_path)
    assert again.apply_chat([{"role": "user", "content": "Hi"}]) == ids
    assert again.eos_ids == tokenizer.eos_ids
