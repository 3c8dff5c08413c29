"""The scheduler's interface: the events that a driver reports, and the actions that the scheduler asks for in return.

| the driver sees                                  | it reports              | the actions that may follow                  |
| ------------------------------------------------ | ----------------------- | -------------------------------------------- |
| an engine is ready                               | `EngineJoined`          | `Run` of rollouts that wait                  |
| a rollout is ready to start                      | `RolloutOffered`        | `Run(reason=START)` if it fits               |
| `complete` returned                              | `TurnFinished`          | `CallTools`, at once or at static's barrier  |
| the sandbox starts the tool calls                | `ToolStarted`           | none                                         |
| the observation is complete                      | `ToolFinished`          | `Run(reason=CONTINUE)` on the same engine    |
| the method wants to fork a rollout               | `BranchRequested`       | `Run(reason=BRANCH)`, now or when it fits    |
| the rollout ended, for any reason                | `RolloutEnded`          | `Release`, and `Run` of rollouts that wait   |
| an engine is lost                                | `EngineDied`            | `Run(reason=RESTART)` on another engine      |

A `Run` is one call of `InferenceEngine.complete` with at most `max_tokens` new tokens. `Run.run` is reported back with the
answer. The scheduler counts and ignores an answer to an older run: its engine was lost, or its rollout has ended. A rollout
that loses its engine keeps its finished turns; another engine samples the lost turn again from the same seed.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from strop.rollout.scheduler.admission import EngineSpec
from strop.types import RolloutKey


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOffered:
    """A rollout that is ready to start. The rollouts of one task are its group."""

    key: RolloutKey
    prompt: Hashable = None  # equal for equal prompts of a task
    prompt_tokens: int
    max_tokens: int  # of the whole response: every completion and observation after the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFinished:
    """A completion came back. After the last one of a rollout, `RolloutEnded` follows instead of tool events."""

    key: RolloutKey
    run: int  # of the `Run` that it answers
    num_tokens: int  # sampled
    recomputed_tokens: int = 0  # computed before by this engine, but no longer in its cache


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolStarted:
    """The tool calls of a turn left the queue of the sandbox and run."""

    key: RolloutKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFinished:
    """The last tool call of a turn has its result."""

    key: RolloutKey
    num_tokens: int  # of the observation


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchRequested:
    """Fork a rollout after its newest observation, or after its newest completion if that has no observation yet.

    A branch for which the rollout's engine has no room goes before all rollouts that have not started.
    """

    parent: RolloutKey
    key: RolloutKey  # of the branch
    max_tokens: int  # of completions and observations after the fork


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEnded:
    """A rollout is over: answered, at a limit, void or cancelled."""

    key: RolloutKey


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJoined:
    engine: EngineSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDied:
    """The engine is lost, with its KV memory and the completions that it was sampling."""

    name: str


Event: TypeAlias = (
    RolloutOffered | TurnFinished | ToolStarted | ToolFinished | BranchRequested | RolloutEnded | EngineJoined | EngineDied
)


class RunReason(StrEnum):
    """Why a completion is requested. The reason decides how much of its context the engine has in its cache."""

    START = "start"  # the first turn: the prompt
    BRANCH = "branch"  # the first turn of a branch: all but its last ids are cached for its parent
    CONTINUE = "continue"  # everything but the newest observation is cached
    RESTART = "restart"  # the rollout lost its engine: nothing but the prompt may be cached


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Request the next completion of a rollout from `engine`."""

    key: RolloutKey
    engine: str
    run: int  # number of this run, reported back with its answer
    reason: RunReason
    max_tokens: int  # left of the response


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTools:
    """Send the tool calls of the newest turn to the tools."""

    key: RolloutKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Abort what the rollout may be running on `engine` and free its KV memory."""

    key: RolloutKey
    engine: str


Action: TypeAlias = Run | CallTools | Release
