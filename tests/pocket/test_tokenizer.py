from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.core.errors import DataError
from trimtab.model.tokenizer import HFTokenizer, Tokenizer
from trimtab.pocket.tokenizer import CHARACTERS, CharTokenizer

tokenizer = CharTokenizer()


def test_vocabulary_is_small_and_its_specials_are_distinct() -> None:
    assert tokenizer.vocab_size == 64
    assert len(set(CHARACTERS)) == len(CHARACTERS) == 62
    assert tokenizer.pad_id not in tokenizer.eos_ids
    assert tokenizer.eos_ids == {tokenizer.eos_id}


@given(st.text(alphabet=CHARACTERS))
def test_round_trip(text: str) -> None:
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert not set(ids) & {tokenizer.pad_id, tokenizer.eos_id}
    assert tokenizer.decode([*ids, tokenizer.eos_id, tokenizer.pad_id]) == text


def test_unknown_character_is_named_with_its_place_and_a_way_out() -> None:
    with pytest.raises(DataError, match=r"'A' at position 2 .* Write 'a' instead"):
        tokenizer.encode("1+A")
    with pytest.raises(DataError, match="'€' at position 0"):
        tokenizer.encode("€")


@pytest.mark.parametrize("index", [-1, 64])
def test_id_out_of_range_is_an_error(index: int) -> None:
    with pytest.raises(DataError, match=str(index)):
        tokenizer.decode([3, index])


def test_chat_concatenates_contents() -> None:
    messages = [{"role": "system", "content": "1+"}, {"role": "user", "content": "2="}]
    assert tokenizer.apply_chat(messages) == tokenizer.encode("1+2=")
    assert tokenizer.apply_chat([]) == []


def test_it_follows_the_tokenizer_protocol() -> None:
    assert isinstance(tokenizer, Tokenizer)


def test_saved_files_give_the_same_tokenizer(tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    read = HFTokenizer.from_folder(tmp_path)
    assert read.encode(CHARACTERS) == tokenizer.encode(CHARACTERS)
    assert read.decode([*read.encode(CHARACTERS), tokenizer.eos_id]) == CHARACTERS
    assert (read.eos_ids, read.pad_id, read.vocab_size) == ({tokenizer.eos_id}, tokenizer.pad_id, tokenizer.vocab_size)
    messages = [{"role": "user", "content": "gcd(4,2)="}]
    assert read.apply_chat(messages) == tokenizer.apply_chat(messages)
