"""Evaluates any model directory as one of a recipe's evaluations would; the one call behind `strop eval`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.errors import ConfigError
from strop.pipelines.model_stage import find_model
from strop.pipelines.recipe import EvalStage, ModelStage, Recipe
from strop.pipelines.train import train
from strop.reports.progress import Progress


async def evaluate_model(
    recipe: Recipe, model: Path, directory: Path, *, stage: str | None, progress: Progress
) -> Mapping[str, Any]:
    """A run of two stages, the model and one evaluation; the evaluation's figures.

    Raises:
        ConfigError: the recipe has no such evaluation.
    """
    evaluations = {name: each for name, each in recipe.stages.items() if isinstance(each, EvalStage)}
    if not evaluations or (stage is not None and stage not in evaluations):
        known = ", ".join(evaluations) or "none"
        raise ConfigError(f"recipe {recipe.name!r} has no evaluation {stage or ''!r}. Its evaluations: {known}.")
    name = stage or next(iter(evaluations))
    chosen = evaluations[name]
    shared = {key: getattr(chosen, key) for key in ("tasks", "prompt", "sampling", "limits", "reward", "trainer")}
    origin = ModelStage(kind="model", path=str(find_model(str(model))), **shared)
    stages = {"model": origin, name: chosen.model_copy(update={"init": "model"})}
    result = await train(recipe.model_copy(update={"stages": stages}), directory, progress=progress)
    return result.evaluations[0]
