"""The demonstrator that says what a row holds."""

import pytest

from strop.errors import TaskError
from strop.tasks.demonstrators import RecordedDemonstrator
from strop.types import Task


def test_the_response_of_a_row_is_said_in_one_turn_as_it_stands():
    task = Task(id="t", question="?", answer="2", source="rows", facts={"response": " I think.</think> <answer>2</answer>"})
    (said,) = RecordedDemonstrator().script(task, tool="python", seed=0)
    assert said == " I think.</think> <answer>2</answer>"


def test_a_row_without_a_response_names_the_fact_that_is_missing():
    task = Task(id="t", question="?", answer="2", source="rows", facts={"trace": "..."})
    with pytest.raises(TaskError, match=r"no fact 'response', .* its facts: trace\. Carry the column along with tasks\.facts"):
        next(RecordedDemonstrator().script(task, tool="python", seed=0))
