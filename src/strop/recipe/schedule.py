"""A rule over what the steps and validations of a stage of rollouts found, as `end_when` and the schedule have them.

Whether a rule holds follows from the metrics of the steps so far, so a run that resumes comes to the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias, TypeVar

from pydantic import Field, ValidationError, model_validator

from strop.config import Config
from strop.registry import Component
from strop.rewards.base import Reward
from strop.rollout.player import Temperature
from strop.tasks.protocol import TaskSource

Steps: TypeAlias = Sequence[Mapping[str, Any]]
"""The lines of metrics.jsonl of one stage, in order."""

TRUNCATED, REWARD, ACCURACY = "rollout/truncated_fraction", "rollout/reward_mean", "validation/accuracy"
_KINDS = ("truncated_above", "plateau_of", "reward_below", "accuracy_below")


class MetricRule(Config):
    """One thing to wait for: truncated rollouts, a plateau of held-out accuracy, or a collapse of reward or accuracy."""

    truncated_above: float | None = Field(None, ge=0, lt=1, description="More than this share of the rollouts is truncated.")
    reward_below: float | None = Field(
        None, gt=0, lt=1, description="The mean reward is below this share of its best in each of the last `over_steps` steps."
    )
    accuracy_below: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Held-out accuracy is below this share of its best in each validation of the last `over_steps` steps.",
    )
    over_steps: int = Field(
        1, ge=1, description="Number of last steps over which the share is averaged, or in all of which the value is below."
    )
    plateau_of: int | None = Field(
        None, ge=1, description="This many validations in a row do not exceed the best accuracy before them."
    )
    min_gain: float = Field(0.0, ge=0, lt=1, description="Gain in accuracy that a validation must exceed to count.")

    @model_validator(mode="after")
    def _is_one_rule(self) -> Self:
        if sum(getattr(self, kind) is not None for kind in _KINDS) != 1:
            raise ValueError(f"a rule has one of {', '.join(_KINDS)}. Keep one; make a rule of each other.")
        return self

    @property
    def what(self) -> str:
        """As a recipe says it: `plateau_of = 3, min_gain = 0.01`."""
        given = self.model_dump(exclude_defaults=True)
        return ", ".join(f"{key} = {value}" for key, value in given.items())

    @property
    def is_collapse(self) -> bool:
        """Whether it waits for a policy that is worse than an earlier one."""
        return self.reward_below is not None or self.accuracy_below is not None

    @property
    def _reads_accuracy(self) -> bool:
        return self.plateau_of is not None or self.accuracy_below is not None

    def first_step(self, every_steps: int | None, *, after: int = 0) -> int:
        """Return the first step after which it could hold. It reads steps after `after`; validations come every so many."""
        if not self._reads_accuracy:
            return after + self.over_steps + self.is_collapse
        every = every_steps or 1
        first = (after // every + 1) * every
        return first + (max(every, self.over_steps) if self.plateau_of is None else self.plateau_of * every)

    def problem(self, first: int, *, steps: int, every_steps: int | None, has_verdict: bool, returns_best: bool = False) -> str:
        """Why the rule, which could hold after step `first` at the earliest, never does; empty if it may.

        Args:
            steps: number of steps of the stage.
            every_steps: steps between two validations; None without validation.
            has_verdict: whether the reward says what is right.
            returns_best: whether the policy of best held-out accuracy is returned when the rule holds.
        """
        if (self._reads_accuracy or returns_best) and not (every_steps and has_verdict):
            why = "no part of its reward says what is right. Give it one that compares answers"
            if every_steps is None:
                why = "the stage has no validation. Give it one (validation.every_steps)"
            what = "waits for" if self._reads_accuracy else "ends with the policy of the best"
            return f"it {what} held-out accuracy, but {why}, or leave the rule out."
        if first >= steps:
            return (
                f"it could hold after step {first} at the earliest, but the stage has {steps} steps, so it has no effect. Make"
                " it earlier, or raise steps."
            )
        return ""

    def why_holds(self, steps: Steps) -> str:
        """What holds after `steps`, in words; empty where it does not."""
        if self.is_collapse:
            return self._why_collapse(steps)
        return self._why_truncated(steps) if self.plateau_of is None else self._why_plateau(steps)

    def _why_collapse(self, steps: Steps) -> str:
        key, share = (ACCURACY, self.accuracy_below) if self._reads_accuracy else (REWARD, self.reward_below)
        last = [float(line[key]) for line in steps[-self.over_steps :] if key in line]
        best = max((line for line in steps if key in line), key=lambda line: float(line[key]), default={key: 0.0})
        if share is None or not last or best[key] <= 0 or max(last) >= share * best[key]:
            return ""
        of = "held-out accuracy" if self._reads_accuracy else "the mean reward"
        over = f"in the last {self.over_steps} steps" if self.over_steps > 1 else "in the last step"
        return f"{of} was {best[key]:.3g} at its best (step {best['step']}), and at most {max(last):.3g} {over} ({self.what})"

    def _why_truncated(self, steps: Steps) -> str:
        shares = [float(line[TRUNCATED]) for line in steps if TRUNCATED in line][-self.over_steps :]
        if len(shares) < self.over_steps:
            return ""
        mean = sum(shares) / len(shares)
        if self.truncated_above is None or mean <= self.truncated_above:
            return ""
        over = f"of the last {self.over_steps} steps" if self.over_steps > 1 else "of the step"
        return f"{mean:.1%} of the rollouts {over} were truncated ({self.what})"

    def _why_plateau(self, steps: Steps) -> str:
        found = [float(line[ACCURACY]) for line in steps if ACCURACY in line]
        if self.plateau_of is None or len(found) <= self.plateau_of:
            return ""
        before, latest = max(found[: -self.plateau_of]), max(found[-self.plateau_of :])
        if latest > before + self.min_gain:
            return ""
        later = f"{self.plateau_of} validations" if self.plateau_of > 1 else "validation"
        return f"held-out accuracy was {before:.1%} at its best, and at most {latest:.1%} in the {later} since ({self.what})"


_WHEN = ("at_step", "at_update", "every_steps", "every_updates", "when")
_ACTIONS = ("refresh_reference", "reset_optimizer")
_SWITCHES = ("sampling", "limits", "method", "reward", "tasks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How far a stage has come."""

    steps: int
    updates: int  # of the policy; those that were skipped do not count
    held: frozenset[int] = frozenset()  # places in the schedule, from 0, of the entries whose rule has held


class SamplingSwitch(Config):
    """Keys of `sampling` that get another value."""

    temperature: Temperature | None = Field(default=None, description="New temperature.")
    max_tokens: int | None = Field(default=None, ge=1, description="New limit of the tokens of a response.")


class LimitsSwitch(Config):
    """Keys of `limits` that get another value."""

    max_turns: int | None = Field(default=None, ge=1, description="New limit of turns.")
    max_calls_per_turn: int | None = Field(default=None, ge=1, description="New limit of calls in one turn.")
    max_calls: int | None = Field(default=None, ge=0, description="New limit of calls.")
    max_response_tokens: int | None = Field(default=None, ge=16, description="New limit of the tokens of a tool's answer.")


class MethodSwitch(Config):
    """Keys of `method` that get another value."""

    clip_high: float | None = Field(default=None, ge=0, description="New limit of how far the ratio may rise above 1.")


class RewardSwitch(Config):
    """New weights of the reward's parts."""

    weights: dict[str, float] = Field(min_length=1, description="Weights by part; other parts get 0.")


class ScheduleEntry(Config):
    """What changes, and when. Settings change between two steps; later entries override earlier ones."""

    at_step: int | None = Field(default=None, ge=2, description="Before this step is played.")
    at_update: int | None = Field(default=None, ge=1, description="Before the first step that begins with so many updates.")
    every_steps: int | None = Field(default=None, ge=1, description="After every so many steps.")
    every_updates: int | None = Field(default=None, ge=1, description="After the steps that complete another so many updates.")
    when: MetricRule | None = Field(None, description="Once, from the step after the first for which the rule holds.")
    sampling: SamplingSwitch = Field(SamplingSwitch(), description="Keys of `sampling` that change.")
    limits: LimitsSwitch = Field(LimitsSwitch(), description="Keys of `limits` that change.")
    method: MethodSwitch = Field(MethodSwitch(), description="Keys of `method` that change.")
    reward: RewardSwitch | None = Field(None, description="New weights of the reward.")
    tasks: TaskSource | None = Field(None, description="Other tasks from then on.")
    refresh_reference: bool = Field(False, description="Measure KL against the present policy.")
    reset_optimizer: bool = Field(False, description="Reset the moments and restart the learning-rate schedule.")

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
        tables = {name: table for name in _SWITCHES if (table := getattr(self, name)) is not None}
        given = {name: of.table() if name == "tasks" else of.model_dump(exclude_none=True) for name, of in tables.items()}
        return {name: values for name, values in given.items() if values}

    @property
    def changed(self) -> frozenset[str]:
        """What it changes, by name: keys of `sampling`, `limits` and `method`, the other tables whole, actions."""
        by_key = {"sampling", "limits", "method"}
        keys = {f"{table}.{key}" for table in by_key for key in self.switches.get(table, {})}
        return frozenset({*keys, *(self.switches.keys() - by_key), *self.actions})

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
            given = {"kind": self.tasks.kind, **self.tasks.config.model_dump(exclude_defaults=True, mode="json")}
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

    Entries with a rule that change the same thing come one after the other: the later one reads the steps after the one after
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
            after = max((found[below] for below in rungs_below(schedule, place)), default=0)
            found[place] = entry.when.first_step(every_steps, after=after)
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


def _changed(table: Config | Component, values: Mapping[str, Any]) -> Config | Component:
    if isinstance(table, Reward):
        return table.with_weights(**values)
    return table.replaced(**values) if isinstance(table, Component) else table.model_copy(update=dict(values))


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


def why_over(rules: Sequence[MetricRule], steps: Steps) -> str:
    """Why the stage is over after `steps`, in words; empty where no rule holds."""
    return next((why for rule in rules if (why := rule.why_holds(steps))), "")
