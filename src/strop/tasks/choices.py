"""Reads multiple choice out of a row that keeps its right and its wrong answers apart."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from strop.tasks.readers import Read, Row

_LETTERS = "ABCDEFGHIJ"


@dataclass(frozen=True, slots=True)
class Choices:
    """The question with its answers below it, lettered, in an order that hangs on the question alone.

    So every model and every attempt sees the same order, and the right answer is not always at one place.
    """

    question: str
    right: str
    wrong: tuple[str, ...]

    def __call__(self, row: Row) -> str:
        lines = [f"({letter}) {text}" for letter, text in zip(_LETTERS, self.ordered(row), strict=False)]
        return "\n".join([Read(self.question)(row).strip(), "", *lines, "", "Answer with the letter of the right choice."])

    def ordered(self, row: Row) -> list[str]:
        texts = [Read(column)(row).strip() for column in (self.right, *self.wrong)]
        seed = hashlib.blake2b(Read(self.question)(row).strip().encode(), digest_size=8).digest()
        random.Random(int.from_bytes(seed)).shuffle(texts)
        return texts


@dataclass(frozen=True, slots=True)
class RightLetter:
    """The letter of the right answer among `choices`."""

    choices: Choices

    def __call__(self, row: Row) -> str:
        return _LETTERS[self.choices.ordered(row).index(Read(self.choices.right)(row).strip())]
