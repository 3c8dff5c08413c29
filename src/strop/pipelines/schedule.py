"""What changes in the course of a stage: switches of its settings, refreshes of the reference, resets of the optimizer.

Every entry names its unit: a step is a rollout batch, an update is a step of the optimizer. Whether an entry holds follows
from how many of both were made, which a checkpoint knows: so a run that resumes goes on with the same settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from strop.config import Config
from strop.rewards.sum_config import SumRewardConfig
from strop.rollout.player import Temperature
from strop.tasks.config import TaskConfig

_WHEN = ("at_step", "at_update", "every_steps", "every_updates")
_ACTIONS = ("refresh_reference", "reset_optimizer")
_SWITCHES = ("sampling", "limits", "reward", "tasks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How far a stage has come."""

    steps: int
    updates: int  # of the policy; those that were skipped do not count


class SamplingSwitch(Config):
    """Keys of `sampling` that get another value."""

    temperature: Temperature | None = None
    max_tokens: int | None = Field(default=None, ge=1)


class LimitsSwitch(Config):
    """Keys of `limits` that get another value."""

    max_turns: int | None = Field(default=None, ge=1)
    max_calls_per_turn: int | None = Field(default=None, ge=1)
    max_calls: int | None = Field(default=None, ge=0)
    max_response_tokens: int | None = Field(default=None, ge=16)


class RewardSwitch(Config):
    """The weights of the reward's parts, all of them anew."""

    weights: dict[str, float] = Field(min_length=1)


class ScheduleEntry(Config):
    """What changes, and when. Settings change between two steps; later entries are put over earlier ones."""

    at_step: int | None = Field(default=None, ge=2)  # before this step is played
    at_update: int | None = Field(default=None, ge=1)  # before the first step that begins with so many updates made
    every_steps: int | None = Field(default=None, ge=1)  # after each so many steps
    every_updates: int | None = Field(default=None, ge=1)  # after each step in which another so many updates are full
    sampling: SamplingSwitch = SamplingSwitch()
    limits: LimitsSwitch = LimitsSwitch()
    reward: RewardSwitch | None = None
    tasks: TaskConfig | None = None  # other tasks from then on; R1's second RL stage, in its last 400 updates
    refresh_reference: bool = False  # measure KL against the policy as it is now; R1 every 400 updates
    reset_optimizer: bool = False  # forget the moments, and begin the learning-rate schedule again; rStar2-Agent, stage 3

    @model_validator(mode="after")
    def _says_when_and_what(self) -> Self:
        given = [name for name in _WHEN if getattr(self, name) is not None]
        if len(given) != 1:
            found = f"there are {' and '.join(given)}" if given else "there is none"
            raise ValueError(f"an entry has one of {', '.join(_WHEN)}, but {found}. Keep one; make an entry of each other.")
        if not self.switches and not self.actions:
            raise ValueError(f"nothing changes: there is none of {', '.join((*_SWITCHES, *_ACTIONS))}. Name what does.")
        if self.is_repeated and self.switches:
            raise ValueError(
                f"{given[0]} is for what can be done again ({', '.join(_ACTIONS)}), but {next(iter(self.switches))} is changed"
                " once. Make an entry with at_step or at_update of it."
            )
        return self

    @property
    def is_repeated(self) -> bool:
        return self.every_steps is not None or self.every_updates is not None

    @property
    def actions(self) -> tuple[str, ...]:
        return tuple(name for name in _ACTIONS if getattr(self, name))

    @property
    def switches(self) -> Mapping[str, Mapping[str, Any]]:
        """Table -> key -> new value."""
        tables = {name: getattr(self, name) for name in _SWITCHES}
        given = {name: {} if table is None else table.model_dump(exclude_none=True) for name, table in tables.items()}
        return {name: values for name, values in given.items() if values}

    def is_reached(self, done: Done) -> bool:
        """Whether it holds for a step that begins with so much done; of one that is not repeated."""
        if self.at_step is not None:
            return done.steps + 1 >= self.at_step
        return self.at_update is not None and done.updates >= self.at_update

    def is_due(self, before: Done, after: Done) -> bool:
        """Whether its moment came in the step that led from `before` to `after`."""
        if self.every_steps is not None:
            return before.steps // self.every_steps < after.steps // self.every_steps
        if self.every_updates is not None:
            return before.updates // self.every_updates < after.updates // self.every_updates
        return self.is_reached(after) and not self.is_reached(before)

    @property
    def when(self) -> str:
        """As a recipe says it: `at_update = 8200`."""
        return next(f"{name} = {value}" for name in _WHEN if (value := getattr(self, name)) is not None)

    @property
    def what(self) -> str:
        """As a recipe says it: `sampling.max_tokens = 65536, refresh_reference = true`."""
        tables = {table: of for table, of in self.switches.items() if table != "tasks"}
        switched = [f"{table}.{key} = {_as_toml(value)}" for table, of in tables.items() for key, value in of.items()]
        if self.tasks is not None:  # another set, and no change of keys
            given = {"kind": self.tasks.kind, **self.tasks.model_dump(exclude_defaults=True, mode="json")}
            switched.append(f"tasks = {_as_toml({key: json.dumps(value) for key, value in given.items()})}")
        return ", ".join([*switched, *(f"{name} = true" for name in self.actions)])


def due(schedule: Sequence[ScheduleEntry], before: Done, after: Done) -> list[ScheduleEntry]:
    """The entries whose moment came in the step that led from `before` to `after`, in their order."""
    return [entry for entry in schedule if entry.is_due(before, after)]


ConfigT = TypeVar("ConfigT", bound=Config)


def switched(stage: ConfigT, entries: Sequence[ScheduleEntry]) -> ConfigT:
    """`stage` with the settings that `entries` switch to, the later ones over the earlier."""
    for entry in entries:
        tables = {
            name: entry.tasks if name == "tasks" else _changed(getattr(stage, name), values)
            for name, values in entry.switches.items()
        }
        stage = stage.model_copy(update=tables)
    return stage


def _changed(table: Config, values: Mapping[str, Any]) -> Config:
    if isinstance(table, SumRewardConfig):  # its weights stand in its parts
        weights = values["weights"]
        parts = {name: part.model_copy(update={"weight": weights.get(name, 0.0)}) for name, part in table.parts.items()}
        return table.model_copy(update={"parts": parts})
    return table.model_copy(update=dict(values))


def problem_with(stage: Config, entries: Sequence[ScheduleEntry]) -> str:
    """What is wrong with the stage as these leave it; empty where nothing is."""
    found = switched(stage, entries).model_copy(update={"schedule": ()})
    try:
        type(stage).model_validate_json(found.model_dump_json())
    except ValidationError as error:
        return "; ".join(str(each["msg"]).removeprefix("Value error, ") for each in error.errors())
    return ""


def _as_toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {each}" for key, each in value.items()) + " }"
    return str(value)
