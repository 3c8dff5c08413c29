r"""Are two answers equal, by their text or by what sympy makes of them? Pure functions; what may hang says so.

The rules are those of the grader of Dr. GRPO (arXiv 2503.20783), which CS336 assignment 5 uses, written anew: that one hands
what a policy wrote to Python's `eval`, by way of sympy's `parse_expr`; here a LaTeX grammar reads it.
"""

from __future__ import annotations

import re

from strop.sandbox.inside.verify import is_zero_difference
from strop.sandbox.numbers import exact_match, plain_number

MAX_CHARS = 4_000  # of one answer; a longer one is not read. Two of them fit into a pipe

_UNITS = (
    "degree|deg|cm|mm|km|centimeter|meter|metre|kilometer|mile|inch|foot|feet|ft|yard|second|sec|minute|min|hour|hr|day|week|month"
    "|year|mph|gram|kg|pound|lb|liter|litre|gallon|dollar|cent|percent|unit|point|student|people|square unit"
)
# In this order; each is (what to find, what to write for it).
_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"[−–]", "-"),
        (r"\\(?:mbox|mathrm|textbf|mathbf|textit)(?=\s*\{)", r"\\text"),
        (r"^\\text\s*\{([^{}]*)\}$", r"\1"),
        (r"\\text\s*\{\s*(?:and|or)\s*\}|\s(?:and|or)\s", ","),
        (r"(?<=[^\s])\s*\\text\s*\{[^{}]*\}(?:\^\{?[23]\}?)?$", ""),  # a unit, where something stands before it
        (r"\\(?:left|right)(?![a-zA-Z])|\\[!;,: ]|~", ""),
        (r"\{,\}", ","),
        (r"\\?[$%]|\^\s*(?:\\circ|\{\s*\\circ\s*\})|°", ""),
        (r"\\[dt]frac", r"\\frac"),
        (r"\\(l|g|n)eq(?![a-zA-Z])", r"\\\1e"),
        (rf"(?<=[\d}}])\s*(?:{_UNITS})(?:e?s)?\.?(?:\s*\^\s*\{{?[23]\}}?)?$", ""),
        (r"^\s*[a-zA-Z][a-zA-Z0-9]?\s*=([^=]*)$", r"\1"),  # x = 5
        (r"(?<=\d)\s+(?=\d+\s*/\s*\d)", "+"),  # 7 3/4
        (r"\s+", ""),
        (r"\.$", ""),
        (r"\\frac(\d)(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac(\d)(?=\{)", r"\\frac{\1}"),
        (r"(\\frac\{[^{}]*\})(\d)", r"\1{\2}"),
        (r"\\frac\{-([^{}]*)\}", r"-\\frac{\1}"),
        (r"\\sqrt([0-9a-zA-Z])", r"\\sqrt{\1}"),
        (r"√([0-9a-zA-Z])", r"\\sqrt{\1}"),
        (r"(?<![\\a-zA-Z])sqrt\(([^()]*)\)|√\(([^()]*)\)", r"\\sqrt{\1\2}"),
        (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])|π", r"\\pi "),
        (r"∞", r"\\infty "),
        (r"\*\*", "^"),
        (r"[*·×]|\\times(?![a-zA-Z])", r"\\cdot "),
        (r"(?<![\d.])\.(?=\d)", "0."),
        (r"^(-?)(\d+)/(\d+)$", r"\1\\frac{\2}{\3}"),
    )
)
_FRACTION = re.compile(r"-?\\frac\{\d+\}\{\d+\}")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_MAX_LETTERS = 2  # more different ones are words, whose letters algebra would multiply: "dear" would equal "read"


def normal_form(answer: str) -> str:
    """The answer without what does not matter: spaces, case, units, signs of dollars and per cent, spellings of a fraction."""
    text = answer.strip()
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    if len(text) > 1 and text[0] == "{" and text[-1] == "}":
        text = text[1:-1]
    number = plain_number(text)
    return text.lower().strip() if number is None else f"{number.normalize():f}"


def equal_by_text(gold: str, answer: str) -> bool | None:
    """Whether the two are equal, where texts and plain numbers tell; None: ask algebra. Time is linear in their length."""
    if len(gold) > MAX_CHARS or len(answer) > MAX_CHARS:
        return False
    gold, answer = normal_form(gold), normal_form(answer)
    if gold == answer or not gold or not answer:
        return bool(gold) and gold == answer
    return exact_match(gold, answer)


def equal_by_algebra(gold: str, answer: str) -> bool:
    r"""Whether sympy finds the difference to be 0, element by element inside equal brackets. May hang, and may take all memory.

    What cannot be read raises. Fast after `inside.verify.load`.
    """
    pairs = left_to_algebra(gold, answer)
    return pairs is not None and all(is_zero_difference(*pair) for pair in pairs)


def left_to_algebra(gold: str, answer: str) -> list[tuple[str, str]] | None:
    r"""The elements of the two whose differences sympy has yet to find 0; None: they are not equal, whatever it would find.

    As in the course's grader an integer is not equal to an expression that would have to be computed (`\sqrt{4}` for 2), and a
    fraction that is not reduced is not equal to the reduced one.
    """
    gold, answer = normal_form(gold), normal_form(answer)
    if len(gold) > MAX_CHARS or len(answer) > MAX_CHARS:
        return None
    gold_brackets, gold_elements = _elements(gold)
    answer_brackets, answer_elements = _elements(answer)
    if gold_brackets != answer_brackets or len(gold_elements) != len(answer_elements):
        return None
    pairs = [pair for pair in zip(gold_elements, answer_elements, strict=True) if pair[0] != pair[1]]
    return pairs if all(_may_be_equal(*pair) for pair in pairs) else None


def _elements(text: str) -> tuple[str, list[str]]:
    """The brackets and the elements of a tuple or an interval; else no brackets, and the text as the only element."""
    inner = text[1:-1]
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and "," in inner and not set("()[]") & set(inner):
        return text[0] + text[-1], inner.split(",")
    return "", [text]


def _may_be_equal(gold: str, answer: str) -> bool:
    if not gold or not answer or _is_integer(gold) != _is_integer(answer):
        return False
    if _FRACTION.fullmatch(gold) and _FRACTION.fullmatch(answer):
        return False
    return len(set(re.findall(r"[^\W\d_]", _COMMAND.sub("", gold + answer)))) <= _MAX_LETTERS


def _is_integer(text: str) -> bool:
    number = plain_number(text)
    return number is not None and number == number.to_integral_value()
