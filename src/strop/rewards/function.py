"""Makes a reward of a plain Python function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from strop.errors import UserError
from strop.types import Task, Trajectory

PART = "reward"


class FunctionReward:
    """Implements `Reward`; see `function_reward`."""

    def __init__(self, function: Callable[[Task, Trajectory], float]) -> None:
        self._function = function

    async def __call__(self, task: Task, trajectory: Trajectory) -> Mapping[str, float]:
        value = self._function(task, trajectory)
        if not isinstance(value, bool | int | float) or not math.isfinite(value):
            name = getattr(self._function, "__name__", "the function")
            raise UserError(f"reward {name}: returned {value!r} for task {task.id!r}. Return a finite number.")
        return {PART: float(value)}

    async def close(self) -> None:
        """Nothing to end."""


def function_reward(function: Callable[[Task, Trajectory], float]) -> FunctionReward:
    """A reward of the one part `reward`, which is what `function` returns; it is called in the event loop, so it must be quick.

    Raises, when called:
        UserError: the function returned something other than a finite number.
    """
    return FunctionReward(function)
