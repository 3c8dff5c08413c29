"""The checkpoints of a stage, its best policy and its product. A directory of weights exists whole or not at all."""

from __future__ import annotations

import asyncio
import re
import shutil
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field

from strop.config import Config
from strop.errors import RunError
from strop.recipe.stage import Stage, Trained
from strop.run_directory import StageDirectory, file_digests, read_json, restore_directories, write_directory, write_json
from strop.stages.context import StageContext
from strop.training.config import TrainerConfig
from strop.training.reward_model import RewardTrainer
from strop.training.trainer import Trainer
from strop.training.weights import Checkpointed, WriteCheckpoint

_NAME = re.compile(r"^step-(\d+)$")
_HALF = re.compile(r"^\.(step-\d+)\.\w+\.tmp$")
_LONGEST_S = 1800.0  # of training without a checkpoint
_CHECKSUMS = "checksums.json"  # SHA-256 of every other file, by its path within the checkpoint


class CheckpointedKeys(Stage.Config):
    """Keys of every stage that trains weights and writes checkpoints."""

    trainer: TrainerConfig = Field(default=TrainerConfig(), description="How the weights are trained.")
    init: str = Field(description="Stage whose model is trained.")
    checkpoint_every: int = Field(
        default=100, ge=1, description="Steps between checkpoints. There is one after half an hour of training in any case."
    )
    keep_checkpoints: int = Field(default=2, ge=1, description="Checkpoints that are kept; of a finished stage the last.")

    def as_trained(
        self,
        tokens: int = 0,
        *,
        rows: int,
        longest: int,
        num_saved: int = 0,
        num_critics: int = 0,
        num_references: int = 0,
        num_scored: int = 0,
    ) -> Trained:
        """What is trained: the policy, critics as large as it, references that are held, and passes that only score.

        Args:
            rows, longest: of an update; tokens of the longest row.
            num_saved: tokens of an update that rows share with others, computed once.

        With an adapter the policy without it is the reference, and weights have no gradients or moments.
        """
        is_lora = self.trainer.lora is not None
        return Trained(
            trainer=self.trainer,
            tokens=tokens,
            flops_per_parameter=(6 + 2 * num_scored) * (1 + num_critics) + 2 * num_references,
            copies=1 + 4 * num_critics if is_lora else 4 + 4 * num_critics + num_references,
            saved=num_critics if is_lora else 1 + num_critics,
            tokens_of_update=rows * longest - num_saved,
            longest=longest,
            checkpoints=self.keep_checkpoints,
        )


class HeldOutConfig(Config):
    """When the policy is measured, and which policy the stage passes on. The most accurate policy so far is kept."""

    every_steps: int = Field(ge=1, description="Steps between two measurements. The last step is always measured.")
    product: Literal["last", "best"] = Field(default="last", description="The policy that the stage passes on.")

    def is_due(self, step: int, *, last: int) -> bool:
        return step % self.every_steps == 0 or step == last


def latest_step(directory: StageDirectory) -> int:
    """The step of the last whole checkpoint; 0 without one."""
    restore_directories(directory.checkpoints)
    return max(_steps(directory), default=0)


async def resume(context: StageContext, trainer: Checkpointed) -> int:
    """Load the last undamaged checkpoint into `trainer`; returns its step, 0 without one.

    A damaged checkpoint is renamed, a half-written one removed, each with a warning.
    """
    restore_directories(context.directory.path)
    for half in context.directory.path.glob(".*.tmp"):  # a best policy, say
        if half.is_dir():
            shutil.rmtree(half)
    for name in _remove_half_written(context.directory):
        context.warn(
            f"{context.directory.checkpoints / name} was half written when the run ended, and is removed; the checkpoint before"
            " it is used, if there is one."
        )
    while step := latest_step(context.directory):
        directory = context.directory.checkpoint(step)
        if not (damage := await asyncio.to_thread(_damage, directory)):
            await trainer.load(directory)
            context.event("resumed", step=step)
            return step
        aside = directory.with_name(directory.name + ".damaged")
        shutil.rmtree(aside, ignore_errors=True)
        directory.rename(aside)
        context.warn(f"{directory}: {damage}. It is now {aside.name}; the checkpoint before it is used, if there is one.")
    return 0


def _remove_half_written(directory: StageDirectory) -> list[str]:
    """Returns the names of the checkpoints that were being written, in order."""
    restore_directories(directory.checkpoints)
    left = sorted(directory.checkpoints.glob(".*.tmp"))
    for each in left:
        shutil.rmtree(each, ignore_errors=True)  # a rank that was cut off may still write there
    return [match.group(1) for each in left if (match := _HALF.match(each.name))]


def _prune(directory: StageDirectory, keep: int) -> None:
    for old in _steps(directory)[:-keep]:
        shutil.rmtree(directory.checkpoint(old))


class CheckpointWriter:
    """Writes one checkpoint at a time and keeps the last `keep_checkpoints` of them.

    The stage waits only for a copy in memory, and a writer's error is raised by the next call. `async with` leaves no
    checkpoint unfinished.
    """

    def __init__(
        self, context: StageContext, trainer: Checkpointed, stage: CheckpointedKeys, settle: Callable[[int], None] | None = None
    ) -> None:
        """`settle` is called with the step of the oldest checkpoint that is kept, in a thread that nothing waits for."""
        self.context = context
        self._every, self._saved, self._settle = stage.checkpoint_every, time.monotonic(), settle
        self._trainer, self._keep = trainer, stage.keep_checkpoints
        self._writing: asyncio.Task[None] | None = None
        self.settling: threading.Thread | None = None

    def is_due(self, step: int) -> bool:
        """Whether `step` ends with a checkpoint: after `checkpoint_every` steps, and after half an hour without one."""
        return step % self._every == 0 or time.monotonic() - self._saved > _LONGEST_S

    async def save(self, step: int) -> None:
        """Start the checkpoint of `step` when the one before is written. Raises as `settle`."""
        await self.settle()
        self._saved = time.monotonic()
        started = time.perf_counter()
        self.context.event("checkpoint_started", step=step)
        write = await self._trainer.snapshot()
        copied_s = time.perf_counter() - started
        self._writing = asyncio.create_task(self._write(step, write, started, copied_s))

    async def save_if_missing(self, step: int) -> None:
        """`save`, if `step` is a step and has no checkpoint."""
        await self.settle()
        if step > 0 and not self.context.directory.checkpoint(step).exists():
            await self.save(step)

    async def check(self) -> None:
        """Raise the writer's error, if there is one."""
        if self._writing is not None and self._writing.done():
            await self.settle()

    async def settle(self) -> None:
        """Wait until everything is written.

        Raises:
            RunError: it could not be written, for example on a full disk. Earlier checkpoints are unchanged.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            await self.settle()
        except RunError as of_writer:
            if error is not None and not isinstance(error, RunError):
                self.context.warn(str(of_writer))
                return
            raise  # of two errors of one disk, the first

    async def _write(self, step: int, write: WriteCheckpoint, started: float, copied_s: float) -> None:
        def fill(directory: Path) -> None:
            write(directory)
            write_json(directory / _CHECKSUMS, _checksums(directory))

        directory = self.context.directory
        await asyncio.to_thread(write_directory, directory.checkpoint(step), fill)
        time_s = time.perf_counter() - started
        self.context.event("checkpoint_finished", step=step, time_s=time_s, waited_s=copied_s)
        await asyncio.to_thread(_prune, directory, self._keep)
        if self._settle is not None and (self.settling is None or not self.settling.is_alive()):
            self.settling = threading.Thread(target=self._settle, args=(_steps(directory)[0],), daemon=True)
            self.settling.start()


def _damage(directory: Path) -> str:
    """How a checkpoint differs from what was written; empty if it does not."""
    try:
        written = read_json(directory / _CHECKSUMS)
    except RunError:  # whose remedy is for a run directory
        return f"it cannot be checked, since {_CHECKSUMS} is missing or not valid JSON"
    found = _checksums(directory)
    if lacking := sorted(written.keys() - found.keys()):
        return f"{lacking[0]} is missing"
    changed = sorted(name for name, checksum in written.items() if found[name] != checksum)
    return f"{changed[0]} is not as it was written" if changed else ""


def _checksums(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != _CHECKSUMS)
    return {str(path.relative_to(directory)): digest for path, digest in file_digests(files).items()}


def _steps(directory: StageDirectory) -> list[int]:
    """The steps that have a checkpoint, in order."""
    matches = (_NAME.match(entry.name) for entry in directory.checkpoints.glob("step-*"))
    return sorted(int(match.group(1)) for match in matches if match)


RECORD = "validation.json"
"""In the directory of the best policy: its step and its metrics."""


async def keep_if_best(context: StageContext, trainer: Trainer, step: int, found: Mapping[str, Any]) -> None:
    """Replace the best policy and its record, together, if the policy after `step` is better.

    A higher `accuracy` is better; with equal accuracy a lower `loss`, if it is measured.
    """

    def rank(figures: Mapping[str, Any]) -> tuple[float, float]:
        return float(figures["accuracy"]), -float(figures.get("loss", 0.0))

    best = context.directory.best
    if not (best / RECORD).exists() or rank(found) > rank(read_json(best / RECORD)):
        await _write_saved(best, trainer.save_model, record={"step": step, **found})
        context.event("best_so_far", step=step, accuracy=found["accuracy"])


async def write_product(
    context: StageContext, trainer: Trainer | RewardTrainer, stage: CheckpointedKeys, *, returns_best: bool = False
) -> Path:
    """Write the last weights and their adapter, and prune checkpoints. Returns the directory of the stage's product.

    The product is the best policy if `validation` or `returns_best` says so and there is one, else the last. The last
    checkpoint stays, or the last `keep_checkpoints` if the recipe sets it.
    """
    directory, validation = context.directory, getattr(stage, "validation", None)
    await _write_saved(directory.model, trainer.save_model)
    if stage.trainer.lora is not None and isinstance(trainer, Trainer):
        await _write_saved(directory.adapter, trainer.save_adapter)
    keep = stage.keep_checkpoints if "keep_checkpoints" in stage.model_fields_set else 1
    await asyncio.to_thread(_prune, directory, keep)
    returns_best = returns_best or (validation is not None and validation.product == "best")
    return directory.best if returns_best and directory.best.exists() else directory.model


async def _write_saved(
    path: Path, save: Callable[[Path], Coroutine[Any, Any, None]], *, record: Mapping[str, Any] | None = None
) -> None:
    """Write a directory, whole or not at all, with what `save` writes and with `record` as validation.json."""
    loop = asyncio.get_running_loop()

    def fill(directory: Path) -> None:
        asyncio.run_coroutine_threadsafe(save(directory), loop).result()
        if record is not None:
            write_json(directory / RECORD, record)

    await asyncio.to_thread(write_directory, path, fill)
