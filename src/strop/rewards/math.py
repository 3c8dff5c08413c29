"""Judges answers to mathematical problems. What needs algebra is sent to a code service, many pairs at a time.

A pair that reaches its deadline counts as not equal, with an outcome of its own; otherwise a policy would learn to hang the
judge. A judge that is lost is `MachineError`, never a wrong answer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Literal, TypeAlias

from pydantic import Field

from strop.answer_text import boxed, exact_match, plain_number
from strop.config import Config
from strop.errors import MachineError
from strop.http import Gatherer
from strop.rewards.base import (
    AnswerPart,
    AnswerReward,
    AnswerService,
    NotJudged,
    PositiveWeight,
    RunService,
    extract_answer,
    final_text,
)
from strop.rewards.math_answers import pairs_to_compare
from strop.rewards.math_text import (
    MAX_CHARS,
    MAX_NUMBER_CHARS,
    cleaned,
    is_equal_to_dr_grpo,
    left_by_text,
    need_pylatexenc,
    normal_form,
    same_base_and_power,
)
from strop.rollout.prompt import AnswerForm
from strop.sandbox.protocol import AnswerPair, PairVerdict, VerifyRequest
from strop.sandbox.verify_process import ProcessVerifier
from strop.types import Task, Trajectory

_NAMELESS = re.compile(r"[∞∅]|\\\{\s*\\\}")  # values without a letter or digit: infinity, the empty set
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # and escaped ones, which do not group
_BRACED = r"\{\s*(-?\d{1,100})\s*\}"
_PLAIN_FRACTION = re.compile(rf"(-?)\s*\\[dt]?frac\s*{_BRACED}\s*{_BRACED}|(-?\d{{1,100}})\s*/\s*(\d{{1,100}})")


def equal_by_spelling(gold: str, answer: str) -> bool | None:
    """Whether the two are equal, for plain numbers, fractions and numbers with a base; None: only algebra can say.

    A unit is removed only from an answer to a bare number: the problem's text says which unit it asks for.
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
    is_rounded = "." in gold + answer  # 0.3333 may mean a third
    return True if wanted == found else None if is_rounded else False


def could_be_an_answer(gold: str) -> bool:
    r"""Whether a text has a letter, digit or nameless value, and balanced braces; False for `??` and `\frac{`.

    math_verify accepts such texts: it keeps what it cannot parse as text, which is equal to itself.
    """
    if not any(map(str.isalnum, gold)) and _NAMELESS.search(gold) is None:
        return False
    depths = [*accumulate({"{": 1, "}": -1}.get(brace, 0) for brace in _BRACE.findall(gold))]
    return not depths or (min(depths) >= 0 and depths[-1] == 0)


def _rational(text: str) -> Fraction | None:
    """The value of a plain number, or of a fraction of two integers; None for anything else."""
    number = plain_number(text)
    if number is not None:
        return Fraction(number)
    found = _PLAIN_FRACTION.fullmatch(text.strip())
    if found is None:
        return None
    top, bottom = int(found[2] or found[4]), int(found[3] or found[5])
    return Fraction(-top if found[1] else top, bottom) if bottom else None


_GATHER_S = 0.003  # rollouts that end together are judged in one request
_MAX_PAIRS = 256  # in one request


class MathVerifier:
    """Gathers the questions of a few milliseconds into one request. Belongs to the event loop in which it was first used.

    Args:
        service: compares what is not a plain number; by default processes of its own, started when first needed.
        deadline_s: of each pair.
    """

    def __init__(self, service: AnswerService | None = None, *, deadline_s: float = 2.0) -> None:
        self.deadline_s = deadline_s
        self._own: ProcessVerifier | None = None
        if service is None:
            service = self._own = ProcessVerifier()
        self._service = service
        self._gatherer = Gatherer(self._verdicts, wait_s=_GATHER_S, most=_MAX_PAIRS)
        self._readable: dict[str, bool] = {}

    async def verify(self, gold: str, prediction: str, *, is_fused: bool = False) -> PairVerdict:
        """Whether `prediction` equals `gold`. The order matters: math_verify is not symmetric.

        Fused, either of two graders may accept, in the order of rStar2-Agent's released code (`compute_score.py`): a
        Prime-style one (text, then sympy, which is `normalize_answer` here) and math_verify. Both run in one process within one
        deadline. The last step of that code's first grader, numbers with a tolerance and 3.14 for pi, is left out.

        Raises:
            MachineError: the service was lost, or could not judge this pair.
        """
        gold, prediction = cleaned(gold), cleaned(prediction)
        is_equal = equal_by_spelling(gold, prediction)
        if is_equal is not None:
            return PairVerdict.EQUAL if is_equal else PairVerdict.UNEQUAL
        left = left_by_text(gold, prediction) if is_fused else None
        if left == []:
            return PairVerdict.EQUAL
        return await self._compare(gold, prediction, left or ())

    async def verify_form(self, gold: str, prediction: str) -> PairVerdict:
        """As `verify`, of the values that are left when the form of both is read; see `pairs_to_compare`."""
        if (is_same := exact_match(gold, prediction)) is not None:  # most answers are plain numbers
            return PairVerdict.EQUAL if is_same else PairVerdict.UNEQUAL
        is_short = max(len(gold), len(prediction)) <= MAX_CHARS
        if not is_short or (pairs := pairs_to_compare(gold, prediction)) is None:
            return PairVerdict.UNEQUAL
        for pair in pairs:  # one after the other: the first that is wrong decides
            if (verdict := await self.verify(*pair)) is not PairVerdict.EQUAL:
                return verdict
        return PairVerdict.EQUAL

    async def can_read(self, gold: str) -> bool:
        """Whether an answer can be compared with `gold`. Prose can: it is compared as text. Cached for each text.

        Raises:
            MachineError: as `verify`.
        """
        if gold not in self._readable:
            self._readable[gold] = could_be_an_answer(gold) and (
                plain_number(gold) is not None or await self._compare(gold, gold) is not PairVerdict.UNREADABLE
            )
        return self._readable[gold]

    async def _compare(self, gold: str, prediction: str, differences: Sequence[tuple[str, str]] = ()) -> PairVerdict:
        pair = AnswerPair(gold=gold, answer=prediction, differences=tuple(differences))
        verdict = await self._gatherer.ask(pair)
        if verdict is PairVerdict.INTERNAL:
            raise MachineError(f"the answer verifier failed twice on one pair: {gold!r}, {prediction!r:.200}.")
        return verdict

    def _verdicts(self, pairs: list[AnswerPair]) -> AsyncIterator[tuple[int, PairVerdict]]:
        return self._service.verify(VerifyRequest(pairs=tuple(pairs), pair_wall_s=self.deadline_s))

    async def close(self) -> None:
        """Cancel running comparisons and end the verifier's own processes. Safe to call twice."""
        await self._gatherer.close()
        if self._own is not None:
            await self._own.close()


Judge: TypeAlias = Literal["form", "math_verify", "exact", "fused", "dr_grpo"]
_JUDGES = (
    "form: math_verify, after relations, units, bases and words are compared as such. math_verify: only that. exact: equal"
    " texts or equal plain numbers. fused: text and sympy as in r1_zero, or else math_verify. dr_grpo: the grader that CS336"
    " assignment 5 hands out."
)

MAX_DEADLINE_S = 600.0
"""The longest time per pair that a code service accepts by default."""


class _Keys(Config):
    needs_box: bool = Field(default=True, description=r"The answer must be in \boxed{} inside its tag.")  # rStar2-Agent 2.1
    judge: Judge = Field(default="form", description=_JUDGES)
    verify_deadline_s: float = Field(default=2.0, gt=0, le=MAX_DEADLINE_S, description="Time limit of one comparison.")


class MathPart(AnswerPart):
    """1 if the answer equals the task's, by math_verify, by text, or by either of two graders."""

    class Config(AnswerPart.Config, _Keys):
        weight: PositiveWeight = 1.0
        answer_in: Literal["answer_tag", "response"] = Field(
            default="answer_tag", description="Where the answer is: in the answer tag, or in the last box of the last turn."
        )

    config: Config
    _verifier: MathVerifier

    def open(self, service: RunService | None) -> None:
        if self.config.judge == "dr_grpo":
            need_pylatexenc()
        self._verifier = MathVerifier(service, deadline_s=self.config.verify_deadline_s)

    async def close(self) -> None:
        await self._verifier.close()

    @property
    def answer_form(self) -> AnswerForm:
        if self.config.answer_in == "response":
            return AnswerForm.BOX
        return AnswerForm.BOX_IN_TAG if self.config.needs_box else AnswerForm.TAG

    @property
    def settings(self) -> str:
        if self.config.answer_in == "response":
            return "kind = 'math', answer_in = 'response'"
        return f"kind = 'math', needs_box = {str(self.config.needs_box).lower()}"

    @property
    def equality(self) -> Literal["text", "intervals"]:
        return "text" if self.config.judge == "exact" else "intervals"

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        if self.config.judge in ("form", "math_verify") and not await self._verifier.can_read(task.answer):
            raise NotJudged(f"the answer of task {task.id!r}, {task.answer!r}, cannot be read")
        return float(await self.is_correct(task, trajectory))

    async def is_correct(self, task: Task, trajectory: Trajectory) -> bool:
        """As `score`; an unreadable answer of the task makes every answer wrong."""
        answer = self.read_answer(trajectory)
        return bool(answer) and await self._equals(task.answer, answer or "", judge=self.config.judge)

    def read_answer(self, trajectory: Trajectory) -> str | None:
        if self.config.answer_in == "answer_tag":
            return extract_answer(trajectory, needs_box=self.config.needs_box)
        boxes = boxed(final_text(trajectory) or "")
        return boxes[-1].strip() if boxes else None

    async def is_same(self, gold: str, answer: str) -> bool:
        return await self._equals(gold, answer, judge="math_verify" if self.config.judge == "fused" else self.config.judge)

    async def _equals(self, gold: str, answer: str, *, judge: Judge) -> bool:
        if judge == "exact":
            return exact_match(gold, answer) or False
        if judge == "dr_grpo":
            return await asyncio.to_thread(is_equal_to_dr_grpo, gold, answer, is_fast=True)
        if judge == "form":
            return await self._verifier.verify_form(gold, answer) is PairVerdict.EQUAL
        return await self._verifier.verify(gold, answer, is_fused=judge == "fused") is PairVerdict.EQUAL


class MathReward(AnswerReward):
    """Parts, each 0 or 1: `accuracy` (the answer equals the task's), `format` (one answer tag, one box), `called` (a tool ran).

    A truncated trajectory has no answer (rStar2-Agent, arXiv 2508.20722, section 4.3.1).
    """

    class Config(AnswerReward.Config, _Keys):
        """The answer is compared with the task's. A part without a weight is reported and does not count."""

        parts = ("accuracy", "format", "called")

    config: Config
    part = MathPart
    compares_answers = True

    async def judge(self, task: Task, trajectory: Trajectory) -> Mapping[str, float]:
        return {"accuracy": float(await self.answer.is_correct(task, trajectory))}
