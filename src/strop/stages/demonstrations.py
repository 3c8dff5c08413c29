"""Conversations that a demonstrator plays in the real environment, and their order in training."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import AsyncIterator, Mapping
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import Field

from strop.errors import TaskError
from strop.recipe.graph import Product
from strop.recipe.stage import Estimate, Machine, PosedKeys, Stage, StageResult
from strop.rollout.chat_template import ChatFormat
from strop.rollout.demonstrate import demonstrate, in_form_of
from strop.rollout.environment import ToolEnvironments
from strop.rollout.prompt import load_prompt
from strop.stages.context import StageContext, load_chat, product_of
from strop.stages.data import conversation_maker, kept_path, open_tasks
from strop.stages.loop.preflight import task_files
from strop.tasks.demonstrators import DemonstratorConfig, RecordedDemonstrator
from strop.tasks.files import IndexedRows, writing_rows
from strop.tasks.readers import Unreadable
from strop.training.sft import Demonstration, Segment
from strop.types import RolloutKey, Task, Trajectory, derive_seed

if TYPE_CHECKING:
    from strop.recipe.recipe import Recipe


ItemT = TypeVar("ItemT")
_AT_ONCE = 32
_HELD_AT_ONCE = 1024  # played ones, until they are handed on


async def play_demonstrations(
    context: StageContext, stage: PosedKeys, demonstrator: DemonstratorConfig, chat: ChatFormat, *, num: int
) -> AsyncIterator[tuple[Task, Trajectory]]:
    """Yield demonstrations of the first `num` training tasks, played with the real tools, in the order of the tasks.

    Tasks that the demonstrator cannot do are left out, with a warning. No more than `_HELD_AT_ONCE` are in memory.

    Raises:
        TaskError: it can do none of them.
    """
    tasks = open_tasks(context.recipe, context.name, stage.tasks, seed=context.seed("tasks"), split="train")
    tool = next((each.spec.name for each in context.tools), "")
    prompt = load_prompt(stage.prompt)
    environments = ToolEnvironments(chat, prompt, context.tools, stage.limits)
    gate = asyncio.Semaphore(_AT_ONCE)

    async def play(index: int) -> tuple[Task, Trajectory] | TaskError:
        task = tasks.task(index)
        seed = context.seed("demonstration", index)
        try:
            replies = demonstrator.script(task, tool=tool, seed=seed)
        except TaskError as error:
            return error
        if not isinstance(demonstrator, RecordedDemonstrator):  # whose tags are those of its rows
            replies = [in_form_of(prompt, reply) for reply in replies]
        async with gate:
            key = RolloutKey(task_index=index, attempt=0)
            try:
                played = await demonstrate(
                    task,
                    key,
                    replies,
                    environments=environments,
                    chat=chat,
                    calls=environments.format,
                    max_tokens=stage.sampling.max_tokens,
                    seed=seed,
                    prefill=prompt.prefill,
                )
            except Unreadable as error:
                return TaskError(f"task {task.id!r}: {error}.")
            return task, played

    limit = num if tasks.num_tasks is None else min(num, tasks.num_tasks)
    num_done, first_fault = 0, ""
    for start in range(0, limit, _HELD_AT_ONCE):
        for each in await asyncio.gather(*(play(index) for index in range(start, min(limit, start + _HELD_AT_ONCE)))):
            if isinstance(each, tuple):
                num_done += 1
                yield each
            else:
                first_fault = first_fault or str(each)
    if not num_done:
        raise TaskError(f"stages.{context.name}.demonstrator: it can do none of {limit} tasks; of the first, {first_fault}")
    if num_done < num:
        why = "there are no more tasks" if num_done == limit else "the others could not be written"
        context.warn(f"{num_done} demonstrations, not {num}: {why}")


async def write_demonstrations(
    context: StageContext, stage: PosedKeys, demonstrator: DemonstratorConfig, chat: ChatFormat, path: Path, *, num: int
) -> int:
    """Play demonstrations and write them into `path` as conversations. Returns their number."""
    make_row, num_written = conversation_maker(context, stage.prompt, chat), 0
    with writing_rows(path) as add:
        async for task, played in play_demonstrations(context, stage, demonstrator, chat, num=num):
            add(make_row(task, played))
            num_written += 1
    return num_written


def as_demonstration(trajectory: Trajectory) -> Demonstration:
    """Return a trajectory with the provenance of its tokens: what the demonstrator said is imitated, all else is context.

    The demonstrator may be the policy itself; tokens that were forced on it are not imitated.
    """
    segments = [Segment(ids=trajectory.prompt_ids, is_demonstrator=False)]
    for turn in trajectory.turns:
        said = zip(turn.completion.ids, turn.completion.is_forced, strict=True)
        for is_forced, tokens in groupby(said, key=lambda token: token[1]):
            segments.append(Segment(ids=tuple(token for token, _ in tokens), is_demonstrator=not is_forced))
        segments.append(Segment(ids=turn.observation_ids, is_demonstrator=False))
    return Demonstration(segments=tuple(segment for segment in segments if segment.ids))


def batch_at(rows: IndexedRows[ItemT], step: int, *, batch_size: int, seed: int, with_rest: bool = False) -> list[ItemT]:
    """Return the batch of a step, a pure function of its arguments: each epoch in another order.

    The remainder of an epoch is left out, or with `with_rest` its last batch. Rows of all lengths are mixed: batches sorted by
    length would weigh a token of a short batch more than one of a long batch.
    """
    batches_per_epoch = -(-len(rows) // batch_size) if with_rest else len(rows) // batch_size
    epoch, position = divmod(step, batches_per_epoch)
    order = shuffled(len(rows), derive_seed(seed, "epoch", epoch))
    return [rows[index] for index in order[position * batch_size : (position + 1) * batch_size]]


@lru_cache(maxsize=1)  # the current epoch: to shuffle 200 000 numbers at each step takes longer than a small step
def shuffled(num: int, seed: int) -> array[int]:
    """Return the numbers below `num` in the order that `seed` decides."""
    order = array("Q", range(num))
    random.Random(seed).shuffle(order)
    return order


class DemonstrationsStage(Stage):
    """Conversations that a demonstrator plays in the real environment, for stages that mix them with others."""

    makes = Product.CONVERSATIONS
    root_keys = frozenset({"sandbox", "tools"})

    class Config(PosedKeys):
        """Keys of `kind = "demonstrations"`."""

        init: str = Field(description="Stage whose tokenizer the conversations are written in.")
        demonstrator: DemonstratorConfig = Field(description="What writes the demonstrations.")
        num_demonstrations: int = Field(ge=1, description="Number of demonstrations: one for each of the first tasks.")

    config: Config

    def files(self) -> Mapping[str, Path]:
        return task_files("tasks", self.config.tasks, ["train"])

    def plan(self, name: str, recipe: Recipe, machine: Machine) -> Estimate:
        return Estimate(arithmetic=f"{self.config.num_demonstrations} demonstrations")

    async def run(self, context: StageContext) -> StageResult:
        """Play and write the conversations."""
        config, path = self.config, kept_path(context.directory)
        chat = load_chat(product_of(context.run, config.init))
        context.started(1, 0)
        num = await write_demonstrations(context, config, config.demonstrator, chat, path, num=config.num_demonstrations)
        return StageResult(summary=f"{num} demonstrations", product=path)
