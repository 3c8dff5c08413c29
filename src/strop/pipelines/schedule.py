"""What changes in the course of a stage: switches of its settings, refreshes of the reference, resets of the optimizer.

Every entry names its unit: a step is a rollout batch, an update is a step of the optimizer. Whether an entry holds follows
from how many of both were made, which a checkpoint knows, or from the metrics of the steps before it, which are cut back to the
checkpoint: so a run that resumes goes on with the same settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from strop.config import Config
from strop.pipelines.metric_rule import MetricRule, Steps
from strop.rewards.sum_config import SumRewardConfig
from strop.rollout.player import Temperature
from strop.tasks.config import TaskConfig

_WHEN = ("at_step", "at_update", "every_steps", "every_updates", "when")
_ACTIONS = ("refresh_reference", "reset_optimizer")
_SWITCHES = ("sampling", "limits", "reward", "tasks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How far a stage has come."""

    steps: int
    updates: int  # of the policy; those that were skipped do not count
    held: frozenset[int] = frozenset()  # places in the schedule, from 0, of the entries whose rule has held


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

    newer: ClassVar[tuple[str, ...]] = ("when",)

    at_step: int | None = Field(default=None, ge=2)  # before this step is played
    at_update: int | None = Field(default=None, ge=1)  # before the first step that begins with so many updates made
    every_steps: int | None = Field(default=None, ge=1)  # after each so many steps
    every_updates: int | None = Field(default=None, ge=1)  # after each step in which another so many updates are full
    when: MetricRule | None = None  # once, from the step behind the first after which it holds
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

    @property
    def changed(self) -> frozenset[str]:
        """What it changes, by name: keys of `sampling` and `limits`, the other tables whole, actions."""
        keys = {f"{table}.{key}" for table in ("sampling", "limits") for key in self.switches.get(table, {})}
        return frozenset({*keys, *(self.switches.keys() - {"sampling", "limits"}), *self.actions})

    def is_reached(self, done: Done) -> bool:
        """Whether it holds for a step that begins with so much done; of one that is not repeated and has no rule."""
        if self.at_step is not None:
            return done.steps + 1 >= self.at_step
        return self.at_update is not None and done.updates >= self.at_update

    def is_due(self, before: Done, after: Done) -> bool:
        """Whether its moment came in the step that led from `before` to `after`; of one that has no rule."""
        if self.every_steps is not None:
            return before.steps // self.every_steps < after.steps // self.every_steps
        if self.every_updates is not None:
            return before.updates // self.every_updates < after.updates // self.every_updates
        return self.is_reached(after) and not self.is_reached(before)

    @property
    def moment(self) -> str:
        """As a recipe says it: `at_update = 8200`."""
        if self.when is not None:
            return f"when = {{ {self.when.what} }}"
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


def reached(schedule: Sequence[ScheduleEntry], done: Done) -> list[ScheduleEntry]:
    """The entries that hold for a step that begins with so much done, in their order."""
    return [entry for place, entry in enumerate(schedule) if place in done.held or entry.is_reached(done)]


def due(schedule: Sequence[ScheduleEntry], before: Done, after: Done) -> dict[int, ScheduleEntry]:
    """The entries whose moment came in the step that led from `before` to `after`, in their order, by their places."""
    new = after.held - before.held
    return {place: entry for place, entry in enumerate(schedule) if place in new or entry.is_due(before, after)}


class RulesWatch:
    """Which entries' rules have held. All of it follows from the metrics of the steps, so a run that resumes knows the same.

    Entries with a rule that change the same thing come one after the other: the later one reads the steps behind the one after
    which the earlier held. So a ladder of lengths is climbed rung by rung, and no rung is judged by what the one below it did.
    """

    def __init__(self, schedule: Sequence[ScheduleEntry], steps: Steps) -> None:
        """`steps` are those that were done before."""
        self._schedule = schedule
        self.why: dict[int, str] = {}
        """What held, in words, by the place of the entry in the schedule."""
        self._held_after: dict[int, int] = {}  # so many steps, likewise
        if any(entry.when is not None for entry in schedule):
            for num in range(1, len(steps) + 1):
                self.look(steps[:num])

    @property
    def held(self) -> frozenset[int]:
        return frozenset(self.why)

    def look(self, steps: Steps) -> None:
        """Another step is done, the last of `steps`."""
        for place, entry in enumerate(self._schedule):
            if entry.when is None or place in self.why:
                continue
            awaited = rungs_below(self._schedule, place)
            if all(self._held_after.get(below, len(steps)) < len(steps) for below in awaited):
                begun = max((self._held_after[below] for below in awaited), default=0)
                if why := entry.when.why_holds(steps[begun:]):
                    self.why[place], self._held_after[place] = why, len(steps)


def rungs_below(schedule: Sequence[ScheduleEntry], place: int) -> list[int]:
    """The entries with a rule that must have held before the one at `place` is read: those above it that change the same."""
    changed = schedule[place].changed
    return [each for each in range(place) if schedule[each].when is not None and not changed.isdisjoint(schedule[each].changed)]


def first_steps(schedule: Sequence[ScheduleEntry], every_steps: int | None) -> dict[int, int]:
    """The first step after which each rule could hold, by the place of its entry, with validations every so many steps."""
    found: dict[int, int] = {}
    for place, entry in enumerate(schedule):
        if entry.when is not None:
            behind = max((found[below] for below in rungs_below(schedule, place)), default=0)
            found[place] = entry.when.first_step(every_steps, behind=behind)
    return found


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
