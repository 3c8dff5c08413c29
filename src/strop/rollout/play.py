"""Plays tasks to their end: many rollouts at once, each a conversation of engine and environment, groups as they close.

There is no barrier: a rollout's next turn starts when its own tools are done, its reward is computed when it ends, and its
group is yielded when its last rollout is scored.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pydantic import Field

from strop.config import Config
from strop.engine.protocol import CompletionRequest, InferenceEngine
from strop.errors import EngineLost, MachineError, RequestTooLong
from strop.rollout.protocol import Environment, EnvironmentFactory, Reward
from strop.seeds import derive_seed
from strop.types import Group, RolloutKey, ScoredTrajectory, StopReason, Task, Trajectory, Turn

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

    engine: InferenceEngine
    environments: EnvironmentFactory
    judge: Judge
    sampling: SamplingConfig
    stop_ids: frozenset[int]
    max_attempts: int = 3  # of one rollout and of its judgement, when the fault is ours

    async def play_once(self, task: Task, key: RolloutKey, *, seed: int) -> Trajectory:
        """One rollout from the first turn to the last.

        Raises:
            MachineError: a tool or the engine failed; nothing of the rollout is kept.
        """
        environment = self.environments(task, seed=seed)
        request_id, known = "", 0  # the last request, and how many ids the engine has seen of the conversation
        try:
            opening = await environment.start()
            self._check_prompt(task, len(opening.ids))
            turns: list[Turn] = []
            context = opening.ids
            num_left = self.sampling.max_tokens
            while True:
                request = CompletionRequest(
                    id=f"{seed:x}/{key.task_index}/{key.attempt}/{key.branch}/{len(turns)}",
                    ids=context,
                    max_tokens=num_left,
                    stop_ids=self.stop_ids,
                    temperature=self.sampling.temperature,
                    seed=derive_seed(seed, len(turns)),
                    min_tokens=min(self.sampling.min_tokens, num_left),
                    extends=request_id,
                    at=known,
                )
                request_id = request.id
                completion = await self.engine.complete(request)
                context += completion.ids
                known = len(context)
                num_left -= len(completion.ids)
                # One token stays free for the answer to the observation: without it the next completion could not start.
                observation = await environment.step(completion, num_tokens_left=max(0, num_left - 1))
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
                        key=key, task_id=task.id, prompt_ids=opening.ids, turns=tuple(turns), stop_reason=stop_reason
                    )
        finally:
            if request_id:
                await self.engine.release(request_id)
            await environment.close()

    def _check_prompt(self, task: Task, length: int) -> None:
        most = self.engine.capacity.max_request_tokens
        if length + self.sampling.max_tokens > most:
            raise RequestTooLong(
                f"task {task.id!r}: its prompt of {length} tokens and sampling.max_tokens = {self.sampling.max_tokens} exceed"
                f" engine.max_length = {most}. Leave such tasks out (tasks.max_question_chars), lower max_tokens,"
                " or raise engine.max_length and start a run under another --name."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Void:
    """A rollout that our own faults made worthless."""

    key: RolloutKey
    reason: str


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
    one more attempt takes its place; at most `num_rollouts` attempts are added to a group (law 3).

    Raises:
        RequestTooLong: a task's prompt leaves no room for the response.
        EngineLost: there is nobody left to sample; rollouts already finished were reported to `observer`.
    """
    groups = [
        asyncio.ensure_future(
            _play_group(index, task, player, num_rollouts=num_rollouts, seed=seed, observer=observer, finished=finished)
        )
        for index, task in tasks
    ]
    try:
        for closed in asyncio.as_completed(groups):
            yield await closed
    finally:
        for group in groups:
            group.cancel()
        await asyncio.gather(*groups, return_exceptions=True)


async def _play_group(
    index: int,
    task: Task,
    player: Player,
    *,
    num_rollouts: int,
    seed: int,
    observer: PlayObserver,
    finished: Mapping[RolloutKey, ScoredTrajectory],
) -> Group:
    scored: list[ScoredTrajectory] = []
    num_void = 0
    attempts = range(num_rollouts)
    while attempts:
        keys = [RolloutKey(task_index=index, attempt=attempt) for attempt in attempts]
        fresh = [_play_scored(task, key, player, seed=seed, observer=observer) for key in keys if key not in finished]
        outcomes = await _all(fresh)
        scored += [finished[key] for key in keys if key in finished]
        scored += [outcome for outcome in outcomes if isinstance(outcome, ScoredTrajectory)]
        num_void += sum(isinstance(outcome, _Void) for outcome in outcomes)
        last = attempts.stop
        attempts = range(last, min(last + num_rollouts - len(scored), 2 * num_rollouts))
    scored.sort(key=lambda each: each.trajectory.key)
    return Group(task=task, task_index=index, trajectories=tuple(scored), num_void=num_void)


async def _play_scored(
    task: Task, key: RolloutKey, player: Player, *, seed: int, observer: PlayObserver
) -> ScoredTrajectory | _Void:
    rollout_seed = derive_seed(seed, key.task_index, key.attempt, key.branch)
    reason = ""
    for _ in range(player.max_attempts):
        observer.started(key, seed=rollout_seed)
        try:
            trajectory = await player.play_once(task, key, seed=rollout_seed)
            scored = await player.judge.score(task, trajectory)
        except EngineLost:
            raise
        except MachineError as error:
            reason = str(error)
            continue
        observer.finished(scored)
        return scored
    observer.voided(key, reason=reason)
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
