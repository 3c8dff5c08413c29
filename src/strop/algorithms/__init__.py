"""Methods: what to keep of a group, what each token deserves, what it costs. One file each, pure functions."""

from strop.algorithms.arpo import ARPO
from strop.algorithms.grpo import GRPO, Advantage
from strop.algorithms.grpo_roc import GRPORoC
from strop.algorithms.losses import Aggregation, KLEstimator, Mismatch, RatioLevel, token_weights
from strop.algorithms.method import (
    Column,
    CriticMethod,
    Decision,
    Estimate,
    LossInputs,
    Method,
    RewardedRows,
    Selection,
    ValueInputs,
)
from strop.algorithms.policy_loss import Loss, PolicyLoss
from strop.algorithms.ppo import PPO

__all__ = [
    "ARPO",
    "GRPO",
    "PPO",
    "Advantage",
    "Aggregation",
    "Column",
    "CriticMethod",
    "Decision",
    "Estimate",
    "GRPORoC",
    "KLEstimator",
    "Loss",
    "LossInputs",
    "Method",
    "Mismatch",
    "PolicyLoss",
    "RatioLevel",
    "RewardedRows",
    "Selection",
    "ValueInputs",
    "token_weights",
]
