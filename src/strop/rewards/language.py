"""Language consistency: does a policy think in the language that it was asked in?"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from itertools import groupby

from strop.rewards.text import prose, words

SCRIPTS = {
    name: re.compile(f"[{letters}]")
    for name, letters in {
        "latin": r"A-Za-z\u00c0-\u024f\u1e00-\u1eff",
        "han": r"\u3005\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff",
        "kana": r"\u3040-\u30ff",
        "cyrillic": r"\u0400-\u052f",
        "greek": r"\u0370-\u03ff\u1f00-\u1fff",
        "arabic": r"\u0600-\u06ff\u0750-\u077f",
        "devanagari": r"\u0900-\u097f",
        "hangul": r"\uac00-\ud7af\u1100-\u11ff",
    }.items()
}
"""The letters of each script, in Unicode's form NFKC."""
LANGUAGES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("en", "de", "es", "fr", "it", "pt"), ("latin",)),
    "zh": ("han",),
    "ja": ("kana", "han"),
    "ru": ("cyrillic",),
    "el": ("greek",),
    "ar": ("arabic",),
    "hi": ("devanagari",),
    "ko": ("hangul",),
}
"""By the scripts that a language is written in: that tells Chinese from English, and not French from English."""
_OF_VARIABLES = ("latin", "greek")  # a single letter of these names one
_SIGNS = ("<font>", "<sub>", "<super>")  # what Unicode says of the letters of formulas, raised ones and lowered ones
_HEBREW_SIGNS = frozenset("\u2135\u2136\u2137\u2138")  # cardinal numbers


def scripts_of(text: str) -> list[str]:
    """The script of each word of `text`, in order; one that is not among `SCRIPTS` by Unicode's name of it, as `THAI`.

    Code and mathematics are no words, and neither is a single Latin or Greek letter, which names a variable, whatever digits
    and indices it has. A word that changes scripts is one word of each: `sinθ` is `sin` and a variable.
    """
    found = []
    for word in words(prose(text)):
        if word.isascii():
            found += ["latin"] if len(word) > 1 else []
            continue
        letters = unicodedata.normalize("NFKC", "".join(letter for letter in word if not _is_sign(letter)))
        for script, run in groupby(filter(None, map(_script, letters))):
            if script not in _OF_VARIABLES or len(list(run)) > 1:
                found.append(script)
    return found


def chain_of_thought(text: str, *, think_tag: str = "think") -> str | None:
    """What stands between thinking tags, of all turns; the first may begin in the prompt. None without a closing tag."""
    first, *others = text.split(f"</{think_tag}>")[:-1] or (None,)
    if first is None:
        return None
    parts = [first.rpartition(f"<{think_tag}>")[2]]
    parts += [part.rpartition(f"<{think_tag}>")[2] for part in others if f"<{think_tag}>" in part]
    return "\n".join(parts)


def language_consistency(text: str, *, language: str, think_tag: str = "think") -> float:
    """Words in the target language as a share of all words of the chain of thought. DeepSeek-R1 (arXiv 2501.12948) Eq. 7.

    What is no word is in neither count: digits, mathematics, code, and a single Latin or Greek letter, which names a variable.
    Without a chain of thought, or without a word in it, 0.
    """
    found = scripts_of(chain_of_thought(text, think_tag=think_tag) or "")
    return sum(script in LANGUAGES[language] for script in found) / len(found) if found else 0.0


@cache
def _is_sign(letter: str) -> bool:
    return letter in _HEBREW_SIGNS or unicodedata.decomposition(letter).startswith(_SIGNS)


@cache
def _script(letter: str) -> str:
    """Empty for what is no letter of its own: an apostrophe, a mark, a digit of any kind."""
    for name, letters in SCRIPTS.items():
        if letters.match(letter):
            return name
    return unicodedata.name(letter, "UNKNOWN").split()[0] if unicodedata.category(letter) in ("Ll", "Lo", "Lt", "Lu") else ""
