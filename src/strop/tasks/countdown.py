"""Generates Countdown problems: from the numbers 3, 7 and 25, write an expression whose value is 96.

The game in the form of Countdown-Tasks-3to4 (Pan et al., 2025): every number exactly once, with + - * / and brackets.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, Self

from pydantic import Field, model_validator

from strop.errors import TaskError
from strop.tasks.protocol import Split, TaskSource, check_ranges, check_wording
from strop.tasks.published import COUNTDOWN_WORDING
from strop.types import Task, derive_seed

_TEST_SHARE = 10  # one in so many sets of numbers belongs to the test split
_MAX_DRAWS = 1000  # of sets of numbers
_MAX_EXPRESSIONS = 50  # drawn of one set


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """An expression as it is written, and its value."""

    text: str
    value: Fraction
    operator: str = ""  # the outermost; "" for a number


class CountdownTasks(TaskSource):
    """Problems that were drawn as a solution; the task at an index is a pure function of config, seed, split and index.

    A hash of its numbers, in any order and with any target, decides to which split a problem belongs: with no seed is 3, 7, 25
    in training when 25, 3, 7 is in the test. The solution is the task's answer; any other that fits is as good.
    """

    is_endless = True

    class Config(TaskSource.Config):
        """More and larger numbers are harder."""

        # Countdown-Tasks-3to4 (Pan et al., 2025) has three or four numbers.
        min_numbers: int = Field(default=3, ge=2, le=10, description="Fewest numbers of a task.")
        max_numbers: int = Field(default=4, ge=2, le=10, description="Most numbers of a task.")
        max_value: int = Field(default=99, ge=1, le=10**6, description="Largest value of a number.")
        min_target: int = Field(default=10, ge=0, le=10**9, description="Smallest target.")
        max_target: int = Field(default=100, ge=0, le=10**9, description="Largest target.")
        operators: tuple[Literal["+", "-", "*", "/"], ...] = Field(
            default=("+", "-", "*", "/"), min_length=1, description="Operators of the solution that each task is made from."
        )
        wording: str = Field(default=COUNTDOWN_WORDING, description="The question, with {numbers} and {target} once each.")

        @model_validator(mode="after")
        def _adds_up(self) -> Self:
            check_ranges(self, "numbers", "target")
            check_wording(self.wording, "{numbers}", "{target}")
            return self

    config: Config

    def task(self, index: int) -> Task:
        """Return the task at `index`. Raises `TaskError` if hardly any numbers of the split lead to a target."""
        draw = random.Random(derive_seed("countdown", self.seed, self.split, index))
        for _ in range(_MAX_DRAWS):
            numbers = self._numbers(draw)
            solution = self._solution(draw, numbers) if _split_of(numbers) == self.split else None
            if solution is not None:
                return self._task(numbers, solution)
        config = self.config
        raise TaskError(
            f"countdown tasks: {_MAX_DRAWS} draws of {config.min_numbers} to {config.max_numbers} numbers from"
            f" 1 to {config.max_value} held none for the {self.split} split with a target from"
            f" {config.min_target} to {config.max_target}. Widen these ranges, or allow more operators."
        )

    def _numbers(self, draw: random.Random) -> list[int]:
        num = draw.randint(self.config.min_numbers, self.config.max_numbers)
        return [draw.randint(1, self.config.max_value) for _ in range(num)]

    def _solution(self, draw: random.Random, numbers: Sequence[int]) -> Expression | None:
        """An expression of all the numbers whose value is a target that the config allows; None if none was found."""
        for _ in range(_MAX_EXPRESSIONS):
            found = draw_expression(draw, numbers, self.config.operators)
            if found is not None and self.config.min_target <= found.value <= self.config.max_target:
                return found
        return None

    def _task(self, numbers: Sequence[int], solution: Expression) -> Task:
        shown, target = ", ".join(map(str, numbers)), str(solution.value)
        return Task(
            id=f"countdown/{target}/{'-'.join(map(str, numbers))}",
            question=self.config.wording.replace("{numbers}", shown).replace("{target}", target),
            answer=solution.text,
            source=f"countdown/{self.split}",
            facts={"numbers": shown, "target": target, "operators": "".join(self.config.operators)},
        )


def draw_expression(draw: random.Random, numbers: Sequence[int], operators: Sequence[str]) -> Expression | None:
    """Two of `numbers` joined by one of `operators`, and so on until one expression is left; None where that led nowhere.

    As in the game, no value is below zero and every quotient is whole.
    """
    parts = [Expression(text=str(number), value=Fraction(number)) for number in numbers]
    while len(parts) > 1:
        draw.shuffle(parts)
        joined = join(parts.pop(), parts.pop(), draw.choice(operators))
        if joined is None:
            return None
        parts.append(joined)
    return parts[0]


def join(left: Expression, right: Expression, operator: str) -> Expression | None:
    """The larger of the two before the smaller; None where the quotient is not whole."""
    if operator in "-/" and left.value < right.value:
        left, right = right, left
    match operator:
        case "+":
            value = left.value + right.value
        case "-":
            value = left.value - right.value
        case "*":
            value = left.value * right.value
        case _:
            if right.value == 0 or (left.value / right.value).denominator != 1:
                return None
            value = left.value / right.value
    text = f"{_bracketed(left, operator, is_right=False)}{operator}{_bracketed(right, operator, is_right=True)}"
    return Expression(text=text, value=value, operator=operator)


def _bracketed(part: Expression, operator: str, *, is_right: bool) -> str:
    """`part` as an operand of `operator`, in brackets where it would be read as another expression without."""
    splits_sums = operator in "*/" or (operator == "-" and is_right)  # a-(b+c), but a+b-c
    splits_products = operator == "/" and is_right  # a/(b*c), but a/b*c
    needs_brackets = (splits_sums and part.operator in ("+", "-")) or (splits_products and part.operator in ("*", "/"))
    return f"({part.text})" if needs_brackets else part.text


def _split_of(numbers: Sequence[int]) -> Split:
    return "test" if derive_seed("countdown-split", *sorted(numbers)) % _TEST_SHARE == 0 else "train"
