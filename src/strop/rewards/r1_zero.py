r"""The two graders of CS336 assignment 5: an answer after `</think> <answer>`, and an answer in `\boxed{}`.

Both look for the answer as Dr. GRPO (arXiv 2503.20783) does. With `judge = "dr_grpo"` they also accept what it accepts; the
default, `strop`, avoids its misreadings. They are plain functions that need no running service and never hang: numbers and
equal texts are compared here, anything else in another process, under a deadline. A pair that reaches it is not equal.

Measured on one core of a busy machine: 0.04 ms per call that needs no process (all of GSM8K), 1.4 ms on average over wrong
answers to MATH-500 (2.2 ms with `fast=False`), and half a second more for the first call that needs the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from pydantic import Field

from strop.answer_text import BOX, last_box
from strop.rewards.base import CLOSING, OPENING, AnswerPart, PositiveWeight, RolloutPart, RunService, final_text
from strop.rewards.math_text import (
    ask,
    cleaned,
    equal_by_text,
    is_equal_to_dr_grpo,
    left_to_algebra,
    need_pylatexenc,
    same_base_and_power,
)
from strop.rollout.prompt import AnswerForm
from strop.types import Task, Trajectory

_FORMAT = "</think> <answer>"  # with one space

Gold = str | float | Sequence[str]
"""One right answer, or several that are all accepted."""
_Judge: TypeAlias = Literal["strop", "dr_grpo"]


def r1_zero_reward_fn(response: str, ground_truth: Gold, fast: bool = True, *, judge: _Judge = "strop") -> dict[str, float]:
    r"""Judges a response to the r1_zero prompt, whose opening `<think>` belongs to the prompt.

    The format is right if `</think> <answer>` (one space) and `</answer>` both occur. The answer is the text after the last
    `<answer>`, without closing tags; if it has a `\boxed{}`, the inside of the last one. A box that does not close is wrong.

    Args:
        response: the policy's text with the closing tag (vLLM omits it unless `include_stop_str_in_output` is set).
        ground_truth: a number counts as its text.
        fast: compare only by text and sympy; otherwise pairs that these find unequal are also compared by `math_verify`.
        judge: which answers are equal: `dr_grpo`, those that the hand-out's own grader accepts.

    Returns:
        `format_reward`, `answer_reward` and `reward`, each 0 or 1. A right format with a wrong answer has reward 0.

    Raises:
        MachineError: answers cannot be compared on this machine.
        UserError: a library that `judge` needs is not installed.
    """
    is_formatted = has_r1_zero_format(response)
    answer = answer_after_thoughts(response) if is_formatted else None
    return _rewards(answer, ground_truth, fast, judge, is_formatted=is_formatted)


def answer_after_thoughts(response: str) -> str | None:
    """The answer that `r1_zero_reward_fn` reads; None if its last box does not close."""
    answer = response.rpartition(OPENING)[2].replace(CLOSING, "")
    return last_box(answer) if BOX in answer else answer


def has_r1_zero_format(response: str) -> bool:
    """Whether the format of `r1_zero_reward_fn` is right."""
    return _FORMAT in response and CLOSING in response


def question_only_reward_fn(
    response: str, ground_truth: Gold, fast: bool = True, *, judge: _Judge = "strop"
) -> dict[str, float]:
    r"""Judges a response to the bare question: the format is right if it has a `\boxed{}`, and the last one is the answer.

    Arguments, return value and exceptions are those of `r1_zero_reward_fn`.
    """
    answer = last_box(response)
    return _rewards(answer, ground_truth, fast, judge, is_formatted=answer is not None)


def _rewards(answer: str | None, truth: Gold, fast: bool, judge: _Judge, *, is_formatted: bool) -> dict[str, float]:
    golds = [str(truth)] if isinstance(truth, str | int | float) else truth
    right = float(answer is not None and any(_is_equal(gold, answer, fast, judge) for gold in golds))
    return {"format_reward": float(is_formatted), "answer_reward": right, "reward": right}


def _is_equal(gold: str, answer: str, fast: bool, judge: _Judge) -> bool:
    if judge == "dr_grpo":
        return is_equal_to_dr_grpo(gold, answer, is_fast=fast)
    gold, answer = cleaned(last_box(gold) or gold), cleaned(answer)
    for compare in (same_base_and_power, equal_by_text):
        if (is_equal := compare(gold, answer)) is not None:
            return is_equal
    differences = left_to_algebra(gold, answer)
    if differences is not None and (not differences or ask(lambda at, limit_s: at.are_zero(differences, wall_s=limit_s))):
        return True
    return not fast and ask(lambda at, limit_s: at.compare(gold, answer, wall_s=limit_s))


class R1ZeroPart(AnswerPart):
    """The grader of CS336 and Dr. GRPO for an answer after `</think> <answer>`."""

    class Config(AnswerPart.Config):
        weight: PositiveWeight = 1.0
        fast: bool = Field(default=True, description="Compare only by text and sympy; false: by math_verify as well.")
        judge: _Judge = Field(
            default="strop", description="dr_grpo: accept what the hand-out's own grader accepts, its misreadings too."
        )

    config: Config
    answer_form = AnswerForm.R1_ZERO
    grade = staticmethod(r1_zero_reward_fn)

    @property
    def equality(self) -> Literal["mathematics", "intervals"]:
        return "mathematics" if self.config.fast else "intervals"

    def open(self, service: RunService | None) -> None:
        if self.config.judge == "dr_grpo":
            need_pylatexenc()

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        text = final_text(trajectory)
        return 0.0 if text is None else (await self._judge(self.grade, text, task.answer))["reward"]

    def read_answer(self, trajectory: Trajectory) -> str | None:
        text = final_text(trajectory) or ""
        return (answer_after_thoughts(text) or "").strip() if has_r1_zero_format(text) else None

    async def is_same(self, gold: str, answer: str) -> bool:
        response = f"</think> {OPENING}{answer}{CLOSING}"
        return (await self._judge(r1_zero_reward_fn, response, gold))["answer_reward"] > 0

    async def _judge(self, grade: Callable[..., dict[str, float]], response: str, gold: str) -> dict[str, float]:
        """In a thread: the grader may wait for a process."""
        return await asyncio.to_thread(grade, response, gold, self.config.fast, judge=self.config.judge)


class QuestionOnlyPart(R1ZeroPart):
    """The grader of CS336 and Dr. GRPO for an answer in a box anywhere."""

    answer_form = AnswerForm.BOX
    grade = staticmethod(question_only_reward_fn)

    def read_answer(self, trajectory: Trajectory) -> str | None:
        return (last_box(final_text(trajectory) or "") or "").strip()


class R1ZeroFormatPart(RolloutPart):
    """The format that the grader `r1_zero` requires, whatever the answer: 0 or 1. Its value includes it, so use weight 0."""

    class Config(RolloutPart.Config):
        weight: PositiveWeight = 1.0

    has_format = staticmethod(has_r1_zero_format)

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        return float(self.has_format(final_text(trajectory) or ""))


class QuestionOnlyFormatPart(R1ZeroFormatPart):
    """The format that the grader `question_only` requires: 0 or 1."""

    has_format = staticmethod(lambda response: last_box(response) is not None)
