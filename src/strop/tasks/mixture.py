"""Tasks of several sources in fixed proportions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Self

from pydantic import Field, PositiveInt, model_validator

from strop.errors import TaskError
from strop.tasks.protocol import Split, TaskSource, make_tasks
from strop.types import Task


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
        weights = {name: self.config.weights.get(name, 1) for name in self.parts}
        turns = [((number + 0.5) / weight, name, number) for name, weight in weights.items() for number in range(weight)]
        turns.sort()  # the turns of each source are spread over the round
        self._round = [(name, number) for _, name, number in turns]
        self._weights = weights

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
