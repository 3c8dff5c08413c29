"""Evaluates any model directory as one of a recipe's evaluations would; the one call behind `strop eval`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.errors import ConfigError, RunError
from strop.pipelines.eval_stage import changed_tasks, tasks_of
from strop.pipelines.lineage import recorded_lineage
from strop.pipelines.model_stage import find_model
from strop.pipelines.recipe import EvalStage, ModelStage, Recipe
from strop.pipelines.train import train
from strop.reports.progress import Progress
from strop.runs import RunDirectory
from strop.tasks.commits import keeping_commits


async def evaluate_model(
    recipe: Recipe, model: Path, directory: Path, *, stage: str | None, progress: Progress
) -> Mapping[str, Any]:
    """A run of two stages, the model and one evaluation; the evaluation's figures.

    Every finished rollout is kept, so a second call goes on with what is missing, and does nothing where nothing is. More
    problems, or more rollouts of each, than an earlier call asked for are played beside those that are there.

    Raises:
        ConfigError: the recipe has no such evaluation.
        RunError: the evaluation is finished, and its problems have changed since.
    """
    evaluations = {name: each for name, each in recipe.stages.items() if isinstance(each, EvalStage)}
    if not evaluations or (stage is not None and stage not in evaluations):
        known = ", ".join(evaluations) or "none"
        raise ConfigError(f"recipe {recipe.name!r} has no evaluation {stage or ''!r}. Its evaluations: {known}.")
    name = stage or first_evaluation(recipe)
    chosen = evaluations[name]
    shared = {key: getattr(chosen, key) for key in ("tasks", "prompt", "sampling", "limits", "reward", "trainer")}
    origin = ModelStage(kind="model", path=str(find_model(str(model))), **shared)
    stages = {"model": origin, name: chosen.model_copy(update={"init": "model"})}
    run = RunDirectory(directory)
    place = run.stage(name)
    if place.done.exists():
        with keeping_commits(dict(recorded_lineage(run, name).get("hub", {}))):
            changed = changed_tasks(place, tasks_of(recipe, name, chosen))
        if changed:
            raise RunError(
                f"{place.path}: this evaluation is finished, but {len(changed)} of its problems are no longer what they were"
                f" (the first is number {min(changed)}). Give the new ones a place of their own with --name, or restore the"
                " data."
            )
    result = await train(recipe.model_copy(update={"stages": stages}), directory, progress=progress)
    return result.evaluations[0]


def first_evaluation(recipe: Recipe) -> str:
    """The name of the recipe's first evaluation; "" where it has none."""
    return next((name for name, each in recipe.stages.items() if isinstance(each, EvalStage)), "")
