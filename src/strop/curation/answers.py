"""The rules over a task's answer: what a verifier can judge reliably; `RuleScope`, which every rule has; normal forms of texts.

rStar2-Agent (arXiv 2508.20722, section 4.2) keeps only integer answers, because rule-based checks of other forms fail; it drops
the huge numbers among Project Euler's answers.
"""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from strop.config import Config
from strop.types import Task

_INTEGER = re.compile(r"[+-]?\d+")
_THOUSANDS = re.compile(r"(?<=\d)(?:,?\\!\s*|\\,\s*|\{,\})(?=\d{3}(?!\d))")  # only LaTeX writes these
_GROUPED = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")  # with bare commas only as a whole: (100,200) is a pair
_SEPARATED = re.compile(r"(?<![\d,(\[])(?<!\\\{)\d{1,3}(,|~|\\? )\d{3}(?:\1\d{3})+(?!\1?\d)")  # in a bracket it is a list
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d+|/\d+)?")
_DIGITS = re.compile(r"(?<![.\d])\d+")  # before the decimal point
_POWER = re.compile(r"(?<![\d._])(\d+)\^\{?(\d+)(?![\d.^!/*+-]|\\cdot)")
_FACTORIAL = re.compile(r"(?<![\d.])(\d+)!(?!!)")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mbox|operatorname)\s*\{([^{}]*)\}")
_PROSE = re.compile(r"[^\W\d_]{3,}")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{[^{}]*\}(?:\{[^{}]*\})?")
_PROOF = re.compile(r"\b(?:dis)?prove\b|\bshow\s+that\b", re.IGNORECASE)
_CHOICE = re.compile(r"\(?\s*(?:\\text(?:bf)?\s*\{)?\s*\(?([A-Ea-e])\)?\s*\}?\s*[.)]?")
_CHOICES = re.compile(r"(?:\(|\\text(?:bf)?\{\(?|\b)([A-E])(?:\)|\.)", re.MULTILINE)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"  # xyz and ABC, a run of them, are products and corners; no word is
_MAX_COMMANDS, _MAX_PARTS = 8, 4  # of a simple answer: LaTeX commands, and parts that commas separate
_OPINIONS = frozenset({"yes", "no", "true", "false"})
_FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "frac", "mod", "min", "max", "gcd", "lcm"}
)
_FUNCTIONS |= {"arcsin", "arccos", "arctan", "sinh", "cosh", "tanh"}


_STYLE = re.compile(r"\\(?:(?:left|right|displaystyle|textstyle|limits|quad|qquad)(?![a-zA-Z])|[,;:! ])|\$|~")
_FRACTION = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
_RAISED = re.compile("[⁰¹²³⁴-⁹⁺⁻ⁿ]+")
_LOWERED = re.compile("[₀-₉₊₋ₙ]+")
_LATEX_THOUSANDS = re.compile(r"(?<=\d)\\[,!]\s*(?=\d{3}(?!\d))")
_BRACES = re.compile(r"([\^_])\{(\w)\}(?!\d)")  # x^{2} is x^2
_SPACE = re.compile(r"(?<!\d) | (?!\d)")  # not that of 1 2/3
_ONE_WORD = r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+"  # or one sign of Chinese or Japanese
_WORD = re.compile(_ONE_WORD)
_SIGN_OR_WORD = re.compile(rf"{_ONE_WORD}|[-+*/^=<>!|]")


def plain(text: str) -> str:
    """Return `text` in lower case and one form of Unicode, without formula style."""
    text = unicodedata.normalize("NFKC", text)
    return _STYLE.sub(" ", _FRACTION.sub(r"\\frac", text)).lower()


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
    text = " ".join(plain(_LATEX_THOUSANDS.sub("", text)).split())
    text = _BRACES.sub(r"\1\2", _SPACE.sub("", text))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def bare(answer: str) -> str:
    r"""Return the answer without dollar signs, layout and separators of thousands: `$1,\!000$` is 1000."""
    text = _THOUSANDS.sub("", answer.strip().strip("$").replace("−", "-").strip())
    return text.replace(",", "") if _GROUPED.fullmatch(text) else text


class RuleScope(Config):
    """The keys of every rule: the sources whose problems it judges."""

    compares: ClassVar[bool] = False
    """Whether it compares a task with those before it."""
    kind: str
    sources: tuple[str, ...] = Field(
        (), description='Datasets, paths or hub names; empty: all. For dataset = "strop": the source column of its rows.'
    )

    @property
    def name(self) -> str:
        return self.kind

    def opened(self) -> Any:
        """Return the `Rule`. Raises `TaskError` if a benchmark or outcomes cannot be read."""
        return self


class IntegerAnswer(RuleScope):
    """Keeps answers that are one integer."""

    kind: Literal["integer_answer"] = "integer_answer"

    def judge(self, task: Task) -> str | None:
        return None if _INTEGER.fullmatch(bare(task.answer)) else f"the answer {_short(task.answer)} is not an integer"


class VerifiableAnswer(RuleScope):
    """Drops answers that no rule can verify: proofs, letters of multiple choices, yes and no, prose."""

    kind: Literal["verifiable_answer"] = "verifiable_answer"

    def judge(self, task: Task) -> str | None:
        answer = bare(task.answer)
        if _PROOF.search(task.question) and not _NUMBER.fullmatch(answer):
            return "the question asks for a proof"
        if _CHOICE.fullmatch(answer) and len(set(_CHOICES.findall(task.question))) >= 3:
            return f"the answer {_short(answer)} is a letter of a multiple choice"
        if whole := _TEXT.fullmatch(answer.rstrip(".")):
            answer = whole[1].strip()
        if answer.rstrip(".").lower() in _OPINIONS:
            return f"the answer {_short(answer)} is right in half of all guesses"
        formula = _COMMAND.sub(" ", _TEXT.sub(" ", _ENVIRONMENT.sub(" ", answer)))
        if any(word not in _FUNCTIONS and word not in _LETTERS for word in map(str.lower, _PROSE.findall(formula))):
            return f"the answer {_short(answer)} is prose, which no rule can verify"
        return None


class SimpleAnswer(RuleScope):
    """Drops answers that are too long, or have too many parts, for reliable checks."""

    kind: Literal["simple_answer"] = "simple_answer"
    max_chars: int = Field(default=80, ge=1, le=10**9, description="Characters of an answer.")

    def judge(self, task: Task) -> str | None:
        answer = bare(task.answer)
        for what, count, limit in (
            ("characters", len(answer), self.max_chars),
            ("LaTeX commands", len(_COMMAND.findall(answer)), _MAX_COMMANDS),
            ("parts", answer.rpartition("=")[2].count(",") + 1, _MAX_PARTS),
        ):
            if count > limit:
                return f"the answer has {count} {what}, more than {limit}: {_short(answer)}"
        return None


class SmallNumbers(RuleScope):
    """Drops answers with a huge number: in digits, or as a power or a factorial of plain numbers."""

    kind: Literal["small_numbers"] = "small_numbers"
    # float64 holds at most 15 digits exactly.
    max_digits: int = Field(default=15, ge=1, le=10**9, description="Digits of a number in an answer.")

    def judge(self, task: Task) -> str | None:
        answer = _SEPARATED.sub(lambda number: number[0].replace(number[1], ""), bare(task.answer))
        longest = max((len(digits) for digits in _DIGITS.findall(answer)), default=0)
        if longest > self.max_digits:
            return f"the answer has a number of {longest} digits, more than {self.max_digits}"
        logarithms = [float(exponent) * math.log10(max(1.0, float(base))) for base, exponent in _POWER.findall(answer)]
        logarithms += [math.lgamma(float(number) + 1) / math.log(10) for number in _FACTORIAL.findall(answer)]
        if max(logarithms, default=0.0) >= self.max_digits:
            return f"the answer {_short(answer)} has a power or a factorial of more than {self.max_digits} digits"
        return None


def _short(answer: str) -> str:
    return repr(answer if len(answer) <= 60 else answer[:57] + "...")
