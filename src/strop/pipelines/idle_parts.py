"""Warns of parts of a reward that are for no rollout of a step: the sum goes without them, and no metric tells of that.

A stage whose schedule has other tasks to come is not told: parts may be there for those.
"""

from __future__ import annotations

from collections.abc import Sequence

from strop.pipelines.recipe import SteppedStage
from strop.pipelines.stage import StageContext
from strop.rewards import SumRewardConfig
from strop.rewards.routing import idle_parts
from strop.types import Group


class IdleParts:
    """Tells of each part once, behind the first step that has no task for it."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._told: set[str] = set()

    def look(self, step: int, stage: SteppedStage, groups: Sequence[Group]) -> None:
        """Look at a step of the `stage`, with the settings that it had then."""
        reward = stage.reward
        brought = [entry.tasks for entry in stage.schedule if entry.tasks is not None]
        if not isinstance(reward, SumRewardConfig) or (brought and brought[-1] != stage.tasks):
            return
        for name, why in idle_parts(reward, [group.task for group in groups]).items():
            if name not in self._told:
                self._told.add(name)
                self._context.warn(
                    f"step {step}: reward.parts.{name} is for none of its {len(groups)} tasks, so all were judged without it:"
                    f" {why} If no later step brings such tasks, mend `where`, or carry the column along with tasks.facts."
                )
