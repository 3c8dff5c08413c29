"""Judges answers to Countdown problems: an expression is parsed, never executed, and computed in exact fractions."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from pydantic import Field

from strop.config import Config
from strop.errors import TaskError
from strop.rewards.base import AnswerPart, AnswerReward, extract_answer
from strop.rollout.prompt import AnswerForm
from strop.types import Task, Trajectory

MAX_CHARS = 500

_SPELLINGS = (
    *(("×", "*"), ("·", "*"), ("÷", "/"), ("−", "-")),
    *((r"\times", "*"), (r"\cdot", "*"), (r"\div", "/"), (r"\left", ""), (r"\right", "")),
)
_TOKEN = re.compile(r"[0-9]+|[-+*/()]")
_EXPRESSION = re.compile(r"(?:[0-9]+|[-+*/()]|\s)+")
_OPERATIONS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class _BoxKeys(Config):
    needs_box: bool = Field(default=True, description=r"The answer must be in \boxed{} inside its tag.")


class Expression(AnswerPart):
    """Reads the expression; two are the same only if their texts are."""

    class Config(AnswerPart.Config, _BoxKeys):
        """Where the expression is."""

    config: Config

    @property
    def answer_form(self) -> AnswerForm:
        return AnswerForm.BOX_IN_TAG if self.config.needs_box else AnswerForm.TAG

    @property
    def settings(self) -> str:
        return f"kind = 'countdown', needs_box = {str(self.config.needs_box).lower()}"

    def read_answer(self, trajectory: Trajectory) -> str | None:
        return extract_answer(trajectory, needs_box=self.config.needs_box)

    async def is_same(self, gold: str, answer: str) -> bool:
        return gold == answer

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        numbers, target = _problem(task)
        answer = self.read_answer(trajectory)
        return float(answer is not None and value_of(answer, numbers) == target)


class CountdownReward(AnswerReward):
    """Parts, each 0 or 1: `accuracy` (an expression of exactly the task's numbers that equals its target), `valid` (one of
    exactly these numbers, whatever its value), `format` (one answer tag, one box), `called` (a tool ran).

    A truncated trajectory has no answer.
    """

    class Config(AnswerReward.Config, _BoxKeys):
        """The answer is an expression of the task's numbers, judged by its value."""

        parts = ("accuracy", "valid", "format", "called")

    config: Config
    part = Expression

    async def judge(self, task: Task, trajectory: Trajectory) -> Mapping[str, float]:
        answer = self.answer.read_answer(trajectory)
        is_valid = answer is not None and value_of(answer, _problem(task)[0]) is not None
        return {"accuracy": await self.answer.score(task, trajectory), "valid": float(is_valid)}


def value_of(text: str, numbers: Sequence[int]) -> Fraction | None:
    r"""The value of `text` if it is an expression that uses each of `numbers` exactly once; None for anything else.

    Allowed are + - * / between two operands, brackets, blanks, and the spellings ``\times \cdot \div × · ÷ −``. A sign in front
    of a number, an equals sign, a division by zero and more than 500 characters are not allowed. It never raises.
    """
    if len(text) > MAX_CHARS:
        return None
    for spelling, meaning in _SPELLINGS:
        text = text.replace(spelling, meaning)
    if not _EXPRESSION.fullmatch(text):
        return None
    tokens = [str(int(token)) if token.isdigit() else token for token in _TOKEN.findall(text)]
    if sorted(int(token) for token in tokens if token.isdigit()) != sorted(numbers):
        return None  # the expression has only as many numbers as the task, and none larger
    try:
        return _computed(ast.parse(" ".join(tokens), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _computed(node: ast.expr) -> Fraction:
    """Raises `ValueError` for anything other than numbers and operations of two operands."""
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.BinOp(left=left, op=operation, right=right):
            return _OPERATIONS[type(operation)](_computed(left), _computed(right))
    raise ValueError("not an expression of + - * /")


def _problem(task: Task) -> tuple[list[int], int]:
    """The numbers and the target of a task. Raises `TaskError` if one of them is missing."""
    try:
        return [int(number) for number in re.split(r"[,\s]+", task.facts["numbers"].strip())], int(task.facts["target"])
    except (KeyError, ValueError) as error:
        raise TaskError(
            f"task {task.id!r} is no Countdown problem ({type(error).__name__}: {error}): reward.kind = 'countdown' needs the"
            ' facts `numbers`, as in "3, 7, 25", and `target`, as in "96". Use tasks.kind = "countdown", or add columns of'
            " these names to tasks.facts."
        ) from error
