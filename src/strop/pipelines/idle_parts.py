"""Warns of parts of a reward that are for no rollout of a step: the sum goes without them, and no metric tells of that."""

from __future__ import annotations

from collections.abc import Sequence

from strop.pipelines.stage import StageContext
from strop.rewards import AnyRewardConfig, SumRewardConfig
from strop.rewards.routing import idle_parts
from strop.types import Group


class IdleParts:
    """Tells of each part once, behind the first step that has no task for it."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._told: set[str] = set()

    def look(self, step: int, reward: AnyRewardConfig, groups: Sequence[Group]) -> None:
        """Look at a step whose rollouts were judged by `reward`."""
        if not isinstance(reward, SumRewardConfig):
            return
        for name, why in idle_parts(reward, [group.task for group in groups]).items():
            if name not in self._told:
                self._told.add(name)
                self._context.warn(
                    f"step {step}: reward.parts.{name} is for none of its {len(groups)} tasks, so all were judged without it:"
                    f" {why} If no later step brings such tasks, mend `where`, or carry the column along with tasks.facts."
                )
