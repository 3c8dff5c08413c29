"""The rollouts of each RL step with `max_staleness = 1`: sampled while the step before is trained on.

Step k + 1 is sampled from the weights that step k begins with. Which weights those are follows from the step only, never from
timing, so a run and its resumed twin sample from the same. A step ends, and its checkpoint is written, when the next one's
rollouts are all on disk, so a resumed run needs no older weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

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


def read_closed(rollouts: Path, task_of: Callable[[int], Task]) -> tuple[list[Group], Mapping[str, Any]] | None:
    """The groups of that rollouts file's step, each rollout judged by itself, and the line that closed its ledger.

    None if the step was not played to its end, or a rollout is missing.
    """
    closed = next((line for line in reversed(read_lines(ledger_of(rollouts))) if line["event"] == "closed"), None)
    if closed is None:
        return None
    finished = {scored.trajectory.key: scored for scored in read_rollouts(rollouts, weights=closed["weights"])}
    groups = []
    for group in closed["groups"]:
        keys, index = [RolloutKey(**key) for key in group["keys"]], group["task_index"]
        if any(key not in finished for key in keys):
            return None
        trajectories = tuple(finished[key] for key in keys)
        groups.append(Group(task=task_of(index), task_index=index, trajectories=trajectories, num_void=group["num_void"]))
    return groups, closed


class AsyncRollouts(Generic[StageT]):
    """Plays at most one step while another is trained on.

    Args:
        stage: as the recipe has it.
        play: (step, the stage as its schedule has it, checksum of the policy) -> the rollouts.
    """

    def __init__(
        self,
        context: StageContext,
        stage: StageT,
        rollouts: StepRollouts,
        play: Callable[[int, StageT, str], Awaitable[PlayedStep]],
    ) -> None:
        self._context, self._stage, self._rollouts, self._play = context, stage, rollouts, play
        self._next: asyncio.Future[PlayedStep] | None = None

    async def take(self, step: int, stage: StageT, weights: str) -> PlayedStep:
        """The rollouts of `step`; `stage` is as its schedule has it for that step.

        Raises:
            RunError: a resumed run lacks rollouts that were played ahead, whose weights are gone.
        """
        if self._next is not None:
            task, self._next = self._next, None
            return await task
        if step == 1:
            return await self._play(step, stage, weights)
        return await self._read(step, stage)

    def begin(self, step: int, weights: str) -> None:
        """Start to play `step`, if there is such a step."""
        if step <= self._stage.steps:
            # The number of updates is not known yet; `RL.Config` refuses schedules that depend on it.
            stage = self._stage.at(Done(steps=step - 1, updates=0))
            self._next = asyncio.ensure_future(self._play(step, stage, weights))

    async def settle(self) -> None:
        """Wait until the step that was begun is played and on disk. Raises its error."""
        if self._next is not None:
            await asyncio.wait({self._next})
            self._next.result()

    async def close(self) -> None:
        """Cancel the step that was begun. Its finished rollouts are on disk."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)

    async def _read(self, step: int, stage: StageT) -> PlayedStep:
        path = self._context.directory.rollouts(step)
        found = read_closed(path, self._rollouts.tasks_of(stage).task)
        if found is None:
            raise RunError(
                f"{path}: rollouts of step {step}, which were played before the checkpoint of step {step - 1}, are missing, and"
                " the older weights that sampled them are gone. Restore the file and its ledger, or remove"
                f" {self._context.directory.checkpoint(step - 1)} to continue from the checkpoint before it."
            )
        groups, closed = found
        await self._rollouts.player.judge_by(stage.reward)
        groups = [self._rollouts.player.judge(group) for group in groups]
        return PlayedStep(
            groups=groups,
            verdict=self._rollouts.player.verdict,
            figures=closed["figures"],
            time_s=closed["time_s"],
            num_tokens=num_sampled_tokens(groups),
        )


def staleness_metrics(groups: Sequence[Group], step: int) -> dict[str, float]:
    """Mean and maximum over the step's sampled tokens of the publications since their weights; {} where there are none."""
    found = [
        step - 1 - turn.completion.policy_version
        for group in groups
        for scored in group.trajectories
        for turn in scored.trajectory.turns
        for _ in turn.completion.ids
    ]
    return {"rollout/staleness_mean": sum(found) / len(found), "rollout/staleness_max": float(max(found))} if found else {}
