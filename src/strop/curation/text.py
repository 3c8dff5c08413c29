"""Normal forms of a problem's text, without layout, case and formula style."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Sequence

_NAMES = "left|right|displaystyle|textstyle|limits|quad|qquad"
_STYLE = re.compile(rf"\\(?:(?:{_NAMES})(?![a-zA-Z])|[,;:! ])|\$|~")
_RECORDED_STYLE = re.compile(rf"\\(?:{_NAMES}|[,;:! ])(?![a-zA-Z])|\$|~")  # that leaves `\,` before a letter
_FRACTION = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
_RAISED = re.compile("[⁰¹²³⁴-⁹⁺⁻ⁿ]+")
_LOWERED = re.compile("[₀-₉₊₋ₙ]+")
_THOUSANDS = re.compile(r"(?<=\d)\\[,!]\s*(?=\d{3}(?!\d))")
_BRACES = re.compile(r"([\^_])\{(\w)\}(?!\d)")  # x^{2} is x^2
_SPACE = re.compile(r"(?<!\d) | (?!\d)")  # not that of 1 2/3
_ONE_WORD = r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+"  # or one sign of Chinese or Japanese
_WORD = re.compile(_ONE_WORD)
_SIGN_OR_WORD = re.compile(rf"{_ONE_WORD}|[-+*/^=<>!|]")


def plain(text: str, style: re.Pattern[str] = _STYLE) -> str:
    """Return `text` in lower case and one form of Unicode, without formula style."""
    text = unicodedata.normalize("NFKC", text)
    return style.sub(" ", _FRACTION.sub(r"\\frac", text)).lower()


def words(text: str) -> list[str]:
    r"""Words, numbers and names of LaTeX commands, in order: `Find $\dfrac{1}{2}x$.` is find, frac, 1, 2, x."""
    return _WORD.findall(plain(text))


def signs_and_words(text: str) -> list[str]:
    """`words`, with the operators and relations between them: x+3 and x-3 are two texts."""
    return _SIGN_OR_WORD.findall(plain(text))


def grams(of: Sequence[str], n: int) -> list[str]:
    """Return all runs of `n` consecutive words, in order."""
    return [" ".join(of[start : start + n]) for start in range(len(of) - n + 1)]


def fingerprint(text: str) -> bytes:
    """Return 16 bytes that are equal for texts that differ only in layout; operators, brackets and powers count."""
    text = _LOWERED.sub(r"_{\g<0>}", _RAISED.sub(r"^{\g<0>}", text))
    text = " ".join(plain(_THOUSANDS.sub("", text)).split())
    return _digest(_BRACES.sub(r"\1\2", _SPACE.sub("", text)))


def question_digest(text: str) -> str:
    """Return the digest of a question in recorded outcomes. It must never change, since outcomes are looked up by it."""
    return _digest("".join(plain(text, _RECORDED_STYLE).split())).hex()


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
