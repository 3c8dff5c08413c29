"""Takes the steps of a stage: metrics, checkpoints, validation on held-out tasks, the schedule, the time budget."""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias, TypeVar

from strop.errors import CannotLearnError
from strop.recipe.schedule import Done, Steps, why_over
from strop.recipe.stage import PlayedKeys
from strop.run_directory import read_json
from strop.stages.context import StageContext, StageMetrics, open_tasks
from strop.stages.evaluation import Eval, Voting, summarise
from strop.stages.loop import checkpoints
from strop.stages.loop.checkpoints import RECORD, CheckpointedKeys, CheckpointWriter, keep_if_best, write_product
from strop.stages.loop.ledger import settle_rollouts, void_reasons
from strop.stages.loop.rollouts import GroupPlayer, StepRollouts
from strop.stages.loop.training_stage import RolloutKeys, TrainingKeys, ValidationConfig
from strop.stages.loop.updates import StepUpdates, update_metrics
from strop.tasks.files import IndexedRows
from strop.training.optimizer import UpdateReport
from strop.training.reward_model import RewardTrainer
from strop.training.trainer import Trainer
from strop.types import Task, derive_seed


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


_FIGURES = (
    "accuracy",
    "accuracy_low",
    "accuracy_high",
    "pass_at_k",
    "maj_at_k",
    "length_tokens_mean",
    "truncated_fraction",
    "tool_error_rate",
)


class Validator:
    """Plays the held-out tasks of one stage, the same each time, on engines that hold the policy.

    Raises:
        ConfigError: no engine can hold a rollout of them.
    """

    def __init__(self, player: GroupPlayer, stage: TrainingKeys, config: ValidationConfig) -> None:
        self._context, self._player, self._config = player.context, player, config
        evaluation, recipe = self._as_evaluation(stage), player.context.recipe
        # Other tasks than those of evaluations: on the tasks that chose it the best policy looks too good.
        seed = derive_seed("validation", recipe.seed)
        self._tasks: list[tuple[int, Task]] = []
        sets: dict[str, range] = {}
        for key, tasks in config.sources(stage.tasks).items():
            source = open_tasks(recipe, self._context.name, tasks, seed=seed, split=config.split, key=key)
            player.check(evaluation, source)
            num = config.num_tasks if source.num_tasks is None else min(config.num_tasks, source.num_tasks)
            first = len(self._tasks)
            self._tasks += [(first + index, source.task(index)) for index in range(num)]
            sets[f"{key.removeprefix('validation.tasks.')}/"] = range(first, first + num)
        self._sets = {"": range(len(self._tasks))} | (sets if config.tasks else {})  # by what their metrics begin with

    async def validate(
        self, trainer: Trainer, step: int, stage: TrainingKeys, *, last: int, weights: str = ""
    ) -> dict[str, float]:
        """The metrics of the policy after `step`; {} if it is not due, or every rollout is void.

        Args:
            stage: as its schedule has it now.
            last: the last step, which is always measured.
            weights: checksum of the policy if the engines hold it; otherwise it is published first.
        """
        if not self._config.is_due(step, last=last):
            return {}
        started, metrics = time.perf_counter(), dict[str, float]()
        context, evaluation, player = self._context, self._as_evaluation(stage), self._player
        weights = weights or await player.publish(trainer, version=step)
        seed = derive_seed("validation", context.recipe.seed, "rollouts")
        with player.ledger(context.directory.validation(step), weights) as ledger:
            playing = player.play(evaluation, self._tasks, ledger, num_rollouts=evaluation.k, seed=seed)
            groups = sorted([group async for group in playing], key=lambda group: group.task_index)
        if not any(group.trajectories for group in groups):
            context.warn(f"step {step}: every rollout of the validation is void, so it has no result.")
            return {}
        votes = None  # where a task has one attempt, or answers cannot be compared
        if self._config.k > 1:
            async with Voting(stage.reward, context.runner) as voting:
                votes = await voting.votes(groups)
        for prefix, places in self._sets.items():
            of_set = [at for at, group in enumerate(groups) if group.task_index in places]
            if not any(groups[at].trajectories for at in of_set):
                continue
            votes_of_set = None if votes is None else [votes[at] for at in of_set]
            found = summarise(evaluation, [groups[at] for at in of_set], seed=context.recipe.seed, votes=votes_of_set)
            if "accuracy" in found and not prefix:
                await keep_if_best(context, trainer, step, found)
            metrics |= {f"validation/{prefix}{figure}": float(found[figure]) for figure in _FIGURES if figure in found}
        return metrics | {"time/validation_s": time.perf_counter() - started}

    def _as_evaluation(self, stage: TrainingKeys) -> Eval.Config:
        config, keys = self._config, {name: getattr(stage, name) for name in PlayedKeys.model_fields}
        keys["sampling"] = config.sampling_of(stage.sampling)
        if config.max_turns is not None:
            keys["limits"] = stage.limits.model_copy(update={"max_turns": config.max_turns})
        return Eval.Config(init=stage.init, split=config.split, num_tasks=config.num_tasks, k=config.k, **keys)


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
    note: str  # for the stage's summary: the rule that held, in words; empty if none ended it
    product: Path


ItemT = TypeVar("ItemT")
StageT = TypeVar("StageT", bound=RolloutKeys)
Step: TypeAlias = Callable[[int, StageT, str], Awaitable[StepResult]]
"""(number from 1, the stage as its schedule has it now, checksum of the policy to sample from) -> result."""
Take: TypeAlias = Callable[[int], Awaitable[tuple[UpdateReport, Mapping[str, float]]]]
"""(number from 1) -> the one update of the step, and its metrics."""
Validate: TypeAlias = Callable[[int], Awaitable[Mapping[str, float]]] | None
"""(number from 1) -> metrics of the policy after the step; None without any."""


def batch_at(rows: IndexedRows[ItemT], step: int, *, batch_size: int, seed: int, with_rest: bool = False) -> list[ItemT]:
    """Return the batch of a step, a pure function of its arguments: each epoch in another order.

    The remainder of an epoch is left out, or with `with_rest` its last batch. Rows of all lengths are mixed: batches sorted by
    length would weigh a token of a short batch more than one of a long batch.
    """
    batches_per_epoch = -(-len(rows) // batch_size) if with_rest else len(rows) // batch_size
    epoch, position = divmod(step, batches_per_epoch)
    order = shuffled(len(rows), derive_seed(seed, "epoch", epoch))
    return [rows[index] for index in order[position * batch_size : (position + 1) * batch_size]]


@lru_cache(maxsize=1)  # the current epoch: to shuffle 200 000 numbers at each step takes longer than a small step
def shuffled(num: int, seed: int) -> array[int]:
    """Return the numbers below `num` in the order that `seed` decides."""
    order = array("Q", range(num))
    random.Random(seed).shuffle(order)
    return order


async def take_updates(
    context: StageContext,
    stage: CheckpointedKeys,
    trainer: Trainer | RewardTrainer,
    steps: int,
    take: Take,
    validate: Validate = None,
) -> Path:
    """Take the steps after the last checkpoint of a stage without rollouts. Return the directory of the stage's product.

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
            of_update = update_metrics([report]).items()  # loss and statistics have names of the stage's own in `figures`
            shared = {key: value for key, value in of_update if not key.startswith(("policy/", "update/loss"))}
            figures = {**figures, **shared, "time/step_s": time.perf_counter() - started}
            clock.step_finished(is_validated=False)
            validation = {} if validate is None else await validate(step)
            metrics.append(step, {**figures, **validation, **clock.metrics})
            if writer.is_due(step) and step < steps:
                await writer.save(step)
    return await write_product(context, trainer, stage)


async def take_steps(
    context: StageContext, stage: StageT, trainer: Trainer, rollouts: StepRollouts, take: Step[StageT]
) -> Taken:
    """Take the steps after the last checkpoint of a stage with rollouts, and write its product.

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
            validation = dict[str, float]()
            if validator is not None and not gave_up:
                validation = await validator.validate(trainer, step, now, weights=weights, last=last)
            clock.validated(validation)
            num_stuck = num_stuck + 1 if result.problems else 0
            # Before the checkpoint that makes it count.
            of_step = {**result.metrics, **validation, **clock.metrics, "update/stuck_steps": num_stuck}
            log.append(step, of_step, result.updates.rows())
            if clock.is_spent:
                left_s = clock.metrics["budget/left_s"]
                context.event("budget_spent", step=step, budget_s=stage.budget_s, left_s=left_s)
                if left_s < 0:
                    past = f"step {step} ended {-left_s:.1f} s past budget_s = {stage.budget_s:g}"
                    context.warn(f"{past}: it took longer than the one before.")
            if over := _why_over_early(stage, log.steps):
                because, returns_best = _ending(context, stage, log.steps)
                context.event("ended_early", step=step, because=because)
                if returns_best:
                    context.warn(f"ended after step {step}: {because}")
            if step < stage.steps and not over and not clock.is_spent:
                await _follow_schedule(context, stage, trainer, before, Done(steps=step, updates=trainer.num_updates))
            problems = [*result.problems]
            reasons = Counter(void_reasons(context.directory.rollouts(step)) if problems else ())
            for why, _ in reasons.most_common(1):
                problems.append(f"{reasons.total()} rollouts are void, most often because: {why.rstrip('.')}.")
            for problem in problems:
                context.warn(f"step {step} cannot learn: {problem}")
            is_hopeless = num_stuck >= stage.give_up_after
            # The last step is always saved: a resumed run must not find time, or a reason, for another.
            if (writer.is_due(step) and step < stage.steps) or gave_up or is_hopeless or clock.is_spent or over:
                await writer.save(step)
            if gave_up:
                raise gave_up
            if is_hopeless:
                raise CannotLearnError(
                    f"stages.{context.name}: {num_stuck} steps in a row could not learn; of step {step}:"
                    f" {'; '.join(problems)} Everything up to step {step} is in {context.directory.path}. Try easier"
                    " tasks, a better starting point (SFT), more rollouts per task, or raise give_up_after to continue."
                )
    if writer.settling is not None:
        await asyncio.to_thread(writer.settling.join)
    await asyncio.to_thread(settle, step)
    because, returns_best = _ending(context, stage, log.steps)
    product = await write_product(context, trainer, stage, returns_best=returns_best)
    return Taken(steps=len(log.steps), note=f"; ended early: {because}" if because else "", product=product)


def _ending(context: StageContext, stage: RolloutKeys, steps: Steps) -> tuple[str, bool]:
    """The rule that ended the stage after `steps`, in words, and whether the best policy is passed on and not the last.

    Both are the same in a run that resumes there.
    """
    collapse = why_over([rule for rule in stage.end_when if rule.is_collapse], steps)  # also after the last step
    over, record = _why_over_early(stage, steps) or collapse, context.directory.best / RECORD
    returns_best = bool(collapse) and record.exists()
    if returns_best:
        over += f"; the policy is that of step {read_json(record)['step']}, the best that a validation found"
    return over, returns_best


def _why_over_early(stage: RolloutKeys, steps: Steps) -> str:
    """The rule of `end_when` that holds after `steps`, in words; empty if none does, or these are all steps of the stage."""
    return why_over(stage.end_when, steps) if stage.end_when and len(steps) < stage.steps else ""


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
