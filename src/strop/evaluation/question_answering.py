"""Judges short answers by their words: exact match and F1 against the best of the references, as SQuAD counts them.

Functions for parts of a reward (`kind = "function"`). The references are the task's fact `references`, a JSON list of texts, as
the published entries of QA benchmarks carry it; its answer alone where there is none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from strop.errors import TaskError
from strop.rewards.answers import extract_answer
from strop.rewards.f1 import normalized, token_f1
from strop.types import Task, Trajectory


def exact_match(task: Task, trajectory: Trajectory) -> float:
    """1 where the answer equals a reference but for case, punctuation, articles and blanks; else 0."""
    said = read_answer(trajectory)
    return float(bool(said) and any(said == normalized(reference) for reference in _references(task)))


def f1(task: Task, trajectory: Trajectory) -> float:
    """F1 of the words that the answer has in common with the best reference, between 0 and 1."""
    answer = extract_answer(trajectory, needs_box=False)
    return 0.0 if answer is None else max(token_f1(answer, reference) for reference in _references(task))


def read_answer(trajectory: Trajectory) -> str:
    """The answer as it is compared; "" where there is none."""
    answer = extract_answer(trajectory, needs_box=False)
    return "" if answer is None else normalized(answer)


def _references(task: Task) -> Sequence[str]:
    if "references" not in task.facts:
        return [task.answer]
    try:
        references = json.loads(task.facts["references"])
    except ValueError:
        references = None
    if not isinstance(references, list) or not references or not all(isinstance(each, str) for each in references):
        raise TaskError(
            f"task {task.id!r} of {task.source}: its fact 'references' is {task.facts['references'][:80]!r}, not a JSON list of"
            " right answers. Mend the row."
        )
    return references
