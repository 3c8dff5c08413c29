"""(task, trajectory) -> reward parts. The rewards that a recipe names by `kind`, and the form in which they read answers."""

from __future__ import annotations

from dataclasses import dataclass

from strop.rewards.base import Reward, RunService, judge_group, make_reward
from strop.rewards.code import CodeReward
from strop.rewards.countdown import CountdownReward
from strop.rewards.math import MathReward, MathVerifier, Verdict
from strop.rewards.sum import FunctionReward, SumReward, function_reward
from strop.rollout.prompt import AnswerForm

__all__ = [
    "SETTINGS",
    "CodeReward",
    "CountdownReward",
    "FunctionReward",
    "MathReward",
    "MathVerifier",
    "Reader",
    "Reward",
    "RunService",
    "SumReward",
    "Verdict",
    "function_reward",
    "judge_group",
    "make_reward",
    "readers_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A part of a reward that looks for an answer; others look at lengths, languages or the whole response."""

    key: str  # in the recipe: reward, or reward.parts.NAME
    part: str  # the name that weights it; empty if the reward is not a sum
    settings: str  # that decide what it reads
    form: AnswerForm


SETTINGS = {
    AnswerForm.BOX_IN_TAG: "kind = 'math' or 'countdown'",
    AnswerForm.TAG: "kind = 'math' or 'countdown' with needs_box = false",
    AnswerForm.BOX: "a part of kind 'question_only', or of kind 'math' with answer_in = 'response'",
    AnswerForm.R1_ZERO: "a part of kind 'r1_zero'",
    AnswerForm.ARPO: "a part of kind 'arpo'",
    AnswerForm.CODE: "kind = 'code'",
}
"""The settings of a recipe that read answers in each form."""


def readers_of(reward: Reward) -> list[Reader]:
    """The parts that read an answer. What a user's own function reads is not known, so it is not among them."""
    return [
        Reader(key=f"reward.parts.{name}" if name else "reward", part=name, settings=part.settings, form=part.answer_form)
        for name, part in reward.readers().items()
        if part.answer_form is not None
    ]
