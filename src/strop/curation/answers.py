r"""Rules over a task's answer: what a verifier can judge, and what is worth judging.

rStar2-Agent (arXiv 2508.20722, section 4.2) keeps integer answers only, because rule-based checks of other forms err; it drops
the huge numbers among Project Euler's answers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isfinite

from strop.curation.magnitude import Magnitude, magnitudes
from strop.types import Task

_INTEGER = re.compile(r"[+-]?\d+")
_THOUSANDS = re.compile(r"(?<=\d)(?:,?\\!\s*|\\,\s*|\{,\})(?=\d{3}(?!\d))")  # which LaTeX alone writes
_GROUPED = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")  # with bare commas only as a whole: (100,200) is a pair
_SEPARATED = re.compile(r"(?<![\d,(\[])(?<!\\\{)\d{1,3}(,|~|\\? )\d{3}(?:\1\d{3})+(?!\1?\d)")  # in a bracket it is a list
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d+|/\d+)?")
_DIGITS = re.compile(r"(?<![.\d])\d+")  # before the decimal point
_SCIENTIFIC = re.compile(r"\de\+?(\d{2,})", re.IGNORECASE)
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mbox|operatorname)\s*\{([^{}]*)\}")
_PROSE = re.compile(r"[^\W\d_]{3,}")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{[^{}]*\}(?:\{[^{}]*\})?")
_PROOF = re.compile(r"\b(?:dis)?prove\b|\bshow\s+that\b", re.IGNORECASE)
_CHOICE = re.compile(r"\(?\s*(?:\\text(?:bf)?\s*\{)?\s*\(?([A-Ea-e])\)?\s*\}?\s*[.)]?")
_CHOICES = re.compile(r"(?:\(|\\text(?:bf)?\{\(?|\b)([A-E])(?:\)|\.)", re.MULTILINE)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"  # xyz and ABC, a run of them, are products and corners; no word is
_OPINIONS = frozenset({"yes", "no", "true", "false"})
_FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "frac", "mod", "min", "max", "gcd", "lcm"}
)
_FUNCTIONS |= {"arcsin", "arccos", "arctan", "sinh", "cosh", "tanh"}


def bare(answer: str) -> str:
    r"""The answer without dollar signs, layout and separators of thousands: `$1,\!000$` is 1000."""
    text = _THOUSANDS.sub("", answer.strip().strip("$").replace("−", "-").strip())
    return text.replace(",", "") if _GROUPED.fullmatch(text) else text


@dataclass(frozen=True, slots=True)
class IntegerAnswer:
    """Keeps answers that are one integer."""

    name: str = "integer_answer"

    def judge(self, task: Task) -> str | None:
        return None if _INTEGER.fullmatch(bare(task.answer)) else f"the answer {_short(task.answer)} is no integer"


@dataclass(frozen=True, slots=True)
class VerifiableAnswer:
    """Drops what no rule can verify: proofs, choices among letters, yes and no, prose."""

    max_words: int = 0  # of prose that an answer may hold, for data sets of questions
    name: str = "verifiable_answer"

    def judge(self, task: Task) -> str | None:
        answer = bare(task.answer)
        if _PROOF.search(task.question) and not _NUMBER.fullmatch(answer):
            return "the question asks for a proof"
        if _CHOICE.fullmatch(answer) and len(set(_CHOICES.findall(task.question))) >= 3:
            return f"the answer {_short(answer)} is a letter of a multiple choice"
        if whole := _TEXT.fullmatch(answer.rstrip(".")):
            answer = whole[1].strip()
        if answer.rstrip(".").lower() in _OPINIONS and not self.max_words:
            return f"the answer {_short(answer)} is guessed right half of the time"
        formula = _COMMAND.sub(" ", _TEXT.sub(" ", _ENVIRONMENT.sub(" ", answer)))
        prose = [word for word in map(str.lower, _PROSE.findall(formula)) if word not in _FUNCTIONS and word not in _LETTERS]
        if len(prose) > self.max_words:
            return f"the answer {_short(answer)} is prose, which no rule verifies"
        return None


@dataclass(frozen=True, slots=True)
class SimpleAnswer:
    """Drops answers so long, or of so many parts, that checks of them err."""

    max_chars: int = 80
    max_commands: int = 8  # of LaTeX, as \\frac
    max_parts: int = 4  # separated by commas
    name: str = "simple_answer"

    def judge(self, task: Task) -> str | None:
        answer = bare(task.answer)
        for what, count, limit in (
            ("characters", len(answer), self.max_chars),
            ("LaTeX commands", len(_COMMAND.findall(answer)), self.max_commands),
            ("parts", answer.rpartition("=")[2].count(",") + 1, self.max_parts),
        ):
            if count > limit:
                return f"the answer has {count} {what}, more than {limit}: {_short(answer)}"
        return None


@dataclass(frozen=True, slots=True)
class SmallNumbers:
    """Drops answers that hold a huge number, written out or as a power, a factorial or a binomial."""

    max_digits: int = 15  # of a number; float64 holds no more exactly
    name: str = "small_numbers"

    def judge(self, task: Task) -> str | None:
        answer = _SEPARATED.sub(lambda number: number[0].replace(number[1], ""), bare(task.answer))
        longest = max((len(digits) for digits in _DIGITS.findall(answer)), default=0)
        if longest > self.max_digits:
            return f"the answer has a number of {longest} digits, more than {self.max_digits}"
        scientific = (Magnitude("power", int(exponent) + 1) for exponent in _SCIENTIFIC.findall(answer))
        largest = max((*magnitudes(answer), *scientific), key=lambda each: each.num_digits, default=None)
        if largest is not None and largest.num_digits > self.max_digits:
            digits = f"{largest.num_digits:.0f}" if isfinite(largest.num_digits) else "more than 10^18"
            return f"the answer {_short(answer)} has a {largest.what} of {digits} digits, more than {self.max_digits}"
        return None


def _short(answer: str) -> str:
    return repr(answer if len(answer) <= 60 else answer[:57] + "...")
