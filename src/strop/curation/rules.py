"""Curation rules for answers, duplicates and agreement with recorded outcomes; the file of outcomes; normal forms of texts.

rStar2-Agent (arXiv 2508.20722, section 4.2) keeps only integer answers, because rule-based checks of other forms fail. It drops
the huge numbers among Project Euler's answers, and keeps problems of OpenMathReasoning whose label agrees with at least 2 of 16
answers of a model.

Duplicates are equal texts, or nearly equal ones by MinHash (Broder, 1997): pairs with equal answers whose sets of word triples
overlap by a Jaccard index of at least 0.8. Candidates come from bands of the signatures (locality-sensitive hashing); each is
then checked by the whole signature. Problems from one template share bands although few are similar enough. Each answer has its
own bands, so problems with other answers are never compared; and a problem is compared with at most `max_compared` others,
which bounds the work.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from strop.config import Config
from strop.errors import TaskError
from strop.tasks.files import read_rows
from strop.types import Group, ScoredTrajectory, Task

_INTEGER = re.compile(r"[+-]?\d+")
_THOUSANDS = re.compile(r"(?<=\d)(?:,?\\!\s*|\\,\s*|\{,\})(?=\d{3}(?!\d))")  # only LaTeX writes these
_GROUPED = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")  # with bare commas only as a whole: (100,200) is a pair
_SEPARATED = re.compile(r"(?<![\d,(\[])(?<!\\\{)\d{1,3}(,|~|\\? )\d{3}(?:\1\d{3})+(?!\1?\d)")  # in a bracket it is a list
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d+|/\d+)?")
_DIGITS = re.compile(r"(?<![.\d])\d+")  # before the decimal point
_SCIENTIFIC = re.compile(r"\de\+?(\d{2,})", re.IGNORECASE)
_NOTATIONS = (
    (re.compile(r"[\s~]|\\[!,;: ]|\\(?:left|right)(?![a-zA-Z])"), ""),
    (re.compile(r"\*\*"), "^"),
    (re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹]+"), lambda found: "^" + found[0].translate(str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789"))),
    (re.compile(r"(?<=\^[{(])\d{1,3}(?:,\d{3})+(?=[)}])"), lambda found: found[0].replace(",", "")),
)
_TOWER = re.compile(r"(?<!_)[\da-zA-Z)]\^[{(]?\d+(?:\^|!)")
_POWER = re.compile(r"(?<![\d._])(?:(\d+(?:\.\d+)?)|\(([^()]*)\)|(?<![_\\a-zA-Z])[a-zA-Z])\^[{(]?(\d+)(?![\d.^!/*+-]|\\cdot)")
_FACTORIAL = re.compile(r"(?<![\d.])(\d+)!(?!!)")
_BINOMIAL = re.compile(r"\\[dt]?binom\{(\d+)\}\{(\d+)\}")
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
    """Drops answers with a huge number, in digits or as a power, a factorial or a binomial of plain numbers."""

    kind: Literal["small_numbers"] = "small_numbers"
    # float64 holds at most 15 digits exactly.
    max_digits: int = Field(default=15, ge=1, le=10**9, description="Digits of a number in an answer.")

    def judge(self, task: Task) -> str | None:
        answer = _SEPARATED.sub(lambda number: number[0].replace(number[1], ""), bare(task.answer))
        longest = max((len(digits) for digits in _DIGITS.findall(answer)), default=0)
        if longest > self.max_digits:
            return f"the answer has a number of {longest} digits, more than {self.max_digits}"
        what, log = _largest(answer)
        if log >= self.max_digits:
            digits = f"{math.floor(log + 1e-9) + 1}" if math.isfinite(log) else "very many"
            return f"the answer {_short(answer)} has a {what} of {digits} digits, more than {self.max_digits}"
        return None


AnswerRule: TypeAlias = IntegerAnswer | VerifiableAnswer | SimpleAnswer | SmallNumbers


def _largest(answer: str) -> tuple[str, float]:
    """The kind and the decimal logarithm of the largest power, factorial or binomial. A rule of thumb.

    Operands are numbers as they are written; a letter or a bracket as base counts as 2, a power in an exponent as huge.
    """
    for pattern, replacement in _NOTATIONS:
        answer = pattern.sub(replacement, answer)
    found = [("power", math.inf)] if _TOWER.search(answer) else [("power", 0.0)]
    found += [("power", float(exponent)) for exponent in _SCIENTIFIC.findall(answer)]
    for number, bracket, exponent in _POWER.findall(answer):
        base = float(number or (bracket if bracket.isdigit() else 2))
        if base > 1 and "/" not in bracket and "\\frac" not in bracket:
            found.append(("power", float(exponent) * math.log10(base)))
    found += [("factorial", _log_factorial(float(number))) for number in _FACTORIAL.findall(answer)]
    for n, k in ((float(n), float(k)) for n, k in _BINOMIAL.findall(answer)):
        if k <= n < math.inf:
            found.append(("binomial", _log_factorial(n) - _log_factorial(k) - _log_factorial(n - k)))
    return max(found, key=lambda each: each[1])


def _log_factorial(number: float) -> float:
    return math.lgamma(number + 1) / math.log(10)


def _short(answer: str) -> str:
    return repr(answer if len(answer) <= 60 else answer[:57] + "...")


logger = logging.getLogger(__name__)

_NUM_HASHES = 120
_SHINGLE_WORDS = 3
_SEED = 1
_THRESHOLD = 0.8
_NUM_BANDS = 20  # of 6 hashes, the most at which a pair at the threshold shares a band with a probability of 0.99


class ExactDuplicates:
    """Keeps the first of problems whose questions differ only in layout."""

    name = "exact_duplicates"

    def __init__(self) -> None:
        self._first: dict[bytes, tuple[str, str]] = {}

    def judge(self, task: Task) -> str | None:
        key, answer = fingerprint(task.question), bare(task.answer)
        if key not in self._first:
            self._first[key] = (task.id, answer)
            return None
        first, first_answer = self._first[key]
        other = "" if first_answer == answer else f", whose answer is {first_answer!r} where this one's is {answer!r}"
        return f"the same question as {first}{other}"


class NearDuplicates:
    """Keeps the first of problems with nearly equal questions.

    The answers must be equal too: the same sentence with other numbers is another problem.

    Args:
        max_compared: candidates that a problem is compared with, the earliest first. A warning says that there were more.
    """

    name = "near_duplicates"

    def __init__(self, *, max_compared: int = 10_000) -> None:
        try:
            from rensa import RMinHash, RMinHashLSH
        except ImportError as error:
            raise TaskError(
                "the rule near_duplicates needs the `rensa` package, which is not installed. Install it with"
                " pip install 'strop[data]', or leave the rule out."
            ) from error
        self.max_compared = max_compared
        self.num_compared = 0
        """Pairs of signatures that were compared."""
        self._has_warned = False
        self._new_signature = partial(RMinHash, num_perm=_NUM_HASHES, seed=_SEED)
        self._kept: list[tuple[str, Any]] = []  # ids and signatures
        self._places = defaultdict[str, Any](lambda: RMinHashLSH(_THRESHOLD, _NUM_HASHES, _NUM_BANDS))  # in `_kept`, by answer

    def judge(self, task: Task) -> str | None:
        own = self.signature(task.question)
        places = self._places[bare(task.answer)]
        candidates = sorted(places.query(own))
        for place in candidates[: self.max_compared]:
            name, other = self._kept[place]
            self.num_compared += 1
            if (likeness := own.jaccard(other)) >= _THRESHOLD:
                return f"{likeness:.0%} alike with {name}"
        if len(candidates) > self.max_compared and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "near_duplicates: %s shares text with more than %d problems with the same answer. It was compared only with the"
                " first of these, so near duplicates may remain. This holds for further problems, without a warning.",
                task.id,
                self.max_compared,
            )
        places.insert(len(self._kept), own)
        self._kept.append((task.id, own))
        return None

    def signature(self, text: str) -> Any:
        """Return the MinHash signature of the word triples of `text`, the same in every process."""
        said = words(text)
        found = self._new_signature()
        found.update(grams(said, _SHINGLE_WORDS) or said)
        return found


class ExactDuplicatesRule(RuleScope):
    """Keeps the first of equal questions."""

    compares = True
    kind: Literal["exact_duplicates"] = "exact_duplicates"

    def opened(self) -> ExactDuplicates:
        return ExactDuplicates()


class NearDuplicatesRule(RuleScope):
    """Keeps the first of nearly equal questions; needs the extra `data`."""

    compares = True
    kind: Literal["near_duplicates"] = "near_duplicates"

    def opened(self) -> NearDuplicates:
        return NearDuplicates()


_FORM = "A row holds task_id and question_digest (texts), num_right and num_judged (0 <= num_right <= num_judged)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How often a model solved a task. Void rollouts are not judged."""

    task_id: str
    question_digest: str  # two files may have equal ids
    num_right: int
    num_judged: int


TaskKey: TypeAlias = tuple[str, str]
"""The id of a task and a digest of its question."""


def key_of(task: Task) -> TaskKey:
    return task.id, fingerprint(task.question).hex()


def outcome_of(group: Group, verdict: Callable[[ScoredTrajectory], bool | None]) -> Outcome:
    """Return how often the task of `group` was solved. `verdict` says whether a rollout is right, or None if unknown."""
    found = [verdict(scored) for scored in group.trajectories]
    task_id, digest = key_of(group.task)
    num_judged = len(found) - found.count(None)
    return Outcome(task_id=task_id, question_digest=digest, num_right=found.count(True), num_judged=num_judged)


def read_outcomes(path: Path) -> dict[TaskKey, Outcome]:
    """Return the outcomes in a JSONL file; rows of one task add up. Raises `TaskError` for a bad row."""
    found: dict[TaskKey, Outcome] = {}
    for place, row in read_rows(path):
        outcome = _outcome(row, place)
        key = outcome.task_id, outcome.question_digest
        if before := found.get(key):
            num_right, num_judged = outcome.num_right + before.num_right, outcome.num_judged + before.num_judged
            outcome = replace(outcome, num_right=num_right, num_judged=num_judged)
        found[key] = outcome
    return found


def _outcome(row: Mapping[str, Any], place: str) -> Outcome:
    task_id, digest, right, judged = (row.get(key) for key in ("task_id", "question_digest", "num_right", "num_judged"))
    if not isinstance(task_id, str) or type(right) is not int or type(judged) is not int or not 0 <= right <= judged:
        raise TaskError(
            f"{place}: not the outcome of a task. {_FORM}; the stages filter and rejection_sampling write such files."
        )
    if not isinstance(digest, str):
        raise TaskError(
            f"{place}: no question_digest for task {task_id!r}. {_FORM}; strop.curation.rules.key_of(task) returns the"
            " first two."
        )
    return Outcome(task_id=task_id, question_digest=digest, num_right=right, num_judged=judged)


class AgreementRule(RuleScope):
    """Keeps problems whose label agrees with some of a model's answers; other labels are probably wrong.

    Rollouts that were not judged (void, or without a verdict) may be right: a task is dropped only if they cannot change that.
    """

    kind: Literal["agreement"] = "agreement"
    outcomes: Path = Field(description="JSONL file with the outcome of each task.")
    num_rollouts: int = Field(default=16, ge=1, le=10**9, description="Rollouts of each task; unjudged ones may be right.")
    min_right: int = Field(
        default=2, ge=1, le=10**9, description="Right rollouts that a task needs (rStar2-Agent section 4.2)."
    )

    @model_validator(mode="after")
    def _can_be_reached(self) -> Self:
        if self.min_right > self.num_rollouts:
            raise ValueError(
                f"min_right is {self.min_right} but num_rollouts is {self.num_rollouts}: every problem would be dropped. Lower"
                " min_right."
            )
        return self

    def opened(self) -> Agreement:
        return Agreement(rule=self, outcomes=read_outcomes(self.outcomes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The rule with the outcomes. Drops tasks without one."""

    rule: AgreementRule
    outcomes: Mapping[TaskKey, Outcome]

    @property
    def name(self) -> str:
        return self.rule.kind

    def judge(self, task: Task) -> str | None:
        if (outcome := self.outcomes.get(key_of(task))) is None:
            return "no rollout of it was judged"
        num_missing = max(0, self.rule.num_rollouts - outcome.num_judged)
        if outcome.num_right + num_missing >= self.rule.min_right:
            return None
        agree = f"{outcome.num_right} of {outcome.num_judged} answers agree with the label, fewer than {self.rule.min_right}"
        return agree + (f", {num_missing} were not judged" if num_missing else "")


OutcomeOrDuplicateRule: TypeAlias = AgreementRule | ExactDuplicatesRule | NearDuplicatesRule
