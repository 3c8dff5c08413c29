"""Which tests of a task make up which subtask, and what points a program earns by them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strop.errors import TaskError
from strop.types import Task

_FORM = '{"tests": [{"input": "3\\n", "output": "9\\n", "subtasks": ["small"]}], "points": {"small": 30}}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Subtasks:
    """Of one task. A test may belong to several subtasks, as an easy one belongs to the hard problem too."""

    of_tests: tuple[frozenset[str], ...]
    points: Mapping[str, float]

    def score(self, is_passed: Sequence[bool]) -> float:
        """The points of the subtasks all of whose tests passed, as a share of all points.

        open-r1's `ioi_scoring.py`: a subtask scores what its worst test scores. A test scores 0 or 1 here, and nothing is
        rounded; there IOI's own graders give parts of a test's point, and a score has two places. A row of open-r1's data is
        one subtask, whose score is the reward; the mean by points is that of a task with several.
        """
        failed = {name for names, passed in zip(self.of_tests, is_passed, strict=True) if not passed for name in names}
        earned = math.fsum(points for name, points in self.points.items() if name not in failed)
        return earned / math.fsum(self.points.values())


def text_of_tests(task: Task, *, fact: str | None) -> tuple[str, str]:
    """The text that holds the tests of a task, and what to call the place where it stands.

    Raises:
        TaskError: there is no such fact.
    """
    if fact is None:
        return task.answer, "its answer"
    if fact not in task.facts:
        known = ", ".join(sorted(task.facts)) or "none"
        raise TaskError(
            f"task {task.id!r} has no fact {fact!r}, where reward.tests_fact says its tests are; its facts: {known}."
            " Carry the column along with tasks.facts."
        )
    return task.facts[fact], f"its fact {fact!r}"


def read_subtasks(task: Task, *, fact: str | None) -> Subtasks:
    """The subtasks of the tests in the task's answer, or in its `fact`; `read_tests` reads the tests themselves.

    Raises:
        TaskError: there are none, or tests and points do not fit together.
    """
    text, place = text_of_tests(task, fact=fact)
    try:
        tree = json.loads(text)
        points = {name: _number(of_one) for name, of_one in tree["points"].items()}
        of_tests = tuple(frozenset(_names(test.get("subtasks", []))) for test in tree["tests"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TaskError(
            f"task {task.id!r}: {place} holds no subtasks ({type(error).__name__}: {error}). Write JSON: {_FORM}, or set"
            " another score than 'subtasks'."
        ) from error
    if problem := _problem(of_tests, points):
        raise TaskError(f"task {task.id!r}: in {place} {problem}")
    return Subtasks(of_tests=of_tests, points=points)


def _problem(of_tests: Sequence[frozenset[str]], points: Mapping[str, float]) -> str:
    """What does not fit together, and what to do about it; empty where all does."""
    known = ", ".join(points) or "none"
    for number, names in enumerate(of_tests, start=1):
        if not names:
            return f'test {number} is of no subtask, so it would count for nothing. Name one in its "subtasks", or remove it.'
        for name in sorted(names - points.keys()):
            return f'test {number} is of subtask {name!r}, which has no points; those with points: {known}. Add it to "points".'
    for name, of_one in points.items():
        if not (math.isfinite(of_one) and of_one > 0):
            return f"subtask {name!r} has {of_one:g} points. Give it more than 0, or remove it and its tests."
        if not any(name in names for names in of_tests):
            return f'subtask {name!r} has points but no test. Name it in the "subtasks" of its tests, or remove its points.'
    return ""


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"points are {value!r}, which is no number")
    return float(value)


def _names(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"the subtasks of a test are {value!r}, which is no list of names")
    return value
