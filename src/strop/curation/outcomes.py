"""The outcomes of a model's rollouts of tasks, and the rule that a label must agree with some of them.

rStar2-Agent (arXiv 2508.20722, section 4.2) keeps problems of OpenMathReasoning whose label agrees with at least 2 of 16
answers of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from strop.curation.answers import RuleScope, fingerprint
from strop.errors import TaskError
from strop.tasks.files import read_rows
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
    return task.id, fingerprint(task.question).hex()


def outcome_of(group: Group, verdict: Callable[[ScoredTrajectory], bool | None]) -> Outcome:
    """Return how often the task of `group` was solved. `verdict` says whether a rollout is right, or None if unknown."""
    found = [verdict(scored) for scored in group.trajectories]
    task_id, digest = key_of(group.task)
    num_judged = len(found) - found.count(None)
    return Outcome(task_id=task_id, question_digest=digest, num_right=found.count(True), num_judged=num_judged)


def read_outcomes(path: Path) -> dict[TaskKey, Outcome]:
    """Return the outcomes in a JSONL file; rows of one task add up. Raises `TaskError` for a bad row."""
    found: dict[TaskKey, Outcome] = {}
    for place, row in read_rows(path):
        outcome = _outcome(row, place)
        key = outcome.task_id, outcome.question_digest
        if before := found.get(key):
            num_right, num_judged = outcome.num_right + before.num_right, outcome.num_judged + before.num_judged
            outcome = replace(outcome, num_right=num_right, num_judged=num_judged)
        found[key] = outcome
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


class AgreementRule(RuleScope):
    """Keeps problems whose label agrees with some of a model's answers; other labels are probably wrong.

    Rollouts that were not judged (void, or without a verdict) may be right: a task is dropped only if they cannot change that.
    """

    kind: Literal["agreement"] = "agreement"
    outcomes: Path = Field(description="JSONL file with the outcome of each task.")
    num_rollouts: int = Field(default=16, ge=1, le=10**9, description="Rollouts of each task; unjudged ones may be right.")
    min_right: int = Field(
        default=2, ge=1, le=10**9, description="Right rollouts that a task needs (rStar2-Agent section 4.2)."
    )

    @model_validator(mode="after")
    def _can_be_reached(self) -> Self:
        if self.min_right > self.num_rollouts:
            raise ValueError(
                f"min_right is {self.min_right} but num_rollouts is {self.num_rollouts}: every problem would be dropped. Lower"
                " min_right."
            )
        return self

    def opened(self) -> Agreement:
        return Agreement(rule=self, outcomes=read_outcomes(self.outcomes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The rule with the outcomes. Drops tasks without one."""

    rule: AgreementRule
    outcomes: Mapping[TaskKey, Outcome]

    @property
    def name(self) -> str:
        return self.rule.kind

    def judge(self, task: Task) -> str | None:
        if (outcome := self.outcomes.get(key_of(task))) is None:
            return "no rollout of it was judged"
        num_missing = max(0, self.rule.num_rollouts - outcome.num_judged)
        if outcome.num_right + num_missing >= self.rule.min_right:
            return None
        agree = f"{outcome.num_right} of {outcome.num_judged} answers agree with the label, fewer than {self.rule.min_right}"
        return agree + (f", {num_missing} were not judged" if num_missing else "")
