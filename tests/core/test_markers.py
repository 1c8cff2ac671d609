"""Markers: what counts as one, and that pieces, tokens and whole texts agree on where it ends."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trimtab.core.errors import ConfigError
from trimtab.core.markers import NAMED, Hit, MarkerSet, TokenMarkers
from trimtab.pocket.tokenizer import CharTokenizer

EVERYTHING = MarkerSet(tuple(NAMED), ("Wait", "Wait, no", "it, no", "."), whole_words=False)
WHOLE = MarkerSet(tuple(NAMED), ("Wait", "a", "a_b", "**"))

FRAGMENTS = (
    *(
        "a",
        "b",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        ".",
        "!",
        "。",
        "”",
        '"',
        ")",
        "1.",
        "12",
        "_",
        "é",
        "ß",
        "语",
        "🦉",
        "\ufffd",
    ),
    *(
        "Wait",
        "wait",
        "Waiting",
        ", no",
        "Hmm",
        "let me",
        " check",
        "let me check",
        "`",
        "```",
        "````",
        "~~~",
        "```py\n",
    ),
    *("Step 1", "## Step 2", "**Step", " 3", "step", "\\boxed{", "\\boxed {", "{", "}", "\\", "\\{", "</think>"),
    *("</", "answer>", "final answer", ":", " is", "The", "# "),
)
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join)


def found(markers: MarkerSet, text: str) -> list[str]:
    return [text[hit.start : hit.end] for hit in markers.find(text)]


def named(name: str, text: str) -> list[str]:
    return found(MarkerSet((name,)), text)


def words(text: str, *these: str, whole: bool = True) -> list[str]:
    return found(MarkerSet(words=these, whole_words=whole), text)


# ---------------------------------------------------------------- what is a marker


def test_whole_words_are_not_part_of_longer_ones() -> None:
    text = "Wait. Waiting, await, Wait_a, wait, (Wait) Wait"
    assert [hit.start for hit in MarkerSet(words=("Wait",)).find(text)] == [0, 37, 43]
    assert len(words(text, "Wait", whole=False)) == 5


def test_edges_that_are_no_letters_need_no_boundary() -> None:
    assert words("x####42", "####") == ["####"]
    assert words("a**b** ", "**") == ["**", "**"]


def test_of_overlapping_words_the_first_complete_counts() -> None:
    assert words("let me check", "let me check", "me") == ["me"]
    assert words("Wait, no", "Wait", "Wait, no") == ["Wait"]
    assert words("aab", "aab", "ab", whole=False) == ["aab"]  # complete together: the longest
    assert words("aaaa", "aa", whole=False) == ["aa", "aa"]


def test_reflection_words_in_any_case() -> None:
    text = "WAIT. hmm... Let me Check, waiting; Alternatively"
    assert named("reflection", text) == ["WAIT", "hmm", "Let me Check", "Alternatively"]


def test_paragraphs_are_blank_lines_after_content() -> None:
    markers = MarkerSet(("paragraph",))
    assert [text.strip() for text in _cut(markers, "a\n\n\n\nb\n\n")] == ["a", "b"]
    assert [text.strip() for text in _cut(markers, "\n\na\n \t\nb\r\n\r\nc")] == ["a", "b", "c"]
    assert _cut(markers, "no blank\nlines") == ["no blank\nlines"]
    assert _cut(markers, " \n\n") == []
    assert _cut(markers, "") == []
    assert named("paragraph", "a\n\n\n\nb\n\n") == ["\n\n", "\n\n"]


def test_blank_lines_in_code_are_no_paragraphs() -> None:
    code = "text\n\n```python\nx = 1\n\ny = 2\n```\n\nmore\n\n~~~\n```\n\n~~~"
    assert len(_cut(MarkerSet(("paragraph",)), code)) == 4
    assert named("code-fence", code) == ["```", "```", "~~~", "~~~"]
    assert named("code-fence", "````\n```\n\n````\n") == ["````", "````"]
    assert named("code-fence", "```inline``` is none\n  ```py\nx\n  ``` \n") == ["```", "```"]
    assert len(_cut(MarkerSet(("paragraph",)), "a\n```x```\n\nb")) == 2


def test_numbered_headings_begin_steps() -> None:
    text = "Plan.\nStep 1: add\nStep 2: halve\n\n### Step 3\ntake it\n**Step 4** end\nStepwise 5\n```\nStep 6\n```"
    assert [piece.split("\n")[0] for piece in _cut(MarkerSet(("step",)), text)] == [
        "Plan.",
        "Step 1: add",
        "Step 2: halve",
        "### Step 3",
        "**Step 4** end",
    ]
    assert len(_cut(MarkerSet(("paragraph",)), text)) == 2


def test_sentences() -> None:
    text = 'He said "go." Then 3.5 is it?! See e.g. this.\n1. First\n 12. Second one is 5. (Yes.) 好。“对。”x… end'
    assert named("sentence", text) == ['."', "?!", ".", ".", ".", ".)", "。", "。”", "…"]
    assert named("sentence", "no end.") == ["."]


def test_lines() -> None:
    assert named("line", "a\n\n \nb\nc") == ["\n", "\n"]


def test_boxes_close_at_their_brace() -> None:
    text = r"so \boxed{\frac{1}{2}} and \boxed {a\}b} and \boxed{\boxed{3}} but \boxed{4"
    assert named("boxed", text) == [r"\boxed{\frac{1}{2}}", r"\boxed {a\}b}", r"\boxed{\boxed{3}}"]
    assert named("answer", r"The final answer is \boxed{5}.</answer>") == [
        "final answer is",
        r"\boxed{5}",
        "</answer>",
    ]


def test_end_of_thought() -> None:
    assert named("think-end", "a</think>b") == ["</think>"]


def _cut(markers: MarkerSet, text: str) -> list[str]:
    return [text[start:end] for start, end in markers.segments(text)]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MarkerSet(("reflecton",)), "Did you mean 'reflection'"),
        (lambda: MarkerSet(words=("",)), "at least one character"),
        (lambda: MarkerSet(words=("a\ufffd",)), "U\\+FFFD"),
        (lambda: MarkerSet(), "at least one name or word"),
    ],
)
def test_bad_sets_are_refused(build: Callable[[], MarkerSet], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


# ---------------------------------------------------------------- against plain rules


@given(text=texts)
@settings(max_examples=100, deadline=None)
def test_words_agree_with_a_plain_search(text: str) -> None:
    assert words(text, "Wait", "Hmm") == re.findall(r"(?<!\w)(?:Wait|Hmm)(?!\w)", text)


@given(text=texts.filter(lambda text: "`" not in text and "~" not in text))
@settings(max_examples=100, deadline=None)
def test_paragraphs_agree_with_a_plain_split(text: str) -> None:
    plain = [part.strip() for part in re.split(r"\n[^\S\n]*\n\s*", text)]
    assert [part.strip() for part in _cut(MarkerSet(("paragraph",)), text)] == [part for part in plain if part]


@given(text=texts)
@settings(max_examples=100, deadline=None)
def test_every_step_marker_closes_one_step(text: str) -> None:
    for name in ("step", "paragraph", "line"):
        markers = MarkerSet((name,))
        hits, spans = markers.find(text), markers.segments(text)
        closed = [end for _, end in spans if end in {hit.end for hit in hits}]
        assert closed == [hit.end for hit in hits]
        assert len(spans) - len(hits) in (0, 1)  # an open last step


# ---------------------------------------------------------------- pieces of text


def streamed(markers: MarkerSet, pieces: Sequence[str]) -> list[Hit]:
    stream = markers.stream()
    return [hit for piece in pieces for hit in stream.feed(piece)] + stream.finish()


def split(text: str, cuts: Sequence[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize("markers", [EVERYTHING, WHOLE], ids=["parts", "whole"])
@given(text=texts, cuts=st.lists(st.integers(0, 200), max_size=8))
@example(text="a\nStep 1", cuts=[2, 3, 7])
@example(text="Wait, no", cuts=[4])
@example(text="\\boxed{\\}}", cuts=[8])
@settings(max_examples=150, deadline=None)
def test_pieces_and_the_whole_agree(markers: MarkerSet, text: str, cuts: list[int]) -> None:
    whole = markers.find(text)
    for pieces in (split(text, cuts), list(text), [text]):
        assert sorted(streamed(markers, pieces), key=_order) == sorted(whole, key=_order)


def _order(hit: Hit) -> tuple[int, int, str]:
    return hit.end, hit.start, hit.kind


@pytest.mark.parametrize("markers", [EVERYTHING, WHOLE], ids=["parts", "whole"])
@given(text=texts)
@settings(max_examples=150, deadline=None)
def test_a_marker_comes_no_later_than_it_must(markers: MarkerSet, text: str) -> None:
    """While nothing is undecided, all markers that end in what was fed have been returned."""
    stream, seen = markers.stream(), []
    whole = markers.find(text)
    for index, character in enumerate(text):
        seen += stream.feed(character)
        if not stream.undecided:
            due = [hit for hit in whole if hit.end <= index + 1]
            assert sorted(seen, key=_order) == sorted(due, key=_order)


def test_long_texts_stay_cheap() -> None:
    """A text without any line end or marker keeps only a bounded tail, except for its open line."""
    stream = MarkerSet(("sentence", "reflection", "boxed", "answer")).stream()
    for _ in range(2000):
        stream.feed("word after word ")
    assert len(stream._text) < 100


# ---------------------------------------------------------------- tokens


class ByteTokenizer:
    """256 bytes and some longer strings of bytes, among them such that break characters."""

    longer = (
        b"Wait",
        b" wait",
        b"\n\n",
        b".\n\n",
        b"ing",
        b"\\boxed",
        b"{\\",
        b"```",
        b"\xf0\x9f",
        b"\xa6\x89 W",
        b"\n\nWait\n\n",
    )

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.bytes_of(index) for index in ids).decode("utf-8", errors="replace")

    def bytes_of(self, index: int) -> bytes:
        return bytes([index]) if index < 256 else self.longer[index - 256] if index < 300 else b""

    def encode(self, text: str, choice: np.random.Generator) -> list[int]:
        """Ids of a text, longer strings taken at random where they fit, and now and then an id without text."""
        raw, ids = text.encode(), []
        while raw:
            fits = [256 + i for i, piece in enumerate(self.longer) if raw.startswith(piece)] + [raw[0], 300]
            ids.append(int(choice.choice(fits)))
            raw = raw[len(self.bytes_of(ids[-1])) :]
        return ids


BYTES = ByteTokenizer()


@cache
def real_tokenizer(kind: str) -> tuple[Callable[[Sequence[int]], str], Callable[[str], list[int]], int]:
    """A small tokenizer of the `tokenizers` library: byte-level as GPT-2's, or with byte fallback as Llama 2's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    corpus = ["Wait, let me check. Step 1: so x.\n\nHmm 好。 é \\boxed{42} </think> the final answer is"] * 3
    if kind == "byte-level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    else:
        vocab = {f"<0x{value:02X}>": value for value in range(256)}
        pieces = [*"▁.,:{}\\</>", *map(chr, range(97, 123)), "W", "S", "▁W", "ai", "t", "▁Wai", "▁Wait"]
        for piece in pieces:
            vocab.setdefault(piece, len(vocab))
        merges = [("▁", "W"), ("a", "i"), ("▁W", "ai"), ("▁Wai", "t")]
        tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer.decode, lambda text: tokenizer.encode(text).ids, tokenizer.get_vocab_size()


def expected(markers: MarkerSet, decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[tuple[str, int]]:
    """Kind and token of every marker: decode all prefixes, and take the first that holds the marker."""
    text = decode(ids)
    sizes = [len(decode(ids[: n + 1]).rstrip("\ufffd")) for n in range(len(ids))]
    ends = np.maximum.accumulate([0, *sizes]).tolist()[1:]  # an incomplete character can hide those before it
    return [(hit.kind, bisect_left(ends, hit.end)) for hit in markers.find(text)]


def chunks(ids: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    edges = np.minimum(np.cumsum([0, *sizes, len(ids)]), len(ids)).tolist()
    return [ids[a:b] for a, b in pairwise(edges)]


def streamed_tokens(tokens: TokenMarkers, pieces: Sequence[Sequence[int]]) -> list[Hit]:
    stream = tokens.stream()
    return [hit for piece in pieces for hit in stream.feed(piece)] + stream.finish()


def check_tokens(
    tokens: TokenMarkers, decode: Callable[[Sequence[int]], str], ids: Sequence[int], sizes: Sequence[int]
) -> None:
    whole = tokens.find(ids)
    assert [(hit.kind, hit.token) for hit in whole] == expected(tokens.markers, decode, ids)
    for pieces in (chunks(ids, sizes), [[index] for index in ids]):
        assert sorted(streamed_tokens(tokens, pieces), key=_order) == sorted(whole, key=_order)
    assert len(tokens.segments(ids)) == len(tokens.markers.segments(decode(ids)))


BYTE_TOKENS = [TokenMarkers(markers, BYTES.decode) for markers in (EVERYTHING, WHOLE)]
sizes_of_chunks = st.lists(st.integers(0, 7), max_size=10)


@pytest.mark.parametrize("tokens", BYTE_TOKENS, ids=["parts", "whole"])
@given(text=texts, seed=st.integers(0, 2**32 - 1), sizes=sizes_of_chunks)
@settings(max_examples=100, deadline=None)
def test_tokens_and_their_text_agree(tokens: TokenMarkers, text: str, seed: int, sizes: list[int]) -> None:
    check_tokens(tokens, BYTES.decode, BYTES.encode(text, np.random.default_rng(seed)), sizes)


@pytest.mark.parametrize("tokens", BYTE_TOKENS, ids=["parts", "whole"])
@given(ids=st.lists(st.integers(0, 266), max_size=60), sizes=sizes_of_chunks)
@example(ids=[0xE2] * 70 + list(b" Wait. "), sizes=[5, 7])
@example(ids=[0xE2, 0x82, *b"Wait\n", 0xC3, *b"\nb"], sizes=[1, 1])
@settings(max_examples=100, deadline=None)
def test_bytes_that_are_no_text_are_survived(tokens: TokenMarkers, ids: list[int], sizes: list[int]) -> None:
    whole = tokens.find(ids)
    for pieces in (chunks(ids, sizes), [[index] for index in ids]):
        assert sorted(streamed_tokens(tokens, pieces), key=_order) == sorted(whole, key=_order)
    assert all(0 <= hit.token < len(ids) for hit in whole)


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
@given(text=texts.map(str.strip), sizes=sizes_of_chunks)
@example(text="。é!", sizes=[])
@settings(max_examples=60, deadline=None)
def test_tokenizers_of_the_library(kind: str, text: str, sizes: list[int]) -> None:
    decode, encode, _ = real_tokenizer(kind)
    check_tokens(TokenMarkers(EVERYTHING, decode), decode, encode(text), sizes)


def test_a_tokenizer_whose_pieces_depend_on_their_neighbours() -> None:
    """A word-level decoder that puts spaces between words but not before punctuation: sizes do not add up."""
    vocabulary = ["Wait", ".", ",", "no", "we", "check"]

    def decode(ids: Sequence[int]) -> str:
        return re.sub(r" ([.,])", r"\1", " ".join(vocabulary[index] for index in ids))

    tokens = TokenMarkers(MarkerSet(("sentence",), ("Wait", "no")), decode)
    ids = [0, 2, 3, 1, 4, 5, 1, 0]
    assert decode(ids) == "Wait, no. we check. Wait"
    check_tokens(tokens, decode, ids, [2, 1, 3])
    assert [hit.token for hit in tokens.find(ids)] == [0, 2, 3, 6, 7]


def test_several_tokens_a_marker_and_several_markers_a_token() -> None:
    tokens = TokenMarkers(MarkerSet(("paragraph",), ("Wait",)), BYTES.decode)
    both = 256 + BYTES.longer.index(b"\n\nWait\n\n")
    ids = [*b"a", both, *b"b\n", *b"\nW", *b"a", *b"it!"]
    assert [(hit.kind, hit.token) for hit in tokens.find(ids)] == [
        ("paragraph", 1),
        ("word", 1),
        ("paragraph", 1),
        ("paragraph", 4),
        ("word", 8),
    ]
    assert TokenMarkers(MarkerSet(("paragraph",)), BYTES.decode).segments(ids) == [(0, 2), (1, 2), (2, 5), (5, 10)]


def test_a_stop_at_the_nth_step_leaves_n_steps() -> None:
    tokens = TokenMarkers(MarkerSet(("step",)), BYTES.decode)
    ids = list(b"one\n\ntwo\nStep 3: x\n\n\nfour\n\nfive")
    hits = tokens.find(ids)
    assert len(hits) == 4
    for number, hit in enumerate(hits, start=1):
        cut = ids[: hit.token + 1]
        assert len(tokens.segments(cut)) == number
        assert tokens.segments(ids)[number - 1] == tokens.segments(cut)[number - 1]


def test_character_tokens_of_the_pocket_model() -> None:
    tokenizer = CharTokenizer()
    tokens = TokenMarkers(MarkerSet(("line",), ("#",)), tokenizer.decode)
    ids = [*tokenizer.encode("1+2=3\n#3"), tokenizer.eos_id]
    assert [(hit.kind, hit.token) for hit in tokens.find(ids)] == [("line", 5), ("word", 6)]
    complete = tokens.complete(tokenizer.vocab_size)
    assert np.flatnonzero(complete).tolist() == tokenizer.encode("#")
    assert np.flatnonzero(tokens.suspects(tokenizer.vocab_size)).tolist() == sorted(tokenizer.encode("\n#"))


@given(ids=st.lists(st.integers(0, 266), max_size=40))
@settings(max_examples=100, deadline=None)
def test_markers_end_in_suspects_only(ids: list[int]) -> None:
    for tokens in BYTE_TOKENS:
        suspect = tokens.suspects(267)
        assert all(suspect[ids[hit.token]] for hit in tokens.find(ids))


def test_tokens_that_cannot_complete_a_marker_are_not_decoded() -> None:
    calls = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal calls
        calls += 1
        return BYTES.decode(ids)

    tokens = TokenMarkers(MarkerSet(("paragraph",), ("Wait",)), decode)
    tokens.suspects(256)
    calls, stream = 0, tokens.stream()
    for index in b"plain words " * 50:
        assert stream.feed([index]) == []
    assert calls == 0
    assert [hit.token for hit in stream.feed(list(b"\n\n"))] == [601]


def test_empty_responses() -> None:
    tokens = BYTE_TOKENS[0]
    assert tokens.find([]) == []
    assert tokens.segments([]) == []
    assert tokens.stream().finish() == []
    assert MarkerSet(("step",)).find("") == []


def test_a_long_response_is_quick() -> None:
    decode, encode, _ = real_tokenizer("byte-level")
    ids = encode("Wait, let me check the sum of 12 and 30.\n\nStep 1: it is 42. 好。\n" * 400)
    tokens = TokenMarkers(MarkerSet(("step", "reflection", "sentence")), decode)
    tokens.find(ids)
    start = time.process_time()
    hits = tokens.find(ids)
    assert time.process_time() - start < 0.5
    assert len(hits) > 1500


def test_markers_do_not_import_torch() -> None:
    modules = ", ".join(f"trimtab.core.{name}" for name in ("markers", "history", "ledger", "budget"))
    subprocess.run([sys.executable, "-c", f"import sys, {modules}; assert 'torch' not in sys.modules"], check=True)
