"""Finds, checks, writes and thins out the checkpoints of a stage. A checkpoint is there whole or not at all (law 9)."""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
import time
from pathlib import Path

from strop.errors import RunError
from strop.pipelines.stage import StageContext
from strop.runs import StageDirectory, read_json, write_directory, write_json
from strop.training.protocol import Trainer

_NAME = re.compile(r"^step-(\d+)$")
_CHECKSUMS = "checksums.json"  # sha256 of every other file, by its path within the checkpoint
_DAMAGED = ".damaged"


def latest_step(directory: StageDirectory) -> int:
    """The last step that a checkpoint holds; 0 when there is none. What a kill left half written is removed."""
    if not directory.checkpoints.is_dir():
        return 0
    for left in directory.checkpoints.glob(".*.tmp"):
        shutil.rmtree(left)
    return max(_steps(directory), default=0)


async def resume(context: StageContext, trainer: Trainer) -> int:
    """Load the last checkpoint that is as it was written into `trainer`; returns its step, 0 when there is none.

    One that is not is set aside under another name, and told.
    """
    while step := latest_step(context.directory):
        directory = context.directory.checkpoint(step)
        if not (damage := await asyncio.to_thread(_damage, directory)):
            await trainer.load(directory)
            context.event("resumed", step=step)
            return step
        aside = directory.with_name(directory.name + _DAMAGED)
        shutil.rmtree(aside, ignore_errors=True)
        directory.rename(aside)
        context.warn(f"{directory}: {damage}. It is now {aside.name}; the checkpoint before it is used, if there is one.")
    return 0


async def save(context: StageContext, trainer: Trainer, step: int, *, keep: int) -> None:
    """Write the checkpoint of `step`, then remove all but the last `keep`."""
    context.event("checkpoint_started", step=step)
    started = time.perf_counter()
    loop = asyncio.get_running_loop()

    def fill(directory: Path) -> None:
        asyncio.run_coroutine_threadsafe(trainer.save(directory), loop).result()
        write_json(directory / _CHECKSUMS, _checksums(directory))

    await asyncio.to_thread(write_directory, context.directory.checkpoint(step), fill)
    context.event("checkpoint_finished", step=step, time_s=time.perf_counter() - started)
    for old in sorted(_steps(context.directory))[:-keep]:
        shutil.rmtree(context.directory.checkpoint(old))


def _damage(directory: Path) -> str:
    """How a checkpoint differs from what was written; empty when it does not."""
    try:
        written = read_json(directory / _CHECKSUMS)
    except RunError as error:
        return f"it cannot be checked: {error}"
    found = _checksums(directory)
    if lacking := sorted(written.keys() - found.keys()):
        return f"{lacking[0]} is missing"
    changed = sorted(name for name, checksum in written.items() if found[name] != checksum)
    return f"{changed[0]} is not as it was written" if changed else ""


def _checksums(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != _CHECKSUMS)
    return {str(path.relative_to(directory)): _sha256(path) for path in files}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _steps(directory: StageDirectory) -> list[int]:
    matches = (_NAME.match(entry.name) for entry in directory.checkpoints.iterdir())
    return [int(match.group(1)) for match in matches if match]
