"""Plays tasks to their end: many rollouts at once, each a conversation of engine and environment, groups as they close.

There is no barrier: a rollout's next turn starts when its own tools are done, its reward is computed when it ends, and its
group is yielded when its last rollout is scored. Which engine a rollout goes to, and when, is the scheduler's to say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from pydantic import Field

from strop.config import Config
from strop.engine.protocol import CompletionRequest, InferenceEngine
from strop.errors import EngineLost, MachineError, RequestTooLong
from strop.rollout.fleet.dispatch import Dispatch
from strop.rollout.fleet.fleet import Fleet
from strop.rollout.fleet.seat import Seat
from strop.rollout.protocol import Environment, EnvironmentFactory, Reward
from strop.seeds import derive_seed
from strop.types import Group, RolloutKey, ScoredTrajectory, StopReason, Task, Trajectory, Turn

logger = logging.getLogger(__name__)

_ResultT = TypeVar("_ResultT")


class SamplingConfig(Config):
    """How completions are sampled. Truncated sampling (top-p, top-k) does not exist here: law 5."""

    temperature: float = Field(default=1.0, ge=0)
    max_tokens: int = Field(default=512, ge=1)  # of a whole response: every completion and observation after the prompt
    min_tokens: int = Field(default=0, ge=0)  # of each completion; CS336 uses 4


class PlayObserver(Protocol):
    """Follows the rollouts of one batch as they start and end."""

    def started(self, key: RolloutKey, *, seed: int) -> None: ...

    def finished(self, scored: ScoredTrajectory) -> None: ...

    def voided(self, key: RolloutKey, *, reason: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """A reward and the weights of its parts."""

    reward: Reward
    weights: Mapping[str, float]

    async def score(self, task: Task, trajectory: Trajectory) -> ScoredTrajectory:
        parts = await self.reward(task, trajectory)
        total = sum(self.weights.get(name, 0.0) * value for name, value in parts.items())
        return ScoredTrajectory(trajectory=trajectory, reward=total, reward_parts=dict(parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """Everything that playing a task needs, whatever the task."""

    engine: InferenceEngine | Fleet  # a bare engine is a fleet of one that is not replaced
    environments: EnvironmentFactory
    judge: Judge
    sampling: SamplingConfig
    stop_ids: frozenset[int]
    max_attempts: int = 3  # of one rollout and of its judgement, when the fault is ours

    @property
    def fleet(self) -> Fleet:
        return self.engine if isinstance(self.engine, Fleet) else Fleet([self.engine], closes_engines=False)

    async def play_once(self, task: Task, key: RolloutKey, *, seed: int) -> Trajectory:
        """One rollout from the first turn to the last.

        Raises:
            MachineError: a tool or the engine failed; nothing of the rollout is kept.
        """
        async with self.fleet.batch() as dispatch:
            opened = await self.open(task, seed=seed, most=dispatch.max_request_tokens)
            try:
                seats = await dispatch.offer({key: opened.prompt_ids}, max_tokens=self.sampling.max_tokens)
                return await self.converse(task, seats[key], opened, seed=seed)
            finally:
                await opened.close()

    async def open(self, task: Task, *, seed: int, most: int | None) -> Opened:
        """The environment of another playing of `task`, begun; whoever asked closes it.

        Args:
            most: tokens of the longest conversation that an engine holds; None where nobody knows.

        Raises:
            RequestTooLong: its prompt leaves no room for the response.
        """
        environment = self.environments(task, seed=seed)
        try:
            opening = await environment.start()
            self._check_prompt(task, len(opening.ids), most)
        except BaseException:
            await environment.close()
            raise
        return Opened(environment=environment, prompt_ids=opening.ids)

    async def converse(self, task: Task, seat: Seat, opened: Opened, *, seed: int) -> Trajectory:
        """One rollout from its opening to its end; seat and environment are given back."""
        key = seat.key
        turns: list[Turn] = []
        context = opened.prompt_ids
        num_left = self.sampling.max_tokens
        try:
            while True:
                request = CompletionRequest(
                    id=f"{seed:x}/{key.task_index}/{key.attempt}/{key.branch}/{len(turns)}",
                    ids=context,
                    max_tokens=num_left,
                    stop_ids=self.stop_ids,
                    temperature=self.sampling.temperature,
                    seed=derive_seed(seed, len(turns)),
                    min_tokens=min(self.sampling.min_tokens, num_left),
                )
                completion = await seat.complete(request)
                context += completion.ids
                num_left -= len(completion.ids)
                # One token stays free for the answer to the observation: without it the next completion could not start.
                observation = await opened.environment.step(completion, num_tokens_left=max(0, num_left - 1))
                turns.append(
                    Turn(
                        completion=completion,
                        calls=observation.calls,
                        observation_ids=observation.ids,
                        completion_text=observation.completion_text,
                        observation_text=observation.text,
                    )
                )
                context += observation.ids
                num_left -= len(observation.ids)
                stop_reason = StopReason.LENGTH if observation.stop_reason is None and num_left < 1 else observation.stop_reason
                if stop_reason is not None:
                    return Trajectory(
                        key=key, task_id=task.id, prompt_ids=opened.prompt_ids, turns=tuple(turns), stop_reason=stop_reason
                    )
                seat.observed(len(observation.ids))
        finally:
            seat.leave()
            await opened.close()

    def _check_prompt(self, task: Task, length: int, most: int | None) -> None:
        if most is not None and length + self.sampling.max_tokens > most:
            raise RequestTooLong(
                f"task {task.id!r}: its prompt of {length} tokens and sampling.max_tokens = {self.sampling.max_tokens} exceed"
                f" engine.max_length = {most}. Leave such tasks out (tasks.max_question_chars), lower max_tokens,"
                " or raise engine.max_length and start a run under another --name."
            )


@dataclass(slots=True, eq=False, kw_only=True)
class Opened:
    """The environment of one playing of a rollout, and the prompt that it began with."""

    environment: Environment
    prompt_ids: tuple[int, ...]
    is_closed: bool = False

    async def close(self) -> None:
        """Safe to call twice."""
        if not self.is_closed:
            self.is_closed = True
            await self.environment.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Void:
    """A rollout that our own faults made worthless."""

    key: RolloutKey
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _TooLong:
    """A rollout whose prompt leaves no room for a response: neither another try nor another attempt would help."""

    key: RolloutKey
    error: RequestTooLong


async def play(
    tasks: Sequence[tuple[int, Task]],
    player: Player,
    *,
    num_rollouts: int,
    seed: int,
    observer: PlayObserver,
    finished: Mapping[RolloutKey, ScoredTrajectory],
) -> AsyncIterator[Group]:
    """Play `num_rollouts` rollouts of each (task index, task); yield each group when its last rollout is scored.

    Args:
        seed: of the batch. A rollout's own seed follows from it and the rollout's key, nothing else (law 8).
        finished: rollouts of an interrupted playing of this batch; they are not played again (law 9).

    A rollout that a fault of ours spoils is played again from turn 0 up to `player.max_attempts` times, then it is void and
    one more attempt takes its place; at most `num_rollouts` attempts are added to a group (law 3). A task whose prompt leaves
    no room for the response is void at once, with a warning.

    Raises:
        RequestTooLong: every task's does; raised once all groups are yielded.
        EngineLost: there is nobody left to sample; rollouts already finished were reported to `observer`.
    """
    async with player.fleet.batch() as dispatch:
        table = _Table(
            player=player,
            dispatch=dispatch,
            seed=seed,
            observer=observer,
            finished=finished,
            most=dispatch.max_request_tokens,
        )
        groups = [asyncio.ensure_future(_play_group(index, task, table, num_rollouts=num_rollouts)) for index, task in tasks]
        try:
            for closed in asyncio.as_completed(groups):
                yield await closed
            if groups and len(table.too_long) == len(groups):
                first = min(table.too_long)
                raise RequestTooLong(f"every task of the batch is too long, the first of them: {table.too_long[first]}")
        finally:
            for group in groups:
                group.cancel()
            await asyncio.gather(*groups, return_exceptions=True)
            for opened in table.opened:  # of rollouts that were cancelled before their first turn
                await opened.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """What all rollouts of a batch share."""

    player: Player
    dispatch: Dispatch
    seed: int
    observer: PlayObserver
    finished: Mapping[RolloutKey, ScoredTrajectory]
    most: int | None  # tokens of the longest conversation that any engine held when the batch began; None: there was none
    opened: set[Opened] = field(default_factory=set)  # environments that may be open
    too_long: dict[int, RequestTooLong] = field(default_factory=dict)  # by task index: why none of its rollouts was played

    def seed_of(self, key: RolloutKey) -> int:
        return derive_seed(self.seed, key.task_index, key.attempt, key.branch)

    async def open(self, task: Task, key: RolloutKey) -> Opened | MachineError | RequestTooLong:
        """The environment of another try of `key`, begun; or why that could not be."""
        seed = self.seed_of(key)
        self.observer.started(key, seed=seed)
        try:
            opened = await self.player.open(task, seed=seed, most=self.most)
        except (MachineError, RequestTooLong) as error:
            return error
        self.opened.add(opened)
        return opened

    async def seats(
        self, task: Task, opened: Mapping[RolloutKey, Opened | MachineError | RequestTooLong]
    ) -> dict[RolloutKey, Seat]:
        """A seat for each rollout of one task whose environment is open.

        Raises:
            EngineLost: there is no engine; or those that could hold a rollout of the task are lost, and none will come.
        """
        prompts = {key: each.prompt_ids for key, each in opened.items() if isinstance(each, Opened)}
        if not prompts:
            return {}
        try:
            return await self.dispatch.offer(prompts, max_tokens=self.player.sampling.max_tokens)
        except RequestTooLong as error:
            if self.most is None:
                raise
            raise EngineLost(f"task {task.id!r}: every engine that could hold it is lost. {error}") from error

    async def play(self, task: Task, seat: Seat, opened: Opened) -> ScoredTrajectory:
        trajectory = await self.player.converse(task, seat, opened, seed=self.seed_of(seat.key))
        self.opened.discard(opened)
        return await self.player.judge.score(task, trajectory)


async def _play_group(index: int, task: Task, table: _Table, *, num_rollouts: int) -> Group:
    scored: list[ScoredTrajectory] = []
    num_void, too_long = 0, None
    attempts = range(num_rollouts)
    while attempts and too_long is None:
        keys = [RolloutKey(task_index=index, attempt=attempt) for attempt in attempts]
        outcomes = await _play_attempts(task, [key for key in keys if key not in table.finished], table)
        scored += [table.finished[key] for key in keys if key in table.finished]
        scored += [outcome for outcome in outcomes if isinstance(outcome, ScoredTrajectory)]
        num_void += sum(not isinstance(outcome, ScoredTrajectory) for outcome in outcomes)
        too_long = next((outcome.error for outcome in outcomes if isinstance(outcome, _TooLong)), None)
        last = attempts.stop
        attempts = range(last, min(last + num_rollouts - len(scored), 2 * num_rollouts))
    if too_long is not None:
        logger.warning("void: %s", too_long)
        if not scored:
            table.too_long[index] = too_long
    scored.sort(key=lambda each: each.trajectory.key)
    return Group(task=task, task_index=index, trajectories=tuple(scored), num_void=num_void)


async def _play_attempts(task: Task, keys: Sequence[RolloutKey], table: _Table) -> list[ScoredTrajectory | _Void | _TooLong]:
    """Rollouts of one task, offered together, so that the scheduler knows that they share a prompt."""
    opened = dict(zip(keys, await _all([table.open(task, key) for key in keys]), strict=True))
    seats = await table.seats(task, opened)
    return await _all([_play_scored(task, key, table, opened=opened[key], seat=seats.get(key)) for key in keys])


async def _play_scored(
    task: Task, key: RolloutKey, table: _Table, *, opened: Opened | MachineError | RequestTooLong, seat: Seat | None
) -> ScoredTrajectory | _Void | _TooLong:
    """The first try is made in what is open already; others begin anew."""
    reason = ""
    for num_tries in range(1, table.player.max_attempts + 1):
        if num_tries > 1:
            opened = await table.open(task, key)
            seat = (await table.seats(task, {key: opened})).get(key)
        if isinstance(opened, RequestTooLong):
            table.observer.voided(key, reason=str(opened))
            return _TooLong(key=key, error=opened)
        if isinstance(opened, MachineError) or seat is None:
            reason = str(opened)
            continue
        try:
            scored = await table.play(task, seat, opened)
        except EngineLost:
            raise
        except MachineError as error:
            reason = str(error)
            continue
        table.observer.finished(scored)
        return scored
    table.observer.voided(key, reason=reason)
    return _Void(key=key, reason=reason)


async def _all(coroutines: Sequence[Awaitable[_ResultT]]) -> list[_ResultT]:
    """Their results in order; the first exception ends the others."""
    running = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*running))
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class Unwatched:
    """A `PlayObserver` for when nobody needs to know."""

    def started(self, key: RolloutKey, *, seed: int) -> None:
        pass

    def finished(self, scored: ScoredTrajectory) -> None:
        pass

    def voided(self, key: RolloutKey, *, reason: str) -> None:
        pass


__all__ = ["Environment", "Judge", "PlayObserver", "Player", "SamplingConfig", "Unwatched", "play"]
