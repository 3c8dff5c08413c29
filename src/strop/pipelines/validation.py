"""Measures the policy of a stage on held-out tasks while the stage trains, and keeps the best one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

from strop.pipelines.engines import open_fleet
from strop.pipelines.eval_stage import summarise
from strop.pipelines.held_out import RECORD, ValidationConfig, is_better
from strop.pipelines.ledger import StepLedger
from strop.pipelines.recipe import DpoStage, EvalStage, SftStage, TrainingStage
from strop.pipelines.room import check_engines
from strop.pipelines.stage import StageContext, load_chat, make_player
from strop.pipelines.stage_tasks import open_tasks
from strop.rewards import judge_group, make_reward
from strop.rollout.chat import ChatFormat
from strop.rollout.fleet import Fleet
from strop.rollout.play import play
from strop.rollout.protocol import Reward
from strop.runs import write_directory, write_json
from strop.seeds import derive_seed
from strop.training.protocol import Trainer
from strop.types import Group

_FIGURES = (
    "accuracy",
    "accuracy_low",
    "accuracy_high",
    "pass_at_k",
    "length_tokens_mean",
    "truncated_fraction",
    "tool_error_rate",
)


class Validator:
    """Plays the held-out tasks of one stage, the same ones each time, on engines that hold the policy already.

    Raises:
        ConfigError: no engine could hold a rollout of them.
    """

    def __init__(self, context: StageContext, stage: TrainingStage, *, init: str, fleet: Fleet, chat: ChatFormat) -> None:
        assert stage.validation is not None
        self.config: ValidationConfig = stage.validation
        self._context, self._init, self._fleet, self._chat = context, init, fleet, chat
        evaluation = self._as_evaluation(stage)
        check_engines(context.recipe, context.name, evaluation, chat, context.tools(), fleet)
        # Not those of evaluations: what the best policy was chosen by says too much good of it.
        seed = derive_seed("validation", context.recipe.seed)
        source = open_tasks(context.recipe, context.name, evaluation.tasks, seed=seed, split=evaluation.split)
        num = evaluation.num_tasks if source.num_tasks is None else min(evaluation.num_tasks, source.num_tasks)
        self._tasks = [(index, source.task(index)) for index in range(num)]

    async def validate(
        self, trainer: Trainer, step: int, stage: TrainingStage, reward: Reward, *, weights: str, last: int
    ) -> dict[str, float]:
        """The metrics of the policy after `step`, the last of which is `last`; {} where it is not to be measured, or cannot be.

        Args:
            stage: as its schedule has it now.
            weights: the checksum of the policy, which the engines hold.
        """
        if not self.config.is_due(step, last=last):
            return {}
        started = time.perf_counter()
        groups = await self._play(step, stage, reward, weights)
        if not any(group.trajectories for group in groups):
            self._context.warn(f"step {step}: every rollout of the validation is void, so nothing is known of the policy.")
            return {}
        found = summarise(self._as_evaluation(stage), groups, seed=self._context.recipe.seed)
        if self.config.keep_best and "accuracy" in found:
            await keep_if_best(self._context, trainer, step, found)
        metrics = {f"validation/{name}": float(found[name]) for name in _FIGURES if name in found}
        return metrics | {"time/validation_s": time.perf_counter() - started}

    async def _play(self, step: int, stage: TrainingStage, reward: Reward, weights: str) -> list[Group]:
        """What an interrupted try of the same policy finished is not played again (law 9)."""
        evaluation, context = self._as_evaluation(stage), self._context
        path = context.directory.validation(step)
        with closing(StepLedger(path, weights=weights, policy_version=self._fleet.policy_version)) as ledger:
            playing = play(
                self._tasks,
                make_player(
                    evaluation, engine=self._fleet, chat=self._chat, tools=context.tools(), reward=reward, observe=ledger
                ),
                num_rollouts=evaluation.k,
                seed=derive_seed("validation", context.recipe.seed, "rollouts"),
                observer=ledger,
                finished=ledger.finished_before,
            )
            groups = [judge_group(reward, group) async for group in playing]
        return sorted(groups, key=lambda group: group.task_index)

    def _as_evaluation(self, stage: TrainingStage) -> EvalStage:
        sampling = stage.sampling
        if self.config.temperature is not None:
            sampling = sampling.model_copy(update={"temperature": self.config.temperature})
        return EvalStage(
            kind="eval",
            init=self._init,
            tasks=stage.tasks,
            prompt=stage.prompt,
            sampling=sampling,
            limits=stage.limits,
            reward=stage.reward,
            split=self.config.split,
            num_tasks=self.config.num_tasks,
            k=self.config.k,
        )


class FineTuningValidator:
    """Validates a stage without rollouts of its own, on engines that are there for this alone."""

    def __init__(self, validator: Validator, fleet: Fleet, reward: Reward, stage: SftStage) -> None:
        self._validator, self._fleet, self._reward, self._stage = validator, fleet, reward, stage

    async def validate(self, trainer: Trainer, step: int) -> dict[str, float]:
        """As `Validator.validate`; the policy is published first."""
        if not self._validator.config.is_due(step, last=self._stage.steps):
            return {}
        weights = await self._fleet.publish(partial(trainer.publish, version=step), version=step)
        return await self._validator.validate(trainer, step, self._stage, self._reward, weights=weights, last=self._stage.steps)


@asynccontextmanager
async def open_fine_tuning_validator(
    context: StageContext, stage: SftStage, model: Path
) -> AsyncIterator[FineTuningValidator | None]:
    """Engines with the weights of the directory `model` and a judge, closed on the way out; None where nothing is validated."""
    if stage.validation is None:
        yield None
        return
    chat = load_chat(model)
    fleet = await open_fleet(context, model, chat)
    try:
        reward = make_reward(stage.reward, context.runner)
        try:
            validator = Validator(context, stage, init=stage.init, fleet=fleet, chat=chat)
            yield FineTuningValidator(validator, fleet, reward, stage)
        finally:
            await reward.close()
    finally:
        await fleet.close()


async def keep_if_best(context: StageContext, trainer: Trainer, step: int, found: Mapping[str, Any]) -> None:
    """Replace the best policy and its record, both at once, where the policy after `step` is better than it."""
    if is_better(context.directory.best, found):
        await write_model(context.directory.best, trainer, record={"step": step, **found})
        context.event("best_so_far", step=step, accuracy=found["accuracy"])


async def write_model(path: Path, trainer: Trainer, *, record: Mapping[str, Any] | None = None) -> None:
    """The policy as a directory that `transformers` loads; `record` says in it what was found of it."""
    loop = asyncio.get_running_loop()

    def fill(directory: Path) -> None:
        asyncio.run_coroutine_threadsafe(trainer.save_model(directory), loop).result()
        if record is not None:
            write_json(directory / RECORD, record)

    await asyncio.to_thread(write_directory, path, fill)


async def write_product(context: StageContext, trainer: Trainer, stage: TrainingStage | DpoStage) -> Path:
    """Write the stage's last policy; returns the directory of the one that it hands on."""
    await write_model(context.directory.model, trainer)
    hands_on_best = stage.validation is not None and stage.validation.product == "best"
    return context.directory.best if hands_on_best and context.directory.best.exists() else context.directory.model
