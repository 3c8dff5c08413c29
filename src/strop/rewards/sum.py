"""A weighted sum of parts, each for the tasks whose facts select it; a function of the user's as a reward or a part.

A rollout that a part cannot judge is excluded from its group.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from pydantic import Field, model_validator

from strop import user_code
from strop.config import Config
from strop.errors import ConfigError, TaskError
from strop.registry import import_object
from strop.rewards.base import (
    ACCURACY,
    SINGLE,
    AnswerPart,
    NotJudged,
    Part,
    Reward,
    RolloutPart,
    RunService,
    check_any_weight,
    is_finite_number,
)
from strop.rewards.form import AfterAccuracyPart, CosinePart, LengthPart
from strop.rollout.player import EXCLUDED, Excluded
from strop.types import Group, Task, Trajectory

_MAX_VALUES = 4  # of a fact, in a message


_FORM = "A reward is def name(task: Task, trajectory: Trajectory) -> float"


class _Function(Config):
    function: str = Field(description="The function, as module:name.")
    right_above: float | None = Field(
        default=None, description="The value above which an answer is right, for accuracies. Without it there is only the mean."
    )

    def import_code(self, key: str) -> None:
        """As `imported`."""
        self.imported(key)

    def imported(self, key: str) -> Callable[[Task, Trajectory], float | None]:
        """Return the function. Raises `ConfigError` if it cannot be imported, or called with a task and a trajectory."""
        return _checked(import_object(self.function, key=f"{key}.function"))


class FunctionReward(Reward):
    """A user's own function as the only part; see `function_reward`."""

    class Config(Reward.Config, _Function):
        """A user's own function (task, trajectory) -> float as the only part."""

        @property
        def weights(self) -> dict[str, float]:
            return {SINGLE: 1.0}

    config: Config

    @property
    def verifying_parts(self) -> tuple[str, ...]:
        return () if self.config.right_above is None else (SINGLE,)

    def right_above(self, part: str) -> float:
        return self.config.right_above or 0.0

    def open(self, service: RunService | None) -> None:
        self._function = self.config.imported("reward")

    async def __call__(self, task: Task, trajectory: Trajectory) -> Mapping[str, float]:
        return {SINGLE: _call(self._function, task, trajectory)}


class FunctionPart(RolloutPart):
    """A user's own function (task, trajectory) -> float, or None to exclude the rollout from its group."""

    class Config(RolloutPart.Config, _Function):
        """The function, and the keys of every part."""

    config: Config

    @property
    def is_verifier(self) -> bool:
        return self.config.right_above is not None

    def open(self, service: RunService | None) -> None:
        self._function = self.config.imported("reward.parts.*")

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        return _call(self._function, task, trajectory, none=NotJudged(f"{self.config.function} returned None"))


def function_reward(function: Callable[[Task, Trajectory], float], *, right_above: float | None = None) -> FunctionReward:
    """A reward with the single part `reward`, which is what `function` returns. It runs in the event loop, so it must be quick.

    Raises:
        ConfigError: it cannot be called with a task and a trajectory. Raised by a call: the function raised, or returned
            something other than a finite number.
    """
    place = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', type(function).__name__)}"
    reward = FunctionReward(FunctionReward.Config(function=place, right_above=right_above))
    reward._function = _checked(function)
    return reward


def _checked(function: Any) -> Callable[[Task, Trajectory], float | None]:
    if not callable(function):
        raise ConfigError(f"reward function {function!r:.200} is not callable. {_FORM}.")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        problem = f"cannot be called with (task, trajectory): {error}. {_FORM}"
        raise user_code.mistake(function, problem, what=_named(function)) from error
    except ValueError:  # a builtin without a signature
        pass
    return function  # type: ignore[no-any-return]


def _call(function: Callable[..., Any], task: Task, trajectory: Trajectory, *, none: NotJudged | None = None) -> float:
    """A finite number. Raises `none` if it returned None, and `ConfigError` if it raised, or returned something else."""
    what, about = _named(function), f"for task {task.id!r}"
    value = user_code.call(function, task, trajectory, what=what, about=about)
    if value is None and none is not None:
        raise none
    if not is_finite_number(value):
        raise user_code.returned(function, value, "Return a finite number", what=what, about=about)
    return float(value)


def _named(function: Any) -> str:
    return f"reward function {getattr(function, '__qualname__', type(function).__name__)}"


class SumReward(Reward):
    """Judges a trajectory by every part that applies to its task; parts that compare rollouts wait for `judge_group`."""

    class Config(Reward.Config):
        """A weighted sum of named parts, each for all tasks or for some."""

        parts: dict[str, Part] = Field(min_length=1, description="The parts by name.")

        @property
        def weights(self) -> dict[str, float]:
            return {name: part.config.weight for name, part in self.parts.items()}

        @model_validator(mode="after")
        def _check(self) -> Self:
            check_any_weight(self.weights)
            for name, part in self.parts.items():
                if isinstance(part, AfterAccuracyPart):
                    judged = self.parts.get(part.config.accuracy)
                    if judged is None or isinstance(judged, AfterAccuracyPart):
                        raise ValueError(
                            f"parts.{name}.accuracy is {part.config.accuracy!r:.200}, which is not a part that judges an"
                            f" answer. The parts are {', '.join(self.parts)}."
                        )
            if EXCLUDED in self.parts:
                raise ValueError(f"a part is called {EXCLUDED!r}, which marks rollouts that are not judged. Rename it.")
            return self

    config: Config

    def __init__(self, config: Config | None = None, /, **keys: Any) -> None:
        super().__init__(config, **keys)
        self.parts = {name: part.replaced() for name, part in self.config.parts.items()}

    def open(self, service: RunService | None) -> None:
        for part in self.parts.values():
            part.open(service)

    async def close(self) -> None:
        for part in self.parts.values():
            await part.close()

    async def __call__(self, task: Task, trajectory: Trajectory) -> Mapping[str, float]:
        parts = self._parts_for(task)
        independent = {name: part for name, part in parts.items() if isinstance(part, RolloutPart)}
        found = await asyncio.gather(*(_score(name, part, task, trajectory) for name, part in independent.items()))
        if reasons := [value for value in found if isinstance(value, str)]:
            return Excluded("; ".join(reasons))
        values = {name: value for name, value in zip(independent, found, strict=True) if not isinstance(value, str)}
        for name, part in parts.items():
            if isinstance(part, CosinePart):
                values[name] = part.score_given(trajectory, is_correct=self._is_correct(part, values))
        return values

    def _is_correct(self, part: AfterAccuracyPart, values: Mapping[str, float]) -> bool:
        name = part.config.accuracy
        return name in values and values[name] > self.right_above(name)

    async def try_out(self, task: Task, trajectory: Trajectory) -> None:
        for name, part in self._parts_for(task).items():
            if isinstance(part, RolloutPart) and (isinstance(part, FunctionPart) or ":" in part.kind):
                await _score(name, part, task, trajectory)

    def with_lengths(self, group: Group) -> Group:
        trajectories = group.trajectories
        for name, part in self._parts_for(group.task).items():
            if not isinstance(part, LengthPart):
                continue
            values = part.score_group(
                [scored.trajectory for scored in trajectories],
                [self._is_correct(part, scored.reward_parts) for scored in trajectories],
            )
            trajectories = tuple(
                replace(
                    scored,
                    reward=scored.reward + part.config.weight * (value - scored.reward_parts.get(name, 0.0)),
                    reward_parts={**scored.reward_parts, name: value},
                )
                for scored, value in zip(trajectories, values, strict=True)
            )
        return replace(group, trajectories=trajectories)

    @property
    def verifying_parts(self) -> tuple[str, ...]:
        """The part called `accuracy`, whatever it is; then those that compare answers, and functions with `right_above`."""
        verifiers = [name for name, part in self.parts.items() if part.is_verifier]
        return tuple(dict.fromkeys([*([ACCURACY] if ACCURACY in self.parts else []), *verifiers]))

    def right_above(self, part: str) -> float:
        judging = self.parts[part]
        return judging.config.right_above or 0.0 if isinstance(judging, FunctionPart) else 0.0

    @property
    def compares_answers(self) -> bool:
        names = self.verifying_parts
        return bool(names) and all(self.parts[name].compares_answers for name in names)

    def readers(self) -> Mapping[str, Part]:
        return {name: part for name, part in self.parts.items() if part.answer_form is not None}

    def answer_part(self, name: str) -> AnswerPart | None:
        part = self.parts[name]
        return part if isinstance(part, AnswerPart) else None

    def unused_parts(self, tasks: Sequence[Task]) -> dict[str, str]:
        """Parts that apply to none of `tasks`, by name, each with the reason."""
        return {
            name: _why_unused(part, tasks)
            for name, part in self.parts.items()
            if part.config.where and not any(part.applies_to(task) for task in tasks)
        }

    def _parts_for(self, task: Task) -> dict[str, Part]:
        """Raises `TaskError` if no part applies to the task."""
        parts = {name: part for name, part in self.parts.items() if part.applies_to(task)}
        if not parts:
            raise TaskError(
                f"task {task.id!r}: no part of the reward applies to it; its facts: {dict(task.facts)!s:.200}. Widen a part's"
                " `where`, or add the column to tasks.facts."
            )
        return parts


async def _score(name: str, part: RolloutPart, task: Task, trajectory: Trajectory) -> float | str:
    """The part's value, or why it cannot judge `trajectory`."""
    about = f"for task {task.id!r}"
    with user_code.blaming(about):
        try:
            value = await part.score(task, trajectory)
        except NotJudged as reason:
            return f"part {name!r}: {reason}"
    if not is_finite_number(value):
        what = f"{type(part).__qualname__}.score"
        raise user_code.returned(part.score, value, "Return a finite number", what=what, about=about)
    return value


def _why_unused(part: Part, tasks: Sequence[Task]) -> str:
    wanted = " and ".join(f"{fact} = {', '.join(map(repr, values))}" for fact, values in part.config.where.items())
    found = {fact: sorted({task.facts.get(fact, "") for task in tasks})[:_MAX_VALUES] for fact in part.config.where}
    return f"`where` requires {wanted}, and the tasks have {found}."
