r"""Finds answers in `\boxed{}`, and reads plain numbers in their common forms: 72, 72.0, +72, 1,072, $72, \text{72}."""

from __future__ import annotations

import re
from decimal import Decimal

BOX = r"\boxed"
# The start of a box, another escaped character, or a brace. A regex cannot balance braces, but it can skip other text.
_BOXED, _FRAMED = (
    re.compile(rf"(?P<box>\\(?:{names})\s*\{{)|\\(?!\\(?:{names})\s*\{{)[\s\S]|[{{}}]") for names in ("boxed", "boxed|fbox")
)
_MAX_NUMBER_CHARS = 200
_WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}\\]*)\}")
_PLAIN = re.compile(r"[+-]?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.[0-9]*)?|[+-]?\.[0-9]+")
_DOLLAR_SIGNED = re.compile(r"(?P<sign>[+-]?)\s*(?:\\?\$)\s*(?P<number>.*)")


def boxed(text: str, *, is_fbox_one: bool = False) -> list[str]:
    r"""Return the content of each `\boxed{...}` whose braces balance, in order of their opening. Escaped braces do not count.

    Takes one pass over the text. `is_fbox_one`: `\fbox{...}` counts too, since some data sets use it.
    """
    openings: list[int | None] = []  # of open braces: the start of a box, or None for another brace
    closed: list[tuple[int, int]] = []
    for token in (_FRAMED if is_fbox_one else _BOXED).finditer(text):
        if token["box"]:
            openings.append(token.end())
        elif token[0] == "{":
            openings.append(None)
        elif token[0] == "}" and openings and (opening := openings.pop()) is not None:
            closed.append((opening, token.start()))
    return [text[opening:end] for opening, end in sorted(closed)]


def last_box(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` as Dr. GRPO (arXiv 2503.20783) reads it: escaped braces count.

    None if there is no box, the last one does not close, or a space comes before its brace.
    """
    found, rest = text.rpartition(BOX)[1:]
    if not found or rest[:1] != "{":
        return None
    end = closes_at(rest, 0)
    return rest[1 : end - 1] if end <= len(rest) else None


def closes_at(text: str, start: int) -> int:
    """Return the place after the brace that closes the one at `start`; beyond the text if none does."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return place + 1
    return len(text) + 1


def plain_number(text: str) -> Decimal | None:
    """Return the number if `text` is exactly one number in plain decimal notation, otherwise None."""
    stripped = text.strip()
    if len(stripped) > _MAX_NUMBER_CHARS:
        return None
    wrapped = _WRAPPED.fullmatch(stripped)
    if wrapped:
        stripped = wrapped[1].strip()
    if len(stripped) > 1 and stripped[0] == stripped[-1] == "$":  # mathematics between dollar signs
        stripped = stripped[1:-1].strip()
    stripped = stripped.replace("{,}", ",").replace(r"\,", "").replace(r"\!", "").replace("\u2212", "-")
    signed = _DOLLAR_SIGNED.fullmatch(stripped)
    if signed:
        stripped = signed["sign"] + signed["number"]
    return Decimal(stripped.replace(",", "")) if _PLAIN.fullmatch(stripped) else None


def exact_match(gold: str, prediction: str) -> bool | None:
    """Compare two equal texts or two plain numbers. None for other answers, which need `math_verify`."""
    if gold.strip() == prediction.strip():
        return bool(gold.strip())
    gold_number, predicted_number = plain_number(gold), plain_number(prediction)
    return None if gold_number is None or predicted_number is None else gold_number == predicted_number
