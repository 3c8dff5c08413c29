"""Judges short answers: multiple choice by its letter, others by exact match and F1."""

from __future__ import annotations

import re
from collections.abc import Sequence

from strop.errors import TaskError
from strop.rewards.base import extract_answer
from strop.rewards.form import TEXT_COMMAND, normalized, token_f1
from strop.run_directory import parse_json
from strop.types import Task, Trajectory

_LETTER = re.compile(
    r"(?:the\s+)?(?:answer|option|choice|答案|选项)?\s*(?:is|是|为|选)?\s*[:：]?\s*[(（]?\s*([A-Z])\s*[)）]?\s*[.:。]?",
    re.IGNORECASE,
)


def right_letter(task: Task, trajectory: Trajectory) -> float:
    """1 if the letter is the task's, else 0; a function for a part of a reward (`kind = "function"`)."""
    return float(read_letter(trajectory) == task.answer.strip().upper())


def read_letter(trajectory: Trajectory) -> str:
    """The letter in the box of the answer tag, or in the tag itself; "" if there is something else."""
    answer = extract_answer(trajectory, needs_box=False)
    found = None if answer is None else _LETTER.fullmatch(TEXT_COMMAND.sub(r"\1", answer).strip())
    return "" if found is None else found[1].upper()


def right_names(task: Task, trajectory: Trajectory) -> float:
    """1 if the answer names whom the task's answer names, in any order, and says nothing else; else 0."""
    answer = extract_answer(trajectory, needs_box=False)
    return float(answer is not None and _names(answer) == _names(task.answer))


def exact_match(task: Task, trajectory: Trajectory) -> float:
    """1 if the answer equals a reference, ignoring case, punctuation, articles and blanks; else 0."""
    said = read_answer(trajectory)
    return float(bool(said) and any(said == normalized(reference) for reference in _references(task)))


def f1(task: Task, trajectory: Trajectory) -> float:
    """F1 of the words that the answer has in common with the best reference, between 0 and 1."""
    answer = extract_answer(trajectory, needs_box=False)
    return 0.0 if answer is None else max(token_f1(answer, reference) for reference in _references(task))


def read_answer(trajectory: Trajectory) -> str:
    """The normalized answer; "" if there is none."""
    answer = extract_answer(trajectory, needs_box=False)
    return "" if answer is None else normalized(answer)


def _names(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", TEXT_COMMAND.sub(r"\1", text).casefold())) - {"and"}


def _references(task: Task) -> Sequence[str]:
    """The right answers: the JSON list in the fact `references`, or the answer. Raises `TaskError` for another fact."""
    if "references" not in task.facts:
        return [task.answer]
    try:
        references = parse_json(task.facts["references"])
    except ValueError:
        references = None
    if not isinstance(references, list) or not references or not all(isinstance(each, str) for each in references):
        raise TaskError(
            f"task {task.id!r} of {task.source}: its fact 'references' is {task.facts['references']!r:.80}, not a JSON list of"
            " right answers. Correct the row."
        )
    return references
