"""Expert iteration: roll out, keep what is right, imitate it, publish, log.

Anthony, Tian and Barber (arXiv 1705.08439); with language models STaR (Zelikman et al., arXiv 2203.14465); Algorithm 2 of CS336
assignment 5, section 5.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Self, TypeVar

import torch
from pydantic import Field, model_validator

from strop.algorithms.method import Decision, Selection
from strop.errors import CannotLearnError
from strop.evaluation.metrics import entropy_metrics, require_verdict, rollout_metrics, tool_call_metrics
from strop.recipe.recipe import Recipe
from strop.recipe.schedule import ScheduleEntry
from strop.recipe.stage import Estimate, Machine, StageResult, check_differ
from strop.reports.number_format import counted
from strop.stages.context import StageContext, product_of
from strop.stages.conversations import as_demonstration
from strop.stages.loop.rollouts import StepRollouts, open_player, selection_metrics, write_selection
from strop.stages.loop.steps import StepResult, Stopwatch, take_steps
from strop.stages.loop.training_stage import RolloutKeys, RolloutStage
from strop.stages.loop.updates import StepUpdates, keep_skipped, update_metrics, why_nothing_learned
from strop.training.config import Schedule
from strop.training.sft import pack_demonstrations, sft_token_loss, sft_token_statistics
from strop.training.trainer import Trainer
from strop.types import Group, ScoredTrajectory, derive_seed

ItemT = TypeVar("ItemT")


def select_right(group: Group, *, is_right: Callable[[ScoredTrajectory], bool]) -> Selection:
    """Keep the rollouts that are right. What was voided is not in the group, so it is neither right nor wrong.

    Args:
        group: the rollouts of one task, in canonical order.
        is_right: whether a rollout is one to imitate.
    """
    right = Decision(is_kept=True, reason="kept: it is right", figures={})
    wrong = Decision(is_kept=False, reason="dropped: it is wrong", figures={})
    return Selection(group=group, decisions=tuple(right if is_right(scored) else wrong for scored in group.trajectories))


def epoch_batches(rows: Sequence[ItemT], *, batch_size: int, epoch: int, seed: int) -> list[list[ItemT]]:
    """All of `rows` once, in an order that seed and epoch decide, in batches of at most `batch_size` and of nearly equal size.

    The last rows are not left out, and they make no batch of their own: each token of a batch weighs 1/T, so one update on two
    rows would move the weights as far as one on thirty-two.
    """
    order = list(range(len(rows)))
    random.Random(derive_seed("expert-iteration", seed, epoch)).shuffle(order)
    num_batches = -(-len(order) // batch_size)
    return [[rows[index] for index in order[start::num_batches]] for start in range(num_batches)]


class ExpertIterationRun:
    """One run of the stage: what its steps share."""

    def __init__(self, context: StageContext, stage: ExpertIteration.Config, trainer: Trainer, rollouts: StepRollouts) -> None:
        self.context, self.stage, self.trainer, self.rollouts = context, stage, trainer, rollouts

    async def step(self, step: int, stage: ExpertIteration.Config, weights: str) -> StepResult:
        """One step of `stage`, as its schedule has it now, from the policy with checksum `weights`."""
        watch = Stopwatch()
        played = await self.rollouts.play(step, stage, weights)
        groups = played.groups
        watch.lap("time/rollout_s")
        await self.rollouts.sleep()
        verdict = self.rollouts.player.verdict
        selections = [select_right(group, is_right=lambda each: verdict(each) is True) for group in groups]
        updates = await self.imitate(step, selections)
        num = sum(len(group.trajectories) for group in groups)
        none_kept = f"none of {num} rollouts is right, so there is nothing to imitate"
        problems = why_nothing_learned(selections, updates, "", none_kept)
        if not updates.policy:
            updates.leave_out(stage.epochs, problems[0], update=self.trainer.num_updates)
        watch.lap("time/update_s")
        # Imitation is a policy gradient whose advantage is 1 for every token that is kept.
        imitated = [[torch.ones(len(each.trajectory.ids)) for each in selection.kept] for selection in selections]
        write_selection(self.context, step, selections, imitated)
        weights = await self.rollouts.publish(self.trainer, version=step)
        watch.lap("time/publish_s")
        metrics = rollout_metrics(groups, verdict) | entropy_metrics(groups) | dict(played.figures)
        metrics |= tool_call_metrics(groups) | selection_metrics(selections)
        if num:
            metrics["rollout/kept_fraction"] = metrics["groups/rollouts_used"] / num
        metrics |= update_metrics(updates.policy) | {"rollout/tokens_per_s": played.tokens_per_s, **watch.times}
        return StepResult(metrics=metrics, weights=weights, problems=problems, updates=updates)

    async def imitate(self, step: int, selections: Sequence[Selection]) -> StepUpdates:
        """SFT on what was kept, at temperature 1; no update where nothing was.

        Raises:
            CannotLearnError: too many updates were skipped, before any was made.
        """
        stage, updates = self.stage, StepUpdates()
        kept = [as_demonstration(scored.trajectory) for selection in selections for scored in selection.kept]
        try:
            for epoch in range(stage.epochs):
                seed = self.context.seed("batches", step)
                for rows in epoch_batches(kept, batch_size=stage.batch_size, epoch=epoch, seed=seed):
                    batch = pack_demonstrations(rows)
                    update = self.trainer.update(batch, sft_token_loss, sft_token_statistics)
                    updates.policy.append(await keep_skipped(self.context, batch, update, step=step))
        except CannotLearnError as error:
            updates.give_up(error)
        return updates


class ExpertIteration(RolloutStage):
    """SFT on the rollouts of a step that are right. CS336 assignment 5, section 5, takes five steps."""

    class Config(RolloutKeys):
        """Keys of `kind = "expert_iteration"`."""

        batch_size: int = Field(default=32, ge=1, description="Rollouts of one update, at most.")

        @model_validator(mode="after")
        def _adds_up(self) -> Self:
            require_verdict(self.reward, "rollouts are imitated if they are right")
            check_differ(self.sampling.temperature, self.group_size, "1.0 is usual. Or set group_size = 1.")
            if self.trainer.optimizer.schedule is Schedule.COSINE or self.trainer.optimizer.warmup_fraction:
                raise ValueError(
                    "trainer.optimizer has schedule = 'cosine' or a warmup_fraction, but the number of updates depends on how"
                    " many rollouts are right. Set schedule = 'constant', and warmup_updates if there is to be a warm-up."
                )
            return self

        def _schedule_problem(self, entry: ScheduleEntry) -> str:
            if entry.refresh_reference:
                return "expert iteration has no reference. Leave refresh_reference out."
            return super()._schedule_problem(entry)

    config: Config

    def plan(self, name: str, recipe: Recipe, machine: Machine) -> Estimate:
        config = self.config
        rollouts = config.tasks_per_step * config.group_size
        updates = config.epochs * -(-rollouts // config.batch_size)
        trained = rollouts * config.epochs * self.tokens_of_responses(updates)
        return self.estimate(
            name,
            recipe,
            arithmetic=f"{counted(config.steps, 'step')} x {config.tasks_per_step} tasks x {config.group_size} rollouts ="
            f" {rollouts} a step; those that are right are imitated for {counted(config.epochs, 'epoch')} in batches of up"
            f" to {config.batch_size}: up to {counted(updates, 'update')} a step",
            updates=updates,
            trained=config.as_trained(trained, rows=min(config.batch_size, rollouts), longest=recipe.engine.max_length),
        )

    async def run(self, context: StageContext) -> StageResult:
        """Train from the last checkpoint to the last step."""
        stage, init = self.config, product_of(context.run, self.config.init)
        async with AsyncExitStack() as opened:
            trainer = Trainer.from_directory(init, stage.trainer)
            opened.push_async_callback(trainer.close)
            rollouts = StepRollouts(await opened.enter_async_context(open_player(context, stage, init)), stage)
            run = ExpertIterationRun(context, stage, trainer, rollouts)
            taken = await take_steps(context, stage, trainer, rollouts, run.step)
            updates = counted(trainer.num_updates, "update")
            summary = f"{counted(taken.steps, 'step')} of expert iteration, {updates}{taken.note}"
            return StageResult(summary=summary, product=taken.product)
