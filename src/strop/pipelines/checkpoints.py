"""Finds, writes and thins out the checkpoints of a stage. A checkpoint is there whole or not at all (law 9)."""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from pathlib import Path

from strop.pipelines.stage import StageContext
from strop.runs import StageDirectory, write_directory
from strop.training.trainer import LocalTrainer

_NAME = re.compile(r"^step-(\d+)$")


def latest_step(directory: StageDirectory) -> int:
    """The last step that a checkpoint holds; 0 when there is none. What a kill left half written is removed."""
    if not directory.checkpoints.is_dir():
        return 0
    for left in directory.checkpoints.glob(".*.tmp"):
        shutil.rmtree(left)
    return max(_steps(directory), default=0)


async def resume(context: StageContext, trainer: LocalTrainer) -> int:
    """Load the last checkpoint into `trainer`; returns its step, 0 when the stage starts from nothing."""
    step = latest_step(context.directory)
    if step:
        await trainer.load(context.directory.checkpoint(step))
        context.event("resumed", step=step)
    return step


async def save(context: StageContext, trainer: LocalTrainer, step: int, *, keep: int) -> None:
    """Write the checkpoint of `step`, then remove all but the last `keep`."""
    context.event("checkpoint_started", step=step)
    started = time.perf_counter()
    loop = asyncio.get_running_loop()

    def fill(directory: Path) -> None:
        asyncio.run_coroutine_threadsafe(trainer.save(directory), loop).result()

    await asyncio.to_thread(write_directory, context.directory.checkpoint(step), fill)
    context.event("checkpoint_finished", step=step, time_s=time.perf_counter() - started)
    for old in sorted(_steps(context.directory))[:-keep]:
        shutil.rmtree(context.directory.checkpoint(old))


def _steps(directory: StageDirectory) -> list[int]:
    matches = (_NAME.match(entry.name) for entry in directory.checkpoints.iterdir())
    return [int(match.group(1)) for match in matches if match]
