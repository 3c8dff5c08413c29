"""Compares answers to mathematical problems as texts, and in a process of this machine what needs algebra."""

from __future__ import annotations

import atexit
import importlib.util
import os
import re
from collections.abc import Callable

from strop.errors import MachineError, UserError
from strop.sandbox.numbers import exact_match, plain_number
from strop.sandbox.protocol import PairVerdict
from strop.sandbox.verify_process import ProcessVerifier
from strop.tasks.boxes import BOX, last_box

MAX_CHARS = 4_000  # of one answer; a longer one is not read
MAX_NUMBER_CHARS = 200  # of a number with its unit; patterns for numbers never see more of the policy's text

_UNITS = (
    "degree|deg|cm|mm|km|centimeter|meter|metre|kilometer|mile|inch|foot|feet|ft|yard|second|sec|minute|min|hour|hr|day|week|month"
    "|year|mph|gram|kg|pound|lb|liter|litre|gallon|dollar|cent|percent|unit|point|student|people|square unit"
)
# Applied in this order: (pattern, replacement).
_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"[−–]", "-"),
        (r"\\(?:mbox|mathrm|textbf|mathbf|textit)(?=\s*\{)", r"\\text"),
        (r"^\\text\s*\{([^{}]*)\}$", r"\1"),
        (r"\\text\s*\{\s*(?:and|or)\s*\}|\s(?:and|or)\s", ","),
        (r"(?<=[^\s])\s*\\text\s*\{[^{}]*\}(?:\^\{?[23]\}?)?$", ""),  # a unit after something else
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
_MAX_LETTERS = 2  # more different ones are words; algebra would multiply their letters, and "dear" would equal "read"
_SPACES = ("\\,", "\\;", "\\:", "\\!", "~")  # in LaTeX

_STYLE = re.compile(r"^\\(?:displaystyle|textstyle)(?![a-zA-Z])\s*")
_BASED = re.compile(r"(\d+)\s*_\s*(?:\{\s*(\d+)\s*\}|(\d+))")
_UNIT_POWER = re.compile(r"[\d}]\s*\\(?:text|mbox|mathrm)\s*\{[^{}]*\}\s*(?:\^\s*\{?\s*(\d)\s*\}?)?$")


def normal_form(answer: str) -> str:
    """The answer without spaces, case, units, dollar and per cent signs, and with fractions in one notation."""
    text = answer.strip()
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    if len(text) > 1 and text[0] == "{" and text[-1] == "}":
        text = text[1:-1]
    number = plain_number(text)
    return text.lower().strip() if number is None else f"{number.normalize():f}"


def equal_by_text(gold: str, answer: str) -> bool | None:
    """Whether the two are equal as texts or plain numbers; None: only algebra can say. Takes time linear in their length."""
    if len(gold) > MAX_CHARS or len(answer) > MAX_CHARS:
        return False
    gold, answer = normal_form(gold), normal_form(answer)
    if gold == answer or not gold or not answer:
        return bool(gold) and gold == answer
    return exact_match(gold, answer)


def left_to_algebra(gold: str, answer: str) -> list[tuple[str, str]] | None:
    r"""The pairs of elements whose differences sympy must find to be 0; None: the two are not equal whatever it finds.

    As in the course's grader, an integer is not equal to an expression that has to be computed (`\sqrt{4}` for 2), and a
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
    """The brackets and elements of a tuple or an interval; for other texts no brackets and one element."""
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


def left_by_text(gold: str, prediction: str) -> list[tuple[str, str]] | None:
    """The differences left for sympy: empty if the texts are equal; None if the two are not equal whatever sympy finds."""
    is_equal = equal_by_text(gold, prediction)
    if is_equal is None:
        return left_to_algebra(gold, prediction)
    return [] if is_equal else None


def cleaned(answer: str) -> str:
    """The answer without a final full stop, dollar signs around it and style commands; the bare number of \\text{number}."""
    answer = answer.strip()
    if len(answer) > MAX_CHARS:
        return answer
    answer = _without_end(_STYLE.sub("", _without_dollars(_without_end(answer))))
    number = plain_number(answer)
    return answer if number is None else f"{number:f}"


def same_base_and_power(gold: str, answer: str) -> bool | None:
    """Whether two numbers with a base are the same; False if two units have different powers; None for anything else.

    math_verify reads neither: it takes 52_8 for 52_9, and square inches for cubic ones.
    """
    bases = based(gold), based(answer)
    if None not in bases:
        return bases[0] == bases[1]
    units = [_UNIT_POWER.search(text[-MAX_NUMBER_CHARS:]) for text in (gold, answer)]
    if units[0] and units[1] and (units[0][1] or "1") != (units[1][1] or "1"):
        return False
    return None


def based(text: str) -> tuple[int, int] | None:
    """Digits and base of a number like 52_8 or 4210_{5}; None for anything else."""
    found = _BASED.fullmatch(text.strip().rstrip(".").strip("$ ")) if len(text) <= MAX_NUMBER_CHARS else None
    return (int(found[1]), int(found[2] or found[3])) if found else None


def _without_dollars(answer: str) -> str:
    """The text between two dollar signs, if there are no others."""
    inner = answer[1:-1]
    is_wrapped = len(answer) > 1 and answer[0] == answer[-1] == "$" and "$" not in inner and not inner.endswith("\\")
    return inner.strip() if is_wrapped else answer


def _without_end(answer: str) -> str:
    """Without a full stop and spaces at the end. Not a regular expression: hostile text could make it backtrack for hours."""
    while True:
        shorter = answer.rstrip()
        for space in _SPACES:
            shorter = shorter.removesuffix(space)
        if shorter.endswith(".") and not shorter.endswith(("..", "\\.")):
            shorter = shorter[:-1]
        if shorter == answer:
            return answer
        answer = shorter


LIMIT_S = 1.0  # of one comparison


def is_equal_to_dr_grpo(gold: str, answer: str, *, is_fast: bool) -> bool:
    """Whether the grader of Dr. GRPO accepts `answer`; see `strop.sandbox.inside.dr_grpo`. Blocks, for `LIMIT_S` at most.

    Args:
        gold: if it has a box, the inside of the last one counts.
        is_fast: without math_verify.

    Raises:
        UserError: pylatexenc is not installed.
        MachineError: answers cannot be compared on this machine.
    """
    need_pylatexenc()
    wanted = last_box(gold) if BOX in gold else gold
    if wanted is None or max(len(wanted), len(answer)) > MAX_CHARS:
        return False
    if wanted == answer:
        return True
    return ask(lambda at, limit_s: at.compare_as_dr_grpo(wanted, answer, is_fast=is_fast, wall_s=limit_s))


def need_pylatexenc() -> None:
    """Raises `UserError` if it is not installed."""
    if importlib.util.find_spec("pylatexenc") is None:
        raise UserError("judge = 'dr_grpo' needs the library pylatexenc: pip install 'strop[cs336]'.")


def ask(question: Callable[[ProcessVerifier, float], PairVerdict]) -> bool:
    """Whether the process finds two answers equal; at its deadline, the second argument, it does not. Raises `MachineError`."""
    verdict = question(_verifiers.setdefault(os.getpid(), ProcessVerifier(max_processes=1)), LIMIT_S)
    if verdict is PairVerdict.INTERNAL:
        raise MachineError("the process that compares answers was lost twice on one pair.")
    return verdict is PairVerdict.EQUAL


_verifiers: dict[int, ProcessVerifier] = {}  # by process id: a forked process must not use its parent's


@atexit.register
def _close() -> None:
    if (verifier := _verifiers.pop(os.getpid(), None)) is not None:
        verifier.close_now()
