"""(task, trajectory) -> reward parts."""

from strop.rewards.config import RewardConfig
from strop.rewards.function import function_reward
from strop.rewards.math import MathReward
from strop.rewards.shaping import weighted
from strop.rewards.verifier import MathVerifier, Verdict

__all__ = ["MathReward", "MathVerifier", "RewardConfig", "Verdict", "function_reward", "weighted"]
