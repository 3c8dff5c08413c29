"""Expert iteration: roll out, keep what is right, imitate it, publish, write down; one step after the other.

tasks -> play -> scored groups -> select those that are right -> SFT, some epochs -> publish -> run log
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import torch

from strop.algorithms.expert_iteration import epoch_batches, select_right
from strop.algorithms.protocol import Selection
from strop.errors import CannotLearnError
from strop.evaluation.summary import entropy_metrics, rollout_metrics, tool_call_metrics
from strop.evaluation.verdict import verdict_of
from strop.pipelines.demonstrations import as_demonstration
from strop.pipelines.idle_parts import IdleParts
from strop.pipelines.recipe import ExpertIterationStage
from strop.pipelines.skipped import update_or_keep
from strop.pipelines.stage import StageContext, model_of
from strop.pipelines.step_figures import (
    Clock,
    cost_metrics,
    how_many_cut_off,
    not_made,
    selection_metrics,
    update_metrics,
    update_rows,
    why_calls_fail,
    why_no_progress,
    why_some_are_void,
    why_void,
)
from strop.pipelines.step_rollouts import StepRollouts, open_rollouts, write_selection
from strop.pipelines.stepping import StepResult, take_steps
from strop.pipelines.validation import write_product
from strop.reports.scales import counted
from strop.training.opening import open_trainer
from strop.training.protocol import Trainer, UpdateReport
from strop.training.sft import pack_demonstrations, sft_token_loss, sft_token_statistics
from strop.types import Group


async def run_expert_iteration_stage(context: StageContext, stage: ExpertIterationStage) -> tuple[Path, str]:
    """Train from the last checkpoint to the last step; returns the model directory and one sentence about it."""
    init = model_of(context.run, stage.init)
    async with AsyncExitStack() as opened:
        trainer = open_trainer(init, stage.trainer)
        opened.push_async_callback(trainer.close)
        rollouts = await opened.enter_async_context(open_rollouts(context, stage, init))
        taken = await take_steps(context, stage, trainer, rollouts, _Loop(context, stage, trainer, rollouts).step)
        product = await write_product(context, trainer, stage)
        updates = counted(trainer.num_updates, "update")
        return product, f"{counted(taken.steps, 'step')} of expert iteration, {updates}{taken.note}"


class _Loop:
    """What stays the same from step to step."""

    def __init__(self, context: StageContext, stage: ExpertIterationStage, trainer: Trainer, rollouts: StepRollouts) -> None:
        self.context, self.stage, self.trainer, self.rollouts = context, stage, trainer, rollouts
        self.idle_parts = IdleParts(context)

    async def step(self, step: int, stage: ExpertIterationStage, weights: str) -> StepResult:
        """One step of `stage`, as its schedule has it now, from the policy with checksum `weights`."""
        clock = Clock()
        played = await self.rollouts.play(step, stage, weights)
        groups = played.groups
        rollout_s = clock.lap()
        verdict, drops_repeats = verdict_of(stage.reward), stage.drop_repeats
        selections = [
            select_right(group, is_right=lambda each: verdict(each) is True, drops_repeats=drops_repeats) for group in groups
        ]
        reports, gave_up = await self._imitate(step, selections)
        problems = _why_stuck(groups, selections, reports)
        if not reports:
            reports = not_made(stage.epochs, problems[0], update=self.trainer.num_updates)
        problems += why_some_are_void(groups, self.context.directory.rollouts(step)) if problems else []
        update_s = clock.lap()
        # Imitation is a policy gradient whose advantage is 1 wherever something was kept.
        imitated = [[torch.ones(len(each.trajectory.ids)) for each in selection.kept] for selection in selections]
        write_selection(self.context, step, selections, imitated)
        weights = await self.rollouts.publish(self.trainer, version=step)
        figures = (
            rollout_metrics(groups, verdict)
            | entropy_metrics(groups)
            | dict(played.figures)
            | tool_call_metrics(groups)
            | selection_metrics(selections)
            | _kept_metrics(selections)
            | update_metrics(reports)
            | cost_metrics(reports)
            | {
                "rollout/tokens_per_s": played.tokens_per_s,
                "time/rollout_s": rollout_s,
                "time/update_s": update_s,
                "time/publish_s": clock.lap(),
                "time/step_s": clock.total,
            }
        )
        self.idle_parts.look(step, stage, groups)
        self.context.event("step_finished", step=step, weights=weights)
        return StepResult(figures=figures, weights=weights, problems=problems, updates=update_rows(reports), gave_up=gave_up)

    async def _imitate(self, step: int, selections: Sequence[Selection]) -> tuple[list[UpdateReport], CannotLearnError | None]:
        """SFT on what was kept, at temperature 1, as on anybody's demonstrations; no update where nothing was.

        Raises:
            CannotLearnError: too many were skipped, before any was made; after one it is returned.
        """
        stage = self.stage
        kept = [as_demonstration(scored.trajectory) for selection in selections for scored in selection.kept]
        reports: list[UpdateReport] = []
        try:
            for epoch in range(stage.epochs):
                seed = self.context.seed("batches", step)
                for rows in epoch_batches(kept, batch_size=stage.batch_size, epoch=epoch, seed=seed):
                    batch = pack_demonstrations(rows)
                    reports.append(
                        await update_or_keep(self.context, self.trainer, batch, sft_token_loss, sft_token_statistics, step=step)
                    )
        except CannotLearnError as error:
            if all(report.is_skipped for report in reports):
                raise
            return reports, error
        return reports, None


def _kept_metrics(selections: Sequence[Selection]) -> dict[str, float]:
    """The share of rollouts that were kept, of all that were not void; left out where all were."""
    num_scored = sum(len(selection.group.trajectories) for selection in selections)
    num_kept = sum(len(selection.kept) for selection in selections)
    return {"rollout/kept_fraction": num_kept / num_scored} if num_scored else {}


def _why_stuck(groups: Sequence[Group], selections: Sequence[Selection], reports: Sequence[UpdateReport]) -> list[str]:
    """Why this step taught nothing, in words for the user (law 11); empty when it did."""
    if void := why_void(groups):
        return void
    if not any(selection.kept for selection in selections):
        num = sum(len(group.trajectories) for group in groups)
        why = f"none of {num} rollouts is right, so there is nothing to imitate.{how_many_cut_off(groups)}"
        return [why, *why_calls_fail(groups)]
    return why_no_progress(groups, reports)
