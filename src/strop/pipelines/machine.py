"""Whether this machine has what a recipe names, asked before time is spent on anything."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch

from strop.engine.config import EngineConfig
from strop.engine.servers.remedies import check_interpreter
from strop.errors import ModelError, TaskError, UserError
from strop.pipelines.recipe import (
    ConversationsStage,
    DemonstrationsStage,
    DpoStage,
    EvalStage,
    ModelStage,
    PlayedStage,
    Recipe,
    RewardModelStage,
    RolloutStage,
    SampledStage,
    SftStage,
    StageConfig,
    SteppedStage,
    TrainingStage,
)
from strop.rewards.scorers.config import EmbeddedScorerConfig, VllmScorerConfig
from strop.rewards.scorers.reward_model import ExchangeFormat, check_reward_model
from strop.rewards.sum_config import ScorerPart, SumRewardConfig
from strop.runs import RunDirectory
from strop.tasks.config import JsonlConfig, LookupConfig, ParquetConfig, Split, TaskConfig
from strop.tasks.files import missing


def check_machine(
    recipe: Recipe, *, done: Collection[str] = (), is_plan: bool = False, run: RunDirectory | None = None
) -> None:
    """Look for what the stages of `recipe` will open, those that are `done` left aside.

    Args:
        is_plan: a reward model or a file of data may still be made or fetched; a reward model that is there must be one.
        run: where it will be run; a file of data in the directory of an earlier stage there may still be made by that.

    Raises:
        UserError: `engine.python` cannot be run here, or a CUDA device, a reward model or a file of data is not there, and a
            stage will need it.
    """
    stages = {name: stage for name, stage in recipe.stages.items() if name not in done}
    if any(isinstance(stage, PlayedStage) for stage in stages.values()):
        if isinstance(recipe.engine, EngineConfig):
            _check_engine_devices(recipe.engine)
        else:
            check_interpreter(recipe.engine)
    for name, stage in stages.items():
        if isinstance(stage, SftStage | SteppedStage | RewardModelStage | DpoStage):
            _check_device(stage.trainer.device, f"stages.{name}.trainer", workers=stage.trainer.workers)
        for part, config in scorer_parts_of(stage).items():
            if isinstance(config.scorer, EmbeddedScorerConfig):
                _check_device(config.scorer.device, f"stages.{name}.reward.parts.{part}.scorer")
    scorers = {f"stages.{name}.{key}": config for name, stage in stages.items() for key, config in scorers_of(stage)}
    _check_scorers({key: config for key, config in scorers.items() if not (is_plan and is_missing(config))})
    if not is_plan:
        _check_files(stages, run)


def is_missing(config: EmbeddedScorerConfig | VllmScorerConfig) -> bool:
    return config.path is not None and not Path(config.path).exists()


def scorers_of(stage: StageConfig) -> Iterator[tuple[str, EmbeddedScorerConfig | VllmScorerConfig]]:
    """The scorers with a directory that judge rollouts of the stage, by key."""
    for name, part in scorer_parts_of(stage).items():
        if isinstance(part.scorer, EmbeddedScorerConfig | VllmScorerConfig) and part.scorer.path is not None:
            yield f"reward.parts.{name}.scorer.path", part.scorer


def scorer_parts_of(stage: StageConfig) -> dict[str, ScorerPart]:
    """The parts with a reward model of the reward that judges rollouts of the stage; of a stage that is not judged, none."""
    is_judged = isinstance(stage, PlayedStage) or (isinstance(stage, SftStage) and stage.is_judged)
    if not is_judged or not isinstance(stage.reward, SumRewardConfig):
        return {}
    return {name: part for name, part in stage.reward.parts.items() if isinstance(part, ScorerPart)}


def _check_scorers(scorers: Mapping[str, EmbeddedScorerConfig | VllmScorerConfig]) -> None:
    """Each directory is looked at once: a shared reward names it in every stage."""
    found: set[tuple[str, str | None]] = set()
    for key, config in scorers.items():
        if config.path is None or (config.kind, config.path) in found:
            continue
        found.add((config.kind, config.path))
        try:
            if isinstance(config, EmbeddedScorerConfig):
                check_reward_model(Path(config.path))
            ExchangeFormat(Path(config.path))
        except ModelError as error:
            raise UserError(f"{key}: {error}") from error


def _check_files(stages: Mapping[str, StageConfig], run: RunDirectory | None) -> None:
    """What is in them is looked at later: in those of tasks with the first model, whose prompts they are to fit."""
    made_before: list[Path] = []
    for name, stage in stages.items():
        for key, path in (*_files_of(stage), *_files_of_tasks(stage)):
            if not path.exists() and not any(path.resolve().is_relative_to(each) for each in made_before):
                raise TaskError(f"stages.{name}.{key}: {missing(path)} Nothing was begun.")
        for key, path in _files_of(stage):
            if path.is_dir():
                raise UserError(f"stages.{name}.{key}: {path}: is a directory. Name a file of it; nothing was begun.")
        made_before += [run.stage(name).path.resolve()] if run is not None else []


def missing_files(stage: StageConfig) -> Iterator[tuple[str, Path]]:
    """The files and directories of data that the stage will read and that are not there, by key."""
    by_path: dict[Path, str] = {}
    for key, path in (*_files_of(stage), *_files_of_tasks(stage)):
        by_path.setdefault(path, key)
    yield from ((key, path) for path, key in by_path.items() if not path.exists())


def _files_of(stage: StageConfig) -> Iterator[tuple[str, Path]]:
    if isinstance(stage, ConversationsStage | RewardModelStage | DpoStage):
        yield "path", Path(stage.path).expanduser()
    if isinstance(stage, RewardModelStage | DpoStage) and stage.test_path is not None:
        yield "test_path", Path(stage.test_path).expanduser()


def _files_of_tasks(stage: StageConfig) -> Iterator[tuple[str, Path]]:
    """Files and directories."""
    for key, tasks, split in _tasks_of(stage):
        match tasks:
            case LookupConfig():
                yield key, tasks.path
            case JsonlConfig() | ParquetConfig():
                path = tasks.path if split == "train" else tasks.test_path
                if path is not None:
                    yield key, path.expanduser()


def _tasks_of(stage: StageConfig) -> Iterator[tuple[str, TaskConfig, Split]]:
    """The sets of tasks that the stage opens, by key, each with the part of it that it opens."""
    if isinstance(stage, EvalStage):
        yield "tasks", stage.tasks, stage.split
    elif _is_of_training_tasks(stage):
        yield "tasks", stage.tasks, "train"
    if isinstance(stage, SteppedStage):
        yield from (("schedule.tasks", entry.tasks, "train") for entry in stage.schedule if entry.tasks is not None)
    if isinstance(stage, TrainingStage) and stage.validation is not None:
        yield "tasks", stage.tasks, stage.validation.split


def _is_of_training_tasks(stage: StageConfig) -> bool:
    """Whether the stage plays training tasks of its own, or a demonstrator does for it."""
    if isinstance(stage, ModelStage):
        return stage.tiny is not None
    return isinstance(stage, DemonstrationsStage) or (
        isinstance(stage, SampledStage | RolloutStage | SftStage) and not stage.data
    )


def _check_engine_devices(config: EngineConfig) -> None:
    if config.device == "cpu" or ("CUDA_VISIBLE_DEVICES" in os.environ and config.devices):
        return  # engines with devices of their own see those, whatever this process sees
    num_devices = torch.cuda.device_count()
    if config.devices and (missing := [device for device in config.devices if device >= num_devices]):
        raise UserError(
            f"engine.devices names {missing}, but {_what_torch_sees(num_devices)}. Name devices that are there, counted from 0,"
            ' or leave the key out and set engine.device = "cpu".'
        )
    _ = config.torch_device


def _check_device(name: str, key: str, *, workers: int = 0) -> None:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f'{key}.device is {name!r}, which is no device. Write "cpu", "cuda" or "cuda:1".') from error
    if device.type != "cuda":
        return
    num_devices, num_wanted = torch.cuda.device_count(), max(1, workers, (device.index or 0) + 1)
    if num_wanted > num_devices:
        of_workers = f" and {key}.workers is {workers}" if workers else ""
        raise UserError(
            f"{key}.device is {name!r}{of_workers}, but {_what_torch_sees(num_devices)}."
            ' Use "cpu", or a device that is there' + (", or fewer workers." if workers else ".")
        )


def _what_torch_sees(num_devices: int) -> str:
    if num_devices:
        return f"torch sees {num_devices} CUDA device{'s' if num_devices > 1 else ''} here"
    is_cpu_build = torch.version.cuda is None and torch.version.hip is None
    return "torch sees no CUDA device here" + (" (this build of it is for CPUs alone)" if is_cpu_build else "")
