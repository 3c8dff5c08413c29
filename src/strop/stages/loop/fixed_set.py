"""The base of stages that play a fixed set of tasks with a policy that does not learn from it.

`filter` and `rejection_sampling` keep what it gets right. Evaluations play their tasks in the same way.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from strop.errors import MachineError, TaskError
from strop.recipe.recipe import Recipe
from strop.recipe.stage import Estimate, Machine, PlayedKeys, Sampled, check_differ
from strop.reports.number_format import counted
from strop.runs.lineage import weights_digest
from strop.stages.context import StageContext, product_of, tasks_to_play
from strop.stages.loop.engines import MachineStage, task_files, tasks_there
from strop.stages.loop.ledger import settle_rollouts, void_reasons, write_timeline
from strop.stages.loop.rollouts import open_player
from strop.types import Group

_TASKS_AT_ONCE = 256  # their rollouts are held in memory until their groups are closed


class FixedSetKeys(PlayedKeys):
    """Keys of a stage in which a model plays a fixed set of tasks."""

    init: str = Field(description="Stage whose model plays.")
    num_tasks: int | None = Field(default=None, ge=1, description="Number of tasks, the first of them. Default: all.")
    k: int = Field(default=8, ge=1, description="Rollouts of each task.")

    @model_validator(mode="after")
    def _can_differ(self) -> Self:
        check_differ(self.sampling.temperature, self.k, "1.0 is usual. Or set k = 1.")
        return self

    @property
    def num_first_tasks(self) -> int:
        return min(self.num_tasks or super().num_first_tasks, super().num_first_tasks)


class FixedSetStage(MachineStage):
    """Base of stages in which a model plays a fixed set of tasks."""

    root_keys = frozenset({"engine", "sandbox", "scheduler", "tools"})
    plays = True

    config: FixedSetKeys

    def files(self) -> Mapping[str, Path]:
        config = self.config
        return task_files("tasks", config.tasks, [config.played_split]) if config.has_own_tasks else {}

    def plan(self, name: str, recipe: Recipe, machine: Machine) -> Estimate:
        config = self.config
        there = tasks_there(name, config, recipe, config.num_tasks)  # None where nothing says how many there are
        limit = "up to " if there is None else ""
        num_tasks = config.num_tasks or 0 if there is None else min(there, config.num_tasks or there)
        num = num_tasks * config.k
        tasks = f"{limit}{counted(num_tasks, 'task')}" if num_tasks else "all tasks"
        total = f" = {limit}{counted(num, 'rollout')}" if num_tasks else ""
        return Estimate(
            arithmetic=f"{tasks} x {counted(config.k, 'rollout')}{total}",
            sampled=Sampled(tokens=num * config.sampling.max_tokens, rollouts=num),
        )


class SampledKeys(FixedSetKeys):
    """Keys of a stage that makes rows from the rollouts of a fixed set of tasks, and writes the outcome of each task."""

    data: tuple[str, ...] = Field(default=(), description="Stages whose tasks are played, instead of `tasks`.")

    @model_validator(mode="after")
    def _has_an_end(self) -> Self:
        if self.num_tasks is None and not self.data and self.tasks.is_endless:
            raise ValueError(f"tasks.kind = {self.tasks.kind!r} makes tasks without end. Set num_tasks, or data.")
        return self


async def play_tasks(
    context: StageContext, stage: FixedSetKeys, *, seed: int, weights: str = "", tasks_at_once: int | None = None
) -> AsyncIterator[Group]:
    """Yield a group of `k` rollouts for each of the stage's tasks, in their order.

    Rollouts that an interrupted try finished are not played again. No more groups are held than are played at once.

    Args:
        weights: digest of the model, if it is known; only rollouts that were sampled from the same weights count as finished.

    Raises:
        UserError: there are no tasks, or an engine could never hold a rollout of them.
        MachineError: every rollout is void.
    """
    model, source = product_of(context.run, stage.init), tasks_to_play(context, stage)
    num = stage.num_tasks if source.num_tasks is None else min(stage.num_tasks or source.num_tasks, source.num_tasks)
    if num is None:
        raise TaskError(f"stages.{context.name}: its tasks have no end. Set num_tasks.")
    context.started(num, 0)
    num_closed = num_void = num_valid = 0
    parts: list[Path] = []
    size = tasks_at_once or _TASKS_AT_ONCE
    weights = weights or weights_digest(model)
    async with open_player(context, stage, model) as player:
        player.check(stage, source)
        for number, start in enumerate(range(0, num, size)):
            parts.append(context.directory.rollouts(number))  # one for each part, because a ledger is read whole on resume
            with player.ledger(parts[-1], weights) as ledger:
                tasks = [(index, source.task(index)) for index in range(start, min(start + size, num))]
                waiting: dict[int, Group] = {}  # closed before one that comes before it
                next_index = start
                async for group in player.play(stage, tasks, ledger, num_rollouts=stage.k, seed=seed):
                    waiting[group.task_index] = group
                    num_closed, num_void = num_closed + 1, num_void + group.num_void
                    num_valid += len(group.trajectories)
                    while next_index in waiting:
                        yield waiting.pop(next_index)
                        next_index += 1
                    context.progress.step({}, num_closed)
            write_timeline(context, number, player.pool.last_batch)
    for problem in await asyncio.to_thread(lambda: [*settle_rollouts(context.directory, upto=len(parts), keep=len(parts))]):
        context.warn(problem)
    if not num_void:
        return
    reasons = Counter(reason for rollouts in parts for reason in void_reasons(rollouts))
    why = reasons.most_common(1)[0][0].rstrip(".") if reasons else "the reward could not judge them"
    why = f"The most frequent reason: {why}."
    if not num_valid:
        where = parts[0].parent
        raise MachineError(f"stages.{context.name}: every rollout of {num} tasks is void. {why} All reasons are in {where}.")
    context.warn(f"{num_void} rollouts are void and are not counted. {why}")


def why_not_right(is_right: bool | None) -> str:
    """Return why an attempt with this verdict is not kept; empty if it is right."""
    if is_right is None:
        return "no verdict: no part of the reward says whether it is right"
    return "" if is_right else "wrong: its answer is not right"
