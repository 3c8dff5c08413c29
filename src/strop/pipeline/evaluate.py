"""Evaluates a model directory with one of a recipe's evaluations; implements `strop eval`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.errors import ConfigError
from strop.pipeline.run import train
from strop.recipe.recipe import Recipe
from strop.stages.context import Progress
from strop.stages.evaluation import Eval
from strop.stages.harness import Harness
from strop.stages.model import ModelStage, find_model


def choose_evaluation(recipe: Recipe, stage: str | None, overrides: Sequence[str] = ()) -> str:
    """Return `stage`, or the recipe's first evaluation.

    Raises:
        ConfigError: there is no such evaluation, or one of `overrides` (as of `--set`) has no effect on it.
    """
    evaluations = [name for name, each in recipe.stages.items() if isinstance(each, Eval | Harness)]
    if not evaluations or (stage is not None and stage not in evaluations):
        known = ", ".join(evaluations) or "none"
        raise ConfigError(f"recipe {recipe.name!r} has no evaluation {stage or ''!r}. Its evaluations: {known}.")
    name = stage or evaluations[0]
    for override in overrides:
        key = override.partition("=")[0].strip()
        table, _, below = key.partition(".")
        if table == "stages" and not below.startswith(f"{name}."):
            raise ConfigError(f"--set {key}: only stage {name!r} is evaluated. Set a key of it, or choose another --stage.")
        if key == f"stages.{name}.init":
            raise ConfigError(f"--set {key}: --model names what is evaluated.")
        if key == "name":
            raise ConfigError(f"--set {key}: use --name.")
    return name


async def evaluate_model(
    recipe: Recipe, model: Path, directory: Path, *, stage: str | None, progress: Progress
) -> Mapping[str, Any]:
    """Run the model and one evaluation as two stages, and return the metrics of the evaluation.

    Finished rollouts are kept: a second call plays only what is missing.

    Raises:
        ConfigError: the recipe has no such evaluation.
        RunError: the evaluation has begun there with other keys or data.
    """
    chosen = evaluation_of(recipe, str(find_model(str(model))), choose_evaluation(recipe, stage))
    result = await train(chosen, directory, progress=progress)
    return result.evaluations[0]


def evaluation_of(recipe: Recipe, model: str, name: str) -> Recipe:
    """The recipe with two stages: the model, and the evaluation `name` of it."""
    chosen = recipe.stages[name]
    assert isinstance(chosen, Eval | Harness)
    return recipe.model_copy(update={"stages": {"model": ModelStage(path=model), name: chosen.replaced(init="model")}})
