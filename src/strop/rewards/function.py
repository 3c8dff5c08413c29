"""Makes a reward of a plain Python function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field

from strop import user_code
from strop.config import Config
from strop.errors import ConfigError
from strop.registry import import_object
from strop.rewards.base import SINGLE, NotJudged, Reward, RolloutPart, RunService, is_finite_number
from strop.types import Task, Trajectory

_FORM = "A reward is def name(task: Task, trajectory: Trajectory) -> float"


class _Function(Config):
    function: str = Field(description="The function, as module:name.")

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
        return (SINGLE,)

    def open(self, service: RunService | None) -> None:
        self._function = self.config.imported("reward")

    async def __call__(self, task: Task, trajectory: Trajectory) -> Mapping[str, float]:
        value = _call(self._function, task, trajectory)
        if value is None:
            raise _returned(self._function, None, task)
        return {SINGLE: value}


class FunctionPart(RolloutPart):
    """A user's own function (task, trajectory) -> float, or None to exclude the rollout from its group."""

    class Config(RolloutPart.Config, _Function):
        """The function, and the keys of every part."""

    config: Config

    @property
    def is_verifier(self) -> bool:
        return self.config.weight != 0

    def open(self, service: RunService | None) -> None:
        self._function = self.config.imported("reward.parts.*")

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        value = _call(self._function, task, trajectory)
        if value is None:
            raise NotJudged(f"{self.config.function} returned None")
        return value


def function_reward(function: Callable[[Task, Trajectory], float]) -> FunctionReward:
    """A reward with the single part `reward`, which is what `function` returns. It runs in the event loop, so it must be quick.

    Raises:
        ConfigError: it cannot be called with a task and a trajectory. Raised by a call: the function raised, or returned
            something other than a finite number.
    """
    place = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', type(function).__name__)}"
    reward = FunctionReward(FunctionReward.Config(function=place))
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


def _call(function: Callable[[Task, Trajectory], float | None], task: Task, trajectory: Trajectory) -> float | None:
    """A finite number, or None. Raises `ConfigError` if the function raised, or returned something else."""
    value = user_code.call(function, task, trajectory, what=_named(function), about=f"for task {task.id!r}")
    if value is not None and not is_finite_number(value):
        raise _returned(function, value, task)
    return None if value is None else float(value)


def _returned(function: Any, value: object, task: Task) -> ConfigError:
    about = f"for task {task.id!r}"
    return user_code.returned(function, value, "Return a finite number", what=_named(function), about=about)


def _named(function: Any) -> str:
    return f"reward function {getattr(function, '__qualname__', type(function).__name__)}"
