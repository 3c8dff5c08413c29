import re

import pytest

from strop import Task, TaskSource
from strop.errors import ConfigError
from strop.tasks import make_tasks


class Good(TaskSource):
    num_tasks = 2

    def task(self, index):
        return Task(id=f"{self.split}-{index}", question="q", answer="a", source="own")


class Empty(Good):
    num_tasks = 0


class OpenRaises(Good):
    def open(self, *, seed, split):
        return 1 / 0


class TaskRaises(TaskSource):
    def task(self, index):
        return [][index]


class TaskIsADict(TaskSource):
    def task(self, index):
        return {"question": "q"}


def test_a_source_of_a_user_gives_its_tasks():
    tasks = make_tasks(Good(), seed=0, split="test")
    assert (tasks.num_tasks, tasks.task(1).id) == (2, "test-1")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (Empty, "has no tasks: its num_tasks is 0"),
        (OpenRaises, "raised ZeroDivisionError: division by zero"),
        (TaskRaises, "raised IndexError"),
        (TaskIsADict, "task(0) returned a dict. Return a strop.Task"),
    ],
)
def test_a_mistake_of_a_user_is_one_error_with_class_file_and_line(source, says):
    with pytest.raises(ConfigError, match=re.escape(says)) as raised:
        make_tasks(source(), seed=0, split="test").task(0)
    assert re.search(rf"{source.__name__} .*test_own_tasks\.py, line \d+", str(raised.value))
