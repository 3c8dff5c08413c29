"""Difficulty filter: keeps the tasks that the current policy gets right neither too often nor too rarely."""

from __future__ import annotations

from dataclasses import asdict
from typing import Self

from pydantic import Field, model_validator

from strop.curation.rules import Outcome, outcome_of
from strop.errors import TaskError
from strop.evaluation.metrics import require_verdict, verdict_of
from strop.recipe.stage import Product, StageResult
from strop.stages.context import StageContext
from strop.stages.loop.fixed_set import FixedSetStage, SampledKeys, play_tasks
from strop.tasks.files import writing_rows


class Filter(FixedSetStage):
    """Keeps the tasks that a policy gets right neither too often nor too rarely.

    rStar2-Agent (arXiv 2508.20722), section 4.3, drops those that are right 8 times of 8.
    """

    makes = Product.TASKS

    class Config(SampledKeys):
        """Keys of `kind = "filter"`."""

        min_right: int = Field(default=0, ge=0, description="Fewest right rollouts of a task that is kept.")
        max_right: int | None = Field(
            default=None, ge=0, description="Most right rollouts of a task that is kept. Default: k - 1."
        )

        @property
        def most_right(self) -> int:
            return self.k - 1 if self.max_right is None else self.max_right

        @model_validator(mode="after")
        def _keeps_something(self) -> Self:
            require_verdict(self.reward, "tasks are kept by how many rollouts are right")
            if not self.min_right <= self.most_right <= self.k:
                raise ValueError(
                    f"min_right is {self.min_right} and max_right {self.most_right} of k = {self.k} rollouts. Choose min_right"
                    " <= max_right <= k."
                )
            return self

    config: Config

    async def run(self, context: StageContext) -> StageResult:
        """Play, judge and write. Raises `TaskError` if no task is kept."""
        config, directory = self.config, context.directory
        num_kept = num_dropped = num_unknown = 0
        first, verdict = "", verdict_of(config.reward)
        with (
            writing_rows(directory.dropped) as drop,
            writing_rows(directory.kept) as keep,
            writing_rows(directory.outcomes) as add_outcome,
        ):
            async for group in play_tasks(context, config, seed=context.seed("rollouts")):
                outcome = outcome_of(group, verdict)
                add_outcome(asdict(outcome))
                if reason := why_dropped(outcome, config):
                    num_dropped += 1
                    first = first or reason
                    counts = {"num_right": outcome.num_right, "num_judged": outcome.num_judged}
                    drop(asdict(group.task) | {"reason": reason, **counts})
                else:
                    num_kept += 1
                    num_unknown += not outcome.num_judged
                    keep(asdict(group.task))
        num = num_kept + num_dropped
        if not num_kept:
            raise TaskError(
                f"stages.{context.name}: none of {num} tasks has {config.min_right} to {config.most_right} right rollouts of"
                f" {config.k}; of the first: {first}. Loosen min_right or max_right, or give it other tasks. All reasons are in"
                f" {directory.dropped}."
            )
        unknown = f" ({num_unknown} of them without a verdict)" if num_unknown else ""
        summary = f"{num_kept} of {num} tasks kept{unknown}, {num_dropped} dropped"
        return StageResult(summary=summary, product=directory.kept)


def why_dropped(outcome: Outcome, stage: Filter.Config) -> str:
    """Return why a task is dropped; empty if it is kept.

    A rollout without a verdict may be right or wrong: a task is dropped only if no verdict on it could change that.
    """
    num_right, num_unknown = outcome.num_right, max(0, stage.k - outcome.num_judged)
    of = f"{num_right} of {stage.k} rollouts are right" + (f", {num_unknown} void" if num_unknown else "")
    if num_right > stage.most_right:
        return f"{of}, more than max_right = {stage.most_right}: too easy"
    if num_right + num_unknown < stage.min_right:
        return f"{of}, fewer than min_right = {stage.min_right}: too hard, or its answer is wrong"
    return ""
