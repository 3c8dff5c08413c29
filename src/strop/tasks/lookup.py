"""Makes problems that need two tools: find a number in a corpus by search, then compute with it.

The corpus is a .jsonl that the search tool reads too. A line whose passage tells a number says so beside its text:

    {"text": "The price of (bamiro) is 412.", "subject": "bamiro", "attribute": "price", "value": 412}

Lines without a `value` are passages like any other, and nothing is asked about them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.errors import TaskError
from strop.seeds import derive_seed
from strop.tasks.config import LookupConfig, Split
from strop.types import Task

_TEST_SHARE = 5  # one in so many subjects belongs to the test split


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A number that a passage tells."""

    subject: str
    attribute: str
    value: int


class LookupTasks:
    """Without end; the task at an index is a pure function of corpus, config, seed, split and index.

    Which split a problem belongs to is a hash of its subject: whatever is asked in a test, nothing of what it is about was
    ever asked in training, under no seed.

    Raises:
        TaskError: the corpus cannot be read, or tells no number that belongs to the split.
    """

    def __init__(self, config: LookupConfig, *, seed: int, split: Split) -> None:
        self.config = config
        self.seed = seed
        self.split = split
        self._facts = [fact for fact in read_facts(config.path) if split_of(fact.subject) == split]
        if not self._facts:
            raise TaskError(
                f"{config.path}: no line of it tells a number of the {split} split. A line needs `subject`, `attribute` and"
                " `value`, and about one subject in five is for tests: give it more subjects."
            )

    @property
    def num_tasks(self) -> None:
        return None

    def task(self, index: int) -> Task:
        draw = random.Random(derive_seed("lookup", self.seed, self.split, index))
        fact = draw.choice(self._facts)
        operator = draw.choice(self.config.operators)
        operand = draw.randint(self.config.min_operand, self.config.max_operand)
        operation = f"{operator}{operand}"
        places = {"{attribute}": fact.attribute, "{subject}": fact.subject, "{operation}": operation}
        question = self.config.wording
        for place, text in places.items():
            question = question.replace(place, text)
        return Task(
            id=f"lookup/{fact.attribute}/{fact.subject}/{operation}",
            question=question,
            answer=str(_computed(fact.value, operator, operand)),
            source=f"lookup/{self.split}",
            facts={"subject": fact.subject, "attribute": fact.attribute, "value": str(fact.value), "operation": operation},
        )


def split_of(subject: str) -> Split:
    """Where everything about `subject` belongs."""
    return "test" if derive_seed("lookup-split", subject) % _TEST_SHARE == 0 else "train"


def read_facts(path: Path) -> list[Fact]:
    """What the corpus tells in numbers, in its order.

    Raises:
        TaskError: there is no such file, or a line of it is wrong; the message names the line.
    """
    try:
        with path.open(encoding="utf-8") as file:
            return list(_facts_of(file, path))
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(
            f"{path}: the corpus cannot be read: {error}. Set tasks.path to a .jsonl whose lines have `text`, `subject`,"
            " `attribute` and `value`; `python -m strop.tasks.lookup_corpus FILE` writes one."
        ) from error


def _facts_of(lines: Iterable[str], path: Path) -> Iterator[Fact]:
    seen: dict[tuple[str, str], int] = {}
    for number, line in enumerate(lines, start=1):
        row = _row(line, place=f"{path}, line {number}")
        if row is None or "value" not in row:
            continue
        subject, attribute, value = row.get("subject"), row.get("attribute"), row["value"]
        if not (isinstance(subject, str) and isinstance(attribute, str) and type(value) is int):
            raise TaskError(
                f"{path}, line {number}: a line with a `value` needs a whole number there, and texts as `subject` and"
                f" `attribute`; it has {subject!r}, {attribute!r} and {value!r}."
            )
        if first := seen.get((subject, attribute)):
            raise TaskError(
                f"{path}, line {number}: the {attribute} of {subject} is in line {first} already, so a question would have"
                " two answers. Take one of them out."
            )
        seen[subject, attribute] = number
        yield Fact(subject=subject, attribute=attribute, value=value)


def _row(line: str, *, place: str) -> dict[str, Any] | None:
    """The object in `line`; None where it is empty."""
    if not line.strip():
        return None
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise TaskError(f"{place}: not JSON: {error}. Mend that line, or take it out.") from error
    if not isinstance(row, dict):
        raise TaskError(
            f"{place}: {type(row).__name__} where an object with a `text` is needed. Mend that line, or take it out."
        )
    return row


def _computed(value: int, operator: str, operand: int) -> int:
    match operator:
        case "+":
            return value + operand
        case "-":
            return value - operand
        case _:
            return value * operand
