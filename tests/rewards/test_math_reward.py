import asyncio
import re

import pytest
from trajectories import TASK, called, trajectory, turn

from strop.config import validate
from strop.errors import ConfigError
from strop.rewards import MathReward, function_reward, make_reward
from strop.types import StopReason, ToolOutcome

RIGHT, WRONG = r"<answer>\boxed{72}</answer>", r"<answer>\boxed{71}</answer>"


def judge(reward, judged):
    return dict(asyncio.run(reward(TASK, judged)))


@pytest.mark.parametrize(
    ("judged", "parts"),
    [
        (trajectory(RIGHT), (1, 1, 0)),
        (trajectory(WRONG), (0, 1, 0)),
        (trajectory(turn("", called()), RIGHT), (1, 1, 1)),
        (trajectory(turn("", called(ToolOutcome.ERROR)), RIGHT), (1, 1, 0)),
        (trajectory(turn("", called(ToolOutcome.TOO_MANY_CALLS)), RIGHT), (1, 1, 0)),  # it did not run
        (trajectory(turn("", called(ToolOutcome.ERROR), called(ToolOutcome.ECHO)), WRONG), (0, 1, 1)),
        (trajectory(turn(RIGHT, called(ToolOutcome.NOT_RUN)), stop_reason=StopReason.TURN_LIMIT), (0, 0, 0)),
        (trajectory("72"), (0, 0, 0)),
        (trajectory(RIGHT + RIGHT), (1, 0, 0)),
        (trajectory(RIGHT, stop_reason=StopReason.LENGTH), (0, 0, 0)),
    ],
)
def test_the_parts_are_accuracy_format_and_called(judged, parts):
    assert judge(make_reward(MathReward()), judged) == dict(zip(("accuracy", "format", "called"), parts, strict=True))


def test_by_default_the_answer_alone_counts():
    assert MathReward().weights == {"accuracy": 1.0}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            {"acuracy": 1.0},
            r"weights\.acuracy: no such part\. Did you mean 'accuracy'\? The parts are accuracy, format, called\.",
        ),
        ({"accuracy": 0.0}, "every trajectory would get the same reward"),
        ({}, "every trajectory would get the same reward"),
        ({"accuracy": -1.0}, r"weights\.accuracy is -1: a right answer would be punished"),
        ({"accuracy": 1e308}, "less than or equal to 1000000"),
    ],
)
def test_weights_that_cannot_be_meant_are_refused(weights, message):
    with pytest.raises(ConfigError, match=message):
        validate(MathReward.Config, {"weights": weights}, place="recipe")


def test_a_plain_function_is_a_reward():
    reward = function_reward(lambda task, judged: len(judged.turns) / 2)
    assert judge(reward, trajectory("a", "b", "c")) == {"reward": 1.5}


def raises(task, judged):
    return {}["missing"]


async def is_async(task, judged):
    return 1.0


@pytest.mark.parametrize(
    ("function", "line", "message"),
    [
        (lambda task, judged: float("nan"), 0, r"returned nan for task 't'\. Return a finite number\."),
        (lambda task, judged: None, 0, r"returned None for task 't'\. Return a finite number\."),
        (lambda task, judged: "1", 0, r"returned '1' for task 't'\."),
        (lambda task, judged: [1.0], 0, r"returned \[1\.0\] for task 't'\."),
        (raises, 1, r"raised KeyError: 'missing' for task 't'\."),
        (is_async, 0, r"is a coroutine function\. Write def instead of async def\."),
    ],
)
def test_a_function_that_fails_is_one_error_with_its_name_file_and_line(function, line, message):
    name, first = re.escape(function.__qualname__), function.__code__.co_firstlineno
    with pytest.raises(ConfigError, match=rf"^reward function {name} \({re.escape(__file__)}, line {first + line}\) {message}"):
        judge(function_reward(function), trajectory(RIGHT))


def of_trl(completions, **kwargs):
    return [0.0 for _ in completions]


@pytest.mark.parametrize("function", [of_trl, lambda task: 1.0])
def test_a_function_of_another_signature_is_refused_before_anything_is_judged(function):
    with pytest.raises(ConfigError, match=r"cannot be called with \(task, trajectory\): .*def name\(task: Task, trajectory"):
        function_reward(function)
