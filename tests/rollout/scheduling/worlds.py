"""Conversations whose every token follows from the seed of its turn, and engines that fail when they are told to."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field, replace

from virtual_time import now_s

from faulty_engine import FaultyEngine
from strop.engine.protocol import CompletionRequest
from strop.errors import EngineLost
from strop.rollout.environment import Observation
from strop.rollout.player import Judge, Player, SamplingConfig
from strop.types import Completion, StopReason, Task

STOP = 9
MAX_TOKENS = 60


def said(request: CompletionRequest) -> list[int]:
    """Up to 12 tokens, by the seed alone."""
    draw = random.Random(request.seed)
    return [draw.randint(10, 99) for _ in range(draw.randint(1, 11))] + [STOP]


class FragileEngine(FaultyEngine):
    """Takes a time that depends on the request, and is healthy until its `fault` is set."""

    def __init__(self, *, policy_version: int = 0, block_tokens: int | None = None, **options) -> None:
        super().__init__(said, policy_version=policy_version, **options)
        self.capacity = replace(self.capacity, block_tokens=block_tokens)
        self.fault = ""
        self.is_closed = False
        self.num_running = 0
        self.most_running = 0

    async def complete(self, request: CompletionRequest) -> Completion:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            completion = await super().complete(request)
            await asyncio.sleep(0.1 * len(completion.ids))
            if self.fault == "hang":
                self.num_running -= 1  # it computes nothing for this one any more
                try:
                    await asyncio.Event().wait()
                finally:
                    self.num_running += 1
        finally:
            self.num_running -= 1
        match self.fault:
            case "die":
                raise EngineLost("the engine's process has ended.")
            case "memory":
                raise MemoryError("no memory is left")
            case "network":
                raise ConnectionResetError("the peer hung up")
            case "garbage":
                return _changed(completion, logprobs=completion.logprobs[:-1])
            case "nan":
                return _changed(completion, logprobs=(float("nan"),) * len(completion.ids))
            case "old weights":
                return _changed(completion, spans=((completion.policy_version - 1, len(completion.ids)),))
        return completion

    async def progress(self) -> int:
        if self.num_running and self.fault != "hang":
            self._progress += 1
        return self._progress

    async def close(self) -> None:
        self.is_closed = True
        await super().close()

    @property
    def holds_nothing(self) -> bool:
        return not self._holds and not self.num_running


def _changed(completion: Completion, **fields) -> Completion:
    return replace(completion, **fields)


FAULTS = ("hang", "die", "memory", "network", "garbage", "nan", "old weights")


class Conversations:
    """Environments of several turns with tools that take a while, all by the rollout's seed."""

    def __init__(self, pace: float = 1.0) -> None:
        self.num_open = 0
        self.pace = pace

    def __call__(self, task: Task, *, seed: int) -> _Conversation:
        return _Conversation(self, task, seed)


class _Conversation:
    def __init__(self, world: Conversations, task: Task, seed: int) -> None:
        self.world, self.task, self.draw = world, task, random.Random(seed)
        self.num_left = self.draw.randint(1, 4)

    async def start(self) -> Observation:
        self.world.num_open += 1
        length = 5 + len(self.task.id) + int(self.task.answer)
        return Observation(ids=(1,) * length, text="", completion_text="", calls=(), stop_reason=None)

    async def step(self, completion: Completion, *, num_tokens_left: int) -> Observation:
        self.num_left -= 1
        tool_s, num_tokens = self.draw.uniform(0, 2.0), self.draw.randint(0, 3)
        is_over = self.num_left == 0 or num_tokens > num_tokens_left
        if not is_over:
            await asyncio.sleep(self.world.pace * tool_s)
        return Observation(
            ids=() if is_over else (7,) * num_tokens,
            text="",
            completion_text="",
            calls=(),
            stop_reason=StopReason.ANSWERED if is_over else None,
        )

    async def close(self) -> None:
        self.world.num_open -= 1


@dataclass
class Watcher:
    """Counts what becomes of rollouts, and keeps what becomes of engines."""

    started_keys: Counter = field(default_factory=Counter)
    finished_keys: Counter = field(default_factory=Counter)
    voided_keys: Counter = field(default_factory=Counter)
    engine_events: list = field(default_factory=list)

    def started(self, key, *, seed):
        self.started_keys[key] += 1

    def finished(self, scored):
        self.finished_keys[scored.trajectory.key] += 1

    def voided(self, key, *, reason, num_tokens):
        self.voided_keys[key] += 1

    def engine_joined(self, name, *, replaces):
        self.engine_events.append(("joined", name, replaces))

    def engine_lost(self, name, *, reason):
        self.engine_events.append(("lost", name, reason))

    def engine_not_replaced(self, name, *, reason):
        self.engine_events.append(("not replaced", name, reason))

    def of(self, event):
        return [name for kind, name, _ in self.engine_events if kind == event]


async def accurate(task, trajectory):
    return {"accuracy": 1.0}


def task(index: int) -> tuple[int, Task]:
    return index, Task(id=f"task-{index}", question="?", answer=str(index % 7), source="test")


def make_player(engine, world=None) -> Player:
    return Player(
        engine=engine,
        environments=world or Conversations(),
        judge=Judge(reward=accurate, weights={"accuracy": 1.0}),
        sampling=SamplingConfig(max_tokens=MAX_TOKENS),
        stop_ids=frozenset({STOP}),
    )


def tokens_of(groups):
    return {scored.trajectory.key: tuple(scored.trajectory.ids) for group in groups for scored in group.trajectories}


__all__ = ["FAULTS", "MAX_TOKENS", "Conversations", "FragileEngine", "Watcher", "make_player", "now_s", "task", "tokens_of"]
