r"""When two answers are equal to the grader of Dr. GRPO (arXiv 2503.20783), which CS336 assignment 5 hands out: its verdicts.

Two texts are equal if one of three comparisons says so. Each has its own rules for what does not belong to an answer:

1. as texts, by the rules of Hendrycks' MATH and the units of MathQA;
2. by the rules of PRM800K's grader: as texts, or element by element where sympy finds the difference to be 0;
3. with `is_fast` off, by math_verify.

Some rules accept wrong answers: a unit may be a letter, so that `5 a` is 5, and fractions lose their brackets, so that
`\frac{a+1}{2}` is `a+1/2`. sympy's parser evaluates what it reads as Python. So text with quotes, square brackets, backslashes
or attributes, which it could prove equal to nothing, never reaches it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from functools import cache
from itertools import pairwise

_TEXT = re.compile(r"\\text\{(.+?)\}\n?")

# Of MathQA; a dot stands for any character.
_MATHQA_UNITS = (
    "east|degree|mph|kmph|ft|m sqaure| m east|sq m|deg|mile|q .|monkey|prime|ratio|profit of rs|rd|o|gm|p . m|lb|tile|per|dm|lt"
    "|gain|ab|way|west|a .|b .|c .|d .|e .|f .|g .|h .|t|a|h|no change|men|soldier|pie|bc|excess|st|inches|noon|percent|by|gal"
    "|kmh|c|acre|rise|a . m|th|π r 2|sq|mark|l|toy|coin|sq . m|gallon|° f|profit|minw|yr|women|feet|am|pm|hr|cu cm|square"
    "|v â € ™|are|rupee|rounds|cubic|cc|mtr|s|ohm|number|day|hour|minute|min|second|man|woman|sec|cube|mt|sq inch|mp|∏ cm ³"
    "|hectare|more|unit|cu . m|cm 2|rs .|rs|kg|g|month|km|m|cm|mm|apple|liter|loss|yard|pure|year|increase|decrease|d|less"
    "|Surface|litre|pi sq m|s .|metre|meter|inch"
)
_PRM800K_UNITS = "degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard"


def is_equal(gold: str, answer: str, *, is_fast: bool) -> bool:
    """Whether the grader accepts `answer` for `gold`. May hang or exhaust memory; may raise, which is no."""
    return (
        _as_in_math(gold) == _as_in_math(answer)
        or _is_equal_as_in_prm800k(gold, answer)
        or (not is_fast and _is_equal_to_math_verify(gold, answer))
    )


_Rules = Iterable[tuple[re.Pattern[str], str]]


def _rules(*rules: tuple[str, str]) -> _Rules:
    return tuple((re.compile(pattern), replacement) for pattern, replacement in rules)


def _apply(rules: _Rules, text: str) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


_MATH = _rules(
    (r"\n", ""),
    (r"\\!", ""),
    (r"\\\\", r"\\"),
    (r"\\begin\{array\}\{.*?\}", r"\\begin{pmatrix}"),
    (r"\\end\{array\}", r"\\end{pmatrix}"),
    (r"bmatrix", "pmatrix"),
    (r"d?t?frac", "frac"),
    (r"\\(n|l|g)eq", r"\\\1e"),
    (r"\\left", ""),
    (r"\\right", ""),
)
_LAST_TEXT = re.compile(r"\\text{.*?}$")
_SIGNS = _rules((r"\^\{\\circ\}", ""), (r"\^\\circ", ""), (r"\\\$", ""))
_DECIMALS = _rules((r"\\%", ""), (r" \.", " 0."), (r"\{\.", "{0."), (r"^\.", "0."))


@cache
def _units() -> tuple[re.Pattern[str], ...]:
    names = _MATHQA_UNITS.split("|")
    return tuple(re.compile(rf"(^|\W){name}($|\W)") for name in (*names, *(f"{name}s" for name in names)))


def _as_in_math(answer: str) -> str:
    answer = _without_text(answer.strip()).strip()
    try:
        return _as_mathematics(answer)
    except (IndexError, ValueError):  # a root or fraction of nothing, or two units
        return answer


def _without_text(text: str) -> str:
    found = _TEXT.fullmatch(text)
    return found[1] if found else text


def _as_mathematics(text: str) -> str:
    text = _apply(_MATH, text)
    text = _LAST_TEXT.sub("", text).strip() or text
    for unit in _units() * 2:
        text = unit.sub(r"\1\2", text) or text
    text = _apply(_SIGNS, text)
    if r"\text{ " in text:
        text, _ = text.split(r"\text{ ")
    text = _apply(_DECIMALS, text)
    name, sign, value = text.partition("=")
    if sign and "=" not in value and len(name) <= 2:
        text = value
    head, *roots = text.split(r"\sqrt")
    text = head + "".join(r"\sqrt" + (root if root[0] == "{" else f"{{{root[0]}}}{root[1:]}") for root in roots)
    text = _with_braces(text.replace(" ", ""))
    return r"\frac{1}{2}" if text == "0.5" else _SLASH.sub(_as_fraction, text)


def _with_braces(text: str) -> str:
    r"""`\frac12` as `\frac{1}{2}`; as it is if a fraction has only one sign."""
    head, *fractions = text.split(r"\frac")
    parts = [head]
    for fraction in fractions:
        if fraction[0] != "{" and len(fraction) < 2:
            return text
        rest = fraction[1:]
        if fraction[0] != "{":
            rest = f"{{{fraction[0]}}}" + (rest if rest[0] == "{" else f"{{{rest[0]}}}{rest[1:]}")
        parts.append(rest if fraction[0] != "{" else fraction)
    return r"\frac".join(parts)


_SLASH = re.compile(r"\A(-?\d+)/(-?\d+)\Z", re.ASCII)


def _as_fraction(found: re.Match[str]) -> str:
    is_plain = all(str(int(each)) == each for each in found.groups())  # no 007
    return rf"\frac{{{found[1]}}}{{{found[2]}}}" if is_plain else found[0]


_PRM800K = _rules(
    (r"\\?[$%]", ""),
    (r" or ", " , "),
    (r" and ", " , "),
    (r"million", "*10^6"),
    (r"billion", "*10^9"),
    (r"trillion", "*10^12"),
    *((rf"{unit}(?:es)?s? *(?:\^[0-9]+)?", "") for unit in _PRM800K_UNITS.split("|")),
    (r"\^ *\\circ", ""),
)
_LATEX = _rules((r"\\[td]frac", r"\\frac"), (r"\\frac", r" \\frac"))  # a space before a fraction, for mixed numbers
_NAMES = str.maketrans({"√": "sqrt", "π": "pi", "∞": "inf", "∪": "U", "·": "*", "×": "*"})
_MIXED = _rules((r"- *", "-"), (r"([0-9]) +([0-9])", r"\1+\2"), (r"[ {}]", ""))
_THOUSANDS = re.compile(r"(\d),(\d\d\d)($|\D)")
_FRACTION = re.compile(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$")
_BRACKETS = "()[]"
_MAY_HANG = re.compile(r"\^(?:[{(]|[0-9]+\^|[0-9]{2})")
_MAX_LETTERS = 2  # more different ones are words
_IS_CODE = re.compile(r"""['"`\[\]\\]|(?:[^\W\d]\w*|[^\w\s])\s*\.\s*[^\W\d]""")  # `x.y`; but `10.y` is ten times y


def _is_equal_as_in_prm800k(gold: str, answer: str) -> bool:
    gold, answer = _as_in_prm800k(gold), _as_in_prm800k(answer)
    if gold == answer:
        return True
    of_gold, of_answer = _elements(gold), _elements(answer)
    if len(of_gold) != len(of_answer) or (len(of_gold) > 1 and (gold[0], gold[-1]) != (answer[0], answer[-1])):
        return False
    return all(_is_same_element(*pair) for pair in zip(of_gold, of_answer, strict=True))


def _as_in_prm800k(text: str) -> str:
    text = _apply(_PRM800K, _without_text(text))
    if text[:1] == "{" and text[-1:] == "}":
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    if _is_integer(text):
        text = str(round(float(text)))
    if "\\" in text:
        from pylatexenc.latex2text import LatexNodes2Text

        with contextlib.suppress(Exception):  # as the original does: what cannot be read is compared as it is
            text = LatexNodes2Text().latex_to_text(_apply(_LATEX, text)).translate(_NAMES).strip()
    text = _apply(_MIXED, text).lower()
    bare = _without_thousands(text)
    return str(int(float(bare))) if _is_integer(bare) else text


def _is_integer(text: str) -> bool:
    with contextlib.suppress(ValueError, OverflowError):  # also of round(inf) and round(nan)
        return abs(float(text) - round(float(text))) <= 1e-7
    return False


def _without_thousands(text: str) -> str:
    while (shorter := _THOUSANDS.sub(r"\1\2\3", text)) != text:
        text = shorter
    return text


def _elements(text: str) -> list[str]:
    """The elements of a tuple or an interval; of another text itself; none of no text."""
    text = _without_thousands(text)
    inner = text[1:-1]
    if inner and text[0] in _BRACKETS and text[-1] in _BRACKETS and not set(_BRACKETS) & set(inner):
        return [each.strip() for each in inner.split(",")]
    return [text] if text else []


def _is_same_element(gold: str, answer: str) -> bool:
    """An integer is not computed, and a fraction is not reduced."""
    if _FRACTION.search(gold) and _FRACTION.search(answer):
        return gold == answer
    if _is_integer(_without_thousands(gold)) != _is_integer(_without_thousands(answer)):
        return False
    return _is_zero(f"({gold})-({answer})")


def _is_zero(difference: str) -> bool:
    letters = {letter for letter in difference.replace("sqrt", "").replace("frac", "") if letter.isalpha()}
    if len(letters) > _MAX_LETTERS or _MAY_HANG.search(difference) or _IS_CODE.search(difference):
        return False
    import sympy
    from sympy.parsing import sympy_parser

    with contextlib.suppress(Exception):  # as the original does: sympy raises anything on what is no formula
        rules = (*sympy_parser.standard_transformations, sympy_parser.implicit_multiplication_application)
        return bool(sympy.simplify(sympy_parser.parse_expr(difference.replace("^", "**"), transformations=rules)) == 0)
    return False


_LONG = 128


def _is_equal_to_math_verify(gold: str, answer: str) -> bool:
    if any(len(text) > _LONG and _repeats(text) for text in (gold, answer)):
        return False
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    parsed = (
        parse(
            text if "$" in text else f"${text}$",
            extraction_config=(LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()),
            fallback_mode="no_fallback",
            extraction_mode=["first_match"],
            parsing_timeout=None,
        )
        for text in (gold, answer)
    )
    return bool(verify(*parsed, timeout_seconds=None))


def _repeats(text: str) -> bool:
    """Whether more than a fifth of all substrings are repeats: what neighbours in the order of suffixes begin with alike."""
    suffixes = sorted(text[start:] for start in range(len(text)))
    num_repeats = sum(_num_shared(*pair) for pair in pairwise(suffixes))
    return num_repeats * 2 / (len(text) * (len(text) + 1)) > 0.2


def _num_shared(first: str, second: str) -> int:
    """The number of signs with which both begin."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
