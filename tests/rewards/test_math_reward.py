import asyncio

import pytest
from trajectories import TASK, called, trajectory, turn

from strop.config import validate
from strop.errors import ConfigError, UserError
from strop.rewards import MathReward, RewardConfig, function_reward
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
    assert judge(MathReward(RewardConfig()), judged) == dict(zip(("accuracy", "format", "called"), parts, strict=True))


def test_by_default_the_answer_alone_counts():
    assert RewardConfig().weights == {"accuracy": 1.0}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            {"acuracy": 1.0},
            r"weights\.acuracy: no such part\. Did you mean 'accuracy'\? The parts are accuracy, format, called\.",
        ),
        ({"accuracy": 0.0}, "every trajectory would get the same reward"),
        ({}, "every trajectory would get the same reward"),
    ],
)
def test_weights_that_cannot_be_meant_are_refused(weights, message):
    with pytest.raises(ConfigError, match=message):
        validate(RewardConfig, {"weights": weights}, place="recipe")


def test_a_plain_function_is_a_reward():
    reward = function_reward(lambda task, judged: len(judged.turns) / 2)
    assert judge(reward, trajectory("a", "b", "c")) == {"reward": 1.5}


@pytest.mark.parametrize("value", [float("nan"), None, "1"])
def test_a_function_that_returns_no_finite_number_is_named(value):
    def style(task, judged):
        return value

    with pytest.raises(UserError, match=r"reward style: returned .* for task 't'\. Return a finite number\."):
        judge(function_reward(style), trajectory(RIGHT))
