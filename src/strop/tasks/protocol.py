"""The base class of sources of tasks: each position always holds the same task."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal, TypeAlias

from strop import user_code
from strop.registry import Component
from strop.types import Task

Split: TypeAlias = Literal["train", "test"]


class TaskSource(Component):
    """Problems in a fixed, endless order: a finite set starts its next epoch, reshuffled, where the last one ended.

    A source of your own gives `task`, and `num_tasks` if it is finite. It reads its keys from `config`.
    """

    class Config(Component.Config):
        """A source has no keys by itself."""

    seed: int
    split: str

    def open(self, *, seed: int, split: str) -> None:
        """Get ready to give tasks. Raises `TaskError` if there are none.

        Args:
            seed: decides the order, or the values, of training tasks.
            split: "train" or "test".
        """
        self.seed, self.split = seed, split

    @property
    def num_tasks(self) -> int | None:
        """How many different tasks there are; None when they are generated without end."""
        return None

    @abstractmethod
    def task(self, index: int) -> Task:
        """Return the task at `index` (0 <= index) of the stream. The same index, seed and split give the same task."""


class OwnTasks(TaskSource):
    """The tasks of a user's source, each checked. Mistakes in it are errors that name the user's code.

    Raises:
        ConfigError: `source` has no tasks, or its code raises.
    """

    def __init__(self, source: TaskSource, *, seed: int, split: Split) -> None:
        self._source, self._what = type(source)(source.config), type(source).__qualname__
        user_code.call(self._source.open, seed=seed, split=split, what=self._what)
        num_tasks = self.num_tasks
        if num_tasks is not None and (type(num_tasks) is not int or num_tasks < 1):
            problem = f"has no tasks: its num_tasks is {num_tasks!r:.200}. It must be 1 or more, or None for an endless source"
            raise user_code.mistake(type(source), problem, what=self._what)

    @property
    def num_tasks(self) -> int | None:
        found: int | None = user_code.call(lambda: self._source.num_tasks, what=self._what)
        return found

    def task(self, index: int) -> Task:
        """Return the task at `index`. Raises `ConfigError` if the user's code raises or returns something else."""
        task = user_code.call(self._source.task, index, what=self._what, about=f"for task {index}")
        if not isinstance(task, Task):
            problem = f"task({index}) returned a {type(task).__name__}. Return a strop.Task"
            raise user_code.mistake(self._source.task, problem, what=self._what)
        return task
