r"""Compares plain numbers exactly in their common forms: 72, 72.0, +72, 1,072, $72, \text{72}."""

from __future__ import annotations

import re
from decimal import Decimal

_MAX_CHARS = 200
_WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}\\]*)\}")
_PLAIN = re.compile(r"[+-]?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.[0-9]*)?|[+-]?\.[0-9]+")
_DOLLAR_SIGNED = re.compile(r"(?P<sign>[+-]?)\s*(?:\\?\$)\s*(?P<number>.*)")


def plain_number(text: str) -> Decimal | None:
    """Return the number if `text` is exactly one number in plain decimal notation, otherwise None."""
    stripped = text.strip()
    if len(stripped) > _MAX_CHARS:
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
