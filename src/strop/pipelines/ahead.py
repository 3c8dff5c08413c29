"""The rollouts of each RL step: played when the step begins, or ahead of it, while the step before is trained on.

Ahead, step k + 1 is sampled from the weights that step k begins with, while step k trains them. Which weights those are follows
from the step alone, never from who was faster, so a run and its resumed twin sample from the same (law 8). A step ends, and its
checkpoint is written, when the next one's rollouts are all on disk: whoever resumes there needs no older weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from strop.errors import RunError
from strop.pipelines.recipe import RlStage
from strop.pipelines.schedule import Done
from strop.pipelines.stage import StageContext
from strop.pipelines.step_rollouts import PlayedStep, StepRollouts
from strop.types import Group


class Ahead:
    """Hands out the rollouts of one step after the other, at most one of which is played while another is trained on."""

    def __init__(
        self, context: StageContext, stage: RlStage, rollouts: StepRollouts, *, is_used: Callable[[int, Group], bool]
    ) -> None:
        """
        Args:
            stage: as the recipe has it.
            is_used: whether anything is learnt from a group of a step.
        """
        self._context, self._stage, self._rollouts, self._is_used = context, stage, rollouts, is_used
        self._next: asyncio.Task[PlayedStep] | None = None

    async def take(self, step: int, stage: RlStage, weights: str) -> PlayedStep:
        """The rollouts of `step`, which is `stage` as its schedule has it now; `weights` is the checksum of the policy.

        Raises:
            RunError: a run that resumes lacks rollouts that were played ahead, and nobody has the weights that sampled them; or
                rollouts are of older weights than `max_staleness` allows.
        """
        if not self._stage.max_staleness:
            return await self._play(step, stage, weights)
        if self._next is not None:
            task, self._next = self._next, None
            played = await task
        elif step == 1:
            played = await self._play(step, stage, weights)
        else:
            played = await self._read(step, stage)
        if (found := max(stalenesses(played.groups, step), default=0)) > self._stage.max_staleness:
            raise RunError(
                f"stages.{self._context.name}: rollouts of step {step} are {found} publications behind, but max_staleness is"
                f" {self._stage.max_staleness}. Remove {self._context.directory.rollouts(step)} and the checkpoints after it."
            )
        return played

    def begin(self, step: int, weights: str) -> None:
        """Play `step` from now on, ahead, if that is asked for and there is such a step."""
        if self._stage.max_staleness and step <= self._stage.steps:
            # How many updates it will begin with is not known yet, and does not matter: `RlStage` refuses what hangs on it.
            stage = self._stage.at(Done(steps=step - 1, updates=0))
            self._next = asyncio.create_task(self._play(step, stage, weights))

    async def settle(self) -> None:
        """Wait until what was begun is played and on disk. Raises what ended it."""
        if self._next is not None:
            await asyncio.wait({self._next})
            self._next.result()

    async def close(self) -> None:
        """End what is still being played; what has finished of it is on disk."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)

    async def _play(self, step: int, stage: RlStage, weights: str) -> PlayedStep:
        return await self._rollouts.play(
            step,
            stage,
            weights,
            refill_rounds=stage.method.refill_rounds,
            is_used=lambda group: self._is_used(step, group),
            is_recorded=self._stage.max_staleness > 0,
        )

    async def _read(self, step: int, stage: RlStage) -> PlayedStep:
        played = await self._rollouts.read(step, stage)
        if played is None:
            path = self._context.directory.rollouts(step)
            raise RunError(
                f"{path}: the rollouts of step {step} were played ahead of the checkpoint of step {step - 1}, but are not all"
                " there, with their ledger, and the older weights that sampled them are gone. Restore both files, or remove"
                f" {self._context.directory.checkpoint(step - 1)} to go on from the checkpoint before it."
            )
        return played


def stalenesses(groups: Sequence[Group], step: int) -> list[int]:
    """Of each sampled token of a step: by how many publications its weights are older than those that the step begins with."""
    return [
        step - 1 - turn.completion.policy_version
        for group in groups
        for scored in group.trajectories
        for turn in scored.trajectory.turns
        for _ in turn.completion.ids
    ]


def staleness_metrics(groups: Sequence[Group], step: int) -> dict[str, float]:
    """Over the step's sampled tokens; {} where there are none."""
    found = stalenesses(groups, step)
    if not found:
        return {}
    return {"rollout/staleness_mean": sum(found) / len(found), "rollout/staleness_max": float(max(found))}
