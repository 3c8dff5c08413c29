"""Takes the steps of a stage: metrics, checkpoints, the schedule, the time budget."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from strop.errors import CannotLearnError
from strop.recipe.schedule import Done, Steps, why_over
from strop.run_directory import read_json
from strop.stages.context import StageContext, StageMetrics
from strop.stages.loop import checkpoints
from strop.stages.loop.checkpoints import CheckpointedKeys, CheckpointWriter
from strop.stages.loop.ledger import settle_rollouts, void_reasons
from strop.stages.loop.rollouts import StepRollouts
from strop.stages.loop.training_stage import RolloutKeys
from strop.stages.loop.updates import StepUpdates, single_update_metrics
from strop.stages.loop.validation import RECORD, Validator
from strop.training.optimizer import UpdateReport
from strop.training.trainer import Trainer
from strop.training.weights import Checkpointed


class Stopwatch:
    """Times the phases of a step."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._times: dict[str, float] = {}

    def lap(self, name: str = "") -> None:
        """The phase `name`, or a further part of it, ends now; without a name it is not kept."""
        now = time.perf_counter()
        if name:
            self._times[name] = self._times.get(name, 0.0) + now - self._last
        self._last = now

    @property
    def times(self) -> dict[str, float]:
        """Seconds of each phase, and of the step until the last lap."""
        return {**self._times, "time/step_s": self._last - self._start}


class StageClock:
    """Measures the time of a stage over all its runs: updates, validations and waits for checkpoints.

    A step begins only if one as long as the last, and the validation before it, would end within the budget. Steps that are
    repeated after a crash count once.
    """

    def __init__(
        self, budget_s: float | None, last: Mapping[str, float], *, now: Callable[[], float] = time.perf_counter
    ) -> None:
        """`last` are the metrics of the last step of an earlier run of the stage; may be empty."""
        self._budget_s, self._now = budget_s, now
        self._elapsed_s = last.get("time/elapsed_s", 0.0)
        self._validation_s = 0.0  # of the last one
        self._started = now() - self._elapsed_s - last.get("time/validation_s", 0.0)
        self._step_started = now()
        self.is_spent = last.get("budget/is_spent", 0.0) == 1.0

    def step_finished(self, *, is_validated: bool) -> None:
        """The step's policy is published. `is_validated` if it is measured before the next step begins."""
        self._elapsed_s = self._now() - self._started
        if self._budget_s is not None:
            next_step_s = self._now() - self._step_started + (self._validation_s if is_validated else 0.0)
            self.is_spent = self._elapsed_s + next_step_s > self._budget_s

    def validated(self, metrics: Mapping[str, float]) -> None:
        """`metrics` of the validation; {} without one."""
        self._validation_s = metrics.get("time/validation_s", self._validation_s)
        self._step_started = self._now()

    @property
    def metrics(self) -> dict[str, float]:
        """The time at which the last step ended, and what is left of the budget."""
        metrics = {"time/elapsed_s": self._elapsed_s}
        if self._budget_s is not None:
            metrics |= {"budget/left_s": self._budget_s - self._elapsed_s, "budget/is_spent": float(self.is_spent)}
        return metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of a step."""

    metrics: Mapping[str, float]
    weights: str  # checksum of the policy that was published at its end
    problems: Sequence[str]  # why it could not learn, in words; empty when it did
    updates: StepUpdates


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """How a stage ended. It took fewer steps than `steps` if its budget or a rule of `end_when` ended it."""

    steps: int
    why_over: str  # the rule that held, in words; empty if none ended it
    returns_best: bool  # whether that rule found a collapse, so that the best policy is passed on and not the last

    @property
    def note(self) -> str:
        """For the stage's summary."""
        return f"; ended early: {self.why_over}" if self.why_over else ""


StageT = TypeVar("StageT", bound=RolloutKeys)
Step: TypeAlias = Callable[[int, StageT, str], Awaitable[StepResult]]
"""(number from 1, the stage as its schedule has it now, checksum of the policy to sample from) -> result."""


async def take_updates(
    context: StageContext,
    stage: CheckpointedKeys,
    trainer: Checkpointed,
    steps: int,
    take: Callable[[int], Awaitable[tuple[UpdateReport, Mapping[str, float]]]],
    validate: Callable[[int], Awaitable[Mapping[str, float]]] | None = None,
) -> None:
    """Take the steps after the last checkpoint of a stage without rollouts.

    Args:
        take: (number from 1) -> the one update of the step, and its metrics.
        validate: (number from 1) -> metrics of the policy after the step.

    Raises:
        CannotLearnError: too many updates in a row were skipped; the state before the last step is saved.
    """
    async with CheckpointWriter(context, trainer, stage) as writer:
        done = await checkpoints.resume(context, trainer)
        context.started(steps, done)
        metrics = StageMetrics(context, done_steps=done)
        clock = StageClock(None, metrics.last)
        for step in range(done + 1, steps + 1):
            await writer.check()
            started = time.perf_counter()
            try:
                report, figures = await take(step)
            except CannotLearnError:
                await writer.save_if_missing(step - 1)
                raise
            figures = {**figures, **single_update_metrics(report), "time/step_s": time.perf_counter() - started}
            clock.step_finished(is_validated=False)
            validation = {} if validate is None else await validate(step)
            metrics.append(step, {**figures, **validation, **clock.metrics})
            if writer.is_due(step) and step < steps:
                await writer.save(step)
        metrics.close()


async def take_steps(
    context: StageContext, stage: StageT, trainer: Trainer, rollouts: StepRollouts, take: Step[StageT]
) -> Taken:
    """Take the steps after the last checkpoint of a stage with rollouts.

    Raises:
        CannotLearnError: `give_up_after` steps in a row could not learn, or too many updates in a row were skipped. The state
            is saved: of this step if it made any update, else of the one before.
    """
    validator = None if stage.validation is None else Validator(rollouts.player, stage, stage.validation)

    def settle(upto: int) -> None:
        for problem in settle_rollouts(context.directory, upto=upto, keep=stage.keep_rollouts):
            context.warn(problem)

    async with CheckpointWriter(context, trainer, stage, settle=settle) as writer:
        done = await checkpoints.resume(context, trainer)
        context.started(stage.steps, done)
        log = StageMetrics(context, done_steps=done)
        weights = await rollouts.publish(trainer, version=done)
        num_stuck = int(log.last.get("update/stuck_steps", 0))
        clock = StageClock(stage.budget_s, log.last)
        step, over = done, _why_over_early(stage, log.steps)
        while step < stage.steps and not clock.is_spent and not over:
            step += 1
            await writer.check()
            before = Done(steps=step - 1, updates=trainer.num_updates)
            now = stage.at(before) if stage.schedule else stage
            try:
                result = await take(step, now, weights)
            except CannotLearnError:  # nothing was updated, so the state is that of the step before
                await writer.save_if_missing(step - 1)
                raise
            weights = result.weights
            context.event("step_finished", step=step, weights=weights)
            is_due = stage.validation is not None and stage.validation.is_due(step, last=stage.steps)
            clock.step_finished(is_validated=is_due)
            over = _why_over_early(stage, [*log.steps, result.metrics])
            last = step if clock.is_spent or over else stage.steps
            gave_up = result.updates.gave_up
            validation: Mapping[str, float] = {}
            if validator is not None and not gave_up:
                validation = await validator.validate(trainer, step, now, weights=weights, last=last)
            clock.validated(validation)
            num_stuck = num_stuck + 1 if result.problems else 0
            # Before the checkpoint that makes it count.
            of_step = {**result.metrics, **validation, **clock.metrics, "update/stuck_steps": num_stuck}
            log.append(step, of_step, result.updates.rows())
            if clock.is_spent:
                _report_budget(context, stage, clock, step)
            over = _why_over_early(stage, log.steps)
            if over:
                ended = _taken(context, stage, log.steps)
                context.event("ended_early", step=step, because=ended.why_over)
                if ended.returns_best:
                    context.warn(f"ended after step {step}: {ended.why_over}")
            if step < stage.steps and not over and not clock.is_spent:
                await _follow_schedule(context, stage, trainer, before, Done(steps=step, updates=trainer.num_updates))
            problems = [*result.problems, *(_why_void(context, step) if result.problems else ())]
            for problem in problems:
                context.warn(f"step {step} cannot learn: {problem}")
            is_hopeless = num_stuck >= stage.give_up_after
            # The last step is always saved: a resumed run must not find time, or a reason, for another.
            is_saved = writer.is_due(step) and step < stage.steps
            if is_saved or gave_up or is_hopeless or clock.is_spent or over:
                await writer.save(step)
            if gave_up:
                raise gave_up
            if is_hopeless:
                raise CannotLearnError(
                    f"stages.{context.name}: {num_stuck} steps in a row could not learn; of step {step}:"
                    f" {'; '.join(problems)} Everything up to step {step} is in {context.directory.path}. Try easier"
                    " tasks, a better starting point (SFT), more rollouts per task, or raise give_up_after to continue."
                )
        log.close()
    if writer.settling is not None:
        await asyncio.to_thread(writer.settling.join)
    await asyncio.to_thread(settle, step)
    return _taken(context, stage, log.steps)


def _why_void(context: StageContext, step: int) -> list[str]:
    """A sentence with the most frequent reason where rollouts of a step are void."""
    reasons = Counter(void_reasons(context.directory.rollouts(step)))
    return [f"{reasons.total()} rollouts are void, most often because: {why.rstrip('.')}." for why, _ in reasons.most_common(1)]


def _taken(context: StageContext, stage: RolloutKeys, steps: Steps) -> Taken:
    """How the stage ends after `steps`, the same in a run that resumes there."""
    collapse = why_over([rule for rule in stage.end_when if rule.is_collapse], steps)  # also after the last step
    over, record = _why_over_early(stage, steps) or collapse, context.directory.best / RECORD
    returns_best = bool(collapse) and record.exists()
    if returns_best:
        over += f"; the policy is that of step {read_json(record)['step']}, the best that a validation found"
    return Taken(steps=len(steps), why_over=over, returns_best=returns_best)


def _why_over_early(stage: RolloutKeys, steps: Steps) -> str:
    """The rule of `end_when` that holds after `steps`, in words; empty if none does, or these are all steps of the stage."""
    return why_over(stage.end_when, steps) if stage.end_when and len(steps) < stage.steps else ""


def _report_budget(context: StageContext, stage: RolloutKeys, clock: StageClock, step: int) -> None:
    """Record that the budget is spent. Warn if the step, longer than the one before, exceeded it."""
    left_s = clock.metrics["budget/left_s"]
    context.event("budget_spent", step=step, budget_s=stage.budget_s, left_s=left_s)
    if left_s < 0:
        context.warn(
            f"step {step} ended {-left_s:.1f} s past budget_s = {stage.budget_s:g}: it took longer than the one before."
        )


async def _follow_schedule(context: StageContext, stage: RolloutKeys, trainer: Trainer, before: Done, after: Done) -> None:
    """Apply what became due in a step, before its checkpoint, so that a resumed run does it once."""
    for entry in [each for each in stage.schedule if each.is_due(before, after)]:
        if entry.refresh_reference:
            await trainer.refresh_reference()
        if entry.reset_optimizer:
            await trainer.reset_optimizer()
        context.event("scheduled", step=after.steps + 1, when=entry.moment, what=entry.what)
        if entry.every_updates is None:
            context.progress.note(f"from step {after.steps + 1}: {entry.what} ({entry.moment})")
