"""Generates knights and knaves: who tells the truth, if each person says something of the others?

The puzzles are Smullyan's (What Is the Name of This Book?, 1978). Each has exactly one solution, found by trying all worlds.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

from pydantic import Field, model_validator

from strop.errors import TaskError
from strop.tasks.protocol import Split, TaskSource, check_ranges, check_wording
from strop.types import Task, derive_seed

World: TypeAlias = tuple[bool, ...]  # of each person, whether it is a knight

_TEST_SHARE = 10  # one in so many puzzles belongs to the test split
_MAX_DRAWS = 1000
_NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hope", "Ivy", "Jack", "Kim", "Leo")
_KINDS = {True: "a knight", False: "a knave"}
WORDING = (
    "On an island each person is a knight, who always tells the truth, or a knave, who always lies. {statements} Who are the"
    " knights? Answer with their names in alphabetical order, separated by commas, or with none."
)


@dataclass(frozen=True, slots=True)
class Statement:
    """What one person says: a text with {0}, {1} for persons, and when it is true."""

    text: str
    people: tuple[int, ...]
    holds: Callable[[World], bool]

    def worded(self, names: Sequence[str]) -> str:
        return self.text.format(*(names[person] for person in self.people))


class KnightsTasks(TaskSource):
    """Puzzles with one solution; the task at an index is a pure function of config, seed, split and index.

    A hash of what is said, whatever the names, decides to which split a puzzle belongs.
    """

    is_endless = True

    class Config(TaskSource.Config):
        """How many people there are."""

        min_people: int = Field(default=2, ge=2, le=8, description="Fewest people of a puzzle.")
        max_people: int = Field(default=4, ge=2, le=8, description="Most people of a puzzle.")
        wording: str = Field(default=WORDING, description="The question, with {statements} once.")

        @model_validator(mode="after")
        def _adds_up(self) -> Self:
            check_ranges(self, "people")
            check_wording(self.wording, "{statements}")
            return self

    config: Config

    def task(self, index: int) -> Task:
        """Return the task at `index`. Raises `TaskError` if hardly any puzzle of the split has one solution."""
        draw = random.Random(derive_seed("knights", self.seed, self.split, index))
        for _ in range(_MAX_DRAWS):
            num_people = draw.randint(self.config.min_people, self.config.max_people)
            world = tuple(draw.random() < 0.5 for _ in range(num_people))
            said = [_statement(draw, speaker, world) for speaker in range(num_people)]
            if _split_of(said) == self.split and solutions(said) == [world]:
                return self._task(draw.sample(_NAMES, num_people), world, said)
        raise TaskError(
            f"knights tasks: {_MAX_DRAWS} draws held no puzzle of the {self.split} split with one solution. Raise max_people."
        )

    def _task(self, names: Sequence[str], world: World, said: Sequence[Statement]) -> Task:
        lines = [f'{names[speaker]} says: "{statement.worded(names)}"' for speaker, statement in enumerate(said)]
        knights = sorted(name for name, is_knight in zip(names, world, strict=True) if is_knight)
        return Task(
            id=f"knights/{_digest(said):016x}/{'-'.join(names)}",
            question=self.config.wording.replace("{statements}", " ".join(lines)),
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
    first_kind, second_kind = draw.random() < 0.5, draw.random() < 0.5
    match draw.choice(("is", "same", "and", "or", "if")):
        case "is":
            return Statement(f"{{0}} is {_KINDS[first_kind]}.", (other,), lambda world: world[other] == first_kind)
        case "same":
            text = "{0} and {1} are of the same kind." if first_kind else "{0} and {1} are of different kinds."
            return Statement(text, (other, second), lambda world: (world[other] == world[second]) == first_kind)
        case "and":
            text = f"{{0}} is {_KINDS[first_kind]}, and {{1}} is {_KINDS[second_kind]}."
            return Statement(text, (other, second), lambda world: world[other] == first_kind and world[second] == second_kind)
        case "or":
            text = f"{{0}} is {_KINDS[first_kind]}, or {{1}} is {_KINDS[second_kind]}, or both."
            return Statement(text, (other, second), lambda world: world[other] == first_kind or world[second] == second_kind)
        case _:
            text = f"If {{0}} is {_KINDS[first_kind]}, then {{1}} is {_KINDS[second_kind]}."
            return Statement(text, (other, second), lambda world: world[other] != first_kind or world[second] == second_kind)


def _digest(said: Sequence[Statement]) -> int:
    return derive_seed("knights-puzzle", *(f"{each.text} {each.people}" for each in said))


def _split_of(said: Sequence[Statement]) -> Split:
    return "test" if _digest(said) % _TEST_SHARE == 0 else "train"
