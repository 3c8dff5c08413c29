"""Parts of a sum that another model gives: a reward model's score, a judge's number."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

from strop.rewards.answers import final_text
from strop.rewards.scorers.judge import ModelJudge
from strop.rewards.scorers.protocol import Exchange, Scorer
from strop.rewards.sum_config import JudgePart, PreferencePart, ScorerPart
from strop.rewards.text import final_summary, written
from strop.types import Task, Trajectory

PreferenceScorer = Callable[[Task, Trajectory], Awaitable[float | None]]


def scorer_part(part: ScorerPart, scorer: Scorer) -> PreferenceScorer:
    """The score of a rollout by `scorer`, as `part` wants it; None, so excluded, where `scorer` will not judge it."""

    async def score(task: Task, trajectory: Trajectory) -> float | None:
        judged = judged_text(part, trajectory)
        if judged is None:
            return part.missing
        [value] = await scorer.score([Exchange(prompt=task.question, response=judged)])
        return value if value is None or part.scale == "raw" else _sigmoid(value)

    return score


def judge_part(part: JudgePart, judge: ModelJudge) -> PreferenceScorer:
    """The number of a rollout by `judge`, from 0 to 1; None, so excluded, where it gave no verdict."""

    async def score(task: Task, trajectory: Trajectory) -> float | None:
        judged = judged_text(part, trajectory)
        if judged is None:
            return part.missing
        value = await judge.score(Exchange(prompt=task.question, response=judged))
        return None if value is None else (value - part.judge.lowest) / (part.judge.highest - part.judge.lowest)

    return score


def judged_text(part: PreferencePart, trajectory: Trajectory) -> str | None:
    """What of the rollout is judged; None where there is no such thing."""
    if part.judged_on == "response":
        return written(trajectory) or None
    last = final_text(trajectory)
    if last is None:
        return None  # cut off, or at a call that was not run: the policy did not come to a summary
    if part.is_prefilled and f"</{part.think_tag}>" not in written(trajectory):
        return None  # the prompt began a thought, and nothing that was written ends it
    return final_summary(last, think_tag=part.think_tag)


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
