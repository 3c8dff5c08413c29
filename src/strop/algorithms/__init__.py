"""Methods: what to keep of a group, what each token deserves, what it costs. One file each, pure functions."""

from strop.algorithms.aggregation import Aggregation, token_weights
from strop.algorithms.config import MethodConfig
from strop.algorithms.grpo import GRPO
from strop.algorithms.grpo_roc import GRPORoC
from strop.algorithms.protocol import Column, Decision, LossInputs, Method, Selection

__all__ = [
    "GRPO",
    "Aggregation",
    "Column",
    "Decision",
    "GRPORoC",
    "LossInputs",
    "Method",
    "MethodConfig",
    "Selection",
    "token_weights",
]
