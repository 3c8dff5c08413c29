"""What all rollouts of a batch share, and how one of them is tried until it is scored or void."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from strop.errors import EngineLost, MachineError, RequestTooLong
from strop.rollout.fleet.dispatch import Dispatch
from strop.rollout.fleet.seat import Seat
from strop.rollout.player import Forking, Opened, Past, Player
from strop.rollout.protocol import Excluded, PlayObserver
from strop.seeds import derive_seed
from strop.types import RolloutKey, ScoredTrajectory, Task

_ResultT = TypeVar("_ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Void:
    """A rollout that our own faults made worthless."""

    key: RolloutKey
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLong:
    """A rollout whose prompt leaves no room for a response: neither another try nor another attempt would help."""

    key: RolloutKey
    error: RequestTooLong


Outcome: TypeAlias = ScoredTrajectory | Void | TooLong
Opening: TypeAlias = Opened | MachineError | RequestTooLong
"""An environment that is open; or why it is not."""


def rollout_seed(batch_seed: int, key: RolloutKey) -> int:
    """A rollout's own: it follows from the batch's and the rollout's key, and nothing else (design law 8)."""
    return derive_seed(batch_seed, key.task_index, key.attempt, key.branch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What all rollouts of a batch share."""

    player: Player
    dispatch: Dispatch
    seed: int
    observer: PlayObserver
    finished: Mapping[RolloutKey, ScoredTrajectory]
    is_exact: bool  # whether a rollout that is played again repeats itself to the bit
    most: int | None  # tokens of the longest conversation that any engine held when the batch began; None: there was none
    opened: set[Opened] = field(default_factory=set)  # environments that may be open
    too_long: dict[int, RequestTooLong] = field(default_factory=dict)  # by task index: why none of its rollouts was played

    def seed_of(self, key: RolloutKey) -> int:
        return rollout_seed(self.seed, key)

    def started(self, key: RolloutKey) -> None:
        if key not in self.finished:
            self.observer.started(key, seed=self.seed_of(key))

    async def open(self, task: Task, key: RolloutKey, past: Past | None = None) -> Opening:
        """The environment of another try of `key`, begun at the prompt, or at the end of the `past` that a branch shares; or
        why that could not be."""
        self.started(key)
        try:
            if past is None:
                opened = await self.player.open(task, seed=self.seed_of(key), most=self.most)
            else:
                opened = await self._reopen(task, key, past)
        except (MachineError, RequestTooLong) as error:
            return error
        self.opened.add(opened)
        return opened

    async def seats(self, task: Task, opened: Mapping[RolloutKey, Opening]) -> dict[RolloutKey, Seat]:
        """A seat for each rollout of one task whose environment is open. They have the same number of tokens behind them.

        Raises:
            EngineLost: there is no engine; or those that could hold a rollout of the task are lost, and none will come.
        """
        pasts = {key: each.past for key, each in opened.items() if isinstance(each, Opened)}
        if not pasts:
            return {}
        most = self.player.sampling.max_tokens
        max_tokens = max(most - past.num_response_tokens for past in pasts.values())
        try:
            return await self.dispatch.offer({key: past.ids for key, past in pasts.items()}, max_tokens=max_tokens)
        except RequestTooLong as error:
            if self.most is None:
                raise
            raise EngineLost(f"task {task.id!r}: every engine that could hold it is lost. {error}") from error

    async def play(
        self,
        task: Task,
        key: RolloutKey,
        opened: Opening,
        seat: Seat | None,
        *,
        past: Past | None = None,
        known: ScoredTrajectory | None = None,
        forked_anew: Callable[[], Awaitable[Forking | None]] | None = None,
    ) -> Outcome:
        """One rollout up to its score. The first try is made in what is open already; others begin anew, behind `past`.

        Args:
            seat: of the first try; None where it has to be asked for.
            known: what became of it before an interruption; it is played again for the sake of its branches alone.
            forked_anew: called before each try, for what forks it; whatever branched off an earlier try is gone when it
                returns.
        """
        reason = ""
        for num_tries in range(1, self.player.max_attempts + 1):
            forking = None if forked_anew is None else await forked_anew()
            if num_tries > 1:
                opened, seat = await self.open(task, key, past), None
            if isinstance(opened, RequestTooLong):
                self.observer.voided(key, reason=str(opened))
                return TooLong(key=key, error=opened)
            if isinstance(opened, MachineError):
                reason = str(opened)
                continue
            if seat is None:
                seat = (await self.seats(task, {key: opened}))[key]
            try:
                trajectory = await self.player.converse(task, seat, opened, seed=self.seed_of(key), forking=forking)
                self.opened.discard(opened)
                if known is not None and trajectory.ids == known.trajectory.ids:
                    return known
                scored = await self.player.judge.score(task, trajectory)
            except EngineLost:
                raise
            except MachineError as error:
                reason = str(error)
                continue
            self.observer.finished(scored)
            if isinstance(scored.reward_parts, Excluded):
                self.observer.voided(key, reason=scored.reward_parts.why)
            return scored
        if forked_anew is not None:
            await forked_anew()
        if known is not None:
            return known
        self.observer.voided(key, reason=reason)
        return Void(key=key, reason=reason)

    async def _reopen(self, task: Task, key: RolloutKey, past: Past) -> Opened:
        assert self.player.branching is not None  # nothing else gives a rollout a past
        descent = self.player.branching.descent(key)
        keys = [*(claim.parent for claim in descent[1:]), key]
        forks = [(claim.at, self.seed_of(forked)) for claim, forked in zip(descent, keys, strict=True)]
        return await self.player.reopen(task, past, seed=self.seed_of(descent[0].parent), forks=forks)


async def all_of(coroutines: Sequence[Awaitable[_ResultT]]) -> list[_ResultT]:
    """Their results in order; the first exception ends the others."""
    running = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*running))
    finally:
        await end(running)


async def end(running: Sequence[asyncio.Future[_ResultT]]) -> None:
    """Cancel whatever runs, and wait for that."""
    for each in running:
        each.cancel()
    await asyncio.gather(*running, return_exceptions=True)
