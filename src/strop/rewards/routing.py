"""Which parts of a sum are for a task, by its facts, and which are for no task of several."""

from __future__ import annotations

from collections.abc import Sequence

from strop.rewards.sum_config import Part, SumRewardConfig
from strop.types import Task

_MAX_VALUES = 4  # of a fact, in a message


def is_for(part: Part, task: Task) -> bool:
    """Whether the part judges rollouts of the task."""
    return all(_fits(task, fact, values) for fact, values in part.where.items())


def idle_parts(reward: SumRewardConfig, tasks: Sequence[Task]) -> dict[str, str]:
    """Parts that are for none of `tasks`, by name, each with the reason in words."""
    return {
        name: _why_idle(part, tasks)
        for name, part in reward.parts.items()
        if part.where and not any(is_for(part, task) for task in tasks)
    }


def _why_idle(part: Part, tasks: Sequence[Task]) -> str:
    alone = {fact: values for fact, values in part.where.items() if not any(_fits(task, fact, values) for task in tasks)}
    told = " and ".join(_wanted(fact, values, tasks) for fact, values in (alone or part.where).items())
    carried = _listed({fact for task in tasks for fact in task.facts}, most=None)
    return f"{told}{'' if alone else ', which none has together'}. Facts that they carry: {carried}."


def _wanted(fact: str, values: Sequence[str], tasks: Sequence[Task]) -> str:
    found = {task.facts[fact] for task in tasks if fact in task.facts}
    having = f"but theirs is {_listed(found)}" if found else "a fact that none of them carries"
    return f"`where` wants {fact} = {_listed(values)}, {having}"


def _listed(words: Sequence[str] | set[str], *, most: int | None = _MAX_VALUES) -> str:
    words = sorted(words)
    shown = [f"{word!r:.60}" for word in words[:most]]
    more = len(words) - len(shown)
    return ", ".join([*shown, *([f"and {more} more"] if more else [])]) or "none"


def _fits(task: Task, fact: str, values: Sequence[str]) -> bool:
    return task.facts.get(fact, "") in values
