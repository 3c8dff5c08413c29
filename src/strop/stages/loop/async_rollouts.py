"""The rollouts of each RL step with `async_rollouts`: those of the next steps are sampled while one is trained on.

A step's rollouts begin when at most `max_staleness` publications are left before the step itself. So at most
`max_staleness + 1` batches are in flight or wait, the oldest is trained on first, and no token is older than `max_staleness`
when it is.

A publication waits until all that was begun is played. Which weights sample a step then follows from the step only, never
from timing, so a run and its resumed twin sample from the same. A checkpoint is written when the rollouts of the next
`max_staleness` steps are on disk, so a resumed run needs no older weights.

With `partial` a publication waits for nothing: rollouts go on with the new weights, and those of several steps are in flight
together. Such a run cannot be repeated. Resumed, it trains on whatever was finished, and counts what was sampled after its
checkpoint, from weights that are gone, as sampled from those of the checkpoint.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, Literal, Self, TypeAlias, TypeVar

from pydantic import Field, model_validator

from strop.config import Config
from strop.errors import ConfigError, RunError
from strop.evaluation.metrics import num_sampled_tokens
from strop.recipe.recipe import Recipe
from strop.recipe.schedule import Done
from strop.rewards import judge_group
from strop.rollout.environment import end
from strop.run_directory import read_lines
from strop.stages.loop.ledger import ledger_of, read_rollouts
from strop.stages.loop.rollouts import PlayedStep, StepRollouts
from strop.stages.loop.training_stage import RolloutKeys
from strop.types import Group, RolloutKey, ScoredTrajectory, Task, Turn

StageT = TypeVar("StageT", bound=RolloutKeys)
Play: TypeAlias = Callable[[int, StageT, str], Awaitable[PlayedStep]]
"""(step, the stage as its schedule has it, checksum of the policy) -> the rollouts."""
DROPPED = "rollout/dropped_too_old"


class AsyncRolloutsConfig(Config):
    """How far ahead of the updates rollouts are sampled."""

    max_staleness: int = Field(
        ge=0, description="k: publications that a rollout's weights may be behind. Up to k + 1 steps are in flight or wait."
    )
    too_old: Literal["wait", "drop"] = Field(
        default="drop",
        description="Rollouts that a resumed run finds and that are older. drop: their tasks are played again; wait: they are"
        " trained on in their turn.",
    )
    partial: bool = Field(
        default=False,
        description="Publications wait for no rollout: those in flight go on with the new weights. No two such runs are equal.",
    )

    @model_validator(mode="after")
    def _is_ahead(self) -> Self:
        if self.partial and not self.max_staleness:
            raise ValueError("partial rollouts need max_staleness of at least 1: with 0 none is in flight at a publication.")
        return self

    def problems(self, key: str, recipe: Recipe) -> Iterator[ConfigError]:
        """Why `recipe` cannot have it."""
        engine = recipe.engine
        if self.max_staleness and not engine.is_apart:
            why = "is set, but engine and trainer compute in one process, where they would take turns"
            yield ConfigError(f"{key} {why}. Use a server engine, or Ray with engine.own_process = true.")
        if self.max_staleness and engine.sleeps:
            why = "plays rollouts while the trainer computes, but engine.sleep is true: engines sleep meanwhile"
            yield ConfigError(f"{key} {why}. Leave one of them out.")
        if self.partial and not engine.can_keep_requests:
            why = f"is true, but engines of kind {engine.kind!r} end their requests when they take weights"
            yield ConfigError(f"{key}.partial {why}. Leave it out, or use another kind.")
        if self.partial and recipe.scheduler.policy == "static":
            why = "is true, but scheduler.policy = 'static' waits for whole batches"
            yield ConfigError(f"{key}.partial {why}. Set scheduler.policy = 'scheduler', or leave it out.")


def read_closed(rollouts: Path, task_of: Callable[[int], Task]) -> tuple[list[Group], Mapping[str, Any]] | None:
    """The groups of that rollouts file's step, each rollout judged by itself, and the line that closed its ledger.

    None if the step was not played to its end, or a later try did not end.

    Raises:
        RunError: a rollout is missing.
    """
    lines = [line for line in read_lines(ledger_of(rollouts)) if line["event"] in ("opened", "closed")]
    if not lines or (closed := lines[-1])["event"] != "closed":
        return None
    finished = {scored.trajectory.key: scored for scored in read_rollouts(rollouts, weights=closed["weights"])}
    groups = []
    for group in closed["groups"]:
        keys, index = [RolloutKey(**key) for key in group["keys"]], group["task_index"]
        if missing := [key for key in keys if key not in finished]:
            raise RunError(
                f"{rollouts}: {len(missing)} rollouts that {ledger_of(rollouts).name} has are missing, and the older weights"
                " that sampled them are gone. Restore the file, or remove both to play the step again from newer weights."
            )
        trajectories = tuple(finished[key] for key in keys)
        groups.append(Group(task=task_of(index), task_index=index, trajectories=trajectories, num_void=group["num_void"]))
    return groups, closed


class AsyncRollouts(Generic[StageT]):
    """Plays the steps after the one that is trained on.

    Args:
        stage: as the recipe has it.
    """

    def __init__(self, stage: StageT, config: AsyncRolloutsConfig, rollouts: StepRollouts, play: Play[StageT]) -> None:
        self._stage, self._config, self._rollouts, self._play = stage, config, rollouts, play
        self._context = rollouts.player.context
        self._begun: dict[int, asyncio.Future[PlayedStep]] = {}  # steps that are in flight or wait
        self._last = 0  # step that was begun
        self._version = -1  # of the weights that this try began with
        self._num_dropped: Counter[int] = Counter()  # rollouts, by step
        if config.partial:
            rollouts.reuse = self._reuse

    async def take(self, step: int, weights: str) -> PlayedStep:
        """The rollouts of `step`, the oldest. Begins the steps that may be sampled from the policy with checksum `weights`.

        Raises:
            RunError: a resumed run lacks rollouts whose weights are gone.
        """
        if self._version < 0:
            self._version = self._last = step - 1
        while self._last < min(step + self._config.max_staleness, self._stage.steps):
            before, self._last = self._begun.get(self._last), self._last + 1
            self._begun[self._last] = asyncio.ensure_future(self._find_or_play(self._last, weights, before))
        played = await self._begun[step]
        del self._begun[step]
        return played

    async def settle(self) -> None:
        """Wait until everything that was begun is played and on disk, unless it may be in flight. Raises its error."""
        if self._begun and not self._config.partial:
            await asyncio.wait(self._begun.values())
            for each in self._begun.values():
                each.result()

    async def close(self) -> None:
        """Cancel what was begun. Finished rollouts are on disk."""
        await end([*self._begun.values()])

    async def _find_or_play(self, step: int, weights: str, before: asyncio.Future[PlayedStep] | None) -> PlayedStep:
        """The rollouts of `step`, unless an earlier try has played them; if none is in flight, when those `before` are."""
        if before is not None and not self._config.partial:
            await asyncio.wait({before})
            before.result()
        # The number of updates is not known yet; `RL.Config` refuses schedules that depend on it.
        stage = self._stage.at(Done(steps=step - 1, updates=0))
        path = self._context.directory.rollouts(step)
        if (found := read_closed(path, self._rollouts.tasks_of(stage).task)) is not None:
            groups, closed = found
            finished = [scored for group in groups for scored in group.trajectories]
            if self._config.partial or all(max(_versions(each)) <= self._version for each in finished):
                if len(self._usable(step, finished)) == len(finished):
                    return self._judged(groups, closed)
                if not self._config.partial:  # else its ledger drops them
                    self._reuse(step, finished)
                    path.unlink()
                    ledger_of(path).unlink()
        played = await self._play(step, stage, weights)
        return replace(played, figures={**played.figures, DROPPED: float(self._num_dropped[step])})

    def _usable(self, step: int, finished: Sequence[ScoredTrajectory]) -> list[ScoredTrajectory]:
        """Those of a step's rollouts from earlier tries that are trained on: all of a task or none."""
        known = [_as_sampled_from(each, upto=self._version) for each in finished]
        if self._config.too_old == "wait":
            return known
        oldest = step - 1 - self._config.max_staleness
        too_old = {each.trajectory.key.task_index for each in known if min(_versions(each)) < oldest}
        return [each for each in known if each.trajectory.key.task_index not in too_old]

    def _reuse(self, step: int, finished: list[ScoredTrajectory]) -> list[ScoredTrajectory]:
        """`_usable`; counts and logs the others."""
        usable = self._usable(step, finished)
        if num_dropped := len(finished) - len(usable):
            self._num_dropped[step] += num_dropped
            version = min(*(min(_versions(each)) for each in finished), self._version)
            self._context.event("rollouts_dropped", step=step, rollouts=num_dropped, policy_version=version)
            self._context.warn(
                f"step {step}: {num_dropped} rollouts of earlier tries are dropped and their tasks played again. The oldest"
                f" would be {step - 1 - version} publications old; max_staleness is {self._config.max_staleness}."
            )
        return usable

    def _judged(self, groups: Sequence[Group], closed: Mapping[str, Any]) -> PlayedStep:
        known = [
            replace(group, trajectories=tuple(_as_sampled_from(each, upto=self._version) for each in group.trajectories))
            for group in groups
        ]
        judged = [judge_group(self._rollouts.player.reward, group) for group in known]
        figures, num_tokens = {**closed["figures"], DROPPED: 0.0}, num_sampled_tokens(judged)
        return PlayedStep(groups=judged, figures=figures, time_s=closed["time_s"], num_tokens=num_tokens)


def _versions(scored: ScoredTrajectory) -> list[int]:
    """Those of the weights that sampled it."""
    return [version for turn in scored.trajectory.turns for version, _ in turn.completion.spans] or [0]


def _as_sampled_from(scored: ScoredTrajectory, *, upto: int) -> ScoredTrajectory:
    """The rollout with `upto` as the version of all tokens that newer weights sampled."""
    if max(_versions(scored)) <= upto:
        return scored

    def known(turn: Turn) -> Turn:
        spans = turn.completion.spans
        older = tuple(span for span in spans if span[0] < upto)
        newer = sum(num for version, num in spans if version >= upto)
        return replace(turn, completion=replace(turn.completion, spans=(*older, (upto, newer)) if newer else older))

    trajectory = replace(scored.trajectory, turns=tuple(map(known, scored.trajectory.turns)))
    return replace(scored, trajectory=trajectory)


def staleness_metrics(groups: Sequence[Group], step: int) -> dict[str, float]:
    """Mean and maximum over the step's sampled tokens of the publications since their weights; {} where there are none."""
    num_of_age: Counter[int] = Counter()
    for turn in (turn for group in groups for scored in group.trajectories for turn in scored.trajectory.turns):
        for version, num_tokens in turn.completion.spans:
            num_of_age[step - 1 - version] += num_tokens
    if not (num := num_of_age.total()):
        return {}
    mean = sum(age * num_tokens for age, num_tokens in num_of_age.items()) / num
    return {"rollout/staleness_mean": mean, "rollout/staleness_max": float(max(num_of_age))}
