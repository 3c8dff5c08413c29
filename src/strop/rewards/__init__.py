"""(task, trajectory) -> reward parts."""

from strop.config import import_object
from strop.rewards.config import AnyRewardConfig, FunctionRewardConfig, RewardConfig
from strop.rewards.function import FunctionReward, function_reward
from strop.rewards.math import MathReward
from strop.rewards.verifier import MathVerifier, Verdict

__all__ = [
    "AnyRewardConfig",
    "FunctionReward",
    "FunctionRewardConfig",
    "MathReward",
    "MathVerifier",
    "RewardConfig",
    "Verdict",
    "function_reward",
    "make_reward",
    "weighted",
]


def make_reward(config: AnyRewardConfig) -> MathReward | FunctionReward:
    """The reward that `config` describes; whoever asked closes it. Raises `ConfigError` when a function cannot be imported."""
    if isinstance(config, FunctionRewardConfig):
        return function_reward(import_object(config.function, key="reward.function"))
    return MathReward(config)
