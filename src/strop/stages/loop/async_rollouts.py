"""The rollouts of each RL step with `async_rollouts`: those of the next steps are sampled while one is trained on.

A step's rollouts begin when at most `max_staleness` publications are left before the step itself. So at most
`max_staleness + 1` batches are in flight or wait, the oldest is trained on first, and no rollout is older than
`max_staleness` when it is. A publication waits until all that was begun is played. Which weights sample a step then follows
from the step only, never from timing, so a run and its resumed twin sample from the same. A checkpoint is written when the
rollouts of the next `max_staleness` steps are on disk, so a resumed run needs no older weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import Field

from strop.config import Config
from strop.errors import RunError
from strop.evaluation.metrics import num_sampled_tokens
from strop.recipe.schedule import Done
from strop.run_directory import read_lines
from strop.stages.context import StageContext
from strop.stages.loop.ledger import ledger_of, read_rollouts
from strop.stages.loop.rollouts import PlayedStep, StepRollouts
from strop.stages.loop.training_stage import RolloutKeys
from strop.types import Group, RolloutKey, Task

StageT = TypeVar("StageT", bound=RolloutKeys)


class AsyncRolloutsConfig(Config):
    """How far ahead of the updates rollouts are sampled."""

    max_staleness: int = Field(
        ge=0, description="k: publications that a rollout's weights may be behind. Up to k + 1 steps are in flight or wait."
    )
    too_old: Literal["wait", "drop"] = Field(
        default="drop",
        description="Rollouts that a resumed run finds and that are older, since max_staleness was lowered. drop: their tasks"
        " are played again; wait: they are trained on in their turn.",
    )


def read_closed(rollouts: Path, task_of: Callable[[int], Task]) -> tuple[list[Group], Mapping[str, Any]] | None:
    """The groups of that rollouts file's step, each rollout judged by itself, and the line that closed its ledger.

    None if the step was not played to its end.

    Raises:
        RunError: a rollout is missing.
    """
    closed = next((line for line in reversed(read_lines(ledger_of(rollouts))) if line["event"] == "closed"), None)
    if closed is None:
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
        play: (step, the stage as its schedule has it, checksum of the policy) -> the rollouts.
    """

    def __init__(
        self,
        context: StageContext,
        stage: StageT,
        config: AsyncRolloutsConfig,
        rollouts: StepRollouts,
        play: Callable[[int, StageT, str], Awaitable[PlayedStep]],
    ) -> None:
        self._context, self._stage, self._config, self._rollouts, self._play = context, stage, config, rollouts, play
        self._begun: dict[int, asyncio.Future[PlayedStep]] = {}  # steps that are in flight or wait
        self._last = 0  # step that was begun
        self._version = -1  # of the weights that this try began with

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
        """Wait until everything that was begun is played and on disk. Raises its error."""
        if self._begun:
            await asyncio.wait(self._begun.values())
            for each in self._begun.values():
                each.result()

    async def close(self) -> None:
        """Cancel what was begun. Finished rollouts are on disk."""
        for each in self._begun.values():
            each.cancel()
        await asyncio.gather(*self._begun.values(), return_exceptions=True)

    async def _find_or_play(self, step: int, weights: str, before: asyncio.Future[PlayedStep] | None) -> PlayedStep:
        """The rollouts of `step`, played when those `before` are, unless an earlier try has played them."""
        if before is not None:
            await asyncio.wait({before})
            before.result()
        # The number of updates is not known yet; `RL.Config` refuses schedules that depend on it.
        stage = self._stage.at(Done(steps=step - 1, updates=0))
        path, num_dropped = self._context.directory.rollouts(step), 0
        if (found := read_closed(path, self._rollouts.tasks_of(stage).task)) is not None:
            groups, closed = found
            oldest = step - 1 - max(_ages(groups, step), default=0)
            if oldest <= self._version:  # else the weights are of a part of an earlier try that is repeated
                if step - 1 - oldest <= self._config.max_staleness or self._config.too_old == "wait":
                    return await self._judged(stage, groups, closed)
                num_dropped = sum(len(group.trajectories) for group in groups)
                self._drop(step, path, num_dropped, oldest)
        played = await self._play(step, stage, weights)
        return replace(played, figures={**played.figures, "rollout/dropped_too_old": float(num_dropped)})

    def _drop(self, step: int, path: Path, num_dropped: int, version: int) -> None:
        path.unlink()
        ledger_of(path).unlink()
        self._context.event("rollouts_dropped", step=step, rollouts=num_dropped, policy_version=version)
        self._context.warn(
            f"step {step}: {num_dropped} rollouts of policy version {version} are dropped and their tasks played again: they"
            f" would be {step - 1 - version} publications old, and max_staleness is {self._config.max_staleness}."
        )

    async def _judged(self, stage: StageT, groups: Sequence[Group], closed: Mapping[str, Any]) -> PlayedStep:
        await self._rollouts.player.judge_by(stage.reward)
        groups = [self._rollouts.player.judge(group) for group in groups]
        return PlayedStep(
            groups=groups,
            verdict=self._rollouts.player.verdict,
            figures={**closed["figures"], "rollout/dropped_too_old": 0.0},
            time_s=closed["time_s"],
            num_tokens=num_sampled_tokens(groups),
        )


def staleness_metrics(groups: Sequence[Group], step: int) -> dict[str, float]:
    """Mean and maximum over the step's sampled tokens of the publications since their weights; {} where there are none."""
    ages = _ages(groups, step)
    return {"rollout/staleness_mean": sum(ages) / len(ages), "rollout/staleness_max": float(max(ages))} if ages else {}


def _ages(groups: Sequence[Group], step: int) -> list[int]:
    """Of each sampled token the publications between its weights and those of `step`."""
    return [
        step - 1 - version
        for group in groups
        for scored in group.trajectories
        for turn in scored.trajectory.turns
        for version, num_tokens in turn.completion.spans
        for _ in range(num_tokens)
    ]
