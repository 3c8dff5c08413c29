"""Generates arithmetic problems such as (812-95)*7: easy with a tool, hard for a small model without one."""

from __future__ import annotations

import random
from typing import Literal, Self

from pydantic import Field, model_validator

from strop.errors import TaskError
from strop.tasks.protocol import Split, TaskSource, check_ranges, check_wording
from strop.types import Task, derive_seed

_TEST_SHARE = 10  # one in so many sets of operands belongs to the test split
_MAX_DRAWS = 1000


class ArithmeticTasks(TaskSource):
    """Expressions with integer results; the task at an index is a pure function of config, seed, split and index.

    A hash of its operands, in any order and with any operators, decides to which split an expression belongs: with no seed
    is 48*37 in training when 37*48 is in the test.
    """

    is_endless = True

    class Config(TaskSource.Config):
        """How large the expressions are."""

        num_terms: int = Field(default=3, ge=2, le=10, description="Operands of an expression.")
        min_digits: int = Field(default=1, ge=1, le=12, description="Fewest digits of an operand.")
        max_digits: int = Field(default=2, ge=1, le=12, description="Most digits of an operand.")
        operators: tuple[Literal["+", "-", "*"], ...] = Field(
            default=("+", "-", "*"), min_length=1, description="Operators that expressions are made of."
        )
        wording: str = Field(default="What is {expression}?", description="The question, with {expression} once.")

        @model_validator(mode="after")
        def _adds_up(self) -> Self:
            check_ranges(self, "digits")
            check_wording(self.wording, "{expression}")
            return self

    config: Config

    def task(self, index: int) -> Task:
        """Return the task at `index`. Raises `TaskError` if so few operands are possible that the split has none."""
        draw = random.Random(derive_seed("arithmetic", self.seed, self.split, index))
        for _ in range(_MAX_DRAWS):
            operands = [self._operand(draw) for _ in range(self.config.num_terms)]
            if _split_of(operands) == self.split:
                break
        else:
            raise TaskError(
                f"arithmetic tasks: {_MAX_DRAWS} draws of {self.config.num_terms} operands of {self.config.min_digits} to"
                f" {self.config.max_digits} digits held none for the {self.split} split. Raise num_terms or max_digits."
            )
        expression, value = self._expression(draw, operands)
        return Task(
            id=f"arithmetic/{expression}",
            question=self.config.wording.replace("{expression}", expression),
            answer=str(value),
            source=f"arithmetic/{self.split}",
            facts={"expression": expression},
        )

    def _operand(self, draw: random.Random) -> int:
        num_digits = draw.randint(self.config.min_digits, self.config.max_digits)
        return draw.randint(2 if num_digits == 1 else 10 ** (num_digits - 1), 10**num_digits - 1)

    def _expression(self, draw: random.Random, operands: list[int]) -> tuple[str, int]:
        """Return the operands joined from left to right by drawn operators, and the value."""
        expression, value = str(operands[0]), operands[0]
        is_sum = False
        for operand in operands[1:]:
            operator = draw.choice(self.config.operators)
            if operator == "*":
                expression = f"({expression})*{operand}" if is_sum else f"{expression}*{operand}"
                value, is_sum = value * operand, False
            else:
                expression = f"{expression}{operator}{operand}"
                value, is_sum = value + operand if operator == "+" else value - operand, True
        return expression, value


def _split_of(operands: list[int]) -> Split:
    return "test" if derive_seed("arithmetic-split", *sorted(operands)) % _TEST_SHARE == 0 else "train"
