"""Opens the engines of a stage as one pool, and checks that a rollout fits into their KV memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from strop.engine.config import AnyEngine, EngineConfig, ServerConfig, VllmConfig
from strop.engine.protocol import InferenceEngine
from strop.errors import ConfigError
from strop.recipe.recipe import Recipe
from strop.recipe.stage import PlayedKeys, PosedKeys
from strop.rollout.chat_template import ChatFormat
from strop.rollout.environment import ToolEnvironments, Tools
from strop.rollout.prompt import load_prompt
from strop.rollout.scheduler.engine_pool import EnginePool, engine_name
from strop.rollout.scheduler.replacements import EngineObserver
from strop.stages.context import StageContext
from strop.stages.data import open_tasks
from strop.tasks import TaskSource
from strop.tools.protocol import Tool
from strop.types import Task

_MARGIN = 1.1  # times an engine's own deadline, so that the engine's own error comes first


async def open_engine_pool(context: StageContext, model: Path, chat: ChatFormat) -> EnginePool:
    """Open the engines of the recipe with the weights of the directory `model`.

    Raises:
        UserError: an engine cannot be opened as the recipe says.
    """
    config = context.recipe.engine
    logs = context.directory.logs
    names = [engine_name(index) for index in range(config.num_engines)]
    engines = await context.open_engines(model, config, detokenize=chat.decode, logs=logs, names=names)

    async def open_another(index: int, name: str) -> InferenceEngine:
        [engine] = await context.open_engines(model, config.only(index), detokenize=chat.decode, logs=logs, names=[name])
        return engine

    return EnginePool(
        engines,
        context.recipe.scheduler,
        open_another=open_another,
        stall_timeout_s=config.stall_timeout_s,
        publish_deadline_s=_publish_deadline_s(config),
        observer=_EngineEvents(context),
    )


def _publish_deadline_s(config: AnyEngine) -> float:
    """The time that servers have to read weights, and that of a completion for everything around it."""
    return _MARGIN * (config.stall_timeout_s + (config.publish_timeout_s if isinstance(config, ServerConfig) else 0.0))


class _EngineEvents(EngineObserver):
    """Shows lost and replaced engines to the user and writes them to the run's events."""

    def __init__(self, context: StageContext) -> None:
        self._context = context

    def engine_joined(self, name: str, *, replaces: str) -> None:
        self._context.event("engine_joined", engine=name, replaces=replaces)
        self._context.warn(f"{name} replaces {replaces}.")

    def engine_lost(self, name: str, *, reason: str) -> None:
        self._context.event("engine_lost", engine=name, reason=reason)
        self._context.warn(f"{name} is lost: {reason}")

    def engine_not_replaced(self, name: str, *, reason: str) -> None:
        self._context.event("engine_not_replaced", engine=name, reason=reason)
        self._context.warn(f"{name} was not replaced: {reason}")


def check_room(recipe: Recipe, origin: str, chat: ChatFormat, tools: Sequence[Tool]) -> None:
    """Check every stage whose model comes from `origin`, a finished stage, against `engine.max_length`.

    Raises:
        ConfigError: a prompt among the first of a stage, or any of an evaluation, and its longest response do not fit. Or
            memory is over-subscribed where that has no effect.
    """
    for name, stage in recipe.stages.items():
        if stage.plays:
            _refuse_idle_oversubscription(recipe.for_stage(name))
    for name, stage in recipe.stages.items():
        config = stage.config
        if not isinstance(config, PlayedKeys) or not stage.plays or not config.has_own_tasks:
            continue
        if recipe.origin_of(name) == origin:
            for each in config.with_each_tasks():
                held = recipe.for_stage(name).engine.max_length
                check_longest(recipe, name, each, chat, tools, held=held, limit=f"engine.max_length = {held}")


def prompt_lengths(stage: PosedKeys, tasks: Sequence[Task], chat: ChatFormat, tools: Sequence[Tool]) -> list[int]:
    """Tokens of each task's prompt."""
    kind = stage.environment if isinstance(stage, PlayedKeys) else Tools()
    shared = ToolEnvironments(chat, load_prompt(stage.prompt), tools, stage.limits)
    return [len(kind.prompt_ids(shared, task)) for task in tasks]


def _longest_prompt(
    recipe: Recipe, name: str, stage: PlayedKeys, chat: ChatFormat, tools: Sequence[Tool], source: TaskSource | None = None
) -> tuple[str, int]:
    """The task with the longest prompt among the first of the stage, or all of an evaluation, and the prompt's tokens."""
    seed, num = stage.task_seed(recipe.seed, name), stage.num_first_tasks
    source = source or open_tasks(recipe, name, stage.tasks, seed=seed, split=stage.played_split)
    num = num if source.num_tasks is None else min(num, source.num_tasks)
    tasks = [source.task(index) for index in range(num)]
    lengths = prompt_lengths(stage, tasks, chat, tools)
    return max(zip((task.id for task in tasks), lengths, strict=True), key=lambda each: each[1])


def _refuse_idle_oversubscription(recipe: Recipe) -> None:
    """Refuse over-subscription that has no effect, before anything is trained."""
    engine, scheduler = recipe.engine, recipe.scheduler
    if scheduler.policy != "scheduler" or scheduler.oversubscription == 1:
        return
    refused = f"scheduler.oversubscription = {scheduler.oversubscription:g} has no effect: "
    if isinstance(engine, EngineConfig):
        raise ConfigError(
            f"{refused}a conversation takes a whole slot of the embedded engine, however short it is. Leave it at 1 and raise"
            f" engine.slots ({engine.slots}), or use a server engine, whose memory is paged."
        )
    if isinstance(engine, VllmConfig) and engine.kv_mib is None and not engine.addresses:
        raise ConfigError(
            f"{refused}engine.kv_mib is unset, so each server has memory for engine.slots = {engine.slots} conversations of"
            f" engine.max_length = {engine.max_length} tokens. Leave it at 1, or set engine.kv_mib to less than that."
        )


def check_longest(
    recipe: Recipe,
    name: str,
    stage: PlayedKeys,
    chat: ChatFormat,
    tools: Sequence[Tool],
    *,
    held: int,
    limit: str,
    source: TaskSource | None = None,
) -> None:
    """Raises `ConfigError` if the longest prompt of a stage's first tasks and a response have more than `held` tokens.

    Args:
        limit: what `held` is, in words.
        source: the tasks that it plays. Default: those of `stage.tasks`.
    """
    task, length = _longest_prompt(recipe, name, stage, chat, tools, source)
    response = stage.longest_response
    needed = length + response
    if needed > held:
        raise ConfigError(
            f"stages.{name}: a single rollout cannot fit into KV memory: the prompt of task {task!r} has {length} tokens, and"
            f" sampling.max_tokens = {response}, together {needed}; the limit is {limit}."
            f" Raise engine.max_length to {needed}, or lower sampling.max_tokens to {max(1, held - length)}."
        )
