"""Measures the policy on held-out tasks while a stage trains, keeps the best policy, and writes the stage's product."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.recipe.stage import PlayedKeys
from strop.run_directory import read_json, write_directory, write_json
from strop.stages.context import StageContext, open_tasks
from strop.stages.evaluation import Eval, Voting, summarise
from strop.stages.loop.checkpoints import CheckpointedKeys, prune_finished
from strop.stages.loop.rollouts import GroupPlayer
from strop.stages.loop.training_stage import HeldOutConfig, TrainingKeys, ValidationConfig
from strop.training.trainer import Trainer
from strop.types import Group, Task, derive_seed

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


RECORD = "validation.json"
"""In the directory of the best policy: its step and its metrics."""


def _rank(found: Mapping[str, Any]) -> tuple[float, float]:
    """A higher `accuracy` is better; with equal accuracy a lower `loss`, if it is measured."""
    return float(found["accuracy"]), -float(found.get("loss", 0.0))


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
        self._sets: dict[str, range] = {}  # where the tasks of each named set are
        for key, tasks in config.sources(stage.tasks).items():
            source = open_tasks(recipe, self._context.name, tasks, seed=seed, split=config.split, key=key)
            player.check(evaluation, source)
            num = config.num_tasks if source.num_tasks is None else min(config.num_tasks, source.num_tasks)
            first = len(self._tasks)
            self._tasks += [(first + index, source.task(index)) for index in range(num)]
            self._sets[key.removeprefix("validation.tasks.")] = range(first, first + num)

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
        started = time.perf_counter()
        evaluation, player = self._as_evaluation(stage), self._player
        weights = weights or await player.publish(trainer, version=step)
        seed = derive_seed("validation", self._context.recipe.seed, "rollouts")
        with player.ledger(self._context.directory.validation(step), weights) as ledger:
            playing = player.play(evaluation, self._tasks, ledger, num_rollouts=evaluation.k, seed=seed)
            groups = sorted([group async for group in playing], key=lambda group: group.task_index)
        if not any(group.trajectories for group in groups):
            self._context.warn(f"step {step}: every rollout of the validation is void, so it has no result.")
            return {}
        votes = None  # where a task has one attempt, or answers cannot be compared
        if self._config.k > 1:
            async with Voting(stage.reward, self._context.runner) as voting:
                votes = await voting.votes(groups)
        found = self._figures(evaluation, groups, votes)
        if "accuracy" in found:
            await keep_if_best(self._context, trainer, step, found)
        metrics = {f"validation/{name}": float(found[name]) for name in _FIGURES if name in found}
        for name, places in self._sets.items() if self._config.tasks else ():
            of_set = [at for at, group in enumerate(groups) if group.task_index in places]
            if any(groups[at].trajectories for at in of_set):
                votes_of_set = None if votes is None else [votes[at] for at in of_set]
                found = self._figures(evaluation, [groups[at] for at in of_set], votes_of_set)
                metrics |= {f"validation/{name}/{figure}": float(found[figure]) for figure in _FIGURES if figure in found}
        return metrics | {"time/validation_s": time.perf_counter() - started}

    def _figures(self, stage: Eval.Config, groups: Sequence[Group], votes: Sequence[Sequence[str]] | None) -> dict[str, Any]:
        return summarise(stage, groups, seed=self._context.recipe.seed, votes=votes)

    def _as_evaluation(self, stage: TrainingKeys) -> Eval.Config:
        config, keys = self._config, {name: getattr(stage, name) for name in PlayedKeys.model_fields}
        keys["sampling"] = config.sampling_of(stage.sampling)
        if config.max_turns is not None:
            keys["limits"] = stage.limits.model_copy(update={"max_turns": config.max_turns})
        return Eval.Config(init=stage.init, split=config.split, num_tasks=config.num_tasks, k=config.k, **keys)


async def keep_if_best(context: StageContext, trainer: Trainer, step: int, found: Mapping[str, Any]) -> None:
    """Replace the best policy and its record, together, if the policy after `step` is better."""
    best = context.directory.best
    if not (best / RECORD).exists() or _rank(found) > _rank(read_json(best / RECORD)):
        await write_saved(best, trainer.save_model, record={"step": step, **found})
        context.event("best_so_far", step=step, accuracy=found["accuracy"])


async def write_saved(
    path: Path, save: Callable[[Path], Coroutine[Any, Any, None]], *, record: Mapping[str, Any] | None = None
) -> None:
    """Write a directory, whole or not at all, with what `save` writes and with `record` as validation.json."""
    loop = asyncio.get_running_loop()

    def fill(directory: Path) -> None:
        asyncio.run_coroutine_threadsafe(save(directory), loop).result()
        if record is not None:
            write_json(directory / RECORD, record)

    await asyncio.to_thread(write_directory, path, fill)


async def write_product(
    context: StageContext,
    trainer: Trainer,
    stage: CheckpointedKeys,
    validation: HeldOutConfig | None,
    *,
    returns_best: bool = False,
) -> Path:
    """Write the last policy and its adapter, and prune checkpoints. Returns the directory of the stage's product.

    The product is the best policy if `validation` or `returns_best` says so and there is one, else the last.
    """
    await write_saved(context.directory.model, trainer.save_model)
    if stage.trainer.lora is not None:
        await write_saved(context.directory.adapter, trainer.save_adapter)
    await asyncio.to_thread(prune_finished, context, stage)
    returns_best = returns_best or (validation is not None and validation.product == "best")
    return context.directory.best if returns_best and context.directory.best.exists() else context.directory.model
