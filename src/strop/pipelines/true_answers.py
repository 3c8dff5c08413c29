"""Whether a reward could tell right demonstrations from wrong ones, asked when the recipe is read."""

from __future__ import annotations

from strop.evaluation.verdict import verdict_of
from strop.rewards.config import AnyRewardConfig, RewardConfig
from strop.rewards.sum_config import AnyPart, F1Part, MathPart, R1ZeroPart, SumRewardConfig
from strop.tasks.config import Columns, TaskConfig
from strop.tasks.demonstrators import DemonstratorConfig, RecordedDemonstrator


def compares_answers(reward: AnyRewardConfig) -> bool:
    """Whether all that says what is right under `reward` compares something with the answer of the task."""
    if isinstance(reward, SumRewardConfig):
        judging = [reward.parts[name] for name in verdict_of(reward).parts]
        return bool(judging) and all(_compares_answers(part) for part in judging)
    return isinstance(reward, RewardConfig)


def _compares_answers(part: AnyPart) -> bool:
    return isinstance(part, MathPart | R1ZeroPart) or (isinstance(part, F1Part) and part.references_fact is None)


def problem_with_only_right(reward: AnyRewardConfig, tasks: TaskConfig, demonstrator: DemonstratorConfig | None) -> str:
    """Why nobody could say which demonstrations are right; empty where somebody may."""
    if not verdict_of(reward).parts:
        return (
            "only_right is true, but no part of reward says what is right. Give it one that does (math, code, r1_zero,"
            " question_only, arpo), or leave only_right out."
        )
    if not isinstance(demonstrator, RecordedDemonstrator) or not isinstance(tasks, Columns) or not compares_answers(reward):
        return ""
    if tasks.dataset is None and tasks.answer == demonstrator.response_fact:
        return (
            f"only_right is true, but tasks.answer is {tasks.answer!r}, the column of the responses themselves: they would be"
            " judged by their own answers. Set tasks.answer to the column of the true answer, or leave only_right out."
        )
    return ""
