"""Which answers to a Countdown problem are right, and that whatever a policy writes is read and never executed."""

import asyncio
import re
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trajectories import trajectory

from strop.config import validate
from strop.errors import ConfigError, TaskError
from strop.rewards import make_reward
from strop.rewards.countdown import MAX_CHARS, CountdownReward, value_of
from strop.tasks import make_tasks
from strop.tasks.generated import CountdownTasks
from strop.types import StopReason, Task

TASK = Task(id="t", question="?", answer="(3+7)*25", source="by hand", facts={"numbers": "3, 7, 25", "target": "250"})


def judge(answer, *, task=TASK, box=True, **config):
    inside = rf"\boxed{{{answer}}}" if box else answer
    reward = make_reward(CountdownReward(**config))
    return asyncio.run(reward(task, trajectory(f"<answer>{inside}</answer>")))


@pytest.mark.parametrize(
    ("answer", "accuracy", "valid"),
    [
        ("(3+7)*25", 1, 1),
        ("25 * (7 + 3)", 1, 1),
        (r"25 \times \left(7 + 3\right)", 1, 1),
        ("(3+7)×25", 1, 1),
        ("25*3+7", 0, 1),  # valid, but 82
        ("3*25-7/1", 0, 0),  # a number that was not given
        ("(3+7)*25+3-3", 0, 0),  # a number used again
        ("25*10", 0, 0),  # what two of them make is not them
        ("250", 0, 0),
        ("(3+7)*25=250", 0, 0),
        ("-3+7+25", 0, 0),  # a sign, no operator
        ("(3+7)*(25", 0, 0),
        ("3+7)*25", 0, 0),
        ("(3+7)25", 0, 0),  # no operator between
        ("3 7 25", 0, 0),
        ("37+25", 0, 0),  # digits of two numbers written together
        ("3+7**25", 0, 0),
        ("3//7+25", 0, 0),
        ("", 0, 0),
        ("()", 0, 0),
        ("__import__('os').system('true')", 0, 0),
    ],
)
def test_an_answer_is_right_if_it_uses_each_number_once_and_equals_the_target(answer, accuracy, valid):
    parts = judge(answer)
    assert (parts["accuracy"], parts["valid"]) == (accuracy, valid)


def test_the_format_is_judged_apart():
    assert judge("(3+7)*25") == {"accuracy": 1.0, "valid": 1.0, "format": 1.0, "called": 0.0}
    assert judge("(3+7)*25", box=False) == {"accuracy": 0.0, "valid": 0.0, "format": 0.0, "called": 0.0}
    assert judge("(3+7)*25", box=False, needs_box=False)["accuracy"] == 1.0


def test_a_rollout_that_was_cut_off_has_no_answer():
    cut = trajectory(r"<answer>\boxed{(3+7)*25}</answer>", stop_reason=StopReason.LENGTH)
    assert asyncio.run(make_reward(CountdownReward())(TASK, cut))["accuracy"] == 0.0


def test_arithmetic_is_exact():
    assert value_of("8/(3-8/3)", [3, 3, 8, 8]) == 24  # through a third
    assert value_of("1/3*3", [1, 3, 3]) == 1
    assert value_of("2-3-4", [2, 3, 4]) == -5  # from left to right
    assert value_of("24/4/3", [24, 4, 3]) == 2
    assert value_of("2+3*4", [2, 3, 4]) == 14


@pytest.mark.parametrize("text", ["5/0", "5/(3-3)", "0/0", "1/(2-4/2)"])
def test_a_quotient_by_zero_is_no_expression(text):
    digits = [int(each) for each in text if each.isdigit()]
    assert value_of(text, digits) is None


@given(seed=st.integers(0, 3), split=st.sampled_from(["train", "test"]), index=st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_the_solution_that_a_task_was_drawn_from_is_right_and_any_other_number_in_it_is_not(seed, split, index):
    task = make_tasks(CountdownTasks(min_numbers=2, max_numbers=6, max_target=1000), seed=seed, split=split).task(index)
    numbers = [int(number) for number in task.facts["numbers"].split(", ")]
    assert value_of(task.answer, numbers) == int(task.facts["target"])
    assert judge(task.answer, task=task)["accuracy"] == 1.0
    assert value_of(task.answer, [*numbers, 1]) is None
    assert value_of(task.answer, numbers[1:]) is None
    assert value_of(f"{task.answer}+{numbers[0]}", numbers) is None
    assert value_of(f"({task.answer})", numbers) == int(task.facts["target"])
    assert judge(f"{task.answer}+0", task=task)["accuracy"] == 0.0


@given(text=st.text(max_size=600) | st.text(alphabet="0123456789+-*/() .", max_size=600))
@example("(" * 499)
@example("1" * 499)
@example("٣+٧")  # digits of other scripts
@example("1/" * 200 + "0")
@example("1\x002")
@settings(max_examples=200, deadline=None)
def test_whatever_is_written_it_is_read_without_an_exception(text):
    written = [int(digits) for digits in re.findall(r"[0-9]+", text)]
    for numbers in ([], [1], [3, 7, 25], written):
        value = value_of(text, numbers)
        assert value is None or isinstance(value, Fraction)


def test_length_has_a_bound():
    assert value_of("(" * 50 + "5" + ")" * 50, [5]) == 5
    assert value_of("1" + " " * (MAX_CHARS - 1), [1]) == 1
    assert value_of("1" + " " * MAX_CHARS, [1]) is None


@pytest.mark.parametrize(
    "facts", [{}, {"numbers": "3, 7"}, {"numbers": "3, x", "target": "4"}, {"numbers": "3", "target": "4.5"}]
)
def test_a_task_that_is_no_countdown_problem_is_the_users_mistake(facts):
    with pytest.raises(TaskError, match=r"is no Countdown problem .* add columns of these names to tasks"):
        judge("3", task=Task(id="t", question="?", answer="3", source="rows", facts=facts))


def test_a_weight_of_no_part_is_refused():
    with pytest.raises(ConfigError, match="Did you mean 'valid'"):
        validate(CountdownReward.Config, {"weights": {"vaild": 1.0}}, place="recipe")


def test_the_part_that_reads_the_answer_judges_it_too():
    part = CountdownReward().answer_part("accuracy")
    assert part.applies_to(TASK)
    values = [
        asyncio.run(part.score(TASK, trajectory(rf"<answer>\boxed{{{answer}}}</answer>"))) for answer in (TASK.answer, "1")
    ]
    assert values == [1.0, 0.0]
