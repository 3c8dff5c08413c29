"""Collects the rollouts of a batch, and plays each: a conversation of engine and environment, until it is scored or void.

There is no barrier. The next turn of a rollout starts when its own tools are done, its reward is computed when it ends, and
its group is yielded when its last rollout is scored. The scheduler decides which engine a rollout uses, and when. A rollout
that a fault of ours spoils is played again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Protocol, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from strop import user_code
from strop.config import Config
from strop.engine.protocol import LOWEST_TEMPERATURE, CompletionRequest, Entropies, InferenceEngine, Probe, Truncation
from strop.errors import EngineLost, MachineError, RequestTooLong
from strop.rollout.environment import Environment, EnvironmentFactory, Observation, all_of, end
from strop.rollout.scheduler.batch import Lease, RolloutBatch
from strop.rollout.scheduler.engine_pool import EnginePool
from strop.types import Completion, Group, RolloutKey, ScoredTrajectory, StopReason, Task, Trajectory, Turn, derive_seed

if TYPE_CHECKING:
    from strop.rollout.branch_tree import Forking
    from strop.rollout.branching import Branching

logger = logging.getLogger(__name__)

MAX_TRIES = 3  # of one rollout and its judgement, if the fault is ours
_ROUNDING = 0.0625  # largest error of a logit from 16 to 32 in bfloat16, which has 8 significant bits


def _check_temperature(temperature: float) -> float:
    if 0 < temperature < LOWEST_TEMPERATURE:
        lowest, rounding = f"{LOWEST_TEMPERATURE:g}", f"{_ROUNDING:.2g}"
        raise ValueError(
            f"{temperature:g} is between 0 and {lowest}. Logits are divided by it, and so are their errors: bfloat16 rounds a"
            f" logit of 20 by up to {rounding}, so log-probs would be off by {rounding} / {temperature:g} ="
            f" {_ROUNDING / temperature:.2g} nats, and servers would sample at {lowest} instead. Use 0 for the likeliest token,"
            f" or at least {lowest}."
        )
    return temperature


Temperature: TypeAlias = Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False), AfterValidator(_check_temperature)]
"""0 takes the likeliest token."""


class SamplingConfig(Config):
    """How completions are sampled. Only evaluations truncate: log-probs to train on are over the full vocabulary."""

    temperature: Temperature = Field(default=1.0, description="Logits are divided by it. 0 takes the likeliest token.")
    max_tokens: int = Field(
        default=512,
        ge=1,
        le=10**9,
        description="Tokens of a whole response: every completion and observation after the prompt.",
    )
    max_turn_tokens: int | None = Field(
        default=None, ge=1, le=10**9, description="Most tokens of a completion; one that is cut off there ends its rollout."
    )
    min_tokens: int = Field(
        default=0, ge=0, le=10**9, description="Tokens of each completion before which stop ids are banned. CS336 uses 4."
    )

    top_p: float = Field(default=1.0, gt=0, le=1, description="In evaluations: likeliest tokens of this probability together.")
    top_k: int = Field(default=0, ge=0, le=10**9, description="In evaluations: this many of the likeliest tokens. 0: all.")
    min_p: float = Field(default=0.0, ge=0, le=1, description="In evaluations: least probability, as a share of the largest.")
    repetition_penalty: float = Field(
        default=1.0, gt=0, le=100, description="In evaluations: divides the positive logits of tokens that occurred."
    )

    @property
    def truncation(self) -> Truncation | None:
        """How the distribution is cut; None where it is whole."""
        found = Truncation(top_p=self.top_p, top_k=self.top_k, min_p=self.min_p, repetition_penalty=self.repetition_penalty)
        return None if found == Truncation() else found

    @model_validator(mode="after")
    def _check_min_tokens(self) -> Self:
        if self.min_tokens >= self.max_tokens:
            raise ValueError(
                f"sampling.min_tokens is {self.min_tokens} and sampling.max_tokens is {self.max_tokens}: no completion could"
                " stop before the response ends, so all would be cut off, and no tool would ever be called."
                f" Lower min_tokens below {self.max_tokens}, or raise max_tokens above {self.min_tokens}."
            )
        return self


EXCLUDED = "excluded"
"""The only reward part of a rollout that could not be judged."""


class Excluded(dict[str, float]):
    """The reward parts of a rollout that could not be judged: only `EXCLUDED`. `why` gives the reason."""

    def __init__(self, why: str) -> None:
        super().__init__({EXCLUDED: 1.0})
        self.why = why


class Reward(Protocol):
    """Scores a finished trajectory. A pure function of task and trajectory."""

    async def __call__(self, task: Task, trajectory: Trajectory) -> Mapping[str, float]:
        """Return named parts; their weighted sum is the reward. A wrong or missing answer is a value, not an exception.

        Return `Excluded` if another try could not judge the rollout either and its group is better without it.

        Raises:
            MachineError: the judge itself failed. It is tried again; then the trajectory is void.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What a branch computed itself before it was ended, without what it shares with its parent."""

    generated_tokens: int  # of its whole completions
    prefilled_tokens: int  # that were not in the cache, those of a running completion included
    is_sampling: bool  # a completion ran or waited for its engine; its tokens are unknown


class PlayObserver(Protocol):
    """Is called when the rollouts of a batch start and end."""

    def started(self, key: RolloutKey, *, seed: int) -> None: ...

    def finished(self, scored: ScoredTrajectory) -> None: ...

    def voided(self, key: RolloutKey, *, reason: str, num_tokens: int) -> None:
        """The rollout does not count. Called after `finished` if the rollout ended but could not be judged.

        Args:
            num_tokens: of its conversation so far, with the prompt.
        """

    def displaced(self, key: RolloutKey, spent: Spent) -> None:
        """A branch is ended, finished or not: another one is earlier in the order, or its parent begins again."""

    def replaced(self, key: RolloutKey) -> None:
        """A rollout leaves its group: another one has the same tokens. It may have finished before an interruption."""


class NullObserver(PlayObserver):
    """A `PlayObserver` that does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """A reward and the weights of its parts."""

    reward: Reward
    weights: Mapping[str, float] | None  # None: each part counts 1

    async def score(self, task: Task, trajectory: Trajectory) -> ScoredTrajectory:
        parts = await self.reward(task, trajectory)
        weights = dict.fromkeys(parts, 1.0) if self.weights is None else self.weights
        total = sum(weights.get(name, 0.0) * value for name, value in parts.items())
        kept = parts if isinstance(parts, Excluded) else dict(parts)
        return ScoredTrajectory(trajectory=trajectory, reward=total, reward_parts=kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What a rollout begins with: its prompt and, for a branch, the turns that it shares with its parent."""

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
    """The environment of one try of a rollout, and what the rollout begins with.

    A branch samples its first completion while the environment of its parent is forked for it.
    """

    past: Past
    environment: asyncio.Future[Environment] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    is_closed: bool = False

    async def come(self, environment: Environment) -> None:
        """Use `environment`, or close it if the try is over."""
        if self.environment.cancelled():
            await environment.close()
        else:
            self.environment.set_result(environment)

    def fail(self, error: MachineError) -> None:
        """No environment will come."""
        if not self.environment.cancelled():
            self.environment.set_exception(error)

    async def close(self) -> None:
        """Repeated calls do nothing."""
        is_first, self.is_closed = not self.is_closed, True
        self.environment.cancel()  # if it is still to come, `come` closes it
        if is_first and not self.environment.cancelled() and self.environment.exception() is None:
            await self.environment.result().close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """Everything that rollouts need, whatever the task."""

    engine: InferenceEngine | EnginePool  # a single engine becomes a pool of one, without replacement
    environments: EnvironmentFactory
    judge: Judge
    sampling: SamplingConfig
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...] = ()
    branching: Branching | None = None  # None: every rollout begins at the prompt
    shares_engines: bool = False  # with rollouts of other calls of `collect`

    @property
    def engine_pool(self) -> EnginePool:
        return self.engine if isinstance(self.engine, EnginePool) else EnginePool([self.engine])


Result: TypeAlias = ScoredTrajectory | RequestTooLong | None
"""None: faults of ours made it void. Too long: neither another try nor another attempt would help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlayer:
    """Plays the rollouts of one batch, each until it is scored or void."""

    player: Player
    batch: RolloutBatch
    seed: int
    observer: PlayObserver
    finished: Mapping[RolloutKey, ScoredTrajectory]  # before an interruption
    is_exact: bool  # whether a rollout that is played again gives the same tokens
    max_request_tokens: int | None  # of the longest conversation that an engine held when the batch began; None: no engine
    opened: set[Opened] = field(default_factory=set)  # environments that may be open
    too_long: dict[int, RequestTooLong] = field(default_factory=dict)  # by task index: why none of its rollouts was played

    def seed_of(self, key: RolloutKey) -> int:
        return rollout_seed(self.seed, key)

    def started(self, key: RolloutKey) -> None:
        if key not in self.finished:
            self.observer.started(key, seed=self.seed_of(key))

    async def open(self, task: Task, key: RolloutKey, past: Past | None = None) -> Opened:
        """Open the environment of another try of `key`, at the prompt or after the `past` of a branch. The caller closes it.

        Raises:
            RequestTooLong: the prompt leaves no room for the response.
        """
        self.started(key)
        if past is None:
            environment, past = await self._open(task, seed=self.seed_of(key))
        else:
            from strop.rollout.branch_tree import reopen  # only branches have a past

            environment = await reopen(self, task, key, past)
        opened = Opened(past=past)
        opened.environment.set_result(environment)
        self.opened.add(opened)
        return opened

    async def _open(self, task: Task, *, seed: int) -> tuple[Environment, Past]:
        environment = self.player.environments(task, seed=seed)
        try:
            opening = checked_observation(await environment.start(), environment.start, task)
            length, max_tokens, held = len(opening.ids), self.player.sampling.max_tokens, self.max_request_tokens
            if held is not None and length + max_tokens > held:
                raise RequestTooLong(
                    f"task {task.id!r}: its prompt of {length} tokens and sampling.max_tokens = {max_tokens} exceed"
                    f" engine.max_length = {held}. Leave such tasks out (tasks.max_question_chars), lower max_tokens,"
                    " or raise engine.max_length and start a run under another --name."
                )
        except BaseException:
            await environment.close()
            raise
        return environment, Past(prompt_ids=opening.ids)

    async def lease(self, task: Task, key: RolloutKey, past: Past) -> Lease:
        """Return a lease for a rollout of `task`.

        Raises:
            EngineLost: no engine is left, or all that could hold the rollout are lost.
        """
        max_tokens = self.player.sampling.max_tokens - past.num_response_tokens
        try:
            return await self.batch.offer(key, past.ids, max_tokens=max_tokens)
        except RequestTooLong as error:
            if self.max_request_tokens is None:
                raise
            raise EngineLost(f"task {task.id!r}: every engine that could hold it is lost. {error}") from error

    async def play(
        self,
        task: Task,
        key: RolloutKey,
        *,
        past: Past | None = None,
        begun: tuple[Opened, Lease] | None = None,
        known: ScoredTrajectory | None = None,
        make_forking: Callable[[], Awaitable[Forking | None]] | None = None,
    ) -> Result:
        """Play one rollout up to its score. Every try begins at the prompt, or after the `past` of a branch.

        Args:
            begun: what the first try uses; without it, and in later tries, environment and lease are asked for here.
            known: the result from before an interruption; the rollout is played again only for its branches.
            make_forking: called before each try and after the last failed one; it removes the branches of earlier tries.
        """
        reason, num_tokens = "", 0
        for num_tries in range(1, MAX_TRIES + 1):
            forking = None if make_forking is None else await make_forking()
            try:
                opened, lease = (await self.open(task, key, past), None) if begun is None or num_tries > 1 else begun
            except RequestTooLong as error:
                self.observer.voided(key, reason=str(error), num_tokens=num_tokens)
                return error
            except MachineError as error:
                reason = str(error)
                continue
            lease = lease or await self.lease(task, key, opened.past)
            if forking is not None:
                forking.begin(lease)
            try:
                trajectory = await self._converse(task, lease, opened, forking)
                self.opened.discard(opened)
                if known is not None and trajectory.ids == known.trajectory.ids:
                    return known
                scored = await self.player.judge.score(task, trajectory)
            except EngineLost:
                raise
            except MachineError as error:
                reason, num_tokens = str(error), lease.num_tokens
                continue
            self.observer.finished(scored)
            if isinstance(scored.reward_parts, Excluded):
                self.observer.voided(key, reason=scored.reward_parts.why, num_tokens=len(trajectory.ids))
            return scored
        if make_forking is not None:
            await make_forking()
        if known is not None:
            return known
        self.observer.voided(key, reason=reason, num_tokens=num_tokens)
        return None

    async def _converse(self, task: Task, lease: Lease, opened: Opened, forking: Forking | None) -> Trajectory:
        """Play one rollout from its opening to its end, and close lease and environment."""
        past = opened.past
        num_left = self.player.sampling.max_tokens - past.num_response_tokens
        try:
            while True:
                # The turn that a branch begins with was decided by its parent.
                decides = forking if len(past.turns) > len(opened.past.turns) else None
                completion = await self._complete(lease, past, num_left, opened, decides)
                num_left -= len(completion.ids)
                # One token stays free for the answer to the observation: without it the next completion could not start.
                environment = await opened.environment
                observation = await environment.step(completion, num_tokens_left=max(0, num_left - 1))
                checked_observation(observation, environment.step, task)
                past = Past(prompt_ids=past.prompt_ids, turns=(*past.turns, observation.as_turn(completion)))
                num_left -= len(observation.ids)
                stop_reason = StopReason.LENGTH if observation.stop_reason is None and num_left < 1 else observation.stop_reason
                if stop_reason is not None:
                    break
                lease.observed(len(observation.ids))
            if forking is not None:
                await forking.part()
            return Trajectory(
                key=lease.key,
                task_id=task.id,
                prompt_ids=past.prompt_ids,
                turns=past.turns,
                stop_reason=stop_reason,
                parent=opened.past.parent,
                forked_at=opened.past.num_response_tokens,
            )
        finally:
            lease.close()
            await opened.close()

    async def _complete(self, lease: Lease, past: Past, num_left: int, opened: Opened, forking: Forking | None) -> Completion:
        sampling, branching = self.player.sampling, self.player.branching
        key, seed, turn, probe = lease.key, self.seed_of(lease.key), len(past.turns), None
        max_tokens = min(num_left, sampling.max_turn_tokens or num_left)
        if forking is not None and branching is not None:

            def tell(entropies: tuple[float, ...]) -> None:
                forking.decide(lease, past, entropies, opened)

            probe = Probe(num_tokens=branching.num_awaited, tell=tell)
        request = CompletionRequest(
            id=f"{seed:x}/{key.task_index}/{key.attempt}/{key.branch}/{turn}",
            ids=past.ids,
            max_tokens=max_tokens,
            stop_ids=self.player.stop_ids,
            stop_strings=self.player.stop_strings,
            temperature=sampling.temperature,
            seed=derive_seed(seed, turn),
            min_tokens=min(sampling.min_tokens, max_tokens),
            entropies=Entropies.ANY if branching is None else branching.config.entropies,
            truncation=sampling.truncation,
            probe=probe,
        )
        try:
            return await lease.complete(request)
        finally:
            if forking is not None:
                await forking.settle()


def rollout_seed(batch_seed: int, key: RolloutKey) -> int:
    """Return a rollout's own seed, which depends only on the seed of the batch and the rollout's key."""
    return derive_seed(batch_seed, key.task_index, key.attempt, key.branch)


def checked_observation(value: object, made_by: object, task: Task) -> Observation:
    """Return `value`, which an environment's `start` or `step` returned. Raises `ConfigError` if it is no observation."""
    name = getattr(made_by, "__qualname__", type(made_by).__name__)
    return user_code.expect(value, Observation, made_by, what=name, about=f"for task {task.id!r}")


async def collect(
    tasks: Sequence[tuple[int, Task]],
    player: Player,
    *,
    num_rollouts: int,
    seed: int,
    observer: PlayObserver,
    finished: Mapping[RolloutKey, ScoredTrajectory],
) -> AsyncIterator[Group]:
    """Play `num_rollouts` rollouts of each (task index, task); yield each group when its last rollout is scored.

    With `player.branching`, `initial_rollouts` of them begin at the prompt and may branch. If they and their branches are
    fewer than `num_rollouts` when the last of them has ended, the rest begin at the prompt, all at once, and do not branch.
    With `monitoring_weight` the first rollout of a task is played before the others and says how many begin there.

    A rollout that a fault of ours spoils is played again from turn 0, or from its fork, `MAX_TRIES` times in all. Then
    it is void and one more attempt takes its place; a group gets at most `num_rollouts` more attempts ("outcomes are typed").
    A task whose prompt leaves no room for the response is void at once, with a warning.

    Args:
        seed: of the batch. A rollout's own seed depends only on it and on the rollout's key.
        finished: rollouts that an interrupted run of this batch finished. They are not played again.

    Raises:
        RequestTooLong: no task's prompt leaves room; raised after all groups are yielded.
        EngineLost: no engine is left. Finished rollouts were reported to `observer`.
    """
    pool = player.engine_pool
    async with pool.batch(shared=player.shares_engines) as batch:
        batch_player = BatchPlayer(
            player=player,
            batch=batch,
            seed=seed,
            observer=observer,
            finished=finished,
            is_exact=all(engine.capabilities.is_deterministic for engine in pool.engines.values()),
            max_request_tokens=pool.max_request_tokens or None,
        )
        groups = [
            asyncio.ensure_future(_collect_group(index, task, batch_player, num_rollouts=num_rollouts)) for index, task in tasks
        ]
        try:
            for closed in asyncio.as_completed(groups):
                yield await closed
            too_long = batch_player.too_long
            if groups and len(too_long) == len(groups):
                raise RequestTooLong(f"every task of the batch is too long. The first: {too_long[min(too_long)]}")
        finally:
            await end(groups)
            for opened in batch_player.opened:  # of rollouts that were cancelled before their first turn
                await opened.close()


async def _collect_group(index: int, task: Task, batch_player: BatchPlayer, *, num_rollouts: int) -> Group:
    with user_code.blaming(f"for task {task.id!r}"):
        return await _play_group(index, task, batch_player, num_rollouts=num_rollouts)


async def _play_group(index: int, task: Task, batch_player: BatchPlayer, *, num_rollouts: int) -> Group:
    scored: list[ScoredTrajectory] = []
    num_void, too_long = 0, None
    branching = batch_player.player.branching
    num_first = num_rollouts
    if branching is not None:
        from strop.rollout import branch_tree  # most stages do not branch

        num_first, batch_player, failed = await branch_tree.play_ahead(index, task, batch_player, branching, num_rollouts)
    attempts = range(num_first)
    while attempts and too_long is None:
        keys = [RolloutKey(task_index=index, attempt=attempt) for attempt in attempts]
        if branching is not None and attempts.start == 0:
            tree = branch_tree.Tree(task, batch_player, branching, budget=num_rollouts - num_first)
            results = [*failed, *await tree.play(keys[len(failed) :])]
        else:
            played = all_of([batch_player.play(task, key) for key in keys if key not in batch_player.finished])
            results = [*(batch_player.finished[key] for key in keys if key in batch_player.finished), *await played]
        scored += [result for result in results if isinstance(result, ScoredTrajectory)]
        num_void += sum(not isinstance(result, ScoredTrajectory) for result in results)
        too_long = next((result for result in results if isinstance(result, RequestTooLong)), None)
        last = attempts.stop
        attempts = range(last, min(last + num_rollouts - len(scored), num_first + num_rollouts))
    if too_long is not None:
        logger.warning("void: %s", too_long)
        if not scored:
            batch_player.too_long[index] = too_long
    scored.sort(key=lambda each: each.trajectory.key)
    return Group(task=task, task_index=index, trajectories=tuple(scored), num_void=num_void)
