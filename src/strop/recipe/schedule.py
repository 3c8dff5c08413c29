"""What a stage of rollouts changes on its way (`schedule`), and the metrics that end it early (`end_when`).

Both follow from steps, updates and metrics so far, so a run that resumes comes to the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias, TypeVar

from pydantic import Field, ValidationError, model_validator

from strop.config import Config
from strop.registry import Component
from strop.rollout.player import Temperature
from strop.tasks.protocol import TaskSource

Steps: TypeAlias = Sequence[Mapping[str, Any]]
"""The lines of metrics.jsonl of one stage, in order."""

TRUNCATED, REWARD, ACCURACY = "rollout/truncated_fraction", "rollout/reward_mean", "validation/accuracy"
_KINDS = ("truncated_above", "reward_below", "accuracy_below")


class MetricRule(Config):
    """One thing that ends a stage: truncated rollouts, or a collapse of reward or held-out accuracy."""

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

    @model_validator(mode="after")
    def _is_one_rule(self) -> Self:
        if sum(getattr(self, kind) is not None for kind in _KINDS) != 1:
            raise ValueError(f"a rule has one of {', '.join(_KINDS)}. Keep one; make a rule of each other.")
        return self

    @property
    def what(self) -> str:
        """As a recipe says it: `reward_below = 0.5, over_steps = 20`."""
        given = self.model_dump(exclude_defaults=True)
        return ", ".join(f"{key} = {value}" for key, value in given.items())

    @property
    def is_collapse(self) -> bool:
        """Whether it waits for a policy that is worse than an earlier one; the stage then passes on the best one."""
        return self.truncated_above is None

    def first_step(self, every_steps: int) -> int:
        """Return the first step after which it could hold, with validations every so many steps."""
        if self.accuracy_below is None:
            return self.over_steps + self.is_collapse
        return every_steps + max(every_steps, self.over_steps)

    def problem(self, *, steps: int, every_steps: int | None, has_verdict: bool) -> str:
        """Why the rule never holds, or has no policy to return; empty if all is well.

        Args:
            steps: number of steps of the stage.
            every_steps: steps between two validations; None without validation.
            has_verdict: whether the reward says what is right.
        """
        if self.is_collapse and not (every_steps and has_verdict):
            why = "no part of its reward says what is right. Give it one that compares answers, or a function with right_above"
            if every_steps is None:
                why = "the stage has no validation. Give it one (validation.every_steps)"
            what = "ends with the policy of the best" if self.accuracy_below is None else "waits for"
            return f"it {what} held-out accuracy, but {why}, or leave the rule out."
        if (first := self.first_step(every_steps or 1)) >= steps:
            return (
                f"it could hold after step {first} at the earliest, but the stage has {steps} steps, so it has no effect. Make"
                " it earlier, or raise steps."
            )
        return ""

    def why_holds(self, steps: Steps) -> str:
        """What holds after `steps`, in words; empty where it does not."""
        if self.truncated_above is not None:
            return self._why_truncated(steps, self.truncated_above)
        if self.accuracy_below is not None:
            return self._why_collapsed(steps, ACCURACY, "held-out accuracy", self.accuracy_below)
        return self._why_collapsed(steps, REWARD, "the mean reward", self.reward_below or 0.0)

    def _why_collapsed(self, steps: Steps, key: str, name: str, share: float) -> str:
        last = [float(line[key]) for line in steps[-self.over_steps :] if key in line]
        best = max((line for line in steps if key in line), key=lambda line: float(line[key]), default={key: 0.0})
        if not last or best[key] <= 0 or max(last) >= share * best[key]:
            return ""
        over = f"in the last {self.over_steps} steps" if self.over_steps > 1 else "in the last step"
        return f"{name} was {best[key]:.3g} at its best (step {best['step']}), and at most {max(last):.3g} {over} ({self.what})"

    def _why_truncated(self, steps: Steps, bar: float) -> str:
        shares = [float(line[TRUNCATED]) for line in steps if TRUNCATED in line][-self.over_steps :]
        mean = sum(shares) / self.over_steps
        if len(shares) < self.over_steps or mean <= bar:
            return ""
        over = f"of the last {self.over_steps} steps" if self.over_steps > 1 else "of the step"
        return f"{mean:.1%} of the rollouts {over} were truncated ({self.what})"


def why_over(rules: Sequence[MetricRule], steps: Steps) -> str:
    """Why the stage is over after `steps`, in words; empty where no rule holds."""
    return next((why for rule in rules if (why := rule.why_holds(steps))), "")


_WHEN = ("at_step", "at_update", "every_updates")
_ACTIONS = ("refresh_reference", "reset_optimizer")
_SWITCHES = ("sampling", "limits", "method", "tasks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How far a stage has come."""

    steps: int
    updates: int  # of the policy; those that were skipped do not count


class SamplingSwitch(Config):
    """Keys of `sampling` that get another value."""

    temperature: Temperature | None = Field(default=None, description="New temperature.")
    max_tokens: int | None = Field(default=None, ge=1, description="New limit of the tokens of a response.")


class LimitsSwitch(Config):
    """Keys of `limits` that get another value."""

    max_turns: int | None = Field(default=None, ge=1, description="New limit of turns.")


class MethodSwitch(Config):
    """Keys of `method` that get another value."""

    clip_high: float | None = Field(default=None, ge=0, description="New limit of how far the ratio may rise above 1.")


class ScheduleEntry(Config):
    """What changes, and when. Settings change between two steps; later entries override earlier ones."""

    at_step: int | None = Field(default=None, ge=2, description="Before this step is played.")
    at_update: int | None = Field(default=None, ge=1, description="Before the first step that begins with so many updates.")
    every_updates: int | None = Field(default=None, ge=1, description="After the steps that complete another so many updates.")
    sampling: SamplingSwitch = Field(SamplingSwitch(), description="Keys of `sampling` that change.")
    limits: LimitsSwitch = Field(LimitsSwitch(), description="Keys of `limits` that change.")
    method: MethodSwitch = Field(MethodSwitch(), description="Keys of `method` that change.")
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
        if self.every_updates is not None and self.switches:
            raise ValueError(
                f"every_updates is for what can be done again ({', '.join(_ACTIONS)}), but {next(iter(self.switches))} is"
                " changed once. Make an entry with at_step or at_update of it."
            )
        return self

    @property
    def actions(self) -> tuple[str, ...]:
        return tuple(name for name in _ACTIONS if getattr(self, name))

    @property
    def switches(self) -> Mapping[str, Mapping[str, Any]]:
        """Table -> key -> new value."""
        tables = {name: getattr(self, name).model_dump(exclude_none=True) for name in ("sampling", "limits", "method")}
        if self.tasks is not None:
            tables["tasks"] = self.tasks.table()
        return {name: values for name, values in tables.items() if values}

    def is_reached(self, done: Done) -> bool:
        """Whether its settings hold for a step that begins with so much done."""
        if self.at_step is not None:
            return done.steps + 1 >= self.at_step
        return self.at_update is not None and done.updates >= self.at_update

    def is_due(self, before: Done, after: Done) -> bool:
        """Whether its moment came in the step that led from `before` to `after`."""
        if self.every_updates is not None:
            return before.updates // self.every_updates < after.updates // self.every_updates
        return self.is_reached(after) and not self.is_reached(before)

    @property
    def moment(self) -> str:
        """As a recipe says it: `at_update = 8200`."""
        return next(f"{name} = {value}" for name in _WHEN if (value := getattr(self, name)) is not None)

    @property
    def what(self) -> str:
        """As a recipe says it: `sampling.max_tokens = 65536, refresh_reference = true`."""
        tables = {table: of for table, of in self.switches.items() if table != "tasks"}
        switched = [f"{table}.{key} = {value}" for table, of in tables.items() for key, value in of.items()]
        if self.tasks is not None:  # another set, and no change of keys
            given = {"kind": self.tasks.kind, **self.tasks.config.model_dump(exclude_defaults=True, mode="json")}
            switched.append("tasks = { " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in given.items()) + " }")
        return ", ".join([*switched, *(f"{name} = true" for name in self.actions)])


ConfigT = TypeVar("ConfigT", bound=Config)


def switched(stage: ConfigT, entries: Iterable[ScheduleEntry]) -> ConfigT:
    """`stage` with the settings that `entries` switch to, the later ones over the earlier."""
    for entry in entries:
        tables = {
            name: entry.tasks if name == "tasks" else _changed(getattr(stage, name), values)
            for name, values in entry.switches.items()
        }
        stage = stage.model_copy(update=tables)
    return stage


def _changed(table: Config | Component, values: Mapping[str, Any]) -> Config | Component:
    return table.replaced(**values) if isinstance(table, Component) else table.model_copy(update=dict(values))


def problem_with(stage: Config, entries: Sequence[ScheduleEntry]) -> str:
    """What is wrong with the stage as these leave it; empty where nothing is."""
    found = switched(stage, entries).model_copy(update={"schedule": ()})
    try:
        type(stage).model_validate_json(found.model_dump_json())
    except ValidationError as error:
        return "; ".join(str(each["msg"]).removeprefix("Value error, ") for each in error.errors())
    return ""
