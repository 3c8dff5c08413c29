"""Puts the reward models that stages have made in the place of the stages that a reward names."""

from __future__ import annotations

from typing import TypeVar

from strop.pipelines.reward_inputs import scoring_stages
from strop.pipelines.stage import model_of
from strop.pipelines.stage_config import Stage
from strop.rewards.scorers.config import EmbeddedScorerConfig
from strop.rewards.sum_config import ScorerPart, SumRewardConfig
from strop.runs import RunDirectory

StageT = TypeVar("StageT", bound=Stage)


def with_reward_models(stage: StageT, run: RunDirectory) -> StageT:
    """`stage` with a directory for each stage that its reward names and that is done.

    A shared reward may name a stage that comes later; whoever is judged by it stands on that stage, and the others never ask.
    """
    reward, named = stage.reward, scoring_stages(stage.reward)
    done = {name: each for name, each in named.items() if run.stage(each).done.exists()}
    if not done or not isinstance(reward, SumRewardConfig):
        return stage
    parts = {name: _bound(part, run, done[name]) if name in done else part for name, part in reward.parts.items()}
    return stage.model_copy(update={"reward": reward.model_copy(update={"parts": parts})})


def _bound(part: object, run: RunDirectory, stage: str) -> ScorerPart:
    assert isinstance(part, ScorerPart)
    assert isinstance(part.scorer, EmbeddedScorerConfig)
    scorer = part.scorer.model_copy(update={"path": str(model_of(run, stage)), "stage": None})
    return part.model_copy(update={"scorer": scorer})
