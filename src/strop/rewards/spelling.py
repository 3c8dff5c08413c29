r"""What can be said of answers before any algebra: full stops, units, plain fractions, and numbers of another base."""

from __future__ import annotations

import re
from fractions import Fraction

from strop.rewards.grading import MAX_CHARS, normal_form
from strop.sandbox.numbers import exact_match, plain_number

_SPACES = ("\\,", "\\;", "\\:", "\\!", "~")  # LaTeX's, at the end
MAX_NUMBER_CHARS = 200  # of a number with its unit; patterns never see more of what a policy wrote

_STYLE = re.compile(r"^\\(?:displaystyle|textstyle)(?![a-zA-Z])\s*")
_BASED = re.compile(r"(\d+)\s*_\s*(?:\{\s*(\d+)\s*\}|(\d+))")
_UNIT_POWER = re.compile(r"[\d}]\s*\\(?:text|mbox|mathrm)\s*\{[^{}]*\}\s*(?:\^\s*\{?\s*(\d)\s*\}?)?$")
_NAMELESS = re.compile(r"[∞∅]|\\\{\s*\\\}")  # values without letter or digit: infinity, the empty set
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # with LaTeX's escaped ones, which group nothing
_BRACED = r"\{\s*(-?\d{1,100})\s*\}"
_FRACTION = re.compile(rf"(-?)\s*\\[dt]?frac\s*{_BRACED}\s*{_BRACED}|(-?\d{{1,100}})\s*/\s*(\d{{1,100}})")


def cleaned(answer: str) -> str:
    """The answer without the full stop of its sentence, LaTeX's dollars and a style; a number in text as the bare number."""
    answer = answer.strip()
    if len(answer) > MAX_CHARS:
        return answer
    answer = _without_end(_STYLE.sub("", _without_dollars(_without_end(answer))))
    number = plain_number(answer)
    return answer if number is None else f"{number:f}"


def equal_by_spelling(gold: str, answer: str) -> bool | None:
    """Whether the two are equal where that is plain; None: ask algebra.

    A unit is taken from an answer to a bare number alone: which unit the problem asks for, its words say.
    """
    if (is_same := same_base_and_power(gold, answer)) is not None:
        return is_same
    is_equal = exact_match(gold, answer)
    if is_equal is not None or len(gold) > MAX_NUMBER_CHARS or len(answer) > MAX_NUMBER_CHARS:
        return is_equal
    if plain_number(gold) is not None and (number := plain_number(normal_form(answer))) is not None:
        return True if number == plain_number(gold) else None
    wanted, found = _rational(gold), _rational(answer)
    if wanted is None or found is None:
        return None
    is_rounded = "." in gold + answer  # 0.3333 is what somebody may have meant by a third
    return True if wanted == found else None if is_rounded else False


def same_base_and_power(gold: str, answer: str) -> bool | None:
    """Whether two numbers with a base are the same; False where two units have different powers; None: nothing to tell.

    math_verify reads neither: to it 52_8 is 52_9, and square inches are cubic ones.
    """
    bases = based(gold), based(answer)
    if None not in bases:
        return bases[0] == bases[1]
    units = [_UNIT_POWER.search(text[-MAX_NUMBER_CHARS:]) for text in (gold, answer)]
    if units[0] and units[1] and (units[0][1] or "1") != (units[1][1] or "1"):
        return False
    return None


def could_be_an_answer(gold: str) -> bool:
    r"""Whether a text says anything and groups what it says; False of `??` and of `\frac{`.

    math_verify reads these, too: what it cannot parse it keeps as text, and so finds equal to itself.
    """
    if not any(map(str.isalnum, gold)) and _NAMELESS.search(gold) is None:
        return False
    depth = 0
    for brace in _BRACE.findall(gold):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth < 0:
            return False
    return depth == 0


def based(text: str) -> tuple[int, int] | None:
    """Digits and base of a number like 52_8 or 4210_{5}; None for anything else."""
    found = _BASED.fullmatch(text.strip().rstrip(".").strip("$ ")) if len(text) <= MAX_NUMBER_CHARS else None
    return (int(found[1]), int(found[2] or found[3])) if found else None


def _without_dollars(answer: str) -> str:
    """What stands between two dollars that are all there are."""
    inner = answer[1:-1]
    is_wrapped = len(answer) > 1 and answer[0] == answer[-1] == "$" and "$" not in inner and not inner.endswith("\\")
    return inner.strip() if is_wrapped else answer


def _without_end(answer: str) -> str:
    """Without a full stop and spaces at the end. No pattern: one that repeats may take hours over a text made for it."""
    while True:
        shorter = answer.rstrip()
        for space in _SPACES:
            shorter = shorter.removesuffix(space)
        if shorter.endswith(".") and not shorter.endswith(("..", "\\.")):
            shorter = shorter[:-1]
        if shorter == answer:
            return answer
        answer = shorter


def _rational(text: str) -> Fraction | None:
    """The value of a plain number, or of a fraction of two integers; None for anything else."""
    number = plain_number(text)
    if number is not None:
        return Fraction(number)
    found = _FRACTION.fullmatch(text.strip())
    if found is None:
        return None
    top, bottom = int(found[2] or found[4]), int(found[3] or found[5])
    return Fraction(-top if found[1] else top, bottom) if bottom else None
