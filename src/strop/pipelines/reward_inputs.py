"""The stages that a reward stands on: those whose reward models are parts of it."""

from __future__ import annotations

from strop.pipelines.graph import Input, Product
from strop.rewards.config import AnyRewardConfig
from strop.rewards.scorers.config import EmbeddedScorerConfig
from strop.rewards.sum_config import SumRewardConfig


def inputs_of_reward(reward: AnyRewardConfig) -> tuple[Input, ...]:
    """One for each part that names a stage."""
    stages = scoring_stages(reward)
    return tuple(
        Input(key=f"reward.parts.{name}.scorer.stage", stage=stage, wants=(Product.REWARD_MODEL,))
        for name, stage in stages.items()
    )


def scoring_stages(reward: AnyRewardConfig) -> dict[str, str]:
    """By part of the reward, the stage whose reward model it asks."""
    if not isinstance(reward, SumRewardConfig):
        return {}
    scorers = {name: getattr(part, "scorer", None) for name, part in reward.parts.items()}
    return {
        name: scorer.stage
        for name, scorer in scorers.items()
        if isinstance(scorer, EmbeddedScorerConfig) and scorer.stage is not None
    }
