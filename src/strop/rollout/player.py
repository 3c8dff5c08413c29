"""Plays one rollout: a conversation of engine and environment, from its opening, or from where it branched, to its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from strop.config import Config
from strop.engine.protocol import CompletionRequest, InferenceEngine
from strop.engine.requests import LOWEST_TEMPERATURE
from strop.errors import RequestTooLong, UserError
from strop.rollout.branching import Branching
from strop.rollout.fleet.fleet import Fleet
from strop.rollout.fleet.seat import Seat
from strop.rollout.protocol import Environment, EnvironmentFactory, Excluded, ForkableEnvironment, Reward
from strop.seeds import derive_seed
from strop.types import Completion, RolloutKey, ScoredTrajectory, StopReason, Task, Trajectory, Turn

_ROUNDING = 0.0625  # at most, of a logit from 16 to 32 in bfloat16, which has 8 significant bits


def _can_be_divided_by(temperature: float) -> float:
    if 0 < temperature < LOWEST_TEMPERATURE:
        lowest, rounding = f"{LOWEST_TEMPERATURE:g}", f"{_ROUNDING:.2g}"
        raise ValueError(
            f"{temperature:g} is between 0 and {lowest}. Logits are divided by it, and so are their errors: bfloat16 rounds a"
            f" logit of 20 by up to {rounding}, so log-probs would be off by {rounding} / {temperature:g} ="
            f" {_ROUNDING / temperature:.2g} nats, and servers would sample at {lowest} instead. Use 0 for the likeliest token,"
            f" or at least {lowest}."
        )
    return temperature


Temperature: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_can_be_divided_by)]
"""0 takes the likeliest token."""


class SamplingConfig(Config):
    """How completions are sampled. Truncated sampling (top-p, top-k) does not exist here: law 5."""

    temperature: Temperature = 1.0
    max_tokens: int = Field(default=512, ge=1)  # of a whole response: every completion and observation after the prompt
    min_tokens: int = Field(default=0, ge=0)  # of each completion: stop ids are banned before it; CS336 uses 4

    @model_validator(mode="after")
    def _lets_a_completion_stop(self) -> Self:
        if self.min_tokens >= self.max_tokens:
            raise ValueError(
                f"sampling.min_tokens is {self.min_tokens} and sampling.max_tokens is {self.max_tokens}: no completion could"
                " stop before the response ends, so all would be cut off, and no tool would ever be called."
                f" Lower min_tokens below {self.max_tokens}, or raise max_tokens above {self.min_tokens}."
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """A reward and the weights of its parts."""

    reward: Reward
    weights: Mapping[str, float]

    async def score(self, task: Task, trajectory: Trajectory) -> ScoredTrajectory:
        parts = await self.reward(task, trajectory)
        total = sum(self.weights.get(name, 0.0) * value for name, value in parts.items())
        kept = parts if isinstance(parts, Excluded) else dict(parts)
        return ScoredTrajectory(trajectory=trajectory, reward=total, reward_parts=kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What a rollout begins with: its prompt, and, if it is a branch, the turns that it shares with its parent."""

    prompt_ids: tuple[int, ...]
    turns: tuple[Turn, ...] = ()
    parent: RolloutKey | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        ids = list(self.prompt_ids)
        for turn in self.turns:
            ids += [*turn.completion.ids, *turn.observation_ids]
        return tuple(ids)

    @property
    def num_response_tokens(self) -> int:
        return sum(len(turn.completion.ids) + len(turn.observation_ids) for turn in self.turns)


@dataclass(slots=True, eq=False, kw_only=True)
class Opened:
    """The environment of one playing of a rollout, and what it began with."""

    environment: Environment
    past: Past
    is_closed: bool = False

    async def close(self) -> None:
        """Safe to call twice."""
        if not self.is_closed:
            self.is_closed = True
            await self.environment.close()


class Forking(Protocol):
    """Forks one rollout as it is played; called in this order, turn by turn."""

    def sampled(self, seat: Seat, past: Past, completion: Completion) -> None:
        """`completion` answers `past`, which ends with an observation: whoever forks behind that asks `seat` for it now."""

    async def split(self, environment: Environment) -> None:
        """Fork the environment for those branches; it was not told of the completion yet."""

    async def part(self) -> None:
        """Returns when no branch needs what the rollout holds on its engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """Everything that playing a task needs, whatever the task."""

    engine: InferenceEngine | Fleet  # a bare engine is a fleet of one that is not replaced
    environments: EnvironmentFactory
    judge: Judge
    sampling: SamplingConfig
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...] = ()
    branching: Branching | None = None  # None: every rollout begins at the prompt
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
                seats = await dispatch.offer({key: opened.past.prompt_ids}, max_tokens=self.sampling.max_tokens)
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
        return Opened(environment=environment, past=Past(prompt_ids=opening.ids))

    async def reopen(self, task: Task, past: Past, *, seed: int, forks: Sequence[tuple[int, int]]) -> Opened:
        """The environment of a branch whose parent is not there to be forked: what it shares is stepped through again.

        Its tools run again for that; nothing is sampled, and the ids stay those of `past`.

        Args:
            seed: of the rollout that the branch goes back to, from the prompt.
            forks: for each fork on the way from that to the branch, the turns before it and the seed of the rollout behind it.
        """
        environment = self.environments(task, seed=seed)
        try:
            await environment.start()
            done = 0
            for at, forked_seed in forks:
                for turn in past.turns[done:at]:
                    await environment.step(turn.completion, num_tokens_left=self.sampling.max_tokens)
                forked = await fork(environment, seed=forked_seed)
                before, environment, done = environment, forked, at
                await before.close()
        except BaseException:
            await environment.close()
            raise
        return Opened(environment=environment, past=past)

    async def converse(
        self, task: Task, seat: Seat, opened: Opened, *, seed: int, forking: Forking | None = None
    ) -> Trajectory:
        """One rollout from its opening to its end; seat and environment are given back."""
        past = opened.past
        num_left = self.sampling.max_tokens - past.num_response_tokens
        try:
            while True:
                # Behind what a branch begins with its parent decided already.
                decides = forking if len(past.turns) > len(opened.past.turns) else None
                completion = await self._complete(seat, past, num_left, seed=seed, forking=decides)
                num_left -= len(completion.ids)
                if forking is not None:
                    await forking.split(opened.environment)
                # One token stays free for the answer to the observation: without it the next completion could not start.
                observation = await opened.environment.step(completion, num_tokens_left=max(0, num_left - 1))
                turn = Turn(
                    completion=completion,
                    calls=observation.calls,
                    observation_ids=observation.ids,
                    completion_text=observation.completion_text,
                    observation_text=observation.text,
                )
                past = Past(prompt_ids=past.prompt_ids, turns=(*past.turns, turn))
                num_left -= len(observation.ids)
                stop_reason = StopReason.LENGTH if observation.stop_reason is None and num_left < 1 else observation.stop_reason
                if stop_reason is not None:
                    break
                seat.observed(len(observation.ids))
            if forking is not None:
                await forking.part()
            return Trajectory(
                key=seat.key,
                task_id=task.id,
                prompt_ids=past.prompt_ids,
                turns=past.turns,
                stop_reason=stop_reason,
                parent=opened.past.parent,
                forked_at=opened.past.num_response_tokens,
            )
        finally:
            seat.leave()
            await opened.close()

    async def _complete(self, seat: Seat, past: Past, num_left: int, *, seed: int, forking: Forking | None) -> Completion:
        key, turn = seat.key, len(past.turns)
        request = CompletionRequest(
            id=f"{seed:x}/{key.task_index}/{key.attempt}/{key.branch}/{turn}",
            ids=past.ids,
            max_tokens=num_left,
            stop_ids=self.stop_ids,
            stop_strings=self.stop_strings,
            temperature=self.sampling.temperature,
            seed=derive_seed(seed, turn),
            min_tokens=min(self.sampling.min_tokens, num_left),
        )
        if forking is None:
            return await seat.complete(request)
        return await seat.complete(request, sampled=lambda completion: forking.sampled(seat, past, completion))

    def _check_prompt(self, task: Task, length: int, most: int | None) -> None:
        if most is not None and length + self.sampling.max_tokens > most:
            raise RequestTooLong(
                f"task {task.id!r}: its prompt of {length} tokens and sampling.max_tokens = {self.sampling.max_tokens} exceed"
                f" engine.max_length = {most}. Leave such tasks out (tasks.max_question_chars), lower max_tokens,"
                " or raise engine.max_length and start a run under another --name."
            )


async def fork(environment: Environment, *, seed: int) -> Environment:
    """Raises `UserError` where the environment cannot."""
    if not isinstance(environment, ForkableEnvironment):
        raise UserError(
            f"{type(environment).__name__} cannot be forked, but the stage branches. Give it `async def fork(self, *, seed)`"
            " (strop.rollout.protocol.ForkableEnvironment), or leave branching out."
        )
    return await environment.fork(seed=seed)
