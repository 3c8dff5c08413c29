"""Stages that train: the keys that they share, the checks of them, and what may change on the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from strop.errors import ConfigError
from strop.evaluation.metrics import verdict_of
from strop.recipe.recipe import Recipe
from strop.recipe.schedule import Done, MetricRule, ScheduleEntry, problem_with, switched
from strop.recipe.stage import Estimate, PlayedKeys, Product, Sampled, Trained, check_differ
from strop.rollout.player import SamplingConfig, Temperature
from strop.stages.context import StageContext
from strop.stages.loop.checkpoints import CheckpointedKeys, HeldOutConfig
from strop.stages.loop.engines import MachineStage, passes_in_words, task_files
from strop.stages.loop.ledger import SAMPLE_TASKS
from strop.tasks.protocol import Split, TaskSource
from strop.training.config import OptimizerConfig, Schedule


def check_schedule(optimizer: OptimizerConfig, num_updates: int, *, key: str = "trainer.optimizer") -> None:
    """Raises `ValueError` when a cosine over `num_updates` would end before its warm-up does."""
    warmup_updates = optimizer.over(num_updates).warmup_updates
    if optimizer.schedule is Schedule.COSINE and warmup_updates >= num_updates:
        name, verb = ("warmup_fraction", "makes") if optimizer.warmup_fraction else ("warmup_updates", "is")
        raise ValueError(
            f"{key}.{name} {verb} {warmup_updates}, but the stage has {num_updates} updates in all: nothing is left for the"
            f" cosine. Lower {name}, raise steps, or set schedule = 'constant'."
        )


def checked_steps(context: StageContext, stage: CheckpointedKeys, steps: int) -> int:
    """`steps`, if they are enough updates for the schedule of the stage. Raises `ConfigError` otherwise."""
    try:
        check_schedule(stage.trainer.optimizer, steps, key=f"stages.{context.name}.trainer.optimizer")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return steps


class ValidationConfig(HeldOutConfig):
    """The policy is measured by playing held-out tasks."""

    tasks: dict[str, TaskSource] = Field(
        default={}, description="Sets of tasks by name, each with figures of its own. Default: the stage's `tasks`."
    )
    split: Split = Field(default="test", description="Part of the tasks that is played.")
    num_tasks: int = Field(default=100, ge=1, description="Number of tasks of a set, the first of them.")
    k: int = Field(default=1, ge=1, description="Rollouts of each task.")
    temperature: Temperature | None = Field(default=None, description="Sampling temperature. Default: that of the stage.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Likeliest tokens of this probability together.")
    max_tokens: int | None = Field(default=None, ge=1, description="Tokens of a response. Default: as in the stage.")
    max_turns: int | None = Field(default=None, ge=1, description="Turns of a rollout. Default: as in the stage.")

    def sampling_of(self, stage: SamplingConfig) -> SamplingConfig:
        """How held-out tasks are sampled; `stage` is how those of training are. Raises `ValueError`."""
        own = {"temperature": self.temperature, "max_tokens": self.max_tokens, "top_p": self.top_p}
        return SamplingConfig(**{**stage.model_dump(), **{name: value for name, value in own.items() if value is not None}})

    def sources(self, tasks: TaskSource) -> Mapping[str, TaskSource]:
        """What is played, by key below the stage; `tasks` are the stage's."""
        return {f"validation.tasks.{name}": source for name, source in self.tasks.items()} or {"tasks": tasks}


class TrainingKeys(PlayedKeys, CheckpointedKeys):
    """Keys of a stage that trains the model of another stage and may measure it on held-out tasks."""

    validation: ValidationConfig | None = Field(default=None, description="Measures the policy on held-out tasks on the way.")

    @model_validator(mode="after")
    def _can_be_validated(self) -> Self:
        if self.validation is not None:
            temperature = self.validation.sampling_of(self.sampling).temperature
            check_differ(temperature, self.validation.k, "or set validation.k = 1.", key="validation.temperature")
        return self

    def validation_files(self) -> Mapping[str, Path]:
        """The files that held-out tasks are read from, by key."""
        found: dict[str, Path] = {}
        if self.validation is not None:
            for key, source in self.validation.sources(self.tasks).items():
                found |= task_files(key, source, [self.validation.split])
        return found


class TrainingStage(MachineStage):
    """Base of stages that train the model of another stage."""

    makes = Product.MODEL
    root_keys = frozenset({"engine", "sandbox", "tools"})
    config: CheckpointedKeys


class RolloutKeys(TrainingKeys):
    """Keys of a stage that learns from its own rollouts: each step one rollout batch, updates, one publication."""

    data: tuple[str, ...] = Field(default=(), description="Stages whose tasks are trained on, instead of `tasks`.")
    steps: int = Field(ge=1, description="Steps: each is one batch of rollouts, its updates and a publication.")
    tasks_per_step: int = Field(ge=1, description="Tasks of a step.")
    group_size: int = Field(ge=1, description="G: rollouts of a task that are learned from.")
    epochs: int = Field(default=1, ge=1, description="Passes over what a step learns from.")
    budget_s: float | None = Field(
        default=None, gt=0, description="Seconds of training: no step begins that would end later; `steps` is then a limit."
    )
    end_when: tuple[MetricRule, ...] = Field(default=(), description="Rules over metrics; the first that holds ends the stage.")
    schedule: tuple[ScheduleEntry, ...] = Field(default=(), description="Changes of settings on the way.")
    checkpoint_every: int = Field(
        default=1, ge=1, description="Steps between checkpoints. There is one after half an hour of training in any case."
    )
    keep_rollouts: int = Field(
        default=100, ge=1, description="Last steps whose rollouts are kept. Of earlier steps those of the first 8 tasks are."
    )
    give_up_after: int = Field(default=3, ge=1, description="Steps in a row that cannot learn, before the run stops.")

    def at(self, done: Done) -> Self:
        """The stage as it is for a step that begins with so much done."""
        return switched(self, (entry for entry in self.schedule if entry.is_reached(done)))

    def with_each_tasks(self) -> tuple[Self, ...]:
        """The stage as it begins, and as it is with each of the other sets of tasks that its schedule has."""
        return (self, *(switched(self, [entry]) for entry in self.schedule if entry.tasks is not None))

    @property
    def longest_response(self) -> int:
        return max(self.sampling.max_tokens, *(entry.sampling.max_tokens or 0 for entry in self.schedule), 0)

    @model_validator(mode="after")
    def _changes_hold(self) -> Self:
        what = f"budget_s is {self.budget_s:g}" if self.budget_s is not None else "end_when may end the stage early"
        if (self.budget_s is not None or self.end_when) and self.trainer.optimizer.schedule is Schedule.COSINE:
            raise ValueError(
                f"{what}, but trainer.optimizer.schedule is 'cosine', which needs to know how many updates there will be. Set"
                f" schedule = 'constant', or leave {what.split()[0]} out."
            )
        every_steps = None if self.validation is None else self.validation.every_steps
        has_verdict = bool(verdict_of(self.reward).parts)
        for number, rule in enumerate(self.end_when, start=1):
            problem = rule.problem(steps=self.steps, every_steps=every_steps, has_verdict=has_verdict)
            if rule.reward_below is not None and any(entry.tasks is not None for entry in self.schedule):
                problem = "the schedule changes the tasks, so rewards cannot be compared. Use accuracy_below."
            if problem:
                raise ValueError(f"end_when rule {number} ({rule.what}): {problem}")
        for number, entry in enumerate(self.schedule, start=1):
            if problem := self._schedule_problem(entry) or problem_with(self, self.schedule[:number]):
                raise ValueError(f"schedule entry {number} ({entry.moment}, {entry.what}): {problem}")
        return self

    def _schedule_problem(self, entry: ScheduleEntry) -> str:
        """Why an entry cannot be what is meant; empty where it can."""
        if (entry.at_step or 0) > self.steps:
            return f"the stage has {self.steps} steps, so this never changes a thing. Make it earlier, or raise steps."
        if entry.reset_optimizer and self.trainer.optimizer.schedule is Schedule.COSINE:
            return (
                "trainer.optimizer.schedule is 'cosine' over all updates of the stage, and would begin again without an end."
                " Set schedule = 'constant', or make two stages."
            )
        if entry.tasks is not None and self.data:
            return "data names stages whose tasks are played, so these never are. Leave data out, or make two stages."
        if "method" in entry.switches and not hasattr(getattr(getattr(self, "method", None), "config", None), "clip_high"):
            return "the stage has no method with clip_high. Leave method out of the entry."
        return ""

    @property
    def staleness(self) -> int:
        """Publications that rollouts may be behind."""
        return 0

    @property
    def num_first_tasks(self) -> int:
        return min(self.tasks_per_step, super().num_first_tasks)

    @property
    def rollouts_per_task(self) -> int:
        """Rollouts that are sampled for each task of a step."""
        return self.group_size

    @property
    def updates_in_step(self) -> int:
        """Updates of a step where that is known beforehand, else 0."""
        return 0

    @property
    def critic_only_steps(self) -> int:
        """First steps in which only the critic is updated; 0 for a method without a critic."""
        return 0


class RolloutStage(TrainingStage):
    """Base of stages that learn from their own rollouts, step by step."""

    root_keys = TrainingStage.root_keys | {"scheduler"}
    plays = True

    config: RolloutKeys

    def files(self) -> Mapping[str, Path]:
        config = self.config
        splits: list[Split] = [] if config.data else ["train"]
        found = {**task_files("tasks", config.tasks, splits), **config.validation_files()}
        for entry in config.schedule:
            if entry.tasks is not None:
                found |= task_files("schedule.tasks", entry.tasks, ["train"])
        return found

    def tokens_of_responses(self, updates_per_step: int) -> int:
        """The longest response of each step, added up over the steps."""
        config = self.config
        if not config.schedule:
            return config.steps * config.sampling.max_tokens
        edges = {0, config.steps}  # nothing changes between two of these steps
        for entry in config.schedule:
            num_done = (entry.at_update or 0) // updates_per_step
            edges |= {num_done, num_done + 1, (entry.at_step or 1) - 1}
        ordered = sorted(edge for edge in edges if edge <= config.steps)
        longest = (config.at(Done(steps=step, updates=step * updates_per_step)).sampling.max_tokens for step in ordered)
        return sum(tokens * (after - step) for tokens, (step, after) in zip(longest, pairwise(ordered), strict=False))

    def estimate(
        self, name: str, recipe: Recipe, *, arithmetic: str, updates: int, trained: Trained, notes: Iterable[str] = ()
    ) -> Estimate:
        """The cost of a stage with so many updates in a step."""
        config = self.config
        if overlaps := config.staleness > 0:
            arithmetic += "; each step's rollouts are played while the step before is trained on"
        arithmetic += passes_in_words(name, config, recipe, config.steps * config.tasks_per_step)
        if config.budget_s is not None:
            arithmetic += f"; fewer if {config.budget_s:g} s pass before"
        if config.end_when:
            arithmetic += f"; fewer if before that {' or '.join(rule.what for rule in config.end_when)}"
        num_known, num_before, lines = config.updates_in_step, config.critic_only_steps + 1, []
        for entry in config.schedule:  # with the step that it comes before where that is known
            step = f" (step {num_before + -(-entry.at_update // num_known)})" if entry.at_update and num_known else ""
            lines.append(f"{entry.moment}{step}: {entry.what}")
        num_whole = min(config.steps, config.keep_rollouts)
        kept = num_whole + (config.steps - num_whole) * min(1.0, SAMPLE_TASKS / config.tasks_per_step)
        rollouts = config.tasks_per_step * config.rollouts_per_task
        tokens = rollouts * self.tokens_of_responses(updates)
        return Estimate(
            arithmetic=arithmetic,
            sampled=Sampled(tokens=tokens, steps=config.steps, rollouts=rollouts, kept=kept / config.steps),
            trained=trained,
            overlaps=overlaps,
            time_limit_s=config.budget_s,
            lines=(*lines, *notes),
        )
