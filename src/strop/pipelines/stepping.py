"""Takes a stage step by step, from its last checkpoint to its end, and gives up where it cannot learn."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from strop.errors import CannotLearnError
from strop.pipelines import checkpoints
from strop.pipelines.budget import StageClock
from strop.pipelines.endings import why_over
from strop.pipelines.recipe import DpoStage, ExpertIterationStage, RewardModelStage, RlStage, RolloutStage, SftStage
from strop.pipelines.schedule import Done, RulesWatch, due
from strop.pipelines.stage import StageContext, StageMetrics
from strop.pipelines.step_rollouts import StepRollouts
from strop.training.protocol import Checkpointed, Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step left behind."""

    figures: Mapping[str, float]
    weights: str  # checksum of the policy that was published at its end
    problems: Sequence[str]  # why it could not learn, in words; empty when it did
    updates: Sequence[Mapping[str, Any]]  # a row for each of its updates
    gave_up: CannotLearnError | None  # after some of its updates, that those which were skipped were too many; None where not


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """How a stage came to its end: fewer steps than it may have where its budget or a rule of `end_when` ended it."""

    steps: int
    why_over: str  # what rule held, in words; empty where none ended it

    @property
    def note(self) -> str:
        """For the stage's summary."""
        return f"; ended early: {self.why_over}" if self.why_over else ""


StageT = TypeVar("StageT", RlStage, ExpertIterationStage)
Step: TypeAlias = Callable[[int, StageT, str], Awaitable[StepResult]]
"""(number from 1, the stage as its schedule has it now, checksum of the policy to sample from) -> what is left of the step."""


async def take_updates(
    context: StageContext,
    stage: SftStage | RewardModelStage | DpoStage,
    trainer: Checkpointed,
    steps: int,
    take: Callable[[int], Awaitable[Mapping[str, float]]],
) -> None:
    """Every step of a stage without rollouts that is not behind the last checkpoint, with its metrics and its checkpoint.

    Args:
        take: number of the step, from 1 -> its metrics.

    Raises:
        CannotLearnError: too many updates in a row were skipped; the state before the last is saved.
    """
    async with checkpoints.open_writer(context, trainer, stage) as writer:
        done = await checkpoints.resume(context, trainer)
        context.progress.stage_started(context.name, stage.kind, steps, done)
        metrics = context.metrics(done_steps=done)
        for step in range(done + 1, steps + 1):
            await writer.check()
            try:
                figures = await take(step)
            except CannotLearnError:
                await writer.save_if_missing(step - 1)
                raise
            metrics.append(step, figures)
            if step % stage.checkpoint_every == 0 and step < steps:
                await writer.save(step)
        metrics.close()


async def take_steps(
    context: StageContext, stage: StageT, trainer: Trainer, rollouts: StepRollouts, take: Step[StageT]
) -> Taken:
    """Every step that is not behind the last checkpoint, with its line of metrics, its warnings and its checkpoint.

    Raises:
        CannotLearnError: `give_up_after` steps in a row could not learn (law 11), or too many updates in a row were skipped.
            The state is saved: of this step if it made any update, else of the one before.
    """
    async with checkpoints.open_writer(context, trainer, stage) as writer:
        done = await checkpoints.resume(context, trainer)
        context.progress.stage_started(context.name, stage.kind, stage.steps, done)
        metrics: StageMetrics = context.metrics(done_steps=done)
        weights = await rollouts.publish(trainer, version=done)
        watch = RulesWatch(stage.schedule, metrics.steps)
        before = Done(steps=done, updates=trainer.num_updates, held=watch.held)
        num_stuck = int(metrics.last.get("update/stuck_steps", 0))
        clock = StageClock(stage.budget_s, metrics.last)
        over: str = why_over(stage.end_when, metrics.steps) if before.steps < stage.steps else ""
        while before.steps < stage.steps and not clock.is_spent and not over:
            step = before.steps + 1
            await writer.check()
            now = stage.at(before)
            try:
                result = await take(step, now, weights)
            except CannotLearnError:  # nothing came of this step, so the state is that of the one before
                await writer.save_if_missing(step - 1)
                raise
            due_anyway = stage.validation is not None and stage.validation.is_due(step, last=stage.steps)
            clock.step_finished(is_validated=due_anyway)
            is_last = clock.is_spent or bool(why_over(stage.end_when, [*metrics.steps, {"step": step, **result.figures}]))
            last = step if is_last else stage.steps
            weights = result.weights
            found = {} if result.gave_up else await rollouts.validate(trainer, step, now, weights, last=last)
            clock.validated(found)
            num_stuck = num_stuck + 1 if result.problems else 0
            # Before the checkpoint that makes it count.
            of_step = {**result.figures, **found, **clock.metrics, "update/stuck_steps": num_stuck}
            metrics.append(step, of_step, result.updates)
            _tell_of_budget(context, stage, clock, step)
            if step < stage.steps and (over := why_over(stage.end_when, metrics.steps)):
                context.event("ended_early", step=step, because=over)
            watch.look(metrics.steps)
            after = Done(steps=step, updates=trainer.num_updates, held=watch.held)
            if step < stage.steps and not over and not clock.is_spent:
                await _follow_schedule(context, stage, trainer, before, after, watch.why)
            before = after
            for problem in result.problems:
                context.warn(f"step {step} cannot learn: {problem}")
            is_hopeless = num_stuck >= stage.give_up_after
            # A step that was made the last is saved: a try that resumes behind it must not find time, or a reason, for another.
            is_due = step % stage.checkpoint_every == 0 and step < stage.steps
            if result.gave_up or is_hopeless or clock.is_spent or over or is_due:
                await writer.save(step)
            if result.gave_up:
                raise result.gave_up
            if is_hopeless:
                raise CannotLearnError(
                    f"stages.{context.name}: {num_stuck} steps in a row could not learn; of step {step}:"
                    f" {'; '.join(result.problems)} Everything up to step {step} is in {context.directory.path}. Try easier"
                    " tasks, a better starting point (SFT), more rollouts per task, or raise give_up_after to go on."
                )
        metrics.close()
        return Taken(steps=before.steps, why_over=over)


def _tell_of_budget(context: StageContext, stage: RolloutStage, clock: StageClock, step: int) -> None:
    """Say that no time is left, if that is so; warn where the step, longer than the one before, ended too late."""
    if stage.budget_s is None or not clock.is_spent:
        return
    left_s = clock.metrics["budget/left_s"]
    context.event("budget_spent", step=step, budget_s=stage.budget_s, left_s=left_s)
    if left_s < 0:
        context.warn(
            f"step {step} ended {-left_s:.1f} s past budget_s = {stage.budget_s:g}: it was not foreseen to take so long."
        )


async def _follow_schedule(
    context: StageContext, stage: RolloutStage, trainer: Trainer, before: Done, after: Done, why: Mapping[int, str]
) -> None:
    """Do what came due in a step, before its checkpoint: so a run that resumes has done it, and does it once.

    Args:
        why: what held, in words, of entries that have a rule, by their places.
    """
    for place, entry in due(stage.schedule, before, after).items():
        if entry.refresh_reference:
            await trainer.refresh_reference()
        if entry.reset_optimizer:
            await trainer.reset_optimizer()
        because = {"because": why[place]} if place in why else {}
        context.event("scheduled", step=after.steps + 1, when=entry.moment, what=entry.what, **because)
        if not entry.is_repeated:
            reason = f", since {why[place]}" if place in why else f" ({entry.moment})"
            context.progress.note(f"from step {after.steps + 1}: {entry.what}{reason}")
