"""Runs a recipe's stages in order, each from where it stands; the one call behind `strop train`."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, closing, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import strop
from strop.engine.opening import open_engines
from strop.errors import RunError
from strop.pipelines.eval_stage import run_eval_stage
from strop.pipelines.model_stage import run_model_stage
from strop.pipelines.recipe import EvalStage, ModelStage, Recipe, RlStage, SftStage, StageConfig
from strop.pipelines.rl_stage import run_rl_stage
from strop.pipelines.room import check_room
from strop.pipelines.sft_stage import run_sft_stage
from strop.pipelines.stage import EngineFactory, StageContext, load_chat, model_of
from strop.reports.page import write_report
from strop.reports.progress import Progress
from strop.reports.trackers import make_trackers
from strop.rewards.service import RunService
from strop.runs import FORMAT_VERSION, LineWriter, RunDirectory, read_json, write_json, writing_to
from strop.sandbox.opening import open_service

_FREE_KEYS = re.compile(
    r"description|trackers|scheduler\.\w+|engine\.replicas|"
    r"sandbox\.(max_running|max_alive|zygotes|warm|recycle_after|url|token_env)|"
    r"stages\.[^.]+\.(give_up_after|checkpoint_every|keep_checkpoints)"
)


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
    runner: RunService | None = None,
    open_engines: EngineFactory = open_engines,
) -> TrainResult:
    """Run, or resume, `recipe` in `directory`. Stages that are done are not run again.

    Args:
        command: how the user asked for it; kept in the manifest.
        runner: where programs run and answers are compared; a sandbox on this machine when there is none.
        open_engines: makes the engines of a stage; those that the recipe asks for by default.

    Raises:
        RunError: the directory holds a run of another recipe.
    """
    run = RunDirectory(directory)
    with writing_to(directory):
        directory.mkdir(parents=True, exist_ok=True)
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)  # starts none yet; the manifest says how many there will be
    async with AsyncExitStack() as opened:
        opened.enter_context(_alone_in(run))
        _claim(run, recipe, command)
        if runner is None:
            runner = await opened.enter_async_context(open_service(recipe.sandbox))  # before torch has threads (law 7)
        events = opened.enter_context(closing(LineWriter(run.events)))
        trackers = make_trackers(recipe.trackers, run=run, name=recipe.name, recipe=recipe.model_dump(mode="json"))
        for tracker in trackers:
            opened.callback(tracker.close)
        for name, stage in recipe.stages.items():
            context = StageContext(
                name=name,
                recipe=recipe,
                run=run,
                runner=runner,
                open_engines=open_engines,
                progress=progress,
                trackers=trackers,
                events=events,
            )
            await _run_stage(context, stage)
            if isinstance(stage, ModelStage):
                check_room(recipe, name, load_chat(model_of(run, name)), context.tools())
    evaluations = evaluations_of(run, recipe)
    progress.finished(evaluations, write_report(run))
    return TrainResult(run=run, evaluations=evaluations)


def evaluations_of(run: RunDirectory, recipe: Recipe) -> tuple[Mapping[str, Any], ...]:
    """The results of the recipe's evaluations, in order."""
    names = [name for name, stage in recipe.stages.items() if isinstance(stage, EvalStage)]
    return tuple(read_json(run.stage(name).evaluation) for name in names)


async def _run_stage(context: StageContext, stage: StageConfig) -> None:
    done = context.directory.done
    if done.exists():
        context.progress.stage_finished(context.name, f"{read_json(done)['summary']} (done before)")
        return
    started = time.perf_counter()
    context.event("stage_started")
    model: Path | None = None
    match stage:
        case ModelStage():
            context.progress.stage_started(context.name, stage.kind, 1, 0)
            model, summary = await run_model_stage(context, stage)
        case SftStage():
            model, summary = await run_sft_stage(context, stage)
        case RlStage():
            model, summary = await run_rl_stage(context, stage)
        case EvalStage():
            summary = await run_eval_stage(context, stage)
    elapsed = time.perf_counter() - started
    product = {} if model is None else {"model": _as_seen_from(context.run.path, model)}
    write_json(done, {"summary": summary, "time_s": elapsed, **product})
    context.event("stage_finished")
    context.progress.stage_finished(context.name, f"{summary} ({elapsed:.0f} s)")


def _as_seen_from(directory: Path, path: Path) -> str:
    """Relative where `path` lies in `directory`, so that a run may be moved or copied; absolute elsewhere."""
    is_inside = path.resolve().is_relative_to(directory.resolve())
    return str(path.resolve().relative_to(directory.resolve()) if is_inside else path.resolve())


@contextmanager
def _alone_in(run: RunDirectory) -> Iterator[None]:
    """Keep a second process out of the run directory; the kernel lets go of the lock whatever ends this one.

    Raises:
        RunError: another process is running there.
    """
    descriptor = os.open(run.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise RunError(f"{run.path}: another strop is running there. Wait for it, end it, or choose a --name.") from error
    try:
        yield
    finally:
        os.close(descriptor)


def _claim(run: RunDirectory, recipe: Recipe, command: str) -> None:
    """Write the manifest of a new run, or make sure that the one there is of this recipe.

    Keys that change no result may differ from one try to the next.
    """
    resolved = recipe.model_dump(mode="json")
    if not run.manifest.exists():
        if any(not entry.name.endswith(".tmp") for entry in run.path.iterdir()):  # a kill may leave half a manifest
            raise RunError(
                f"{run.path}: not empty, and not a run directory (no manifest.json). Choose another with --runs or --name."
            )
        write_json(
            run.manifest,
            {
                "format": FORMAT_VERSION,
                "name": recipe.name,
                "seed": recipe.seed,
                "command": command,
                "recipe": resolved,
                "versions": versions(),
                "stages": {
                    name: {"kind": stage.kind} | ({} if isinstance(stage, ModelStage) else {"init": stage.init})
                    for name, stage in recipe.stages.items()
                },
            },
        )
        return
    manifest = read_json(run.manifest)
    if manifest.get("format") != FORMAT_VERSION:
        raise RunError(
            f"{run.manifest}: run directory format {manifest.get('format')}, but this strop writes format {FORMAT_VERSION}."
            " Start a run under another name with --name."
        )
    differing = [each for each in _differences(manifest["recipe"], resolved) if not _FREE_KEYS.fullmatch(each[0])]
    if differing:
        shown = "\n  ".join(f"{key}: {there!r} there, {here!r} asked for" for key, there, here in differing[:5])
        raise RunError(
            f"{run.path} holds a run of another recipe:\n  {shown}\nGive this one a name of its own with --name, or remove that"
            " directory."
        )


def _differences(there: Any, here: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(there, dict) and isinstance(here, dict):
        keys = sorted({*there, *here})
        return [
            found
            for key in keys
            for found in _differences(there.get(key), here.get(key), f"{path}.{key}" if path else str(key))
        ]
    return [] if there == here else [(path, there, here)]


def versions() -> dict[str, str]:
    """What the run's numbers depend on besides the recipe."""
    return {
        "strop": strop.__version__,
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
    }
