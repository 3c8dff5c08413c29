"""Judges answers to Countdown problems: an expression is read, never executed, and computed in exact fractions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction

from strop.errors import TaskError
from strop.rewards.answers import extract_answer, has_answer_format
from strop.rewards.config import CountdownRewardConfig
from strop.rewards.shaping import has_called
from strop.types import Task, Trajectory

MAX_CHARS = 500
MAX_DEPTH = 50  # of brackets in brackets

_SPELLINGS = (("×", "*"), ("·", "*"), ("÷", "/"), ("−", "-"))
_LATEX = ((r"\times", "*"), (r"\cdot", "*"), (r"\div", "/"), (r"\left", ""), (r"\right", ""))
_TOKEN = re.compile(r"\s*([0-9]+|[-+*/()])")


class CountdownReward:
    """Parts, each 0 or 1: `accuracy` (an expression of exactly the task's numbers that equals its target), `valid` (one of
    exactly these numbers, whatever it equals), `format` (one answer tag, one box), `called` (a tool ran).

    A trajectory that was cut off has no answer, whatever it wrote before.
    """

    def __init__(self, config: CountdownRewardConfig) -> None:
        self.config = config

    async def __call__(self, task: Task, trajectory: Trajectory) -> Mapping[str, float]:
        numbers, target = _problem(task)
        answer = extract_answer(trajectory, needs_box=self.config.needs_box)
        value = None if answer is None else value_of(answer, numbers)
        return {
            "accuracy": float(value is not None and value == target),
            "valid": float(value is not None),
            "format": float(has_answer_format(trajectory)),
            "called": float(has_called(trajectory)),
        }

    async def close(self) -> None:
        """Nothing to end."""


def value_of(text: str, numbers: Sequence[int]) -> Fraction | None:
    r"""The value of `text` if it is an expression that uses each of `numbers` exactly once; None for anything else.

    Allowed are + - * / between two operands, brackets, blanks, and the spellings ``\times \cdot \div × · ÷ −``. A sign before a
    number, an equals sign, a quotient by zero and more than 500 characters make it no expression. It never raises.
    """
    tokens = _tokens(text)
    if tokens is None or sorted(int(token) for token in tokens if token.isdigit()) != sorted(numbers):
        return None  # so what is computed has as few numbers as the task, and none larger
    try:
        return _Reader(tokens).read()
    except (_NoExpression, ZeroDivisionError):
        return None


def _tokens(text: str) -> list[str] | None:
    """Numbers, operators and brackets; None where there is anything else."""
    if len(text) > MAX_CHARS:
        return None
    for spelling, meaning in (*_SPELLINGS, *_LATEX):
        text = text.replace(spelling, meaning)
    text = text.rstrip()
    tokens: list[str] = []
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            return None
        tokens.append(found[1])
        position = found.end()
    return tokens


class _NoExpression(Exception):  # noqa: N818 - no error: what a policy wrote
    """The tokens are no expression."""


class _Reader:
    """Computes an expression while it reads it: a sum of products of numbers and of sums in brackets."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._left = [*reversed(tokens)]

    def read(self) -> Fraction:
        """Raises `_NoExpression`, or `ZeroDivisionError`."""
        value = self._sum(0)
        if self._left:
            raise _NoExpression
        return value

    def _sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while self._comes("+-"):
            value = value + self._product(depth) if self._left.pop() == "+" else value - self._product(depth)
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._operand(depth)
        while self._comes("*/"):
            value = value * self._operand(depth) if self._left.pop() == "*" else value / self._operand(depth)
        return value

    def _operand(self, depth: int) -> Fraction:
        if not self._left:
            raise _NoExpression
        token = self._left.pop()
        if token.isdigit():
            return Fraction(int(token))
        if token != "(" or depth == MAX_DEPTH:
            raise _NoExpression
        value = self._sum(depth + 1)
        if not self._comes(")"):
            raise _NoExpression
        self._left.pop()
        return value

    def _comes(self, operators: str) -> bool:
        return bool(self._left) and self._left[-1] in operators


def _problem(task: Task) -> tuple[list[int], int]:
    """The numbers and the target of a task. Raises `TaskError` when it says neither."""
    try:
        return [int(number) for number in re.split(r"[,\s]+", task.facts["numbers"].strip())], int(task.facts["target"])
    except (KeyError, ValueError) as error:
        raise TaskError(
            f"task {task.id!r} is no Countdown problem ({type(error).__name__}: {error}): reward.kind = 'countdown' needs the"
            ' facts `numbers`, as in "3, 7, 25", and `target`, as in "96". Use tasks.kind = "countdown", or carry columns of'
            " these names along with tasks.facts."
        ) from error
