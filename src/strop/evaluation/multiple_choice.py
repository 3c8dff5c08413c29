"""Judges multiple choice by the letter alone: C, (C), C. and \\text{C} are one answer, and two letters are none."""

from __future__ import annotations

import re

from strop.rewards.answers import extract_answer
from strop.types import Task, Trajectory

_WRAPPED = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
_LETTER = re.compile(r"(?:the\s+)?(?:answer|option|choice)?\s*(?:is)?\s*:?\s*\(?\s*([A-Z])\s*\)?\s*[.:]?", re.IGNORECASE)


def right_letter(task: Task, trajectory: Trajectory) -> float:
    """1 where the letter is the task's, else 0; a function for a part of a reward (`kind = "function"`)."""
    return float(read_letter(trajectory) == task.answer.strip().upper())


def read_letter(trajectory: Trajectory) -> str:
    """The letter in the box of the answer tag, or in the tag itself; "" where something else stands there."""
    answer = extract_answer(trajectory, needs_box=False)
    found = None if answer is None else _LETTER.fullmatch(_WRAPPED.sub(r"\1", answer).strip())
    return "" if found is None else found[1].upper()
