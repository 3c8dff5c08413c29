"""What an environment and a reward owe to the code that plays a task to its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from strop.types import Completion, RolloutKey, ScoredTrajectory, StopReason, Task, ToolCall, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the environment answers: ids to feed before the next completion, or the end.

    `completion_text` is the view of the completion that it answers; empty for the opening observation, whose `ids` are
    the prompt.
    """

    ids: tuple[int, ...]
    text: str
    completion_text: str
    calls: tuple[ToolCall, ...]
    stop_reason: StopReason | None  # None: go on


class Environment(Protocol):
    """One playing of one task. Single use, so there is no reset; `close` is called even after an error."""

    async def start(self) -> Observation:
        """The prompt."""

    async def step(self, completion: Completion, *, num_tokens_left: int) -> Observation:
        """Answer a completion. One of more than `num_tokens_left` ids is not given: the rollout overflows instead."""

    async def close(self) -> None: ...


@runtime_checkable
class ForkableEnvironment(Environment, Protocol):
    """An environment whose rollout may branch."""

    async def fork(self, *, seed: int) -> Environment:
        """The environment of a branch, which goes on from here with the branch's seed; whoever asked closes it.

        Asked between an observation and the `step` that answers the completion after it. It has the state that this one has,
        nothing is played again for it, and from here on the two share nothing.
        """


class EnvironmentFactory(Protocol):
    """Makes the environment of one rollout; `seed` belongs to the rollout."""

    def __call__(self, task: Task, *, seed: int) -> Environment: ...


EXCLUDED = "excluded"
"""The one part of a rollout that no judge could judge, whoever is to blame."""


class Excluded(dict[str, float]):
    """The parts of such a rollout: EXCLUDED alone. Beside them, `why` no judge could judge it."""

    def __init__(self, why: str) -> None:
        super().__init__({EXCLUDED: 1.0})
        self.why = why


class Reward(Protocol):
    """Judges a finished trajectory. Pure in (task, trajectory)."""

    async def __call__(self, task: Task, trajectory: Trajectory) -> Mapping[str, float]:
        """Named parts; their weighted sum is the reward. A wrong or missing answer is a value, not an exception.

        `Excluded` where another try could not judge it either, and its group is better off without it.

        Raises:
            MachineError: the judge itself was lost; retried, then the trajectory is void (law 3).
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What a branch took by itself before it was given up; what it shares with its parent is not in it."""

    generated_tokens: int  # of the completions that it had to the end
    prefilled_tokens: int  # those that were not found in the cache; of a completion under way, too
    is_sampling: bool  # one was under way, or waited for its engine: how many tokens it had by then, nobody knows


class PlayObserver(Protocol):
    """Follows the rollouts of one batch as they start and end."""

    def started(self, key: RolloutKey, *, seed: int) -> None: ...

    def finished(self, scored: ScoredTrajectory) -> None: ...

    def voided(self, key: RolloutKey, *, reason: str) -> None:
        """It counts for nothing; after `finished` where it was played to its end, but no judge could judge it."""

    def displaced(self, key: RolloutKey, spent: Spent) -> None:
        """A branch is given up, finished or not, for one that stands before it, or since its parent begins anew."""


class Unwatched:
    """A `PlayObserver` for when nobody needs to know."""

    def started(self, key: RolloutKey, *, seed: int) -> None:
        pass

    def finished(self, scored: ScoredTrajectory) -> None:
        pass

    def voided(self, key: RolloutKey, *, reason: str) -> None:
        pass

    def displaced(self, key: RolloutKey, spent: Spent) -> None:
        pass
