"""Runs the stages of a recipe in a run directory, or resumes them."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from strop import user_code
from strop.cluster.connection import Connection, connected, ignore
from strop.cluster.services import open_services
from strop.engine.opening import open_engines
from strop.engine.protocol import InferenceEngine
from strop.errors import ActorsLost, CannotLearnError, EngineLost, RunError, TrainerLost
from strop.pipeline.plan import check_nodes, check_stages, roles_of
from strop.recipe.recipe import Recipe
from strop.recipe.stage import Product, StageResult
from strop.reports.log import machine_hours, steps_of, utilisation
from strop.reports.page import write_report
from strop.reports.trackers import Progress, make_trackers
from strop.rewards.base import RunService
from strop.rollout.scheduler.batch import RESUME
from strop.run_directory import LineWriter, RunDirectory, cut_back, read_json, read_lines, write_json, writing_to
from strop.runs.lineage import Lineage, check_inputs, mark_stale, why_stale, write_lineage
from strop.runs.manifest import locked
from strop.runs.resume import Selected, Starts, finished, select, stages_to_rerun, stages_to_run
from strop.sandbox.local import open_service
from strop.stages.context import EngineFactory, StageContext, load_chat, product_of
from strop.stages.loop.checkpoints import latest_step
from strop.stages.loop.engines import check_room, scorer_warnings
from strop.stages.reward_model import with_reward_models
from strop.tasks.files import keeping_commits
from strop.tools import open_tools

_MAX_IN_VAIN = 3  # starts of a stage without a new checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """The run directory, and the results of the evaluations in order."""

    run: RunDirectory
    evaluations: tuple[Mapping[str, Any], ...]


async def train(
    recipe: Recipe,
    directory: Path,
    *,
    progress: Progress,
    command: str = "",
    until: str | None = None,
    start: Starts = (),
    only: Starts = (),
    runner: RunService | None = None,
    open_engines: EngineFactory = open_engines,
) -> TrainResult:
    """Run, or resume, `recipe` in `directory`. Finished stages do not run again.

    Args:
        command: the command that the user typed, for the manifest.
        until: the last stage to run, in the order of the graph. None: all stages.
        start: stages to rerun with everything that depends on them. Their present results are moved to `stale/`.
        only: stages to run with everything that they depend on, and no others.
        runner: runs programs and compares answers. None: a sandbox on this machine.
        open_engines: opens the engines of a stage.

    Raises:
        RunError: the directory holds something else, a stage is stale, or a file of a finished stage has changed.
        UserError: a check of a stage that will run has found a problem. Nothing was written.
    """
    run = RunDirectory(directory)
    wanted = stages_to_run(recipe, until, start, only)
    rerun = stages_to_rerun(recipe, start)
    unfinished = [name for name in wanted if name in rerun or not run.stage(name).done.exists()]
    check_stages(recipe, unfinished, run=run)
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)  # starts no thread yet; the manifest records the number
    # The lock is taken late and held longest: until the processes of the cluster have ended.
    async with AsyncExitStack() as held, AsyncExitStack() as opened:
        if is_begun := run.lock.exists():
            held.enter_context(locked(run))
        connection = opened.enter_context(connected(recipe.cluster, directory))
        if connection is not None:
            check_nodes(connection, recipe, unfinished)
        if not is_begun:  # a start that is refused leaves nothing
            with writing_to(directory):
                directory.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(run))
        selected = select(run, recipe, command, until=until, start=start, only=only)
        events = opened.enter_context(closing(LineWriter(run.events)))

        def note(event: str, **fields: Any) -> None:
            events.append({"event": event, "stage": "", "time": time.time(), **fields})

        def notice(text: str) -> None:
            note("warning", text=text)
            progress.warning(text)

        loop = asyncio.get_running_loop()

        def note_loss(event: str, **fields: Any) -> None:
            note(event, **fields)
            if event == "node_lost":  # other losses are shown by what they are of
                loop.call_soon_threadsafe(notice, f"{fields['reason']}. It is not used any more.")

        if connection is not None:
            connection.note = note_loss
            opened.callback(setattr, connection, "note", ignore)
        if runner is None:
            if connection is not None and recipe.cluster is not None and (num := recipe.cluster.sandbox_nodes):
                opening = open_services(recipe.sandbox, connection, num, run.path / "logs", notice)
            else:
                opening = open_service(recipe.sandbox)
            runner = await opened.enter_async_context(opening)  # before torch has threads
        to_run = [name for name in selected.stages if not run.stage(name).done.exists()]
        tools = await opened.enter_async_context(open_tools(recipe.tools if to_run else {}, runner))
        trackers = make_trackers(recipe.trackers, run=run, name=recipe.name, recipe=recipe.model_dump(mode="json"))
        for tracker in trackers:
            opened.callback(tracker.close)
        left_stale = [f"{name} is stale: {why}. Rerun it with --from {name}." for name, why in selected.left_stale.items()]
        for warning in (*selected.new_layouts, *left_stale, *scorer_warnings(recipe, to_run)):
            progress.warning(warning)
        for name in selected.stages:
            stage = recipe.stages[name]
            context = StageContext(
                name=name,
                stage=stage,
                recipe=recipe.for_stage(name),
                run=run,
                runner=runner,
                tools=tools,
                open_engines=open_engines,
                progress=progress,
                trackers=trackers,
                events=events,
            )
            try:
                await _run_placed(connection, context, selected)
            except CannotLearnError:
                write_report(run)
                raise
            if stage.makes is Product.MODEL and not stage.init:
                check_room(recipe, name, load_chat(product_of(run, name)), context.tools)
        finished(run)
    evaluations = evaluations_of(run, recipe)
    progress.finished(evaluations, write_report(run))
    return TrainResult(run=run, evaluations=evaluations)


def evaluations_of(run: RunDirectory, recipe: Recipe) -> tuple[Mapping[str, Any], ...]:
    """Return the results of the recipe's finished evaluations, in order."""
    stages = recipe.stages.items()
    names = [name for name, stage in stages if stage.makes is Product.EVALUATION and run.stage(name).done.exists()]
    return tuple(read_json(run.stage(name).evaluation) for name in names)


async def _run_placed(connection: Connection | None, context: StageContext, selected: Selected) -> None:
    """Run a stage, on the nodes of a cluster if there is one. After a loss it starts again from the last checkpoint.

    A process of the trainer is such a loss; on a cluster also all engines, and what is lost while the stage starts. An engine
    whose server did not start is none: it may never start.
    """
    losses = TrainerLost if connection is None else (TrainerLost, ActorsLost, EngineLost)
    num_in_vain, has_engines = 0, False

    async def open_engines(*arguments: Any, **options: Any) -> Sequence[InferenceEngine]:
        nonlocal has_engines
        engines = await context.open_engines(*arguments, **options)
        has_engines = True
        return engines

    while True:
        if connection is not None and not context.directory.done.exists():
            await _place(connection, context)
        first = latest_step(context.directory)
        try:
            await _run_stage(replace(context, open_engines=open_engines), selected)
            return
        except losses as error:
            now = latest_step(context.directory)
            num_in_vain = 1 if now > first else num_in_vain + 1
            is_loss = has_engines or isinstance(error, TrainerLost) or isinstance(error.__cause__, ActorsLost)
            if num_in_vain > _MAX_IN_VAIN or not is_loss:
                raise
            context.event("stage_restarted", reason=str(error), from_step=now)
            context.warn(f"{str(error).removesuffix(RESUME).strip()} {context.name} starts again from step {now}.")
        gc.collect()  # cycles of what has ended hold a model, for which there may be no second room
        torch.cuda.empty_cache()


async def _place(connection: Connection, context: StageContext) -> None:
    nodes = connection.nodes()
    roles = roles_of(context.recipe, context.name, nodes)
    # The code services are there already, also where they share the nodes that are left.
    roles = replace(roles, sandboxes=min(roles.sandboxes, len(nodes)))
    if placed := list((await asyncio.to_thread(connection.place, roles)).lines()):
        context.event("placed", nodes=placed)
        context.progress.note(f"{context.name} on {'; '.join(placed)}")


async def _run_stage(context: StageContext, selected: Selected) -> None:
    run, recipe, name, stage = context.run, context.recipe, context.name, context.stage
    if context.directory.stale.exists():  # since a stage that it reads from ended with another result in this run
        raise RunError(
            f"{run.path}: stage {name} is stale: {read_json(context.directory.stale)['because']}. Rerun it with --from {name}"
            f" (the present results are moved to {run.path / 'stale'})."
        )
    done = context.directory.done
    if done.exists():
        context.progress.stage_finished(name, f"{read_json(done)['summary']} (done before)")
        return
    await asyncio.to_thread(check_inputs, run, recipe, name)
    started = time.perf_counter()
    context.event("stage_started", cores=len(os.sched_getaffinity(0)), gpus=torch.cuda.device_count())
    context.progress.stage_entered(name)
    lineage: Lineage = dict(selected.lineages[name])
    commits = lineage.setdefault("hub", {})
    write_lineage(run, recipe, name, lineage)
    try:
        with keeping_commits(commits, tell=lambda: write_lineage(run, recipe, name, lineage)):
            result = await with_reward_models(stage, run).run(context)
    except BaseException:
        _remove_if_empty(run, name)
        raise
    user_code.expect(result, StageResult, stage.run, what=f"{type(stage).__qualname__}.run")
    elapsed = time.perf_counter() - started
    key = "model" if stage.makes in (Product.MODEL, Product.REWARD_MODEL) else "data"
    product = {} if result.product is None else {key: _as_seen_from(run.path, result.product)}
    await asyncio.to_thread(write_lineage, run, recipe, name, lineage, product=result.product)
    write_json(done, {"summary": result.summary, "time_s": elapsed, **product})
    mark_stale(run, recipe, why_stale(run, recipe, selected.lineages))
    context.event("stage_finished")
    used = (*machine_hours(read_lines(run.events), name), *utilisation(steps_of(read_lines(run.metrics), name).values()))
    context.progress.stage_finished(name, f"{result.summary} ({', '.join([f'{elapsed:.0f} s', *used])})")


def _remove_if_empty(run: RunDirectory, name: str) -> None:
    """Remove the directory of a stage that failed before it wrote anything: it has not begun, so its keys may change."""
    directory = run.stage(name)
    if all(path.is_dir() or path == directory.lineage or not path.stat().st_size for path in directory.path.rglob("*")):
        for path in (run.metrics, run.updates):
            cut_back(path, name, 0)
        shutil.rmtree(directory.path)


def _as_seen_from(directory: Path, path: Path) -> str:
    """Return `path` relative to `directory` if it lies in it, so that a run may be moved; absolute elsewhere."""
    is_inside = path.resolve().is_relative_to(directory.resolve())
    return str(path.resolve().relative_to(directory.resolve()) if is_inside else path.resolve())
