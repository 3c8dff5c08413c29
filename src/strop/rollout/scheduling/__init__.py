"""Which rollout runs where and when: a pure state machine that the live runtime and the simulator drive.

Whoever drives it sends what happened (`events`) with the time at which it did, and does what comes back (`actions`), in
order. Nothing here waits, reads a clock or knows what an engine is made of.

| the driver sees                                  | it sends                     | it may be told to                       |
| ------------------------------------------------ | ---------------------------- | --------------------------------------- |
| an engine is ready                               | `EngineJoined`               | `Run` whoever waited                    |
| a task's rollouts are to be played               | `GroupOffered`               | `Run(why=START)` those that fit         |
| `complete` returned, and the turn may call tools | `TurnFinished`               | `CallTools`, at once unless static      |
| the sandbox took the calls up                    | `ToolStarted`                | nothing                                 |
| the observation is there, the rollout goes on    | `ToolFinished`               | `Run(why=CONTINUE)` on its engine       |
| the method wants to fork here                    | `BranchAsked`                | `Run(why=BRANCH)`, or `RefuseBranch`    |
| `complete` returned, and the rollout is over     | `RolloutEnded(run=...)`      | `Release`, and `Run` whoever waited     |
| the rollout is over for any other reason         | `RolloutEnded(run=None)`     | `Release` (abort what runs), and `Run`  |
| an engine is to be given up                      | `EngineDraining`             | `EngineDrained`, once it holds nothing  |
| `EngineLost`, a missed deadline                  | `EngineDied`                 | `Run(why=RESTART)` elsewhere            |
| the clock reached `next_tick_s`                  | `Tick`                       | `Release` who waits for a slow tool     |

A `Run` is one `InferenceEngine.complete` with `max_tokens` left; it extends the rollout's newest request where `why` is
`continue`, the parent's where it is `branch`, and nothing otherwise. `Run.run` comes back with the answer: one that is late,
because the engine was declared dead or the rollout ended, is ignored and counted. A rollout that loses its engine keeps the
turns that were finished; the turn that was lost is sampled again, from the same seed, by another engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from strop.rollout.scheduling.actions import Action, CallTools, EngineDrained, RefuseBranch, Release, Run, Why
from strop.rollout.scheduling.config import SchedulerConfig
from strop.rollout.scheduling.events import (
    BranchAsked,
    EngineDied,
    EngineDraining,
    EngineJoined,
    EngineSpec,
    Event,
    GroupOffered,
    RolloutEnded,
    RolloutOffer,
    Tick,
    ToolFinished,
    ToolStarted,
    TurnFinished,
)
from strop.rollout.scheduling.fit import check_fits
from strop.rollout.scheduling.ledger import Ledger
from strop.rollout.scheduling.scheduler import LoadBalancedScheduler
from strop.rollout.scheduling.static import StaticScheduler
from strop.rollout.scheduling.usage import EngineUsage
from strop.types import RolloutKey


class Scheduler(Protocol):
    """What either policy owes to its driver."""

    def handle(self, event: Event, *, now_s: float) -> list[Action]:
        """What `event`, which happened at `now_s`, makes necessary; to be done in this order.

        Raises:
            RequestTooLong: a rollout was offered that no engine could ever hold; nothing of its group was taken.
            StropError: the event is about a rollout or an engine that is not there.
        """

    @property
    def ledger(self) -> Ledger: ...

    @property
    def usage(self) -> Mapping[str, EngineUsage]:
        """By engine, those that are gone included."""

    @property
    def live(self) -> frozenset[RolloutKey]:
        """Rollouts that were offered or branched, and have not ended."""

    @property
    def waiting(self) -> tuple[RolloutKey, ...]:
        """Those of them that wait for an engine."""

    @property
    def num_waiting(self) -> int:
        """How many those are, at no cost."""

    @property
    def stranded(self) -> tuple[RolloutKey, ...]:
        """Those of them that no engine which is left could ever hold; they go on when one joins that can."""

    def is_crowded(self, engine: str) -> bool:
        """Whether more was dealt to an engine than it holds, so that conversations cannot all keep their memory."""

    @property
    def next_tick_s(self) -> float | None:
        """When a `Tick` is due; None: not before another event."""

    @property
    def reserved_blocks(self) -> Mapping[str, int]:
        """By engine."""


def make_scheduler(config: SchedulerConfig) -> Scheduler:
    return StaticScheduler() if config.policy == "static" else LoadBalancedScheduler(config)


__all__ = [
    "Action",
    "BranchAsked",
    "CallTools",
    "EngineDied",
    "EngineDrained",
    "EngineDraining",
    "EngineJoined",
    "EngineSpec",
    "EngineUsage",
    "Event",
    "GroupOffered",
    "Ledger",
    "RefuseBranch",
    "Release",
    "RolloutEnded",
    "RolloutOffer",
    "Run",
    "Scheduler",
    "SchedulerConfig",
    "Tick",
    "ToolFinished",
    "ToolStarted",
    "TurnFinished",
    "Why",
    "check_fits",
    "make_scheduler",
]
