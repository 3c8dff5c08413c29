"""Measures the policy on held-out tasks while a stage trains, keeps the best policy, and writes the stage's product."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from strop.rewards import judge_group, make_reward
from strop.rollout.chat_template import ChatFormat
from strop.rollout.player import Reward, collect
from strop.rollout.scheduler.engine_pool import EnginePool
from strop.run_directory import read_json, write_directory, write_json
from strop.stages.context import StageContext, load_chat, make_player
from strop.stages.data import open_tasks
from strop.stages.evaluation import Eval, summarise
from strop.stages.loop.checkpoints import CheckpointedKeys, prune_finished
from strop.stages.loop.engines import check_engines, open_engine_pool
from strop.stages.loop.ledger import StepLedger
from strop.stages.loop.training_stage import HeldOutConfig, TrainingKeys, ValidationConfig
from strop.training.reward_model import RewardTrainer
from strop.training.trainer import Trainer
from strop.types import Group, derive_seed


class ValidatedKeys(CheckpointedKeys, Protocol):
    """Keys of a stage whose product is its last or its best policy."""

    @property
    def validation(self) -> HeldOutConfig | None: ...


_FIGURES = (
    "accuracy",
    "accuracy_low",
    "accuracy_high",
    "pass_at_k",
    "length_tokens_mean",
    "truncated_fraction",
    "tool_error_rate",
)


RECORD = "validation.json"
"""In the directory of the best policy: its step and its metrics."""


def is_better(best: Path, found: Mapping[str, Any]) -> bool:
    """Whether a policy with these metrics is better than the one in `best`, if there is one.

    A higher `accuracy` is better; with equal accuracy a lower `loss`, if it is measured.
    """
    return not (best / RECORD).exists() or _rank(found) > _rank(read_json(best / RECORD))


def _rank(found: Mapping[str, Any]) -> tuple[float, float]:
    return float(found["accuracy"]), -float(found.get("loss", 0.0))


class Validator:
    """Plays the held-out tasks of one stage, the same each time, on engines that hold the policy.

    Raises:
        ConfigError: no engine can hold a rollout of them.
    """

    def __init__(self, context: StageContext, stage: TrainingKeys, *, init: str, pool: EnginePool, chat: ChatFormat) -> None:
        assert stage.validation is not None
        self.config: ValidationConfig = stage.validation
        self._context, self._init, self._pool, self._chat = context, init, pool, chat
        evaluation = self._as_evaluation(stage)
        check_engines(context.recipe, context.name, evaluation, chat, context.tools(), pool)
        # Other tasks than those of evaluations: on the tasks that chose it the best policy looks too good.
        seed = derive_seed("validation", context.recipe.seed)
        source = open_tasks(context.recipe, context.name, evaluation.tasks, seed=seed, split=evaluation.split)
        num = evaluation.num_tasks if source.num_tasks is None else min(evaluation.num_tasks, source.num_tasks)
        self._tasks = [(index, source.task(index)) for index in range(num)]

    async def validate(
        self, trainer: Trainer, step: int, stage: TrainingKeys, reward: Reward, *, weights: str, last: int
    ) -> dict[str, float]:
        """The metrics of the policy after `step`; {} if it is not due, or every rollout is void.

        Args:
            stage: as its schedule has it now.
            weights: checksum of the policy, which the engines hold.
            last: the last step, which is always measured.
        """
        if not self.config.is_due(step, last=last):
            return {}
        started = time.perf_counter()
        groups = await self._play(step, stage, reward, weights)
        if not any(group.trajectories for group in groups):
            self._context.warn(f"step {step}: every rollout of the validation is void, so it has no result.")
            return {}
        found = summarise(self._as_evaluation(stage), groups, seed=self._context.recipe.seed)
        if "accuracy" in found:
            await keep_if_best(self._context, trainer, step, found)
        metrics = {f"validation/{name}": float(found[name]) for name in _FIGURES if name in found}
        return metrics | {"time/validation_s": time.perf_counter() - started}

    async def _play(self, step: int, stage: TrainingKeys, reward: Reward, weights: str) -> list[Group]:
        """Rollouts that an interrupted run finished with the same policy are not played again."""
        evaluation, context = self._as_evaluation(stage), self._context
        path = context.directory.validation(step)
        with closing(StepLedger(path, weights=weights, policy_version=self._pool.policy_version)) as ledger:
            playing = collect(
                self._tasks,
                make_player(
                    evaluation, engine=self._pool, chat=self._chat, tools=context.tools(), reward=reward, observe=ledger
                ),
                num_rollouts=evaluation.k,
                seed=derive_seed("validation", context.recipe.seed, "rollouts"),
                observer=ledger,
                finished=ledger.finished_before,
            )
            groups = [judge_group(reward, group) async for group in playing]
        return sorted(groups, key=lambda group: group.task_index)

    def _as_evaluation(self, stage: TrainingKeys) -> Eval.Config:
        sampling = stage.sampling
        if self.config.temperature is not None:
            sampling = sampling.model_copy(update={"temperature": self.config.temperature})
        return Eval.Config(
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
    """Validates a stage without rollouts, on engines that are opened only for this."""

    def __init__(self, validator: Validator, pool: EnginePool, reward: Reward, stage: TrainingKeys, steps: int) -> None:
        self._validator, self._pool, self._reward = validator, pool, reward
        self._stage, self._steps = stage, steps

    async def validate(self, trainer: Trainer, step: int) -> dict[str, float]:
        """As `Validator.validate`; the policy is published first."""
        if not self._validator.config.is_due(step, last=self._steps):
            return {}
        weights = await self._pool.publish(partial(trainer.publish, version=step), version=step)
        return await self._validator.validate(trainer, step, self._stage, self._reward, weights=weights, last=self._steps)


@asynccontextmanager
async def open_fine_tuning_validator(
    context: StageContext, stage: TrainingKeys, model: Path, *, steps: int
) -> AsyncIterator[FineTuningValidator | None]:
    """Opens engines with the weights of the directory `model`, and a reward; None without validation."""
    if stage.validation is None:
        yield None
        return
    chat = load_chat(model)
    pool = await open_engine_pool(context, model, chat)
    try:
        reward = make_reward(stage.reward, context.runner)
        try:
            validator = Validator(context, stage, init=stage.init, pool=pool, chat=chat)
            yield FineTuningValidator(validator, pool, reward, stage, steps)
        finally:
            await reward.close()
    finally:
        await pool.close()


async def keep_if_best(context: StageContext, trainer: Trainer, step: int, found: Mapping[str, Any]) -> None:
    """Replace the best policy and its record, together, if the policy after `step` is better."""
    if is_better(context.directory.best, found):
        await write_model(context.directory.best, trainer, record={"step": step, **found})
        context.event("best_so_far", step=step, accuracy=found["accuracy"])


async def write_model(path: Path, trainer: Trainer | RewardTrainer, *, record: Mapping[str, Any] | None = None) -> None:
    """Write the policy as a directory that `transformers` loads, with `record` as validation.json."""
    loop = asyncio.get_running_loop()

    def fill(directory: Path) -> None:
        asyncio.run_coroutine_threadsafe(trainer.save_model(directory), loop).result()
        if record is not None:
            write_json(directory / RECORD, record)

    await asyncio.to_thread(write_directory, path, fill)


async def write_product(context: StageContext, trainer: Trainer, stage: ValidatedKeys) -> Path:
    """Write the last policy and its adapter, and prune checkpoints. Returns the directory of the stage's product."""
    await write_model(context.directory.model, trainer)
    if stage.trainer.lora is not None:
        loop = asyncio.get_running_loop()

        def fill(directory: Path) -> None:
            asyncio.run_coroutine_threadsafe(trainer.save_adapter(directory), loop).result()

        await asyncio.to_thread(write_directory, context.directory.adapter, fill)
    await asyncio.to_thread(prune_finished, context, stage)
    hands_on_best = stage.validation is not None and stage.validation.product == "best"
    return context.directory.best if hands_on_best and context.directory.best.exists() else context.directory.model
