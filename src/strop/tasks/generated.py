"""Generates problems: arithmetic, Countdown, knights and knaves.

Arithmetic such as (812-95)*7 is easy with a tool, hard for a small model without one. Countdown is the game in the form of
Countdown-Tasks-3to4 (Pan et al., 2025): from the numbers 3, 7 and 25, each exactly once, write an expression whose value is 96.
Knights and knaves are Smullyan's puzzles (What Is the Name of This Book?, 1978): who tells the truth, if each person says
something of the others? Each has exactly one solution, found by trying all worlds.
"""

from __future__ import annotations

import itertools
import operator as operators
import random
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from strop.errors import TaskError
from strop.tasks.protocol import TaskSource, check_wording
from strop.types import Task, derive_seed

COUNTDOWN_WORDING = "Use each of the numbers {numbers} exactly once to write an expression with + - * / that equals {target}."
_MAX_DRAWS = 1000
OPERATIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operators.add,
    "-": operators.sub,
    "*": operators.mul,
    "/": operators.truediv,
}


class GeneratedTasks(TaskSource):
    """Base: the task at an index is a pure function of config, seed, split and index."""

    class Config(TaskSource.Config):
        """How a question is posed."""

        places: ClassVar[tuple[str, ...]] = ()
        """Of the wording, each once."""
        ranges: ClassVar[tuple[str, ...]] = ()
        """Names of which there are `min_NAME` and `max_NAME`."""
        if TYPE_CHECKING:
            wording: str  # a key of each kind, which has its own place among the others

        @model_validator(mode="after")
        def _adds_up(self) -> Self:
            for name in self.ranges:
                low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
                if low > high:
                    raise ValueError(
                        f"min_{name} is {low} but max_{name} is {high}: nothing lies between them. Lower min_{name}."
                    )
            check_wording(self.wording, *(f"{{{place}}}" for place in self.places))
            return self

        def posed(self, **facts: str) -> str:
            """The question, with each of `facts` in its place."""
            question = self.wording
            for place, text in facts.items():
                question = question.replace(f"{{{place}}}", text)
            return question

    config: Config
    is_endless = True
    test_share: ClassVar[int] = 10  # one in so many problems belongs to the test split
    too_narrow: ClassVar[str]
    """What the draws lack where hardly any is a task of the split, and what would help."""

    def task(self, index: int) -> Task:
        """Return the task at `index`. Raises `TaskError` if hardly any draw is a task of the split."""
        draw = random.Random(derive_seed(self.kind, self.seed, self.split, index))
        for _ in range(_MAX_DRAWS):
            if (found := self.drawn(draw)) is not None:
                return found
        keys = ", ".join(f"{key} = {value!r}" for key, value in self.config.model_dump(exclude={"wording"}).items())
        raise TaskError(
            f"{self.kind} tasks: {_MAX_DRAWS} draws of {keys} held none for the {self.split} split. {self.too_narrow}"
        )

    @abstractmethod
    def drawn(self, draw: random.Random) -> Task | None:
        """A task of the split, or None where these draws make none."""

    def is_of_split(self, digest: int) -> bool:
        return ("test" if digest % self.test_share == 0 else "train") == self.split


class ArithmeticTasks(GeneratedTasks):
    """Expressions with integer results; the task at an index is a pure function of config, seed, split and index.

    A hash of its operands, in any order and with any operators, decides to which split an expression belongs: with no seed
    is 48*37 in training when 37*48 is in the test.
    """

    class Config(GeneratedTasks.Config):
        """How large the expressions are."""

        places, ranges = ("expression",), ("digits",)
        num_terms: int = Field(default=3, ge=2, le=10, description="Operands of an expression.")
        min_digits: int = Field(default=1, ge=1, le=12, description="Fewest digits of an operand.")
        max_digits: int = Field(default=2, ge=1, le=12, description="Most digits of an operand.")
        operators: tuple[Literal["+", "-", "*"], ...] = Field(
            default=("+", "-", "*"), min_length=1, description="Operators that expressions are made of."
        )
        wording: str = Field(default="What is {expression}?", description="The question, with {expression} once.")

    config: Config

    too_narrow = "Raise num_terms or max_digits."

    def drawn(self, draw: random.Random) -> Task | None:
        operands = [self._operand(draw) for _ in range(self.config.num_terms)]
        if not self.is_of_split(derive_seed("arithmetic-split", *sorted(operands))):
            return None
        expression, value = self._expression(draw, operands)
        return Task(
            id=f"arithmetic/{expression}",
            question=self.config.posed(expression=expression),
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
            if operator == "*" and is_sum:
                expression = f"({expression})"
            expression = f"{expression}{operator}{operand}"
            value, is_sum = OPERATIONS[operator](value, operand), operator != "*"
        return expression, value


_MAX_EXPRESSIONS = 50  # drawn of one set


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """An expression as it is written, and its value."""

    text: str
    value: Fraction
    operator: str = ""  # the outermost; "" for a number


class CountdownTasks(GeneratedTasks):
    """Problems that were drawn as a solution; the task at an index is a pure function of config, seed, split and index.

    A hash of its numbers, in any order and with any target, decides to which split a problem belongs: with no seed is 3, 7, 25
    in training when 25, 3, 7 is in the test. The solution is the task's answer; any other that fits is as good.
    """

    class Config(GeneratedTasks.Config):
        """More and larger numbers are harder."""

        places, ranges = ("numbers", "target"), ("numbers", "target")
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

    config: Config

    too_narrow = "Widen these ranges, or allow more operators."

    def drawn(self, draw: random.Random) -> Task | None:
        num = draw.randint(self.config.min_numbers, self.config.max_numbers)
        numbers = [draw.randint(1, self.config.max_value) for _ in range(num)]
        if not self.is_of_split(derive_seed("countdown-split", *sorted(numbers))):
            return None
        for _ in range(_MAX_EXPRESSIONS):
            found = draw_expression(draw, numbers, self.config.operators)
            if found is not None and self.config.min_target <= found.value <= self.config.max_target:
                return self._task(numbers, found)
        return None

    def _task(self, numbers: Sequence[int], solution: Expression) -> Task:
        shown, target = ", ".join(map(str, numbers)), str(solution.value)
        return Task(
            id=f"countdown/{target}/{'-'.join(map(str, numbers))}",
            question=self.config.posed(numbers=shown, target=target),
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
    if operator == "/" and (right.value == 0 or (left.value / right.value).denominator != 1):
        return None
    value = OPERATIONS[operator](left.value, right.value)
    text = f"{_bracketed(left, operator, is_right=False)}{operator}{_bracketed(right, operator, is_right=True)}"
    return Expression(text=text, value=value, operator=operator)


def _bracketed(part: Expression, operator: str, *, is_right: bool) -> str:
    """`part` as an operand of `operator`, in brackets where it would be read as another expression without."""
    splits_sums = operator in "*/" or (operator == "-" and is_right)  # a-(b+c), but a+b-c
    splits_products = operator == "/" and is_right  # a/(b*c), but a/b*c
    needs_brackets = (splits_sums and part.operator in ("+", "-")) or (splits_products and part.operator in ("*", "/"))
    return f"({part.text})" if needs_brackets else part.text


World: TypeAlias = tuple[bool, ...]  # of each person, whether it is a knight

_NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hope", "Ivy", "Jack", "Kim", "Leo")
_KINDS = {True: "a knight", False: "a knave"}
KNIGHTS_WORDING = (
    "On an island each person is a knight, who always tells the truth, or a knave, who always lies. {statements} Who are the"
    " knights? Answer with their names in alphabetical order, separated by commas, or with none."
)


@dataclass(frozen=True, slots=True)
class Statement:
    """What one person says: a text with {0}, {1} for persons, and when it is true."""

    text: str
    people: tuple[int, ...]
    holds: Callable[[World], bool]


class KnightsTasks(GeneratedTasks):
    """Puzzles with one solution; the task at an index is a pure function of config, seed, split and index.

    A hash of what is said, whatever the names, decides to which split a puzzle belongs.
    """

    class Config(GeneratedTasks.Config):
        """How many people there are."""

        places, ranges = ("statements",), ("people",)
        min_people: int = Field(default=2, ge=2, le=8, description="Fewest people of a puzzle.")
        max_people: int = Field(default=4, ge=2, le=8, description="Most people of a puzzle.")
        wording: str = Field(default=KNIGHTS_WORDING, description="The question, with {statements} once.")

    config: Config

    too_narrow = "Raise max_people."

    def drawn(self, draw: random.Random) -> Task | None:
        num_people = draw.randint(self.config.min_people, self.config.max_people)
        world = tuple(draw.random() < 0.5 for _ in range(num_people))
        said = [_statement(draw, speaker, world) for speaker in range(num_people)]
        if not self.is_of_split(_digest(said)) or solutions(said) != [world]:
            return None
        return self._task(draw.sample(_NAMES, num_people), world, said)

    def _task(self, names: Sequence[str], world: World, said: Sequence[Statement]) -> Task:
        texts = [each.text.format(*(names[person] for person in each.people)) for each in said]
        lines = [f'{name} says: "{text}"' for name, text in zip(names, texts, strict=True)]
        knights = sorted(name for name, is_knight in zip(names, world, strict=True) if is_knight)
        return Task(
            id=f"knights/{_digest(said):016x}/{'-'.join(names)}",
            question=self.config.posed(statements=" ".join(lines)),
            answer=", ".join(knights) or "none",
            source=f"knights/{self.split}",
            facts={"num_people": str(len(names))},
        )


def solutions(said: Sequence[Statement]) -> list[World]:
    """The worlds in which each person's statement is true exactly if the person is a knight."""
    worlds = itertools.product((False, True), repeat=len(said))
    return [world for world in worlds if [each.holds(world) for each in said] == list(world)]


def _statement(draw: random.Random, speaker: int, world: World) -> Statement:
    """One that the speaker of this world may say, of one or two others or of themselves and another."""
    while True:
        found = _any_statement(draw, speaker, len(world))
        if found.holds(world) == world[speaker]:
            return found


def _any_statement(draw: random.Random, speaker: int, num_people: int) -> Statement:
    other = draw.choice([person for person in range(num_people) if person != speaker])
    second = draw.choice([person for person in range(num_people) if person != other])
    one, two = draw.random() < 0.5, draw.random() < 0.5
    first, then = f"{{0}} is {_KINDS[one]}", f"{{1}} is {_KINDS[two]}"
    match draw.choice(("is", "same", "and", "or", "if")):
        case "is":
            return Statement(f"{first}.", (other,), lambda world: world[other] == one)
        case "same":
            text = f"{{0}} and {{1}} are of {'the same kind' if one else 'different kinds'}."
            return Statement(text, (other, second), lambda world: (world[other] == world[second]) == one)
        case "and":
            text = f"{first}, and {then}."
            return Statement(text, (other, second), lambda world: world[other] == one and world[second] == two)
        case "or":
            text = f"{first}, or {then}, or both."
            return Statement(text, (other, second), lambda world: world[other] == one or world[second] == two)
        case _:
            text = f"If {first}, then {then}."
            return Statement(text, (other, second), lambda world: world[other] != one or world[second] == two)


def _digest(said: Sequence[Statement]) -> int:
    return derive_seed("knights-puzzle", *(f"{each.text} {each.people}" for each in said))
