"""Finding and comparing final answers. Everything here takes time linear in the response, whatever it holds."""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal

_OPEN, _CLOSE = "<answer>", "</answer>"
_BOXED = "\\boxed{"
_HASHES = "####"
_LONGEST_NUMBER = 400  # characters; longer ones are not numbers anybody meant
_BODY = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)\]])[-−+])?"  # a minus after a digit or a bracket subtracts
    rf"(?P<top>{_BODY})(?P<power>[eE][-+]?[0-9]{{1,3}}(?![0-9A-Za-z]))?(?:\s?/\s?(?P<bottom>{_BODY}))?"
)
_EDGES = " \t\n.,;:!?'\"`*$"


def tagged_answer(text: str) -> str | None:
    """The inside of the last complete ``<answer>...</answer>``, stripped, or None."""
    end = text.rfind(_CLOSE)
    start = text.rfind(_OPEN, 0, end) if end >= 0 else -1
    return text[start + len(_OPEN) : end].partition(_CLOSE)[0].strip() if start >= 0 else None


def final_answer(text: str) -> str | None:
    r"""The marked final answer: ``<answer>...</answer>``, else the last ``\boxed{...}``, else what follows ``####``."""
    tagged = tagged_answer(text)
    if tagged is not None:
        return tagged
    boxed = _boxed_answer(text)
    if boxed is not None:
        return boxed
    _, found, rest = text.rpartition(_HASHES)
    return rest.strip().partition("\n")[0].strip() if found else None


def _boxed_answer(text: str) -> str | None:
    start = text.rfind(_BOXED)
    depth = 1
    for match in re.compile(r"[{}]").finditer(text, start + len(_BOXED)) if start >= 0 else ():
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            return text[start + len(_BOXED) : match.start()].strip()
    return None


def normalise(text: str) -> str:
    """Case, Unicode form, runs of white space and punctuation at the edges do not count."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(folded.split()).strip(_EDGES)


def last_number(text: str) -> Decimal | None:
    """The last number of ``text``: signs, thousands commas, decimals, powers of ten and fractions are read."""
    last = None
    for last in _NUMBER.finditer(text):  # noqa: B007  keeps the last match without a list of all
        pass
    if last is None or last.end() - last.start() > _LONGEST_NUMBER:
        return None
    value = Decimal(last["top"].replace(",", "") + (last["power"] or ""))
    if last["bottom"]:
        divisor = Decimal(last["bottom"].replace(",", ""))
        if divisor == 0:
            return None
        value /= divisor
    return value.copy_negate() if last["sign"] in ("-", "−") else value  # a plain minus would round


def same_number(found: Decimal, wanted: Decimal, tolerance: float) -> bool:
    """Equal; or, unless both are whole, within ``tolerance`` relative to the larger."""
    if found == wanted:
        return True
    whole = found == found.to_integral_value() and wanted == wanted.to_integral_value()
    return not whole and abs(found - wanted) <= Decimal(tolerance) * max(abs(found), abs(wanted))


def last_line(text: str) -> str | None:
    """The last line that is not blank, stripped, or None."""
    stripped = text.strip()
    return stripped.rpartition("\n")[2].strip() or None
