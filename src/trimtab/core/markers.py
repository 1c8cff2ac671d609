r"""Markers in responses: steps, reflection words, answers, code fences, sentence and line ends.

One service for stopping and for counting, so that both see the same text the same way. A marker is found in text by a
scanner that only looks back, apart from the few characters that decide whether it stands (``Waiting`` is not ``Wait``);
it is therefore found at the same place whether the text comes at once or in pieces.

Named sets:

========== =====================================================================================================
paragraph  a blank line outside fenced code after a line with content; further blank lines belong to it
step       the same, or the line end before a line that opens with "Step" and a number (as a heading or bold, too)
line       the end of a line with content
sentence   sentence punctuation with its closing quotes, before white space; "3." at the start of a line is none
reflection words that announce another look: wait, hmm, alternatively, let me check ... (whole words, any case)
think-end  the tag ``</think>``
boxed      a closed ``\boxed{...}``, braces balanced
answer     a closed box, ``</answer>``, or "final answer:" and the like
code-fence a line of three or more backticks or tildes that opens or closes fenced code; the marker is these
========== =====================================================================================================

Token positions: a marker is completed by the first token after which the text holds its last character, so a marker may
span tokens and a token may hold several. Byte-level pieces that are incomplete UTF-8 are decoded with their successors.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from trimtab.core.errors import invalid, unknown
from trimtab.core.records import IntArray

BoolArray = np.ndarray[Any, np.dtype[np.bool_]]
Span = tuple[int, int]
Decode = Callable[[Sequence[int]], str]

REFLECTION = (
    "wait",
    "hmm",
    "alternatively",
    "hold on",
    "on second thought",
    "let me check",
    "let me double check",
    "let me double-check",
    "let me recheck",
    "let me re-check",
    "let me verify",
    "let me reconsider",
)
ANSWER = ("final answer:", "final answer is", "the answer is", "</answer>")
WORD = "word"  # the kind of custom words

_INCOMPLETE = "\ufffd"  # what a decoder puts in place of bytes that are not (yet) a character


@dataclass(frozen=True, slots=True)
class Hit:
    """A marker: characters ``start`` to ``end`` (exclusive) of the text, and the token that completes it (-1: text)."""

    kind: str
    start: int
    end: int
    token: int = -1


# ---------------------------------------------------------------- scanners


class Scanner(ABC):
    """Finds one kind of marker in a text that grows. Positions are those in the whole text.

    Attributes:
        keep: the text before this position is not needed any more.
        undecided: a marker may already be complete whose standing the next characters decide.
    """

    keep = 0
    undecided = False

    @abstractmethod
    def scan(self, text: str, base: int, final: bool) -> list[Span]:
        """New markers, by their ends. ``text`` begins at ``base``; ``final``: nothing follows it."""

    @abstractmethod
    def may_end_in(self, piece: str) -> bool:
        """False when no marker can have its last character in this piece of text, whatever stands before it."""


class WordScanner(Scanner):
    """Fixed strings. Of overlapping ones the first to be complete counts, of these the longest.

    Args:
        whole: a letter, digit or underscore at an edge of the string must not go on beyond it.
    """

    def __init__(self, words: Iterable[str], whole: bool = True, ignore_case: bool = False) -> None:
        self.words = sorted(set(words), key=len)
        self.whole, self.ignore_case = whole, ignore_case
        self._longest = len(self.words[-1])
        alternatives = "|".join(self._bounded(word) for word in self.words)
        self._pattern = re.compile(f"(?=({alternatives}))", re.IGNORECASE if ignore_case else 0)
        self._position = self._last_end = 0

    def _bounded(self, word: str) -> str:
        left = r"(?<!\w)" if self.whole and _is_word(word[0]) else ""
        right = r"(?!\w)" if self.whole and _is_word(word[-1]) else ""
        return left + re.escape(word) + right

    def scan(self, text: str, base: int, final: bool) -> list[Span]:
        spans = [match.span(1) for match in self._pattern.finditer(text, self._position - base)]
        open_end = not final and self.whole and bool(text) and _is_word(text[-1])
        decided = [span for span in spans if not (open_end and span[1] == len(text))]
        self.undecided = len(decided) < len(spans)
        found = []
        for start, end in sorted(decided, key=lambda span: (span[1], span[0])):
            if start + base >= self._last_end:
                found.append((start + base, end + base))
                self._last_end = end + base
        self._position = max(self._position, base + len(text) - self._longest)
        self.keep = max(0, self._position - 1)
        return found

    def may_end_in(self, piece: str) -> bool:
        words = self.words
        if self.ignore_case:
            if not piece.isascii():  # letters outside ASCII have surprising other cases
                return True
            piece, words = piece.lower(), [word.lower() for word in words]
        return any(
            word in piece or any(piece.startswith(word[-size:]) for size in range(1, min(len(word), len(piece) + 1)))
            for word in words
        )


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


class BoxScanner(Scanner):
    r"""``\boxed{...}`` up to the brace that closes it; ``\{`` and ``\}`` do not count, nor does a box in a box."""

    _OPEN = re.compile(r"\\boxed ?\{")
    _BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
    _OPEN_SIZE = len(r"\boxed {")

    def __init__(self) -> None:
        self._start = self._depth = 0

    def scan(self, text: str, base: int, final: bool) -> list[Span]:
        found = []
        at = self.keep - base
        while match := (self._BRACE if self._depth else self._OPEN).search(text, at):
            at = match.end()
            if not self._depth:
                self._start, self._depth = match.start() + base, 1
            else:
                self._depth += {"{": 1, "}": -1}.get(match[0], 0)
                if not self._depth:
                    found.append((self._start, at + base))
        # what may yet become an opening, or a backslash whose next character is to come, is read again
        again = int(text.endswith("\\")) if self._depth else self._OPEN_SIZE - 1
        self.keep = base + max(at, len(text) - again)
        return found

    def may_end_in(self, piece: str) -> bool:
        return "}" in piece


class SentenceScanner(Scanner):
    """Ends of sentences: ``.!?`` runs before white space, full-width punctuation anywhere."""

    _END = r"""[.!?…]+["'”’)\]*]*(?=\s{eos})|[。！？]+["'”’」』）)]*(?![。！？"'”’」』）)])"""
    _GROWING = re.compile(_END.format(eos=""))
    _FINAL = re.compile(_END.format(eos=r"|\Z"))
    _TAIL = re.compile(r"""[.!?…。！？"'”’)\]*」』）]+\Z""")
    _NUMBER = re.compile(r"(?:\A|\n)[ \t]{0,8}\d{1,3}\Z")
    _CHARACTERS = frozenset(""".!?…。！？"'”’)]*」』）""")
    _BEFORE = 16  # characters that tell a list number from a sentence

    def __init__(self) -> None:
        self._position = 0

    def scan(self, text: str, base: int, final: bool) -> list[Span]:
        found = []
        done = self._position - base
        for match in (self._FINAL if final else self._GROWING).finditer(text, done):
            if match.end() == len(text) and not final:
                break
            done = match.end()
            if not self._numbers(text, base, match.start()):
                found.append((match.start() + base, match.end() + base))
        tail = self._TAIL.search(text, done)
        self._position = base + (tail.start() if tail else len(text))
        self.keep, self.undecided = max(0, self._position - self._BEFORE), tail is not None
        return found

    def _numbers(self, text: str, base: int, start: int) -> bool:
        """Whether the text before ``start`` makes this the full stop of a list number."""
        first = max(0, start - self._BEFORE)
        before = text[first:start] if base + first == 0 else "." + text[first:start]
        return self._NUMBER.search(before) is not None

    def may_end_in(self, piece: str) -> bool:
        return not self._CHARACTERS.isdisjoint(piece)


class LineScanner(Scanner):
    """Reads line by line and knows which lines are fenced code."""

    _FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})(.*)", re.DOTALL)

    def __init__(self) -> None:
        self._seen = 0  # up to here there is no line end that was not read
        self._fence = ""  # the run that opened the code we are in
        self.content_end = -1  # end of the last line with content since the last marker, -1 = none

    def scan(self, text: str, base: int, final: bool) -> list[Span]:
        found: list[Span] = []
        while (end := text.find("\n", self._seen - base)) >= 0:
            self._read(text[self.keep - base : end], base + end + 1, found)
            self.keep = self._seen = base + end + 1
        rest = text[self.keep - base :]
        self._seen = base + len(text)
        self.undecided = not final and self.begin(rest, self.keep, found)
        if final and rest:
            self._read(rest, -1, found)
            self.keep = self._seen
        return found

    def _read(self, line: str, end: int, found: list[Span]) -> None:
        fence = self._toggle(line)
        self.line(line, self.keep, end, fence, found)

    def _toggle(self, line: str) -> Span | None:
        """The fence that this line is, within the line."""
        match = self._FENCE.match(line)
        if match is None:
            return None
        run, rest = match[1], match[2]
        if not self._fence:
            if run[0] == "`" and "`" in rest:  # code within a line
                return None
            self._fence = run
        elif run.startswith(self._fence) and not rest.strip():
            self._fence = ""
        else:
            return None
        return match.span(1)

    @property
    def in_code(self) -> bool:
        return bool(self._fence)

    @abstractmethod
    def line(self, line: str, start: int, end: int, fence: Span | None, found: list[Span]) -> None:
        """A line is complete: from ``start``, its line end before ``end`` (-1: the text ends without one)."""

    def begin(self, line: str, start: int, found: list[Span]) -> bool:
        """An incomplete last line. Returns whether its next characters may decide about a marker before its end."""
        return False

    def may_end_in(self, piece: str) -> bool:
        return "\n" in piece


class LineEndScanner(LineScanner):
    """Ends of lines with content."""

    def line(self, line: str, start: int, end: int, fence: Span | None, found: list[Span]) -> None:
        if line.strip() and end >= 0:
            found.append((end - 1, end))


class FenceScanner(LineScanner):
    """Lines that open or close fenced code."""

    def line(self, line: str, start: int, end: int, fence: Span | None, found: list[Span]) -> None:
        if fence is not None:
            found.append((start + fence[0], start + fence[1]))

    def begin(self, line: str, start: int, found: list[Span]) -> bool:
        return line.lstrip(" \t").startswith(("```", "~~~"))

    def may_end_in(self, piece: str) -> bool:
        return "`" in piece or "~" in piece


class ParagraphScanner(LineScanner):
    """Blank lines outside code that follow content."""

    def line(self, line: str, start: int, end: int, fence: Span | None, found: list[Span]) -> None:
        if line.strip():
            self.content_end = start + len(line.rstrip())
        elif self.content_end >= 0 and not self.in_code and end >= 0:
            found.append((self.content_end, end))
            self.content_end = -1


class StepScanner(ParagraphScanner):
    """Paragraphs, and headings that number a step."""

    _HEADING = re.compile(r"[ \t]{0,4}(?:#{1,6}[ \t]{0,2})?(?:\*\*|__)?(?:Step|STEP)[ \t]{0,2}\d")
    _HEADING_SIZE = 21  # the longest text it can match

    def line(self, line: str, start: int, end: int, fence: Span | None, found: list[Span]) -> None:
        self.begin(line, start, found)
        super().line(line, start, end, fence, found)

    def begin(self, line: str, start: int, found: list[Span]) -> bool:
        if self.content_end < 0 or self.in_code:
            return False
        if self._HEADING.match(line):
            found.append((self.content_end, start))
            self.content_end = -1
        return self.content_end >= 0 and len(line) < self._HEADING_SIZE


NAMED: dict[str, Callable[[], list[Scanner]]] = {
    "paragraph": lambda: [ParagraphScanner()],
    "step": lambda: [StepScanner()],
    "line": lambda: [LineEndScanner()],
    "sentence": lambda: [SentenceScanner()],
    "reflection": lambda: [WordScanner(REFLECTION, ignore_case=True)],
    "think-end": lambda: [WordScanner(("</think>",))],
    "boxed": lambda: [BoxScanner()],
    "answer": lambda: [WordScanner(ANSWER, ignore_case=True), BoxScanner()],
    "code-fence": lambda: [FenceScanner()],
}


# ---------------------------------------------------------------- text


@dataclass(frozen=True)
class MarkerSet:
    """The markers to look for.

    Args:
        names: named sets, see the module.
        words: custom strings, case-sensitive; their hits have the kind ``word``.
        whole_words: custom words must not be part of longer words.

    Raises:
        ConfigError: an unknown name, an empty word, a word that cannot be decoded, or nothing to look for.
    """

    names: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    whole_words: bool = True

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in NAMED:
                raise unknown("markers", name, NAMED, "Other strings go into words.")
        for word in self.words:
            if not word or _INCOMPLETE in word:
                raise invalid("markers.words", word, "strings of at least one character, without U+FFFD")
        if not self.names and not self.words:
            raise invalid("markers", (), "at least one name or word")

    def scanners(self) -> list[tuple[str, Scanner]]:
        """Fresh scanners with the kind of their hits."""
        found = [(name, scanner) for name in dict.fromkeys(self.names) for scanner in NAMED[name]()]
        return [*found, (WORD, WordScanner(self.words, self.whole_words))] if self.words else found

    def stream(self) -> TextStream:
        """Looks for the markers in a text that comes in pieces."""
        return TextStream(self)

    def find(self, text: str) -> list[Hit]:
        """All markers of a whole text, by their ends."""
        stream = self.stream()
        return sorted(stream.feed(text) + stream.finish(), key=_by_end)

    def segments(self, text: str) -> list[Span]:
        """The text cut behind every marker, as character spans; blank pieces are left out.

        With ``paragraph`` or ``step`` these are the steps, and as many of them are closed as there are markers.
        """
        return [(start, end) for start, end in _pieces(self.find(text), len(text)) if text[start:end].strip()]


def _pieces(hits: Sequence[Hit], size: int) -> list[Span]:
    cuts = sorted({0, size, *(hit.end for hit in hits)})
    return list(pairwise(cuts))


def _by_end(hit: Hit) -> tuple[int, int, str]:
    return hit.end, hit.start, hit.kind


class TextStream:
    """Markers of a text that comes in pieces: together the same hits as :meth:`MarkerSet.find` of the whole text.

    A hit is returned as soon as it is certain, at the latest by :meth:`finish`.
    """

    def __init__(self, markers: MarkerSet) -> None:
        self._scanners = markers.scanners()
        self._text, self._base = "", 0  # the tail that scanners may look back on

    @property
    def undecided(self) -> bool:
        """Whether a marker may be complete that the next characters confirm or refute."""
        return any(scanner.undecided for _, scanner in self._scanners)

    def feed(self, text: str) -> list[Hit]:
        """The next piece of the text."""
        return self._scan(text, final=False) if text else []

    def finish(self) -> list[Hit]:
        """The text has ended."""
        return self._scan("", final=True)

    def _scan(self, text: str, final: bool) -> list[Hit]:
        self._text += text
        hits = [
            Hit(kind, start, end)
            for kind, scanner in self._scanners
            for start, end in scanner.scan(self._text, self._base, final)
        ]
        keep = min(scanner.keep for _, scanner in self._scanners)
        self._text, self._base = self._text[keep - self._base :], keep
        return sorted(hits, key=_by_end)


# ---------------------------------------------------------------- tokens


class TokenMarkers:
    """Markers of token sequences.

    Args:
        markers: what to look for.
        decode: ids to text; special tokens decode to nothing.
    """

    def __init__(self, markers: MarkerSet, decode: Decode) -> None:
        self.markers, self.decode = markers, decode
        self.table = PieceTable(decode, [scanner for _, scanner in markers.scanners()])

    def stream(self) -> TokenStream:
        """Looks for the markers in a response that comes token by token or in chunks."""
        return TokenStream(self)

    def find(self, ids: Sequence[int] | IntArray) -> list[Hit]:
        """All markers of a whole response, by their ends."""
        stream = self.stream()
        return sorted(stream.feed(ids) + stream.finish(), key=_by_end)

    def segments(self, ids: Sequence[int] | IntArray) -> list[Span]:
        """The response cut behind every marker, as token spans, as many as :meth:`MarkerSet.segments` of its text.

        A span ends with the token that completes its marker, which is where a stop at this marker cuts. Two markers in
        one token share it.
        """
        reader = TokenReader(self.table, self.decode)
        text = reader.read(np.asarray(ids, dtype=np.int64)) + reader.finish()
        found: list[Span] = []
        done = 0
        for start, end in _pieces(self.markers.find(text), len(text)):
            stop = bisect_left(reader.ends, end) + 1
            if text[start:end].strip():
                found.append((min(done, stop - 1), stop))
            done = stop
        return found

    def complete(self, vocab_size: int) -> BoolArray:
        """Ids whose own text, standing alone, holds a whole marker (V,)."""
        found = np.zeros(vocab_size, dtype=bool)
        for index in np.flatnonzero(self.suspects(vocab_size)).tolist():
            found[index] = bool(self.markers.find(self.decode([index])))
        return found

    def suspects(self, vocab_size: int) -> BoolArray:
        """Ids that may complete a marker (V,); no marker ends in a token with any other id.

        For a stop hook over many rows: rows in which no new token is a suspect, and none is undecided, need no text.
        """
        ids = np.arange(vocab_size)
        self.table.learn(ids)
        return self.table.suspect[ids].copy()


class PieceTable:
    """What is known of single token ids, learnt when an id first comes up.

    Attributes, by id:
        suspect: may complete a marker.
        partial: its bytes are not whole characters.
        size: characters it adds within a text; ``first_size`` at the start of one (some tokenizers drop a space there).
    """

    def __init__(self, decode: Decode, scanners: Sequence[Scanner]) -> None:
        self._decode, self._scanners = decode, scanners
        self._known = np.zeros(0, dtype=bool)
        self.suspect = np.zeros(0, dtype=bool)
        self.partial = np.zeros(0, dtype=bool)
        self.size = np.zeros(0, dtype=np.int64)
        self.first_size = np.zeros(0, dtype=np.int64)

    def learn(self, ids: IntArray) -> None:
        """Make sure these ids are known."""
        largest = int(ids.max(initial=-1))
        if largest >= len(self._known):
            room = max(largest + 1, 2 * len(self._known)) - len(self._known)
            for name in ("_known", "suspect", "partial", "size", "first_size"):
                setattr(self, name, np.pad(getattr(self, name), (0, room)))
        for index in np.unique(ids[~self._known[ids]]).tolist():
            first = self._decode([index])
            piece = self._decode([index, index])[len(first) :]  # its text behind other text
            self.partial[index] = _INCOMPLETE in first + piece
            self.suspect[index] = self.partial[index] or any(s.may_end_in(piece) for s in self._scanners)
            self.size[index], self.first_size[index] = len(piece), len(first)
            self._known[index] = True


class TokenReader:
    """Text of a response that comes in chunks, and how far each token brings it.

    Attributes:
        ends: characters of the text that are certain after each token read.
    """

    _CONTEXT = 4  # pieces decoded again before new ones, for tokenizers whose pieces depend on the one before
    _WINDOW = 32  # tokens without a whole character: more than any encoding has, so they are no text

    def __init__(self, table: PieceTable, decode: Decode) -> None:
        self._table, self._decode = table, decode
        self.ends: list[int] = []
        self._context: list[list[int]] = []  # the last pieces of whole characters
        self._window: list[int] = []  # tokens since the text was last whole
        self._given = 0  # characters of the window given out

    @property
    def incomplete(self) -> bool:
        """Whether the last character is still to come."""
        return bool(self._window)

    def read(self, ids: IntArray) -> str:
        """The text that is certain with these further tokens, beyond what was given before."""
        self._table.learn(ids)
        partial = np.flatnonzero(self._table.partial[ids])
        text, at = "", 0
        while at < len(ids):
            next_ = np.searchsorted(partial, at)
            until = int(partial[next_]) if next_ < len(partial) else len(ids)
            if self._window or until == at:
                text += self._read_one(int(ids[at]))
                at += 1
            else:
                text += self._read_whole(ids[at:until])
                at = until
        return text

    def finish(self) -> str:
        """What is left when nothing follows: the marks of characters that never came."""
        text = self._new_text(self._window)[self._given :] if self._window else ""
        if text:
            self.ends[-1] += len(text)
            self._close(self._window)
        return text

    def _read_whole(self, ids: IntArray) -> str:
        """Tokens of whole characters; one by one only if their sizes depend on their neighbours."""
        text = self._new_text(ids.tolist())
        size = self._table.size[ids]
        if not self._context:
            size[0] = self._table.first_size[ids[0]]
        if size.sum() != len(text):
            return "".join(self._read_one(index) for index in ids.tolist())
        self.ends += (np.cumsum(size) + self._end).tolist()
        for index in ids[-self._CONTEXT :].tolist():
            self._close([index])
        return text

    def _read_one(self, index: int) -> str:
        """One token, with those before it whose bytes wait for it."""
        self._window.append(index)
        text = self._new_text(self._window)
        broken = len(self._window) == self._WINDOW
        whole = text if broken else text.rstrip(_INCOMPLETE)
        new = whole[self._given :]
        self.ends.append(self._end + len(new))
        self._given = max(self._given, len(whole))
        if len(whole) == len(text):
            self._close(self._window)
        if broken:
            self._context = []  # it may end within a character
        return new

    @property
    def _end(self) -> int:
        return self.ends[-1] if self.ends else 0

    def _new_text(self, ids: list[int]) -> str:
        context = [index for piece in self._context for index in piece]
        before = len(self._decode(context)) if context else 0
        return self._decode(context + ids)[before:]

    def _close(self, piece: list[int]) -> None:
        self._context = [*self._context, piece][-self._CONTEXT :]
        self._window, self._given = [], 0


class TokenStream:
    """Markers of a response that comes in chunks: together the same hits as :meth:`TokenMarkers.find` of all of it.

    A hit is returned as soon as it is certain. Chunks that cannot complete a marker are not even decoded until one that
    can arrives.
    """

    def __init__(self, markers: TokenMarkers) -> None:
        self._table = markers.table
        self._reader = TokenReader(markers.table, markers.decode)
        self._text = markers.markers.stream()
        self._unread: list[int] = []

    @property
    def undecided(self) -> bool:
        """Whether the next token may confirm a marker that ends before it."""
        return self._text.undecided or self._reader.incomplete

    def feed(self, ids: Sequence[int] | IntArray) -> list[Hit]:
        """The next tokens of the response."""
        ids = np.asarray(ids, dtype=np.int64)
        self._table.learn(ids)
        self._unread += ids.tolist()
        if self.undecided or self._table.suspect[ids].any():
            return self._read()
        return []

    def finish(self) -> list[Hit]:
        """The response has ended."""
        hits = self._read() + self._placed(self._text.feed(self._reader.finish()))
        return hits + self._placed(self._text.finish())

    def _read(self) -> list[Hit]:
        text = self._reader.read(np.array(self._unread, dtype=np.int64))
        self._unread = []
        return self._placed(self._text.feed(text))

    def _placed(self, hits: list[Hit]) -> list[Hit]:
        return [Hit(hit.kind, hit.start, hit.end, bisect_left(self._reader.ends, hit.end)) for hit in hits]
