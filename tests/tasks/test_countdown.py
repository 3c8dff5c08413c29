"""Countdown problems: always solvable, the same at the same index, and never in both splits."""

import re
from contextlib import suppress
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.config import validate
from strop.errors import ConfigError, TaskError
from strop.tasks import make_tasks
from strop.tasks.demonstrators import CountdownDemonstrator
from strop.tasks.generated import CountdownTasks, Expression, join


def tasks(*, seed=0, split="train", **config):
    return make_tasks(CountdownTasks(**config), seed=seed, split=split)


def numbers(task):
    return [int(number) for number in task.facts["numbers"].split(", ")]


@st.composite
def configs(draw):
    low = draw(st.integers(2, 5))
    return CountdownTasks(
        min_numbers=low,
        max_numbers=draw(st.integers(low, 6)),
        max_value=draw(st.integers(40, 200)),
        min_target=draw(st.integers(0, 30)),
        max_target=draw(st.integers(300, 2000)),
        operators=draw(st.lists(st.sampled_from("+-*/"), min_size=1, unique=True).map(lambda some: ("-", "+", *some))),
    )


@given(source=configs(), seed=st.integers(0, 5), split=st.sampled_from(["train", "test"]), index=st.integers(0, 10**9))
@settings(max_examples=200, deadline=None)
def test_every_task_has_a_solution_of_its_numbers_in_the_configured_ranges(source, seed, split, index):
    task = make_tasks(source, seed=seed, split=split).task(index)
    config = source.config
    given_numbers = numbers(task)
    assert config.min_numbers <= len(given_numbers) <= config.max_numbers
    assert all(1 <= number <= config.max_value for number in given_numbers)
    assert config.min_target <= int(task.facts["target"]) <= config.max_target
    assert sorted(int(number) for number in re.findall(r"\d+", task.answer)) == sorted(given_numbers)
    exact = re.sub(r"\d+", lambda number: f"Fraction({number[0]})", task.answer)
    assert eval(exact, {"Fraction": Fraction}) == int(task.facts["target"])  # what Python makes of it, in exact fractions
    assert set(re.findall(r"[-+*/]", task.answer)) <= set(config.operators)


def test_a_task_is_a_pure_function_of_seed_split_and_index():
    first, again, other = tasks(seed=1), tasks(seed=1), tasks(seed=2)
    backwards = [again.task(index) for index in reversed(range(20))]
    assert [first.task(index) for index in range(20)] == backwards[::-1]
    assert [first.task(index) for index in range(20)] != [other.task(index) for index in range(20)]


def test_no_numbers_are_in_both_splits_whatever_the_seed_and_their_order():
    easy = {"min_numbers": 2, "max_numbers": 2, "max_value": 12, "min_target": 1}
    train = {tuple(sorted(numbers(tasks(seed=seed, **easy).task(index)))) for seed in range(3) for index in range(150)}
    test = {tuple(sorted(numbers(tasks(seed=9, split="test", **easy).task(index)))) for index in range(150)}
    assert test
    assert not train & test


def test_targets_and_lengths_vary():
    some = [tasks().task(index) for index in range(100)]
    assert {len(numbers(task)) for task in some} == {3, 4}
    assert len({task.facts["target"] for task in some}) > 40
    assert {operator for task in some for operator in task.answer if operator in "+-*/()"} == set("+-*/()")


def test_the_question_names_numbers_and_target():
    task = tasks(wording="From {numbers} make {target}.").task(0)
    assert task.question == f"From {task.facts['numbers']} make {task.facts['target']}."


@pytest.mark.parametrize(
    ("left", "right", "operator", "text"),
    [
        ("2+3", "4", "*", "(2+3)*4"),
        ("2*3", "4", "+", "2*3+4"),
        ("9", "2+3", "-", "9-(2+3)"),
        ("2+3", "4", "-", "2+3-4"),
        ("24", "2*3", "/", "24/(2*3)"),
        ("24/2", "3", "/", "24/2/3"),
        ("3", "9", "-", "9-3"),
        ("3", "9", "/", "9/3"),
    ],
)
def test_brackets_stand_where_they_are_needed_and_larger_before_smaller(left, right, operator, text):
    assert join(*(_expression(part) for part in (left, right)), operator).text == text


def test_quotients_are_whole_and_nothing_is_divided_by_zero():
    assert join(_expression("7"), _expression("2"), "/") is None
    assert join(_expression("7"), _expression("0"), "/") is None


def _expression(text):
    inner = re.findall(r"[-+*/]", text)
    return Expression(text=text, value=Fraction(eval(text)), operator=inner[-1] if inner else "")


def test_numbers_that_lead_to_no_target_are_the_users_mistake():
    hopeless = tasks(min_numbers=2, max_numbers=2, operators=("+",), min_target=0, max_target=1)
    with pytest.raises(TaskError, match=r"held none for the train split\. Widen these ranges"):
        hopeless.task(0)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"min_numbers": 5}, "min_numbers is 5 but max_numbers is 4"),
        ({"min_target": 200}, "min_target is 200 but max_target is 100"),
        ({"wording": "Make {target}."}, r"must hold \{numbers\} once"),
        ({"operators": ["^"]}, "operators"),
        ({"max_number": 3}, "Did you mean 'max_numbers'"),
    ],
)
def test_settings_that_make_no_task_are_refused(tree, message):
    with pytest.raises(ConfigError, match=message):
        validate(CountdownTasks.Config, tree, place="recipe")


def play(task, demonstrator, *, seed):
    """The script's turns, with Python's own arithmetic as the tool."""
    script = demonstrator.script(task, tool="python", seed=seed)
    said = [next(script)]
    with suppress(StopIteration):
        while True:
            code = re.search(r"print\(([^\"]+)\)", said[-1])
            said.append(script.send(f"{eval(code[1])}\n" if code else ""))
    return said


def test_a_demonstrator_tries_expressions_until_one_reaches_the_target():
    demonstrator = CountdownDemonstrator(guess_fraction=0.0, max_tries=4)
    lengths = set()
    for index in range(40):
        task = tasks().task(index)
        *tries, last = play(task, demonstrator, seed=index)
        lengths.add(len(tries))
        tried = [re.search(r"print\(([^\"]+)\)", text)[1] for text in tries]
        assert tried[-1] == task.answer
        assert len(set(tried)) == len(tried)
        for expression in tried:
            assert sorted(map(int, re.findall(r"\d+", expression))) == sorted(numbers(task))
            assert (Fraction(eval(expression)) == int(task.facts["target"])) == (expression == task.answer)
        assert all("is not" in text for text in tries[1:])
        assert last.endswith(f"<answer>\\boxed{{{task.answer}}}</answer>")
    assert lengths == {1, 2, 3, 4}


def test_a_demonstrator_that_guesses_is_mostly_wrong_and_calls_nothing():
    demonstrator = CountdownDemonstrator(guess_fraction=1.0)
    right = 0
    for index in range(60):
        task = tasks().task(index)
        [said] = play(task, demonstrator, seed=0)
        assert "<tool_call>" not in said
        guess = re.search(r"boxed\{(.+)\}", said)[1]
        assert sorted(map(int, re.findall(r"\d+", guess))) == sorted(numbers(task))
        right += guess == task.answer
    assert 0 < right < 30
