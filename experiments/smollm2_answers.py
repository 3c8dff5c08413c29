"""What SmolLM2 answers when nothing asks for a form: the last number that it says, or what its last box holds."""

from __future__ import annotations

import re
from fractions import Fraction

from strop.answer_text import boxed
from strop.rewards.base import final_text
from strop.types import Task, Trajectory

NUMBER = re.compile(r"-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


def is_last_said(task: Task, trajectory: Trajectory) -> float:
    """1 where the answer is a number that the last one said equals, or where the last box holds the answer's own text."""
    text = final_text(trajectory) or ""
    boxes = boxed(text)
    said = boxes[-1].strip() if boxes else next(iter(NUMBER.findall(text)[-1:]), "")
    wanted = number(task.answer)
    return float(said == task.answer.strip() if wanted is None else number(said) == wanted)


def number(text: str) -> Fraction | None:
    """Its value where the whole text is one number, with a dollar sign and commas or without."""
    return Fraction(re.sub(r"[$,]", "", text)) if NUMBER.fullmatch(text.strip()) else None
