"""(task, trajectory) -> reward parts. The rewards that a recipe names by `kind`, and the form in which they read answers."""

from __future__ import annotations

from strop.rewards.base import Reward, RunService, judge_group, make_reward
from strop.rewards.math import MathReward
from strop.rewards.sum import SumReward, function_reward
from strop.rollout.prompt import AnswerForm

__all__ = ["SETTINGS", "MathReward", "Reward", "RunService", "SumReward", "function_reward", "judge_group", "make_reward"]


SETTINGS = {
    AnswerForm.BOX_IN_TAG: "kind = 'math' or 'countdown'",
    AnswerForm.TAG: "kind = 'math' or 'countdown' with needs_box = false",
    AnswerForm.BOX: "a part of kind 'question_only', or of kind 'math' with answer_in = 'response'",
    AnswerForm.R1_ZERO: "a part of kind 'r1_zero'",
    AnswerForm.ARPO: "a part of kind 'arpo'",
    AnswerForm.CODE: "kind = 'code'",
}
"""The settings of a recipe that read answers in each form."""
