"""Calls the user's own task sources, rewards, tools, environments and methods on a few tasks, before time is spent on a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from strop import user_code
from strop.algorithms.method import Column, LossInputs, Method, checked_advantages, checked_selection, checked_token_loss
from strop.errors import MachineError
from strop.recipe.recipe import Recipe
from strop.recipe.stage import PlayedKeys
from strop.rewards import RunService, make_reward
from strop.rollout.chat_template import ChatFormat
from strop.rollout.environment import Observation, RolloutLimits, ToolEnvironments, ended
from strop.rollout.player import checked_observation
from strop.rollout.prompt import load_prompt
from strop.tools.protocol import Tool
from strop.types import Completion, Group, RolloutKey, ScoredTrajectory, StopReason, Task, ToolCall, ToolOutcome, Trajectory

NUM_TASKS = 3
_NUM_TOKENS = 8  # of a scripted answer
_ROOM = 10**6
_FIRST = RolloutKey(task_index=0, attempt=0)


async def call_own_code(
    recipe: Recipe, tasks: Mapping[str, Sequence[Task]], chat: ChatFormat, tools: Sequence[Tool], runner: RunService
) -> str:
    """Call each of them, and return what was called. Stages were checked and planned before, and are not run.

    Args:
        tasks: the first tasks of each stage that plays, by its name.

    Raises:
        ConfigError: one raised an exception or returned what it must not; with the function, the task, file and line.
    """
    called: dict[str, None] = {}
    for name, few in tasks.items():
        config = recipe.stages[name].config
        assert isinstance(config, PlayedKeys)
        few = few[:NUM_TASKS]
        method, environment = getattr(config, "method", None), config.environment
        with user_code.blaming():
            if not any("scorer" in each.key for each in recipe.stages[name].inputs()):  # else the run makes a reward model
                await _call_reward(config, few, runner)
            if _places(environment):
                await _call_environment(config, few, chat, tools)
            if isinstance(method, Method) and _places(method):
                _call_method(method, few, group_size=getattr(config, "group_size", 4))
        judges = [config.reward, *getattr(config.reward, "parts", {}).values()]
        functions = [judge.config for judge in judges]
        called |= dict.fromkeys(_places(config.tasks, *judges, *functions, environment, method))
    for tool in tools:
        if (place := user_code.place_of(_code_of(tool))) and user_code.is_own(place):
            with user_code.blaming():
                await _call_tool(tool, next(iter(tasks.values()))[:NUM_TASKS], chat)
            called[f"tool {tool.spec.name}"] = None
    return ", ".join(called)


def _code_of(tool: Tool) -> Any:
    return getattr(tool, "function", type(tool))


def _places(*tables: Any) -> list[str]:
    """The user's classes and functions that `tables` name."""
    named = [getattr(table, key, "") for table in tables for key in ("kind", "source", "function")]
    return [each for each in named if isinstance(each, str) and ":" in each]


async def _call_reward(config: PlayedKeys, tasks: Sequence[Task], runner: RunService) -> None:
    reward = make_reward(config.reward, runner)
    try:
        for task in tasks:
            with user_code.blaming(f"for task {task.id!r}"), suppress(MachineError):
                await reward.try_out(task, trajectory_of(task, answered(task.answer), ids=tuple(range(_NUM_TOKENS))))
    finally:
        await reward.close()


async def _call_environment(config: PlayedKeys, tasks: Sequence[Task], chat: ChatFormat, tools: Sequence[Tool]) -> None:
    """Start a rollout of each task, and say its answer."""
    shared = ToolEnvironments(chat, load_prompt(config.prompt), tools, config.limits, kind=config.environment)
    for index, task in enumerate(tasks):
        await _play_turn(shared, index, task, chat.completion_ids(answered(task.answer)))


async def _play_turn(environments: ToolEnvironments, index: int, task: Task, said: tuple[int, ...]) -> Observation:
    """Start a rollout in which the policy says these ids, and return what it observes."""
    with user_code.blaming(f"for task {task.id!r}"):
        environment = environments(task, seed=index)
        try:
            checked_observation(await environment.start(), environment.start, task)
            observation = await environment.step(completion_of(said), num_tokens_left=_ROOM)
            return checked_observation(observation, environment.step, task)
        finally:
            await environment.close()


def _call_method(method: Method, tasks: Sequence[Task], *, group_size: int) -> None:
    """Select from a scripted group of each task, and compute the advantages and the loss of their tokens."""
    groups = []
    for index, task in enumerate(tasks):
        scored = []
        for attempt in range(method.num_rollouts(group_size)):
            key, ids = RolloutKey(task_index=index, attempt=attempt), tuple(range(1, _NUM_TOKENS + 1 + attempt % 3))
            trajectory = trajectory_of(task, answered(task.answer), ids=ids, key=key)
            reward = (attempt % 3) / 2
            scored.append(ScoredTrajectory(trajectory=trajectory, reward=reward, reward_parts={"accuracy": reward}))
        groups.append(Group(task=task, task_index=index, trajectories=tuple(scored)))
    selections = [checked_selection(method, group, group_size=group_size, seed=index) for index, group in enumerate(groups)]
    advantages = checked_advantages(method, selections)
    for row in (row for rows in advantages for row in rows):
        logprobs = torch.full((1, len(row)), -1.0, requires_grad=True)
        old = logprobs.detach()
        inputs = LossInputs(
            loss_mask=torch.ones_like(old, dtype=torch.bool),
            advantages=row[None].float(),
            sampled_logprobs=old,
            entropies=torch.ones_like(old),
            columns={Column.OLD_LOGPROBS: old, **dict.fromkeys(method.needs, old)},
        )
        loss = checked_token_loss(method.token_loss, logprobs, inputs)
        if not loss.isfinite().all():
            remedy = "Return a finite loss for each token"
            raise user_code.returned(method.token_loss, loss, remedy, what=method.token_loss.__qualname__)


async def _call_tool(tool: Tool, tasks: Sequence[Task], chat: ChatFormat) -> None:
    """Play a turn with a call for each task, with a prompt that lists the tool.

    A tool may refuse arguments that are made up, so its own exceptions are a problem only if every call raises one.
    """
    environments = ToolEnvironments(chat, load_prompt("rstar2"), [tool], RolloutLimits())
    faults = []
    for index, task in enumerate(tasks):
        arguments = {name: _example(schema, task) for name, schema in tool.spec.parameters.get("properties", {}).items()}
        said = chat.completion_ids(environments.format.write(tool.spec.name, arguments))
        observation = await _play_turn(environments, index, task, said)
        for made in observation.calls:
            if made.outcome is ToolOutcome.ERROR:
                faults.append(f"answered {made.text!r:.200} to the arguments {arguments!s:.200} for task {task.id!r}")
    if len(faults) == len(tasks):
        raise user_code.mistake(_code_of(tool), faults[0], what=f"tool {tool.spec.name!r}")


def _example(schema: Mapping[str, Any], task: Task) -> object:
    """Return a value that fits the JSON schema of an argument, as far as its type says."""
    if "default" in schema:
        return schema["default"]
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return _example(schema["anyOf"][0], task)
    properties = {name: _example(each, task) for name, each in schema.get("properties", {}).items()}
    examples = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": properties, "null": None}
    return examples.get(schema.get("type", "string"), task.question)


def answered(answer: str) -> str:
    r"""Return a text in which every grader finds `answer`: behind thoughts, in a box, inside the one pair of answer tags."""
    return rf"<think>So it is.</think> <answer>\boxed{{{answer}}}</answer>"


def completion_of(ids: tuple[int, ...]) -> Completion:
    """Return a completion as an engine reports it, with a log-prob of -1 for each token."""
    return Completion.spoken(ids, logprob=-1.0, entropies=(1.0,) * len(ids))


def trajectory_of(
    task: Task,
    text: str,
    *,
    observed: str = "",
    stop_reason: StopReason = StopReason.ANSWERED,
    ids: tuple[int, ...] = (),
    key: RolloutKey = _FIRST,
) -> Trajectory:
    """Return a trajectory whose last turn says `text`, after a turn in which a tool answered `observed`."""
    call = ToolCall(name="python", arguments="{}", outcome=ToolOutcome.STDOUT, text=observed, duration_s=0.0)
    before = Observation(ids=(), text=observed, completion_text="", calls=(call,), stop_reason=None)
    said = [(completion_of(()), before)] if observed else []
    return played(task, ids[:1], *said, (completion_of(ids), ended(text, (), stop_reason)), key=key, stop_reason=stop_reason)


def played(
    task: Task,
    prompt_ids: tuple[int, ...],
    *said: tuple[Completion, Observation],
    key: RolloutKey = _FIRST,
    stop_reason: StopReason = StopReason.ANSWERED,
) -> Trajectory:
    """Return the trajectory of these completions, each with the observation that answers it."""
    turns = tuple(observation.as_turn(completion) for completion, observation in said)
    return Trajectory(key=key, task_id=task.id, prompt_ids=prompt_ids, turns=turns, stop_reason=stop_reason)
