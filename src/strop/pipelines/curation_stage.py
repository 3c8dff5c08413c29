"""Curation as a stage: the rules of a curation file over its sources, so that a run says itself what it was trained on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.curation.config import CurationConfig
from strop.curation.run import run_curation
from strop.errors import TaskError
from strop.pipelines.curations import curation_of
from strop.pipelines.recipe import CurationStage
from strop.pipelines.stage import StageContext
from strop.pipelines.stage_data import kept_path

_TOLD_EVERY_S = 30.0


async def run_curation_stage(context: StageContext, stage: CurationStage) -> tuple[Path, str]:
    """Judge, or go on where a kill came; returns the file of kept tasks and one sentence that says which rule dropped how many.

    Raises:
        UserError: the file is none of a curation, a source cannot be read, or nothing is kept.
        MachineError: a process that judged was killed or hung; the same command goes on.
    """
    context.progress.stage_started(context.name, stage.kind, 1, 0)
    config = curation_of(context.name, stage, context.run)
    kept = kept_path(context.directory)
    try:
        summary = await _in_thread(context, config, kept.parent, jobs=stage.jobs)
    except TaskError as error:
        raise TaskError(f"stages.{context.name}: {error}") from error
    dropped = ", ".join(f"{rule['num_dropped']} by {rule['name']}" for rule in summary["rules"] if rule["num_dropped"])
    if not summary["num_kept"]:
        raise TaskError(
            f"stages.{context.name}: none of the {summary['num_tasks']} problems passes the rules of {stage.recipe}: {dropped}."
            f" {kept.parent / 'report.html'} shows some of each. Loosen the rules or name other sources, then make the stage"
            f" anew with --from {context.name}."
        )
    told = f"; dropped: {dropped}" if dropped else ""
    return kept, f"{summary['num_kept']} of {summary['num_tasks']} problems kept{told}"


class _Stopped(Exception):  # noqa: N818 - named for what happened
    """The run ends, and the thread is to end with it."""


async def _in_thread(context: StageContext, config: CurationConfig, directory: Path, *, jobs: int) -> Mapping[str, Any]:
    """The curation in a thread, for the event loop only waits; it tells how far it is, and stops where the run does.

    It has ended when this returns, whatever ended it: nothing writes parts any more when the run is another process's.
    """
    is_stopped = threading.Event()
    num_judged = 0

    def progress(num_rows: int) -> None:
        nonlocal num_judged
        num_judged += num_rows
        if is_stopped.is_set():
            raise _Stopped

    running = asyncio.ensure_future(asyncio.to_thread(run_curation, config, directory, jobs=jobs, progress=progress))
    try:
        while not (await asyncio.wait({running}, timeout=_TOLD_EVERY_S))[0]:
            context.progress.note(f"{num_judged:,} rows judged")
        return running.result()
    finally:
        is_stopped.set()
        await asyncio.wait({running})
        running.exception()  # looked at: `_Stopped`, or what `result` has raised already
