"""Generates problems that need two tools: find a number in a corpus by search, then compute with it.

The corpus is a .jsonl that the search tool reads too. A line whose passage holds a number names it next to its text:

    {"text": "The price of (bamiro) is 412.", "subject": "bamiro", "attribute": "price", "value": 412}

A line with a `link` in place of the `value` names another subject, which questions of several hops go to. Lines without either
are passages like any other, and nothing is asked about them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from strop.errors import TaskError
from strop.run_directory import shortened
from strop.tasks.files import Rows, read_rows
from strop.tasks.generated import OPERATIONS, GeneratedTasks
from strop.tasks.protocol import Split
from strop.types import Task, derive_seed

_MIN_OPERAND, _MAX_OPERAND = 10, 99


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A number in a passage, or a link to another subject."""

    subject: str
    attribute: str
    value: int | str


class LookupTasks(GeneratedTasks):
    """Without end; the task at an index is a pure function of corpus, config, seed, split and index.

    A hash of its subject decides to which split a problem belongs: with no seed does a subject of the test occur in training.
    """

    class Config(GeneratedTasks.Config):
        """Where the numbers are, and what is computed with them."""

        places = ("attribute", "subject", "operation")
        path: Path = Field(description="The corpus: a .jsonl file, which the search tool reads too.")
        hops: int = Field(default=0, ge=0, le=10, description="Links to follow from the subject of the question to the number.")
        operators: tuple[Literal["+", "-", "*"], ...] = Field(
            default=("+", "-", "*"), description="Operators of the computation with the number that was found. Empty: none."
        )
        wording: str = Field(
            default="What is the {attribute} of {subject}, then {operation}?",
            description="The question, with {attribute}, {subject} and {operation} once each.",
        )

    config: Config
    test_share = 5  # one in so many subjects

    @property
    def files(self) -> Mapping[Split, Path]:
        return {"train": self.config.path, "test": self.config.path}

    def open(self, *, seed: int, split: str) -> None:
        super().open(seed=seed, split=split)
        self._chains = [each for each in self._all_chains() if self.is_of_split(derive_seed("lookup-split", each[0].subject))]
        if not self._chains:
            raise TaskError(
                f"{self.config.path}: no line of it tells a number of the {split} split, {self.config.hops} links away. A line"
                " needs `subject`, `attribute` and `value`, and about one subject in five is for tests: give it more subjects."
            )

    def _all_chains(self) -> list[tuple[Fact, ...]]:
        """A number each, after the links that lead to it."""
        facts = read_facts(self.config.path)
        chains: list[tuple[Fact, ...]] = [(fact,) for fact in facts if isinstance(fact.value, int)]
        for _ in range(self.config.hops):
            of_subject: dict[int | str, list[tuple[Fact, ...]]] = {}
            for chain in chains:
                of_subject.setdefault(chain[0].subject, []).append(chain)
            chains = [(fact, *chain) for fact in facts for chain in of_subject.get(fact.value, ())]
        return chains

    def drawn(self, draw: random.Random) -> Task:
        chain = draw.choice(self._chains)
        subject, attribute = chain[0].subject, " of ".join(fact.attribute for fact in reversed(chain))
        value = int(chain[-1].value)
        operation, answer = "", value
        if self.config.operators:
            sign = draw.choice(self.config.operators)
            operand = draw.randint(_MIN_OPERAND, _MAX_OPERAND)
            operation, answer = f"{sign}{operand}", OPERATIONS[sign](value, operand)
        return Task(
            id=f"lookup/{attribute}/{subject}/{operation}",
            question=self.config.posed(attribute=attribute, subject=subject, operation=operation),
            answer=str(answer),
            source=f"lookup/{self.split}",
            facts={"subject": subject, "attribute": attribute, "value": str(value), "operation": operation},
        )


def read_facts(path: Path) -> list[Fact]:
    """Return the numbers and links of the corpus, in its order.

    Raises:
        TaskError: there is no such file, or a line of it is wrong; the message names the line.
    """
    try:
        return list(_facts_of(read_rows(path)))
    except TaskError as error:
        raise TaskError(
            f"{error} The corpus of tasks.path is a .jsonl whose lines have `text`, `subject`, `attribute` and `value`;"
            " `python experiments/lookup_corpus.py FILE` writes one."
        ) from error


def _facts_of(rows: Rows) -> Iterator[Fact]:
    seen: dict[tuple[str, str], str] = {}
    for place, row in rows:
        if "value" not in row and "link" not in row:
            continue
        subject, attribute = row.get("subject"), row.get("attribute")
        value, kind = (row["value"], int) if "value" in row else (row["link"], str)
        if not (isinstance(subject, str) and isinstance(attribute, str) and type(value) is kind):
            values = shortened(f"{subject!r}, {attribute!r} and {value!r}")
            raise TaskError(
                f"{place}: a line with a `value` needs a whole number there, and texts as `subject`, `attribute` and `link`;"
                f" it has {values}."
            )
        if first := seen.get((subject, attribute)):
            raise TaskError(
                f"{place}: the {attribute} of {subject} is in {first} already, so a question would have two answers. Remove one"
                " of the two lines."
            )
        seen[subject, attribute] = place
        yield Fact(subject=subject, attribute=attribute, value=value)
