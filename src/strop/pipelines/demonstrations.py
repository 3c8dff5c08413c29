"""Plays demonstrations for supervised fine-tuning, writes them down, and puts them in the order of training."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import AsyncIterator, Iterator
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Protocol

from pydantic import TypeAdapter

from strop.errors import TaskError
from strop.pipelines.recipe import Stage
from strop.pipelines.row_files import RowFile
from strop.pipelines.stage import StageContext
from strop.pipelines.stage_data import RowsWriter
from strop.pipelines.stage_tasks import open_tasks
from strop.rollout.chat import ChatFormat
from strop.rollout.demonstrate import demonstrate
from strop.rollout.environment import ToolEnvironments
from strop.rollout.prompt import load_prompt
from strop.seeds import derive_seed
from strop.tasks.demonstrators import DemonstratorConfig
from strop.tasks.readers import Unreadable
from strop.training.sft import Demonstration, Segment
from strop.types import RolloutKey, Trajectory

_TRAJECTORY = TypeAdapter(Trajectory)
_AT_ONCE = 32
_HELD_AT_ONCE = 1024  # played ones, until they are handed on


class Demonstrations(Protocol):
    """Demonstrations by number, from 0: a list of them, or a file."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Demonstration: ...


async def play_demonstrations(
    context: StageContext, stage: Stage, demonstrator: DemonstratorConfig, chat: ChatFormat, *, num: int
) -> AsyncIterator[Trajectory]:
    """The first `num` training tasks that the demonstrator can do, played with the real tools, in the order of the tasks.

    They come as they are done, and no more than `_HELD_AT_ONCE` are in memory.

    Raises:
        TaskError: it can do none of them.
    """
    tasks = open_tasks(context.recipe, context.name, stage.tasks, seed=context.seed("tasks"), split="train")
    tool = context.tools()[0].spec.name
    environments = ToolEnvironments(chat, load_prompt(stage.prompt), context.tools(), stage.limits)
    gate = asyncio.Semaphore(_AT_ONCE)

    async def play(index: int) -> Trajectory | TaskError:
        task = tasks.task(index)
        seed = context.seed("demonstration", index)
        try:
            replies = demonstrator.script(task, tool=tool, seed=seed)
        except TaskError as error:
            return error
        async with gate:
            key = RolloutKey(task_index=index, attempt=0)
            try:
                return await demonstrate(
                    task,
                    key,
                    replies,
                    environments=environments,
                    chat=chat,
                    calls=environments.format,
                    max_tokens=stage.sampling.max_tokens,
                    seed=seed,
                )
            except Unreadable as error:
                return TaskError(f"task {task.id!r}: {error}.")

    limit = num if tasks.num_tasks is None else min(num, tasks.num_tasks)
    num_done, first_fault = 0, ""
    for start in range(0, limit, _HELD_AT_ONCE):
        for each in await asyncio.gather(*(play(index) for index in range(start, min(limit, start + _HELD_AT_ONCE)))):
            if isinstance(each, Trajectory):
                num_done += 1
                yield each
            else:
                first_fault = first_fault or str(each)
    if not num_done:
        raise TaskError(f"stages.{context.name}.demonstrator: it can do none of {limit} tasks; of the first, {first_fault}")
    if num_done < limit:
        context.warn(f"{num_done} demonstrations where {limit} were asked for: the others could not be written")
    elif limit < num:
        context.warn(f"{limit} demonstrations where up to {num} were wanted: there are no more tasks")


async def play_once(
    context: StageContext, stage: Stage, demonstrator: DemonstratorConfig, chat: ChatFormat, *, num: int
) -> None:
    """Play the stage's demonstrations and write them into its data directory, unless an earlier try did."""
    path = _path(context)
    if not path.exists():
        with RowsWriter(path) as file:
            async for played in play_demonstrations(context, stage, demonstrator, chat, num=num):
                file.add(_TRAJECTORY.dump_python(played, mode="json"))


def played_before(context: StageContext) -> Iterator[Trajectory]:
    """What `play_once` wrote, read one at a time."""
    with RowFile(_path(context)) as rows:
        yield from (_TRAJECTORY.validate_python(row) for row in rows)


def _path(context: StageContext) -> Path:
    return context.directory.path / "data" / "demonstrations.jsonl"


def as_demonstration(trajectory: Trajectory) -> Demonstration:
    """A trajectory with the provenance of its tokens: what the demonstrator said is imitated, all else is context (law 2).

    The demonstrator may be the policy itself; tokens that were forced on it are not its own.
    """
    segments = [Segment(ids=trajectory.prompt_ids, is_demonstrator=False)]
    for turn in trajectory.turns:
        said = zip(turn.completion.ids, turn.completion.is_forced, strict=True)
        for is_forced, tokens in groupby(said, key=lambda token: token[1]):
            segments.append(Segment(ids=tuple(token for token, _ in tokens), is_demonstrator=not is_forced))
        segments.append(Segment(ids=turn.observation_ids, is_demonstrator=False))
    return Demonstration(segments=tuple(segment for segment in segments if segment.ids))


def batch_at(demonstrations: Demonstrations, step: int, *, batch_size: int, seed: int) -> list[Demonstration]:
    """The batch of a step, a pure function of its arguments: each epoch in another order, its remainder left out.

    Rows of all lengths are mixed: batches sorted by length would weigh a token of a short batch more than one of a long batch.
    """
    batches_per_epoch = len(demonstrations) // batch_size
    epoch, position = divmod(step, batches_per_epoch)
    order = shuffled(len(demonstrations), derive_seed(seed, "epoch", epoch))
    return [demonstrations[index] for index in order[position * batch_size : (position + 1) * batch_size]]


@lru_cache(maxsize=1)  # of the epoch that goes on: to shuffle 200 000 anew at each step takes longer than a small step
def shuffled(num: int, seed: int) -> array[int]:
    """The numbers below `num` in the order that `seed` decides."""
    order = array("Q", range(num))
    random.Random(seed).shuffle(order)
    return order
