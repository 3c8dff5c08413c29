"""Rules over the outcomes of a model's rollouts of a task.

rStar2-Agent (arXiv 2508.20722) keeps problems of OpenMathReasoning whose label agrees with at least 2 of 16 answers of a model
(section 4.2); before its third stage it drops problems that the policy solves in 8 of 8 rollouts (section 4.3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from strop.curation.text import question_digest
from strop.errors import TaskError
from strop.tasks.files import read_jsonl
from strop.types import Group, ScoredTrajectory, Task

_FORM = "A row holds task_id and question_digest (texts), num_right and num_judged (0 <= num_right <= num_judged)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How often a model solved a task. Void rollouts are not judged."""

    task_id: str
    question_digest: str  # two files may have equal ids
    num_right: int
    num_judged: int


TaskKey: TypeAlias = tuple[str, str]
"""The id of a task and a digest of its question."""


def key_of(task: Task) -> TaskKey:
    return task.id, question_digest(task.question)


def outcome_of(group: Group, verdict: Callable[[ScoredTrajectory], bool | None]) -> Outcome:
    """Return how often the task of `group` was solved. `verdict` says whether a rollout is right, or None if unknown."""
    found = [verdict(scored) for scored in group.trajectories]
    task_id, digest = key_of(group.task)
    num_judged = len(found) - found.count(None)
    return Outcome(task_id=task_id, question_digest=digest, num_right=found.count(True), num_judged=num_judged)


def read_outcomes(path: Path) -> dict[TaskKey, Outcome]:
    """Return the outcomes in a JSONL file; rows of one task add up. Raises `TaskError` for a bad row."""
    found: dict[TaskKey, Outcome] = {}
    for place, row in read_jsonl(path):
        outcome = _outcome(row, place)
        key = outcome.task_id, outcome.question_digest
        before = found.get(key)
        found[key] = Outcome(
            task_id=outcome.task_id,
            question_digest=outcome.question_digest,
            num_right=outcome.num_right + (before.num_right if before else 0),
            num_judged=outcome.num_judged + (before.num_judged if before else 0),
        )
    return found


def _outcome(row: Mapping[str, Any], place: str) -> Outcome:
    task_id, digest, right, judged = (row.get(key) for key in ("task_id", "question_digest", "num_right", "num_judged"))
    if not isinstance(task_id, str) or type(right) is not int or type(judged) is not int or not 0 <= right <= judged:
        raise TaskError(
            f"{place}: not the outcome of a task. {_FORM}; the stages filter and rejection_sampling write such files."
        )
    if not isinstance(digest, str):
        raise TaskError(
            f"{place}: no question_digest for task {task_id!r}. {_FORM}; strop.curation.outcomes.key_of(task) returns the"
            " first two."
        )
    return Outcome(task_id=task_id, question_digest=digest, num_right=right, num_judged=judged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Keeps tasks whose label agrees with at least `min_right` of a model's answers; other labels are probably wrong.

    Rollouts that were not judged (void, or without a verdict) may be right: a task is dropped only if they cannot change that.
    """

    outcomes: Mapping[TaskKey, Outcome]
    num_rollouts: int = 16
    min_right: int = 2
    name: str = "agreement"

    def judge(self, task: Task) -> str | None:
        outcome = self.outcomes.get(key_of(task))
        if outcome is None:
            return "no rollout of it was judged"
        num_missing = max(0, self.num_rollouts - outcome.num_judged)
        if outcome.num_right + num_missing >= self.min_right:
            return None
        missing = f", {num_missing} were not judged" if num_missing else ""
        return f"{outcome.num_right} of {outcome.num_judged} answers agree with the label, fewer than {self.min_right}{missing}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difficulty:
    """Drops tasks that the policy always solves, or solves fewer than `min_right` times.

    A task with fewer than `num_rollouts` judged rollouts stays.
    """

    outcomes: Mapping[TaskKey, Outcome]
    num_rollouts: int = 8
    min_right: int = 0
    name: str = "difficulty"

    def judge(self, task: Task) -> str | None:
        outcome = self.outcomes.get(key_of(task))
        if outcome is None:
            return "no rollout of it was judged"
        if outcome.num_judged >= self.num_rollouts and outcome.num_right == outcome.num_judged:
            return f"too easy: {outcome.num_right} of {outcome.num_judged} rollouts solve it"
        if outcome.num_judged >= self.num_rollouts and outcome.num_right < self.min_right:
            return f"too hard: {outcome.num_right} of {outcome.num_judged} rollouts solve it, fewer than {self.min_right}"
        return None
