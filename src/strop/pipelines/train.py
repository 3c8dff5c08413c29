"""Runs a recipe's stages in the order of its graph, each from where it stands; the one call behind `strop train`."""

from __future__ import annotations

import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from strop.engine.opening import open_engines
from strop.errors import RunError
from strop.pipelines.claim import alone_in, new_layouts
from strop.pipelines.conversations import run_demonstrations_stage
from strop.pipelines.curation_stage import run_curation_stage
from strop.pipelines.curations import check_curations
from strop.pipelines.dpo_stage import run_dpo_stage
from strop.pipelines.eval_stage import run_eval_stage
from strop.pipelines.expert_iteration_stage import run_expert_iteration_stage
from strop.pipelines.export_stage import run_export_stage
from strop.pipelines.filter_stage import run_filter_stage
from strop.pipelines.graph import Product
from strop.pipelines.growth import asked_for_more
from strop.pipelines.lineage import Lineage, has_other_product, recorded_lineage, write_lineage
from strop.pipelines.machine import check_machine
from strop.pipelines.mix_stage import run_mix_stage
from strop.pipelines.model_stage import run_model_stage
from strop.pipelines.recipe import (
    ConversationsStage,
    CurationStage,
    DemonstrationsStage,
    DpoStage,
    EvalStage,
    ExpertIterationStage,
    ExportStage,
    FilterStage,
    MixStage,
    ModelStage,
    Recipe,
    RejectionSamplingStage,
    RewardModelStage,
    RlStage,
    SftStage,
    Stage,
    StageConfig,
)
from strop.pipelines.rejection_stage import run_rejection_stage
from strop.pipelines.reward_model_stage import run_reward_model_stage
from strop.pipelines.reward_model_warnings import warnings_of_reward_models
from strop.pipelines.reward_models import with_reward_models
from strop.pipelines.rl_stage import run_rl_stage
from strop.pipelines.room import check_room
from strop.pipelines.selection import Starts, finished, named_starts, select, stages_until, standing_on_starts
from strop.pipelines.sft_stage import run_sft_stage
from strop.pipelines.stage import EngineFactory, StageContext, cut_back, load_chat, model_of
from strop.pipelines.written import run_conversations_stage
from strop.reports.page import write_report
from strop.reports.progress import Progress
from strop.reports.trackers import make_trackers
from strop.rewards.service import RunService
from strop.runs import LineWriter, RunDirectory, read_json, write_json, writing_to
from strop.sandbox.opening import open_service
from strop.tasks.commits import keeping_commits
from strop.tools.toolbox import open_tools


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """Where the run lies, and what its evaluations found, in order."""

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
    runner: RunService | None = None,
    open_engines: EngineFactory = open_engines,
) -> TrainResult:
    """Run, or resume, `recipe` in `directory`. Stages that are done are not run again, but evaluations that are asked for more.

    Args:
        command: how the user asked for it; kept in the manifest.
        until: the last stage to run, in the order of the graph; all when None.
        start: make this stage anew, or these, and all that stands on them; what they made is put aside.
        runner: where programs run and answers are compared; a sandbox on this machine when there is none.
        open_engines: makes the engines of a stage; those that the recipe asks for by default.

    Raises:
        RunError: the directory holds a run of another recipe, or stages of it are stale.
        UserError: this machine lacks what a stage that is not done will open; nothing was written.
    """
    run = RunDirectory(directory)
    wanted = stages_until(recipe, until, start)
    is_done_before = {name for name in recipe.stages if run.stage(name).done.exists()}
    is_done_before -= standing_on_starts(recipe, named_starts(start))
    is_done_before -= asked_for_more(run, recipe)
    not_made = [name for name in recipe.stages if name in is_done_before or name not in wanted]
    check_machine(recipe, done=not_made, run=run)
    check_curations(recipe, done=not_made)
    with writing_to(directory):
        directory.mkdir(parents=True, exist_ok=True)
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)  # starts none yet; the manifest says how many there will be
    async with AsyncExitStack() as opened:
        opened.enter_context(alone_in(run))
        selected = select(run, recipe, command, until=until, start=start)
        if runner is None:
            runner = await opened.enter_async_context(open_service(recipe.sandbox))  # before torch has threads (law 7)
        is_done = all(run.stage(name).done.exists() for name in selected.stages)
        toolbox = await opened.enter_async_context(open_tools({} if is_done else recipe.tools, runner))
        events = opened.enter_context(closing(LineWriter(run.events)))
        trackers = make_trackers(recipe.trackers, run=run, name=recipe.name, recipe=recipe.model_dump(mode="json"))
        for tracker in trackers:
            opened.callback(tracker.close)
        for key, there, here in new_layouts(run, recipe):
            progress.warning(f"{key} is {here}, and was {there} when the run began: what follows is equal up to rounding.")
        for name, why in selected.left_stale.items():
            progress.warning(f"{name} is stale: {why}. --from {name} makes it anew.")
        to_run = [name for name in selected.stages if not run.stage(name).done.exists()]
        for warning in warnings_of_reward_models(recipe, to_run):
            progress.warning(warning)
        for name in selected.stages:
            stage = recipe.stages[name]
            context = StageContext(
                name=name,
                recipe=recipe,
                run=run,
                runner=runner,
                toolbox=toolbox,
                open_engines=open_engines,
                progress=progress,
                trackers=trackers,
                events=events,
            )
            await _run_stage(context, stage, selected.lineages[name])
            if isinstance(stage, ModelStage):
                check_room(recipe, name, load_chat(model_of(run, name)), context.tools())
        finished(run)
    evaluations = evaluations_of(run, recipe)
    progress.finished(evaluations, write_report(run))
    return TrainResult(run=run, evaluations=evaluations)


def evaluations_of(run: RunDirectory, recipe: Recipe) -> tuple[Mapping[str, Any], ...]:
    """The results of the recipe's evaluations that are done, in order."""
    stages = recipe.stages.items()
    names = [name for name, stage in stages if isinstance(stage, EvalStage) and run.stage(name).done.exists()]
    return tuple(read_json(run.stage(name).evaluation) for name in names)


Runner: TypeAlias = Callable[[StageContext, Any], Awaitable[tuple[Path | None, str]]]
"""Runs a stage of one kind from where it stands; returns what it made, if that is a file or a directory, and one sentence."""


async def _model(context: StageContext, stage: ModelStage) -> tuple[Path | None, str]:
    context.progress.stage_started(context.name, stage.kind, 1, 0)
    return await run_model_stage(context, stage)


async def _evaluation(context: StageContext, stage: EvalStage) -> tuple[Path | None, str]:
    return None, await run_eval_stage(context, stage)


RUNNERS: Mapping[type[Stage], Runner] = {
    ModelStage: _model,
    DemonstrationsStage: run_demonstrations_stage,
    ConversationsStage: run_conversations_stage,
    SftStage: run_sft_stage,
    RlStage: run_rl_stage,
    ExpertIterationStage: run_expert_iteration_stage,
    EvalStage: _evaluation,
    CurationStage: run_curation_stage,
    FilterStage: run_filter_stage,
    RejectionSamplingStage: run_rejection_stage,
    MixStage: run_mix_stage,
    RewardModelStage: run_reward_model_stage,
    DpoStage: run_dpo_stage,
    ExportStage: run_export_stage,
}
"""By kind of stage. A new kind is a config in recipe.py's `StageConfig` and a line here."""


def _let_go(run: RunDirectory, name: str) -> None:
    """A stage that ended before it made anything has not begun: what was wrong with it may be changed."""
    directory = run.stage(name)
    if all(path.is_dir() or path == directory.lineage or not path.stat().st_size for path in directory.path.rglob("*")):
        for path in (run.metrics, run.updates):
            cut_back(path, name, 0)
        shutil.rmtree(directory.path)


def _refuse_other_parents(context: StageContext, lineage: Lineage) -> None:
    """Raises `RunError` where the stage has begun with what a parent had made before this try made that anew."""
    run, name = context.run, context.name
    recorded = recorded_lineage(run, name)
    if other := [each for each in lineage["stands_on"] if recorded and has_other_product(run, recorded, each)]:
        raise RunError(
            f"{run.path}: stage {name} had begun with what {', '.join(other)} made before, and that has come out otherwise."
            f" Make it anew with --from {name} (what it made is moved to {run.path / 'stale'})."
        )


async def _run_stage(context: StageContext, stage: StageConfig, lineage: Lineage) -> None:
    _refuse_other_parents(context, lineage)
    done = context.directory.done
    if done.exists():
        context.progress.stage_finished(context.name, f"{read_json(done)['summary']} (done before)")
        return
    started = time.perf_counter()
    context.event("stage_started")
    context.progress.stage_entered(context.name)
    commits = dict(lineage.get("hub", {}))
    write_lineage(context.run, context.name, lineage)
    try:
        with keeping_commits(commits, tell=lambda: write_lineage(context.run, context.name, lineage | {"hub": commits})):
            made, summary = await RUNNERS[type(stage)](context, with_reward_models(stage, context.run))
    except BaseException:
        _let_go(context.run, context.name)
        raise
    elapsed = time.perf_counter() - started
    key = "model" if stage.makes in (Product.MODEL, Product.REWARD_MODEL) else "data"
    product = {} if made is None else {key: _as_seen_from(context.run.path, made)}
    write_lineage(context.run, context.name, lineage | ({"hub": commits} if commits else {}), product=made)
    write_json(done, {"summary": summary, "time_s": elapsed, **product})
    context.event("stage_finished")
    context.progress.stage_finished(context.name, f"{summary} ({elapsed:.0f} s)")


def _as_seen_from(directory: Path, path: Path) -> str:
    """Relative where `path` lies in `directory`, so that a run may be moved or copied; absolute elsewhere."""
    is_inside = path.resolve().is_relative_to(directory.resolve())
    return str(path.resolve().relative_to(directory.resolve()) if is_inside else path.resolve())
