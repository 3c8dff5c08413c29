"""What a recipe may say about the scheduling of rollouts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from strop.config import Config


class SchedulerConfig(Config):
    """Which rollout starts next, where, and how much memory is kept for it."""

    policy: Literal["scheduler", "static"] = "scheduler"  # static: rStar2-Agent's baseline (arXiv 2508.20722, Figure 7)
    order: Literal["fifo", "longest_first"] = (
        "longest_first"  # among rollouts that were not started; equals go first in, first out
    )
    num_probes: NonNegativeInt = 2  # rollouts of each group that start before any group's third: they tell how long it is
    affinity: float = Field(default=0.05, ge=0, le=1)  # how much fuller than the emptiest engine the one with the prompt may be
    oversubscription: float = Field(
        default=1.0, ge=1
    )  # times KV memory that may be reserved; above 1 engines may have to evict
    suspend_after_s: PositiveFloat | None = None  # a tool that runs longer gives its rollout's memory back, if somebody waits
    max_replacements: NonNegativeInt = 2  # engines that a step opens in place of lost ones
