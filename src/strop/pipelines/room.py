"""Whether a rollout of a stage fits into the KV memory of its engines, asked before time is spent on anything else."""

from __future__ import annotations

from collections.abc import Sequence

from strop.engine.config import EngineConfig, VllmConfig
from strop.errors import ConfigError
from strop.pipelines.recipe import (
    EvalStage,
    ModelStage,
    PlayedStage,
    Recipe,
    SampledStage,
    Stage,
    SteppedStage,
    TrainingStage,
    init_of,
)
from strop.pipelines.stage_tasks import open_tasks
from strop.rollout.chat import ChatFormat
from strop.rollout.fleet import Fleet
from strop.rollout.prompt import load_prompt
from strop.seeds import derive_seed
from strop.tasks import TaskSource
from strop.tools.protocol import Tool
from strop.types import Task

_NUM_TASKS = 64  # of a stage that learns, whose prompts are looked at; later ones that do not fit are void when they are drawn


def check_room(recipe: Recipe, origin: str, chat: ChatFormat, tools: Sequence[Tool]) -> None:
    """Hold every stage whose model comes from `origin`, a stage that is done, against what the recipe says of its engines.

    Raises:
        ConfigError: the first prompts of a stage, or any of an evaluation, and its longest response do not fit; with the
            arithmetic. Or memory is to be over-subscribed where that can do nothing.
    """
    _refuse_idle_oversubscription(recipe)
    for name, stage in recipe.stages.items():
        is_known = isinstance(stage, EvalStage) or not stage.data if isinstance(stage, PlayedStage) else False
        if isinstance(stage, PlayedStage) and is_known and _origin_of(recipe, stage) == origin:
            for each in stage.with_each_tasks() if isinstance(stage, SteppedStage) else (stage,):
                longest, held = _longest_prompt(recipe, name, each, chat, tools), recipe.engine.max_length
                _refuse_if_too_long(name, each, longest, held, f"engine.max_length = {held}")


def check_engines(
    recipe: Recipe,
    name: str,
    stage: PlayedStage,
    chat: ChatFormat,
    tools: Sequence[Tool],
    fleet: Fleet,
    *,
    source: TaskSource | None = None,
) -> None:
    """Hold a stage against the engines that were opened for it, whose memory is known only now.

    Args:
        source: the tasks that it plays; those that `tasks` describes where there is none.

    Raises:
        ConfigError: no engine could ever hold a rollout of its first tasks, or of any of an evaluation; with the arithmetic.
    """
    longest = _longest_prompt(recipe, name, stage, chat, tools, source)
    held = fleet.max_request_tokens
    _refuse_if_too_long(name, stage, longest, held, f"{held}, which is what the KV memory of the largest engine holds")


def prompt_lengths(stage: Stage, tasks: Sequence[Task], chat: ChatFormat, tools: Sequence[Tool]) -> list[int]:
    """Tokens of each task's prompt."""
    prompt = load_prompt(stage.prompt)
    specs = [tool.spec for tool in tools]
    return [len(prompt.ids(chat, task.question, specs)) for task in tasks]


def _longest_prompt(
    recipe: Recipe, name: str, stage: PlayedStage, chat: ChatFormat, tools: Sequence[Tool], source: TaskSource | None = None
) -> tuple[str, int]:
    """Of the tasks that the stage begins with, or all of an evaluation, the one with the longest prompt, and its tokens."""
    if isinstance(stage, EvalStage):
        seed, num = derive_seed("eval", recipe.seed), stage.num_tasks
        source = open_tasks(recipe, name, stage.tasks, seed=seed, split=stage.split)
    else:
        wanted = stage.num_tasks or _NUM_TASKS if isinstance(stage, SampledStage) else stage.tasks_per_step
        seed, num = derive_seed("run", recipe.seed, name, "tasks"), min(wanted, _NUM_TASKS)
        source = source or open_tasks(recipe, name, stage.tasks, seed=seed, split="train")
    num = num if source.num_tasks is None else min(num, source.num_tasks)
    tasks = [source.task(index) for index in range(num)]
    lengths = prompt_lengths(stage, tasks, chat, tools)
    return max(zip((task.id for task in tasks), lengths, strict=True), key=lambda each: each[1])


def _origin_of(recipe: Recipe, stage: PlayedStage) -> str:
    """The stage that says which model it all began with."""
    name = stage.init
    while not isinstance(before := recipe.stages[name], ModelStage):
        name = init_of(before)
    return name


def _refuse_idle_oversubscription(recipe: Recipe) -> None:
    """As the scheduler does when it sees an engine's memory, but before anything was trained."""
    engine, scheduler = recipe.engine, recipe.scheduler
    if scheduler.policy != "scheduler" or scheduler.oversubscription == 1:
        return
    refused = f"scheduler.oversubscription = {scheduler.oversubscription:g} can start nothing more: "
    if isinstance(engine, EngineConfig):
        raise ConfigError(
            f"{refused}the embedded engine has {engine.slots} slots of engine.max_length = {engine.max_length} tokens, and a"
            " conversation takes one, however short it stays. Leave it at 1 and raise engine.slots, or use a server engine,"
            " whose memory is paged."
        )
    if isinstance(engine, VllmConfig) and engine.kv_mib is None and not engine.addresses:
        raise ConfigError(
            f"{refused}engine.kv_mib is unset, so each server gets memory for engine.slots = {engine.slots} conversations of"
            f" engine.max_length = {engine.max_length} tokens. Leave it at 1, or set engine.kv_mib to less than that."
        )


def _refuse_if_too_long(name: str, stage: Stage, longest: tuple[str, int], held: int, limit: str) -> None:
    task, length = longest
    response = stage.longest_response if isinstance(stage, TrainingStage) else stage.sampling.max_tokens
    needed = length + response
    if needed > held:
        raise ConfigError(
            f"stages.{name}: a single rollout cannot fit into KV memory: the prompt of task {task!r} has {length} tokens, and"
            f" sampling.max_tokens = {response}, together {needed}; the limit is {limit}."
            f" Give the engine room for {needed} tokens (engine.max_length), or lower sampling.max_tokens to"
            f" {max(1, held - length)}."
        )
