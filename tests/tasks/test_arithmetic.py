import re

import pytest

from strop.config import validate
from strop.errors import ConfigError
from strop.tasks import make_tasks
from strop.tasks.generated import ArithmeticTasks


def tasks(*, seed=0, split="train", **config):
    return make_tasks(ArithmeticTasks(**config), seed=seed, split=split)


def operands(task):
    return tuple(sorted(re.findall(r"\d+", task.facts["expression"])))


def test_the_answer_is_what_python_makes_of_the_expression():
    source = tasks(num_terms=4, max_digits=3)
    for index in range(300):
        task = source.task(index)
        assert task.answer == str(eval(task.facts["expression"]))
        assert task.question == f"What is {task.facts['expression']}?"


def test_a_task_is_a_pure_function_of_seed_split_and_index():
    first, again, other = tasks(seed=1), tasks(seed=1), tasks(seed=2)
    backwards = [again.task(index) for index in reversed(range(20))]
    assert [first.task(index) for index in range(20)] == backwards[::-1]
    assert [first.task(index) for index in range(20)] != [other.task(index) for index in range(20)]


def test_no_operands_are_in_both_splits_whatever_the_seed_and_their_order():
    train = {operands(tasks(seed=seed, num_terms=2, max_digits=1).task(index)) for seed in range(3) for index in range(200)}
    test = {operands(tasks(seed=9, split="test", num_terms=2, max_digits=1).task(index)) for index in range(200)}
    assert test
    assert not train & test


def test_digits_terms_and_operators_are_as_configured():
    source = tasks(num_terms=2, min_digits=3, max_digits=3, operators=("*",))
    assert all(re.fullmatch(r"\d{3}\*\d{3}", source.task(index).facts["expression"]) for index in range(50))


def test_a_product_of_a_sum_is_bracketed():
    source = tasks(num_terms=3)
    expressions = [source.task(index).facts["expression"] for index in range(100)]
    assert any(re.fullmatch(r"\(\d+[+-]\d+\)\*\d+", expression) for expression in expressions)


def test_a_wording_without_a_place_for_the_expression_is_refused():
    with pytest.raises(ConfigError, match=r"must hold \{expression\} once"):
        validate(ArithmeticTasks.Config, {"wording": "Calculate."}, place="recipe")
