"""Keeps the batch of an update that was skipped because it was not finite, so that somebody can look at it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import torch

from strop.errors import CannotLearnError
from strop.pipelines.stage import StageContext
from strop.runs import writing_to
from strop.training.batch import TokenBatch
from strop.training.protocol import TokenLoss, TokenStatistics, Trainer, UpdateReport

_MAX_KEPT = 8  # of a stage: one shows what is wrong, a thousand fill the disk


async def update_or_keep(
    context: StageContext, trainer: Trainer, batch: TokenBatch, loss: TokenLoss, statistics: TokenStatistics, *, step: int
) -> UpdateReport:
    """`trainer.update`; the batch of one that is skipped is kept."""
    return await keep_skipped(context, batch, trainer.update(batch, loss, statistics), step=step)


async def keep_skipped(
    context: StageContext, batch: TokenBatch, update: Coroutine[Any, Any, UpdateReport], *, step: int
) -> UpdateReport:
    """The report of `update`; if it is skipped, its batch is written to skipped/step-K-N.pt, and the user told where.

    Raises:
        CannotLearnError: too many in a row were skipped; it names stage and step.
    """
    try:
        report = await update
    except CannotLearnError as error:
        await _keep(context, batch, step, "too many updates in a row were skipped")
        raise CannotLearnError(
            f"stages.{context.name}, step {step}: {error} Its state is saved: the same command goes on from there, with another"
            " trainer.max_skipped_updates if need be, and --from makes the stage anew with other settings."
        ) from error
    if report.is_skipped:
        await _keep(context, batch, step, f"an update was skipped: {report.skip_reason}")
    return report


async def _keep(context: StageContext, batch: TokenBatch, step: int, why: str) -> None:
    directory = context.directory.skipped
    num_kept = len(list(directory.glob("step-*.pt"))) if directory.is_dir() else 0
    if not batch.num_loss_tokens or num_kept >= _MAX_KEPT:
        context.warn(f"step {step}: {why}")
        return
    path = directory / f"step-{step:06d}-{num_kept + 1}.pt"
    await asyncio.to_thread(_write, path, batch)
    context.warn(f"step {step}: {why}. Its batch is in {path}")


def _write(path: Path, batch: TokenBatch) -> None:
    columns = {column.value: values for column, values in batch.columns.items()}
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)} | {"columns": columns}
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            torch.save(fields, file)
