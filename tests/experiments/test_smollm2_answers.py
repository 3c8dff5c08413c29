"""experiments/smollm2_answers.py: what a response that follows no form is taken to answer."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

import smollm2_answers

from strop.types import Completion, FinishReason, RolloutKey, StopReason, Task, Trajectory, Turn


def said(text, stop_reason=StopReason.ANSWERED):
    completion = Completion(
        ids=(5,),
        logprobs=(0.0,),
        entropies=(),
        is_forced=(False,),
        spans=((0, 1),),
        finish_reason=FinishReason.STOP,
        cached_tokens=0,
    )
    turn = Turn(completion=completion, calls=(), observation_ids=(), completion_text=text, observation_text="")
    key = RolloutKey(task_index=0, attempt=0)
    return Trajectory(key=key, task_id="one", prompt_ids=(1,), turns=(turn,), stop_reason=stop_reason)


def is_right(answer, text, **others):
    return smollm2_answers.is_last_said(Task(id="one", question="?", answer=answer, source="ours"), said(text, **others))


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("18", "First 20, then 2 less: 18."),
        ("18", "She earns $18.00 a day"),
        ("1,234", "That makes 1234 of them."),
        ("-5", "It falls to -5"),
        ("7", r"So \boxed{7}, found in 2 steps."),
        (r"\frac{1}{2}", r"It is $\boxed{\frac{1}{2}}$."),
    ],
)
def test_the_last_number_or_the_last_box_is_the_answer(answer, text):
    assert is_right(answer, text) == 1.0


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("18", "18 of 20"),
        ("18", "She has 180"),
        ("18", "I do not know."),
        ("5", "It falls to -5"),
        (r"\frac{1}{2}", r"It is \frac{1}{2}."),
        ("2", r"It is \boxed{\frac{1}{2}}"),
    ],
)
def test_anything_else_is_not(answer, text):
    assert is_right(answer, text) == 0.0


def test_a_response_that_was_cut_has_no_answer():
    assert is_right("18", "18", stop_reason=StopReason.LENGTH) == 0.0
