"""What a stage needs of engines and machine: opens its engines as one pool, checks before and estimates.

Stages call the checks from `check` and the estimates from `plan`. A rollout must fit into the KV memory of an engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from strop.cluster.ray_setup import check_installed
from strop.engine.config import AnyEngine, EngineChoice, EngineConfig, ServerConfig, SglangConfig, VllmConfig
from strop.engine.opening import check_interpreter, check_processes
from strop.engine.protocol import InferenceEngine
from strop.errors import ConfigError, NotThere, UserError, did_you_mean
from strop.recipe.recipe import Recipe
from strop.recipe.stage import Machine, PlayedKeys, PosedKeys, Stage
from strop.rewards import Reward, SumReward
from strop.rewards.reward_model import ExchangeFormat, check_reward_model
from strop.rewards.scorers import EmbeddedScorerConfig, ScorerPart, VllmScorerConfig
from strop.rollout.chat_template import ChatFormat
from strop.rollout.environment import ToolEnvironments, Tools
from strop.rollout.prompt import load_prompt
from strop.rollout.scheduler.engine_pool import EngineObserver, EnginePool, engine_name
from strop.stages.context import StageContext, open_tasks
from strop.tasks.protocol import Split, TaskSource
from strop.tools.protocol import Tool
from strop.training.config import TrainerConfig
from strop.types import Task

_MARGIN = 1.1  # times an engine's own deadline, so that the engine's own error comes first


async def open_engine_pool(context: StageContext, config: EngineChoice, model: Path, chat: ChatFormat) -> EnginePool:
    """Open the engines of `config` with the weights of the directory `model`.

    Raises:
        UserError: an engine cannot be opened as the recipe says.
    """
    logs = context.directory.logs
    names = [engine_name(index) for index in range(config.num_engines)]
    engines = await context.open_engines(model, config, detokenize=chat.decode, logs=logs, names=names)

    async def open_another(index: int, name: str) -> InferenceEngine:
        [engine] = await context.open_engines(model, config.only(index), detokenize=chat.decode, logs=logs, names=[name])
        return engine

    # The time that servers have to read weights, and that of a completion for everything around it.
    reading_s = config.start_timeout_s if isinstance(config, ServerConfig) else 0.0
    return EnginePool(
        engines,
        context.recipe.scheduler,
        open_another=open_another,
        stall_timeout_s=config.stall_timeout_s,
        publish_deadline_s=_MARGIN * (config.stall_timeout_s + reading_s),
        observer=_EngineEvents(context),
    )


class _EngineEvents(EngineObserver):
    """Shows lost and replaced engines to the user and writes them to the run's events."""

    def __init__(self, context: StageContext) -> None:
        self._context = context

    def engine_joined(self, name: str, *, replaces: str) -> None:
        self._show(f"{name} replaces {replaces}.", "engine_joined", engine=name, replaces=replaces)

    def engine_lost(self, name: str, *, reason: str) -> None:
        self._show(f"{name} is lost: {reason}", "engine_lost", engine=name, reason=reason)

    def engine_not_replaced(self, name: str, *, reason: str) -> None:
        self._show(f"{name} was not replaced: {reason}", "engine_not_replaced", engine=name, reason=reason)

    def _show(self, text: str, event: str, **facts: str) -> None:
        self._context.event(event, **facts)
        self._context.warn(text)


def check_room(recipe: Recipe, origin: str, chat: ChatFormat, tools: Sequence[Tool]) -> None:
    """Check every stage whose model comes from `origin`, a finished stage, against `engine.max_length`.

    Raises:
        ConfigError: a prompt among the first of a stage, or any of an evaluation, and its longest response do not fit. Or
            memory is over-subscribed where that has no effect.
    """
    playing = {name: stage.config for name, stage in recipe.stages.items() if stage.plays}
    for name in playing:
        engine, scheduler = recipe.for_stage(name).engine, recipe.scheduler
        if scheduler.policy != "scheduler" or scheduler.oversubscription == 1:
            break
        refused = f"scheduler.oversubscription = {scheduler.oversubscription:g} has no effect: "
        if isinstance(engine, EngineConfig):
            raise ConfigError(
                f"{refused}a conversation takes a whole slot of the embedded engine, however short it is. Leave it at 1 and"
                f" raise engine.slots ({engine.slots}), or use a server engine, whose memory is paged."
            )
        if isinstance(engine, VllmConfig) and engine.kv_mib is None and not engine.addresses:
            raise ConfigError(
                f"{refused}engine.kv_mib is unset, so each server has memory for engine.slots = {engine.slots} conversations of"
                f" engine.max_length = {engine.max_length} tokens. Leave it at 1, or set engine.kv_mib to less than that."
            )
    for name, config in playing.items():
        if isinstance(config, PlayedKeys) and config.has_own_tasks and recipe.origin_of(name) == origin:
            held = recipe.for_stage(name).engine.max_length
            for each in config.with_each_tasks():
                seed = each.task_seed(recipe.seed, name)
                source = open_tasks(recipe, name, each.tasks, seed=seed, split=each.played_split)
                check_longest(name, each, source, chat, tools, held=held, limit=f"engine.max_length = {held}")


def prompt_lengths(stage: PosedKeys, tasks: Sequence[Task], chat: ChatFormat, tools: Sequence[Tool]) -> list[int]:
    """Tokens of each task's prompt."""
    kind = stage.environment if isinstance(stage, PlayedKeys) else Tools()
    shared = ToolEnvironments(chat, load_prompt(stage.prompt), tools, stage.limits)
    return [len(kind.prompt_ids(shared, task)) for task in tasks]


def check_longest(
    name: str, stage: PlayedKeys, source: TaskSource, chat: ChatFormat, tools: Sequence[Tool], *, held: int, limit: str
) -> None:
    """Raises `ConfigError` if the longest prompt of a stage's first tasks and a response have more than `held` tokens.

    Args:
        source: the tasks that it plays.
        limit: what `held` is, in words.
    """
    num = stage.num_first_tasks if source.num_tasks is None else min(stage.num_first_tasks, source.num_tasks)
    tasks = [source.task(index) for index in range(num)]
    lengths = prompt_lengths(stage, tasks, chat, tools)
    length, task = max(lengths), tasks[lengths.index(max(lengths))].id
    response = stage.longest_response
    needed = length + response
    if needed > held:
        raise ConfigError(
            f"stages.{name}: a single rollout cannot fit into KV memory: the prompt of task {task!r} has {length} tokens, and"
            f" sampling.max_tokens = {response}, together {needed}; the limit is {limit}."
            f" Raise engine.max_length to {needed}, or lower sampling.max_tokens to {max(1, held - length)}."
        )


_MOST_COUNTED_MIB = 16  # of a file whose rows are counted: some 50 000 problems, in about a second


class MachineStage(Stage):
    """Base of stages that need engines, the device of a trainer, or reward models that judge them."""

    def check(self, name: str, recipe: Recipe, machine: Machine) -> Iterator[UserError]:
        key, config = f"stages.{name}", self.config
        plays = isinstance(config, PlayedKeys) and self.opens_engines
        if isinstance(config, PlayedKeys) and plays:
            yield from _check_played(key, config, recipe, machine)
        if isinstance(trainer := getattr(config, "trainer", None), TrainerConfig):
            if trainer.workers and not machine.is_elsewhere:
                yield from _caught(check_installed, f"{key}.trainer.workers")
            yield from _check_device(trainer.device, f"{key}.trainer", machine, workers=trainer.workers)
            if plays and not machine.is_elsewhere:
                yield from _check_same_device(name, trainer, recipe.engine)
            starts = [name, getattr(config, "critic_init", None)] if trainer.sequence_parallel > 1 else []
            for num_heads in {recipe.stages[recipe.origin_of(each)].size().num_kv_heads for each in starts if each}:
                if num_heads % trainer.sequence_parallel:
                    yield ConfigError(
                        f"{key}.trainer.sequence_parallel is {trainer.sequence_parallel}, which does not divide the"
                        f" {num_heads} heads of keys and values of the model. Choose a divisor."
                    )
        if isinstance(config, PlayedKeys) and self.is_judged:
            yield from _check_reward(key, config.reward, recipe, machine)


def _check_played(key: str, config: PlayedKeys, recipe: Recipe, machine: Machine) -> Iterator[UserError]:
    """The engine cannot hold or sample what the stage plays, or is not on this machine, or a limit is of no tool."""
    if config.longest_response >= recipe.engine.max_length:
        yield ConfigError(
            f"{key}.sampling.max_tokens is {config.longest_response}, but the engine holds conversations of engine.max_length ="
            f" {recipe.engine.max_length} tokens, prompt included. Raise engine.max_length, or lower max_tokens."
        )
    if config.sampling.repetition_penalty != 1 and isinstance(recipe.engine, SglangConfig):
        yield ConfigError(
            f"{key}.sampling.repetition_penalty is {config.sampling.repetition_penalty:g}, which releases of SGLang are"
            " reported to ignore. Leave it out, or use another engine."
        )
    yield from check_engine(recipe, machine)
    # Where a tool has no name before it is opened, as those of an MCP server, its rollouts say so.
    names = [tool.known_name(each) for each, tool in recipe.tools.items()]
    known = [each for each in names if each is not None]
    for unknown in [each for each in config.limits.max_calls_per_tool if None not in names and each not in known]:
        remedy = f"{did_you_mean(unknown, known)} Tools: {', '.join(known) or 'none'}."
        yield ConfigError(f"{key}.limits.max_calls_per_tool: there is no tool {unknown!r}.{remedy}")


def check_engine(recipe: Recipe, machine: Machine) -> Iterator[UserError]:
    """The interpreter of a server engine, or a device of the embedded one, or Ray for its processes, is not on this machine."""
    if isinstance(recipe.engine, ServerConfig):
        yield from (NotThere(str(error)) for error in _caught(check_interpreter, recipe.engine))
    elif isinstance(recipe.engine, EngineConfig) and not machine.is_elsewhere:
        yield from _caught(check_processes, recipe.engine)
        yield from _caught(_check_engine_devices, recipe.engine)


def _caught(check: Callable[..., object], *arguments: Any) -> Iterator[UserError]:
    """The error that a check raises, if it raises one."""
    try:
        check(*arguments)
    except UserError as error:
        yield error


def scorer_parts_of(reward: Reward) -> dict[str, ScorerPart.Config]:
    """The parts of a reward that ask a reward model."""
    if not isinstance(reward, SumReward):
        return {}
    return {name: part.config for name, part in reward.parts.items() if isinstance(part, ScorerPart)}


def _check_reward(stage: str, reward: Reward, recipe: Recipe, machine: Machine) -> Iterator[UserError]:
    """A reward model reads other text than it was trained on, its device is not here, or its directory holds none."""
    for name, part in scorer_parts_of(reward).items():
        key, scorer = f"{stage}.reward.parts.{name}.scorer", part.scorer
        if isinstance(scorer, EmbeddedScorerConfig):
            yield from _check_device(scorer.device, key, machine)
            trained = recipe.stages.get(scorer.stage or "")
            for each in ("judged_on", *(["think_tag"] if part.judged_on == "summary" else [])):
                mine, theirs = getattr(part, each), getattr(trained and trained.config, each, None)
                if theirs is not None and mine != theirs:
                    yield ConfigError(
                        f'{stage}.reward.parts.{name}.{each} is "{mine}", but that of the stage that trains its model is'
                        f' "{theirs}". Set both to the same value.'
                    )
        if not isinstance(scorer, EmbeddedScorerConfig | VllmScorerConfig) or scorer.path is None:
            continue
        path = Path(scorer.path)
        for check in (check_reward_model, ExchangeFormat) if isinstance(scorer, EmbeddedScorerConfig) else (ExchangeFormat,):
            yield from ((UserError if path.exists() else NotThere)(f"{key}.path: {error}") for error in _caught(check, path))


def scorer_warnings(recipe: Recipe, names: Sequence[str]) -> Iterator[str]:
    """Return what keeps a run with a deterministic engine from repeating itself, of the reward models in this process."""
    for name in names:
        stage, engine = recipe.stages[name], recipe.for_stage(name).engine
        is_repeatable = isinstance(engine, EngineConfig) and engine.deterministic
        if not (is_repeatable and stage.is_judged and isinstance(stage.config, PlayedKeys)):
            continue
        for key, part in scorer_parts_of(stage.config.reward).items():
            scorer = part.scorer
            if isinstance(scorer, EmbeddedScorerConfig) and scorer.max_batch > 1:
                yield (
                    f"stages.{name}.reward.parts.{key}.scorer.max_batch is {scorer.max_batch}: which responses share a batch,"
                    " and so the rounding of their scores, depends on the clock, so a resumed run may end with other bits"
                    " although engine.deterministic is true. Set max_batch = 1, or engine.deterministic = false."
                )


def task_files(key: str, tasks: TaskSource, splits: Sequence[Split]) -> Mapping[str, Path]:
    """The files of the parts of `tasks` that are opened, by key; each file once."""
    found: dict[str, Path] = {}
    for split in splits:
        path = tasks.files.get(split)
        if path is not None and path not in found.values():
            found[key if key not in found else f"{key}.test_path"] = path
    for name, part in tasks.parts.items():
        found |= task_files(f"{key}.parts.{name}", part, splits)
    return found


def tasks_there(name: str, config: PlayedKeys, recipe: Recipe, wanted: int | None) -> int | None:
    """How many tasks there are, or `wanted` of generated ones; None where that is not known before they are read.

    Raises `TaskError` as `open_tasks` does.
    """
    if not config.has_own_tasks:
        return None
    if config.tasks.is_endless:
        return wanted
    path = config.tasks.files.get(config.played_split)
    is_counted = path is None or (path.is_file() and path.stat().st_size <= _MOST_COUNTED_MIB * 2**20)
    if not config.tasks.files or not is_counted:
        return None
    return open_tasks(recipe, name, config.tasks, seed=recipe.seed, split=config.played_split).num_tasks


def passes_in_words(name: str, config: PlayedKeys, recipe: Recipe, num_tasks: int) -> str:
    """How often `num_tasks` tasks pass over each source whose size is known before it is read."""
    if not config.has_own_tasks:
        return ""
    parts = config.tasks.parts or {"": config.tasks}
    weights = {part: getattr(config.tasks.config, "weights", {}).get(part, 1) for part in parts}
    found = ""
    for part, tasks in parts.items():
        there = tasks.num_published or tasks_there(name, config.model_copy(update={"tasks": tasks}), recipe, None)
        num = num_tasks * weights[part] / sum(weights.values())
        found += f"; {num / there:.1f} passes over {there} tasks" + (f" of {part}" if part else "") if there else ""
    return found


def _check_engine_devices(config: EngineConfig) -> None:
    if config.device == "cpu" or ("CUDA_VISIBLE_DEVICES" in os.environ and config.devices):
        return  # engines with devices of their own see those, whatever this process sees
    if missing := [device for device in config.devices if device >= torch.cuda.device_count()]:
        raise UserError(
            f"engine.devices names {missing}, but {_what_torch_sees()}. Name devices that are there, counted from 0,"
            ' or leave the key out and set engine.device = "cpu".'
        )
    _ = config.torch_device


def _check_device(name: str, key: str, machine: Machine, *, workers: int = 0) -> Iterator[UserError]:
    if name == "auto" or machine.is_elsewhere:
        return
    try:
        device = torch.device(name)
    except RuntimeError:
        yield UserError(f'{key}.device is {name!r}, which is no device. Write "cpu", "cuda" or "cuda:1".')
        return
    if device.type == "cuda" and max(1, workers, (device.index or 0) + 1) > torch.cuda.device_count():
        of_workers = f" and {key}.workers is {workers}" if workers else ""
        yield UserError(
            f"{key}.device is {name!r}{of_workers}, but {_what_torch_sees()}."
            ' Use "cpu", or a device that is there' + (", or fewer workers." if workers else ".")
        )


def _check_same_device(name: str, trainer: TrainerConfig, engine: AnyEngine) -> Iterator[ConfigError]:
    """A trainer whose device is not named would compute on another type of device than the embedded engine."""
    if trainer.device != "auto" or trainer.pages_moments or not isinstance(engine, EngineConfig):
        return
    of_engine = "cuda" if engine.device != "cpu" and torch.cuda.device_count() else "cpu"
    if (of_trainer := trainer.torch_device.type) != of_engine:
        yield ConfigError(
            f'stages.{name}.trainer.device is "auto", which is {of_trainer} here for stages.{name}.trainer.workers ='
            f' {trainer.workers}, but engine.device = "{engine.device}" is {of_engine}: {_what_torch_sees()}. Set'
            " both to the same device, or trainer.device to the one that you want."
        )


def _what_torch_sees() -> str:
    if num_devices := torch.cuda.device_count():
        return f"torch sees {num_devices} CUDA device{'s' if num_devices > 1 else ''} here"
    is_cpu_build = torch.version.cuda is None and torch.version.hip is None
    return "torch sees no CUDA device here" + (" (this build of it is for CPUs alone)" if is_cpu_build else "")
