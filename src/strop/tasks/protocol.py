"""The base class of sources of tasks: each position always holds the same task. A mixture draws from several in turn."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, GetJsonSchemaHandler, PositiveInt, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from strop import user_code
from strop.errors import TaskError
from strop.registry import Component
from strop.run_directory import shortened
from strop.types import Task

Split: TypeAlias = Literal["train", "test"]


class TaskSource(Component):
    """Problems in a fixed, endless order: a finite set starts its next epoch, reshuffled, where the last one ended.

    A source of your own gives `task`, and `num_tasks` if it is finite. It reads its keys from `config`.
    """

    kinds = {  # noqa: RUF012  (a constant table)
        "arithmetic": "strop.tasks.generated:ArithmeticTasks",
        "countdown": "strop.tasks.generated:CountdownTasks",
        "lookup": "strop.tasks.lookup:LookupTasks",
        "knights": "strop.tasks.generated:KnightsTasks",
        "mixture": "strop.tasks.protocol:MixedTasks",
        "jsonl": "strop.tasks.rows:JsonlRows",
        "parquet": "strop.tasks.rows:ParquetRows",
        "hub": "strop.tasks.rows:HubRows",
    }
    is_endless: ClassVar[bool] = False
    """Whether tasks are generated without end; of a user's source only `num_tasks` says so."""

    class Config(Component.Config):
        """A source has no keys by itself."""

    seed: int
    split: str

    @classmethod
    def of(cls, value: Any) -> Self:
        """As `Component.of`. The path of a .jsonl or .parquet file stands for its rows."""
        kind = {".jsonl": "jsonl", ".parquet": "parquet"}.get(Path(value).suffix) if isinstance(value, str) else None
        return super().of(value if kind is None else {cls.kind_key: kind, "path": value})

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        found = super().__get_pydantic_json_schema__(schema, handler)
        return {**found, "anyOf": [*found["anyOf"], {"type": "string", "description": "A .jsonl or .parquet file."}]}

    @property
    def files(self) -> Mapping[Split, Path]:
        """The file or directory that each split is read from."""
        return {}

    @property
    def parts(self) -> Mapping[str, TaskSource]:
        """The sources that it draws from, by name."""
        return {}

    def benchmark(self, split: Split) -> str:
        """The name of the tasks of `split` in tables of evaluations."""
        return str(getattr(self.config, "name", None) or self.kind)

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

    @property
    def num_published(self) -> int | None:
        """How many training tasks there are by their publisher's word, for a plan; None where that is not known."""
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


def make_tasks(source: TaskSource, *, seed: int, split: Split) -> TaskSource:
    """Return `source`, opened. `seed` decides the order of training tasks; test rows keep theirs.

    Raises:
        TaskError: the rows cannot be found or are no tasks.
        ConfigError: the user's source is wrong.
    """
    if ":" in source.kind:  # a class of the user's
        return OwnTasks(source, seed=seed, split=split)
    opened = type(source)(source.config)
    opened.open(seed=seed, split=split)
    return opened


def check_wording(wording: str, *places: str) -> None:
    """Raises `ValueError` if `wording` does not hold each of `places` once."""
    for place in places:
        if wording.count(place) != 1:
            raise ValueError(f"wording is {shortened(repr(wording))}: it must hold {place} once, where it goes.")


class MixedTasks(TaskSource):
    """Tasks of several sources, in turn by their weights. The fact `domain` of a task names its source.

    With the weights 2 and 1, of any 3 tasks in a row 2 are of the first source. A source that is finite begins its next epoch
    where it ends.
    """

    is_endless = True

    class Config(TaskSource.Config):
        """The sources and their weights."""

        parts: dict[str, TaskSource] = Field(min_length=1, description="The sources by name.")
        weights: dict[str, PositiveInt] = Field(default={}, description="Tasks of each source in a round. Default: 1 of each.")

        @model_validator(mode="after")
        def _weighs_parts(self) -> Self:
            if unknown := self.weights.keys() - self.parts.keys():
                raise ValueError(f"weights names {min(unknown)!r}, which is no part. The parts are {', '.join(self.parts)}.")
            return self

    config: Config

    @property
    def parts(self) -> Mapping[str, TaskSource]:
        return self.config.parts

    def open(self, *, seed: int, split: Split) -> None:  # type: ignore[override]
        super().open(seed=seed, split=split)
        self._opened = {name: make_tasks(part, seed=seed, split=split) for name, part in self.parts.items()}
        self._weights = {name: self.config.weights.get(name, 1) for name in self.parts}
        turns = [((number + 0.5) / num, name, number) for name, num in self._weights.items() for number in range(num)]
        self._round = [(name, number) for _, name, number in sorted(turns)]  # the turns of each source are spread over it

    @property
    def num_tasks(self) -> int | None:
        """Of test tasks as many rounds as the shortest source has, so that none comes twice."""
        nums = {name: source.num_tasks for name, source in self._opened.items()}
        rounds = [num // self._weights[name] for name, num in nums.items() if num is not None]
        if self.split != "test" or not rounds:
            return None
        if not min(rounds):
            raise TaskError(f"tasks.weights: a round of {self._weights} needs more test rows than a source has. Lower them.")
        return min(rounds) * len(self._round)

    def task(self, index: int) -> Task:
        num_rounds, place = divmod(index, len(self._round))
        name, number = self._round[place]
        task = self._opened[name].task(num_rounds * self._weights[name] + number)
        return replace(task, id=f"{name}/{task.id}", facts={**task.facts, "domain": name})
