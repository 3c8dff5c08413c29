"""Reinforcement learning. `RLRun.step` is one step: rollout, select, advantages, update, publish, log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import ClassVar, Self

from pydantic import Field, model_validator
from torch import Tensor

from strop.algorithms.losses import Mismatch
from strop.algorithms.method import WHOLE_REWARD, Column, Method, Selection, checked_advantages, checked_selection
from strop.analysis.statistics import are_missing, entropy_curves, scored_entropies
from strop.errors import CannotLearnError, ConfigError, UserError
from strop.evaluation.metrics import rollout_metrics, tool_call_metrics, verdict_of
from strop.recipe.recipe import Recipe
from strop.recipe.schedule import ScheduleEntry
from strop.recipe.stage import Estimate, Input, Machine, Product, StageResult
from strop.reports.number_format import counted
from strop.rollout.branching import BranchingConfig
from strop.stages.context import StageContext, product_of
from strop.stages.loop.async_rollouts import AsyncRollouts, AsyncRolloutsConfig, staleness_metrics
from strop.stages.loop.rollouts import PlayedStep, StepRollouts, open_player, selection_metrics, write_selection
from strop.stages.loop.steps import StepResult, Stopwatch, take_steps
from strop.stages.loop.training_stage import RolloutKeys, RolloutStage, check_schedule
from strop.stages.loop.updates import (
    StepUpdates,
    critic_metrics,
    gap_metrics,
    is_solved,
    keep_skipped,
    scored_advantages,
    update_metrics,
    why_none_kept,
    why_nothing_learned,
    why_tied,
)
from strop.training.batch import Ban, TokenBatch, pack, reweighted, split_by_group, tokens_saved
from strop.training.trainer import Trainer
from strop.types import Group


class RLRun:
    """One run of the stage: what its steps share."""

    def __init__(self, context: StageContext, stage: RL.Config, trainer: Trainer, rollouts: StepRollouts) -> None:
        self.context, self.stage, self.trainer, self.rollouts = context, stage, trainer, rollouts
        self.ahead = AsyncRollouts(stage, ahead, rollouts, self.play) if (ahead := stage.async_rollouts) else None

    async def step(self, step: int, stage: RL.Config, weights: str) -> StepResult:
        """One step of `stage`, as its schedule has it now, from the policy with checksum `weights`."""
        method, watch = stage.method, Stopwatch()

        # Rollout
        played = await (self.play(step, stage, weights) if self.ahead is None else self.ahead.take(step, weights))
        groups = played.groups
        await self.rollouts.sleep()
        watch.lap("time/ahead_wait_s" if self.ahead is not None else "")

        # Select
        selections = [self.select(step, group) for group in groups]

        # Advantages, over the whole step and not over a mini-batch
        advantages = checked_advantages(method, selections)
        parts = split_by_group(selections, stage.updates_per_step)
        batches = await self.pack(stage, parts, selections, advantages)
        batches, advantages = scored_advantages(method, selections, parts, batches, advantages)
        batches = [reweighted(batch, method) for batch in batches]
        watch.lap("time/score_s")

        # Update
        updates = await self.update(step, method, batches)
        tie = why_tied(groups, advantages, has_critic=method.critic is not None)
        problems = why_nothing_learned(selections, updates, tie, why_none_kept(selections))
        if not batches:
            num = stage.updates_in_step if step > stage.critic_only_steps else 0
            updates.leave_out(num, problems[0], update=self.trainer.num_updates)
        watch.lap("time/update_s")
        if self.ahead is not None:
            await self.ahead.settle()
            watch.lap("time/ahead_wait_s")

        # Publish
        entropies = scored_entropies(parts, batches) if stage.log_entropies else {}
        write_selection(self.context, step, selections, advantages, entropies)
        weights = await self.rollouts.publish(self.trainer, version=step)
        watch.lap("time/publish_s")

        # Log
        metrics = rollout_metrics(groups, self.rollouts.player.verdict) | dict(played.figures)
        metrics |= staleness_metrics(groups, step) if self.ahead is not None else {}
        metrics |= tool_call_metrics(groups) | selection_metrics(selections) | self.rollouts.branch_metrics(groups, step)
        metrics |= update_metrics(updates.policy)
        metrics |= entropy_curves(selections, entropies, self.rollouts.player.chat) if stage.log_entropies else {}
        if updates.critic:
            metrics |= critic_metrics(batches, updates.critic)
        if not metrics.get("rollout/staleness_max"):
            metrics |= gap_metrics(batches, updates.policy)
        metrics |= {"rollout/tokens_per_s": played.tokens_per_s, "time/rollout_s": played.time_s, **watch.times}
        problems = [] if is_solved(metrics, tie) else problems
        return StepResult(metrics=metrics, weights=weights, problems=problems, updates=updates)

    async def play(self, step: int, stage: RL.Config, weights: str) -> PlayedStep:
        """The rollouts of a step, with further tasks in place of groups of which nothing is selected."""

        def is_used(group: Group) -> bool:
            return bool(self.select(step, group).kept)

        return await self.rollouts.play(step, stage, weights, refill_rounds=stage.method.refill_rounds, is_used=is_used)

    def select(self, step: int, group: Group) -> Selection:
        """The rollouts of a group that are learned from."""
        seed = self.context.seed("select", step, group.task_index)
        return checked_selection(self.stage.method, group, group_size=self.stage.group_size, seed=seed)

    async def pack(
        self,
        stage: RL.Config,
        parts: Sequence[Sequence[Selection]],
        selections: Sequence[Selection],
        advantages: Sequence[Sequence[Tensor]],
    ) -> list[TokenBatch]:
        """The batch of each update, with every column that the method needs.

        A single update computes old log-probs itself, unless they are needed earlier. For several, all are scored before the
        first.
        """
        method, columns = stage.method, stage.method.needs
        if len(parts) * stage.epochs == 1:
            columns -= {Column.OLD_LOGPROBS}
            columns |= method.estimates_need
        columns |= {Column.OLD_ENTROPIES} if stage.log_entropies and are_missing(selections) else frozenset()
        of_group = {id(selection): each for selection, each in zip(selections, advantages, strict=True)}
        ban = Ban(ids=self.rollouts.player.chat.stop_ids, num_tokens=stage.sampling.min_tokens)
        temperature = stage.sampling.temperature
        batches = []
        for part in parts:
            of_part = [of_group[id(selection)] for selection in part]
            batch = pack(
                part, of_part, aggregation=method.aggregation, temperature=temperature, constant=method.constant, ban=ban
            )
            for column in sorted(columns):
                batch = await self.trainer.score(batch, column)
            batches.append(batch)
        return batches

    async def update(self, step: int, method: Method, batches: Sequence[TokenBatch]) -> StepUpdates:
        """Update the critic, if the method has one, and the policy with each batch, in each epoch.

        Raises:
            CannotLearnError: too many updates were skipped, before any was made.
        """
        context, trainer, updates = self.context, self.trainer, StepUpdates()
        try:
            for batch in [*batches] * self.stage.epochs:
                if method.critic is not None:
                    of_critic = trainer.update_critic(batch, method.critic.value_loss, method.critic.value_statistics)
                    updates.critic.append(await keep_skipped(context, batch, of_critic, step=step))
                if step > self.stage.critic_only_steps:
                    of_policy = trainer.update(batch, method.token_loss, method.token_statistics)
                    updates.policy.append(await keep_skipped(context, batch, of_policy, step=step))
        except CannotLearnError as error:
            updates.give_up(error)
        return updates


class RL(RolloutStage):
    """Reinforcement learning by a method."""

    class Config(RolloutKeys):
        """Keys of `kind = "rl"`."""

        also_called: ClassVar[Mapping[str, str]] = {"max_staleness": "async_rollouts.max_staleness"}

        method: Method = Field(description="How advantages and the loss are computed: a kind, or a class of yours.")
        updates_per_step: int = Field(default=1, ge=1, description="Mini-batches of a step, split by task.")
        log_entropies: bool = Field(default=False, description="Log entropies of forking and reflection tokens, on any engine.")
        async_rollouts: AsyncRolloutsConfig | None = Field(
            default=None, description="Rollouts of later steps are sampled while this step's are trained on."
        )
        branching: BranchingConfig | None = Field(
            default=None, description="ARPO: some rollouts of a task begin at the prompt, the others branch off them."
        )
        critic_init: str | None = Field(
            default=None, description="Stage with the model or reward model that a critic starts from. Default: `init`."
        )

        @model_validator(mode="after")
        def _is_consistent(self) -> Self:
            for problem in self._problems():
                raise ValueError(problem)
            check_schedule(self.trainer.optimizer, self.num_updates)
            if self.method.critic is not None:
                check_schedule(self.trainer.critic.optimizer, self.steps * self.updates_in_step, key="trainer.critic.optimizer")
            return self

        def _problems(self) -> Iterator[str]:
            method, keys, tasks, updates = self.method, self.method.config, self.tasks_per_step, self.updates_per_step
            right = verdict_of(self.reward).parts
            if tasks % updates:
                yield f"tasks_per_step is {tasks}, which is no multiple of updates_per_step = {updates}. Change one of them."
            try:
                rollouts = method.num_rollouts(self.group_size)
            except ConfigError as error:  # of a method that does not know its place in the recipe
                raise ValueError(str(error)) from error
            if (tied_by := getattr(keys, "tied_by", WHOLE_REWARD)) not in (WHOLE_REWARD, *right):
                yield (
                    f"method.tied_by is {tied_by!r}, which is no part of the reward that says what is right. Such parts:"
                    f" {', '.join(right) or 'none; a function is one with right_above'}. Or set tied_by = {WHOLE_REWARD!r}."
                )
            if method.makes_one_update and self.updates_in_step > 1:
                yield (
                    "method.loss is 'policy_gradient', which is right for one update after sampling, but a step makes"
                    f' {self.updates_in_step}. Set updates_per_step and epochs to 1, or loss = "no_clip".'
                )
            if self.sampling.temperature == 0:
                yield "sampling.temperature is 0: every rollout of a task would be the same. Raise it; 1.0 is usual."
            if self.staleness and getattr(keys, "mismatch", None) is Mismatch.OFF:
                yield (
                    "rollouts are sampled from older weights than they train (async_rollouts), but method.mismatch is 'off'."
                    " Leave method.mismatch out (it is then 'truncate_token'), or async_rollouts."
                )
            for number, entry in enumerate(self.schedule if self.staleness else (), start=1):
                if entry.switches and entry.at_update is not None:
                    yield (
                        f"schedule entry {number} ({entry.moment}, {entry.what}) depends on updates that are not known yet"
                        " when a step is played ahead (async_rollouts). Use at_step, or leave async_rollouts out."
                    )
            if self.branching is not None and (initial := self.branching.initial_rollouts) > rollouts:
                yield (
                    f"branching.initial_rollouts is {initial}, but a task has {rollouts} rollouts in all. Lower it (ARPO begins"
                    " half of them at the prompt), or raise group_size."
                )
            if self.critic_init is not None and method.critic is None:
                yield f"critic_init is set, but method {method.kind!r} has no critic. Leave it out, or use the method 'ppo'."
            if (critic_only := self.critic_only_steps) >= self.steps:
                yield (
                    f"trainer.critic.alone_steps is {critic_only}, but the stage has {self.steps} steps: none is left for the"
                    " policy. Lower alone_steps, or raise steps."
                )

        def _schedule_problem(self, entry: ScheduleEntry) -> str:
            if max(entry.at_update or 0, entry.every_updates or 0) >= self.num_updates:
                return f"the stage has {self.num_updates} updates, so this has no effect. Make it earlier, or raise steps."
            if entry.refresh_reference and Column.REFERENCE_LOGPROBS not in self.method.needs:
                return "there is no reference, since method.kl_coefficient is 0. Raise it, or leave refresh_reference out."
            return super()._schedule_problem(entry)

        @property
        def rollouts_per_task(self) -> int:
            return self.method.num_rollouts(self.group_size)

        @property
        def critic_only_steps(self) -> int:
            return 0 if self.method.critic is None else self.trainer.critic.alone_steps

        @property
        def num_updates(self) -> int:
            """Updates of the policy, if no step is empty."""
            return (self.steps - self.critic_only_steps) * self.updates_in_step

        @property
        def forks(self) -> BranchingConfig | None:
            return self.branching

        @property
        def staleness(self) -> int:
            return 0 if self.async_rollouts is None else self.async_rollouts.max_staleness

        @property
        def updates_in_step(self) -> int:
            return self.updates_per_step * self.epochs

    config: Config

    def inputs(self) -> tuple[Input, ...]:
        critic = () if self.config.critic_init is None else (self.config.critic_init,)
        return (*super().inputs(), *Input.each("critic_init", critic, Product.MODEL, Product.REWARD_MODEL))

    def check(self, name: str, recipe: Recipe, machine: Machine) -> Iterator[UserError]:
        config, stage = self.config, f"stages.{name}"
        if config.branching is not None and recipe.scheduler.policy == "static":
            why = "would wait for memory of rollouts that wait for its branches, with scheduler.policy = 'static'"
            yield ConfigError(f"{stage}.branching {why}. Set scheduler.policy = 'scheduler'.")
        if config.async_rollouts is not None:
            yield from config.async_rollouts.problems(f"{stage}.async_rollouts", recipe)
        yield from super().check(name, recipe, machine)

    def plan(self, name: str, recipe: Recipe, machine: Machine) -> Estimate:
        config = self.config
        rollouts = config.tasks_per_step * config.rollouts_per_task
        kept = config.tasks_per_step * config.group_size
        trained = kept * config.epochs * self.tokens_of_responses(config.updates_in_step)
        rows, longest, response = kept // config.updates_per_step, recipe.engine.max_length, config.longest_response
        critics, references = int(config.method.critic is not None), int(Column.REFERENCE_LOGPROBS in config.method.needs)
        saved = tokens_saved(config.group_size, longest - response, response, config.trainer)
        distinct = f"{'' if config.branching is None else 'at most '}{1 - saved / (config.group_size * longest):.0%}"
        return self.estimate(
            name,
            recipe,
            arithmetic=f"{counted(config.steps, 'step')} x {config.tasks_per_step} tasks x {config.rollouts_per_task} rollouts"
            f" = {rollouts} a step; {config.method.kind} keeps {config.group_size} a task = {kept};"
            f" {counted(config.updates_in_step, 'update')} a step of {kept // config.updates_per_step} rollouts ="
            f" {counted(config.num_updates, 'update')}",
            updates=config.updates_in_step,
            trained=config.as_trained(
                trained,
                rows=rows,
                longest=longest,
                num_saved=saved * config.tasks_per_step // config.updates_per_step,
                num_critics=critics,
                num_references=references,
                num_scored=1,
            ),
            notes=(
                f"distinct tokens of an update: {distinct}, an estimate with full-length prompts ({longest - response:,}) and"
                f" responses ({response:,})",
                *config.method.notes(config.updates_in_step),
            ),
        )

    async def run(self, context: StageContext) -> StageResult:
        """Train from the last checkpoint to the last step."""
        stage, init = self.config, product_of(context.run, self.config.init)
        async with AsyncExitStack() as opened:
            needs, num, num_of_critic = stage.method.needs, stage.num_updates, stage.steps * stage.updates_in_step
            reference = init if Column.REFERENCE_LOGPROBS in needs else None
            critic = product_of(context.run, stage.critic_init or stage.init) if Column.VALUES in needs else None
            trainer = Trainer.from_directory(
                init, stage.trainer, reference=reference, critic=critic, total_updates=num, total_critic_updates=num_of_critic
            )
            opened.push_async_callback(trainer.close)
            rollouts = StepRollouts(await opened.enter_async_context(open_player(context, stage, init)), stage)
            rl = RLRun(context, stage, trainer, rollouts)
            if rl.ahead is not None:
                opened.push_async_callback(rl.ahead.close)
            taken = await take_steps(context, stage, trainer, rollouts, rl.step)
            made = f"{counted(taken.steps, 'step')} of {stage.method.kind}, {counted(trainer.num_updates, 'update')}"
            return StageResult(summary=made + taken.note, product=taken.product)
