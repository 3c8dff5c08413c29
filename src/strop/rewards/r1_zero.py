r"""The two graders of CS336 assignment 5: an answer behind `</think> <answer>`, and an answer in `\boxed{}`.

Both are those of Dr. GRPO (arXiv 2503.20783). They are plain functions that need no running service and never hang: numbers and
equal texts are compared here, anything else in a process of their own, under a deadline. A pair that reaches it is not equal.

Measured on one core of a busy machine: 0.04 ms a call where no process is asked (all of GSM8K), 1.4 ms on average over wrong
answers to MATH-500 (2.2 ms with `fast=False`), and half a second more for the first call that needs the process.
"""

from __future__ import annotations

from collections.abc import Sequence

from strop.rewards.answers import CLOSING, OPENING
from strop.rewards.grading import equal_by_text
from strop.rewards.grading_process import How, grading_process
from strop.rewards.spelling import cleaned, same_base_and_power
from strop.tasks.boxes import boxed

LIMIT_S = 1.0  # of each way to compare

_FORMAT = "</think> <answer>"  # with one space
_BOX = r"\boxed"

Gold = str | float | Sequence[str]
"""One right answer, or several of which any will do."""


def r1_zero_reward_fn(response: str, ground_truth: Gold, fast: bool = True) -> dict[str, float]:
    r"""Judges a response to the r1_zero prompt, whose opening `<think>` belongs to the prompt.

    The format is right where `</think> <answer>` (one space) and `</answer>` both occur. The answer is the text after the last
    `<answer>`, without closing tags; where it has a `\boxed{}`, the inside of the last one. A box that does not close is wrong.

    Args:
        response: what the policy wrote, the closing tag included (vLLM leaves it out unless `include_stop_str_in_output`).
        ground_truth: a number counts as its text.
        fast: compare by text and sympy only; else what these find unequal is also shown to `math_verify`.

    Returns:
        `format_reward`, `answer_reward` and `reward`, each 0 or 1. A right format with a wrong answer has reward 0.

    Raises:
        MachineError: answers cannot be compared on this machine.
    """
    if not has_r1_zero_format(response):
        return _rewards(is_formatted=False, is_correct=False)
    answer: str | None = response.rpartition(OPENING)[2].replace(CLOSING, "")
    if answer is not None and _BOX in answer:
        answer = _last_box(answer)
    return _rewards(is_formatted=True, is_correct=answer is not None and _is_correct(answer, ground_truth, fast))


def has_r1_zero_format(response: str) -> bool:
    """Whether the format of `r1_zero_reward_fn` is right."""
    return _FORMAT in response and CLOSING in response


def has_question_only_format(response: str) -> bool:
    """Whether the format of `question_only_reward_fn` is right."""
    return _last_box(response) is not None


def question_only_reward_fn(response: str, ground_truth: Gold, fast: bool = True) -> dict[str, float]:
    r"""Judges a response to the bare question: the format is right where it has a `\boxed{}`, and the last one is the answer.

    Arguments, value and exceptions are those of `r1_zero_reward_fn`.
    """
    answer = _last_box(response)
    if answer is None:
        return _rewards(is_formatted=False, is_correct=False)
    return _rewards(is_formatted=True, is_correct=_is_correct(answer, ground_truth, fast))


def _last_box(text: str) -> str | None:
    boxes = boxed(text[text.rfind(_BOX) :]) if _BOX in text else []
    return boxes[0] if boxes else None


def _is_correct(answer: str, ground_truth: Gold, fast: bool) -> bool:
    golds = [str(ground_truth)] if isinstance(ground_truth, str | int | float) else ground_truth
    return any(_is_equal(_last_box(gold) or gold, answer, fast) for gold in golds)


def _is_equal(gold: str, answer: str, fast: bool) -> bool:
    gold, answer = cleaned(gold), cleaned(answer)
    is_equal = same_base_and_power(gold, answer)
    if is_equal is None:
        is_equal = equal_by_text(gold, answer)
    if is_equal is not None:
        return is_equal
    ways = [How.ALGEBRA] if fast else [How.ALGEBRA, How.MATH_VERIFY]
    return any(grading_process().is_equal(gold, answer, how, limit_s=LIMIT_S) for how in ways)


def _rewards(*, is_formatted: bool, is_correct: bool) -> dict[str, float]:
    return {
        "format_reward": float(is_formatted),
        "answer_reward": float(is_correct),
        "reward": float(is_formatted and is_correct),
    }
