"""Trains from Python, by a recipe or by its keys as arguments, and evaluates a model directory with a recipe's evaluation."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.config import validate
from strop.errors import ConfigError, RunError, did_you_mean
from strop.pipeline.run import TrainResult
from strop.pipeline.run import train as run_recipe
from strop.recipe.recipe import SHARED_TABLES, Recipe, resolve
from strop.recipe.stage import STAGE_BEFORE, Product, Stage
from strop.reports.console import ConsoleProgress
from strop.reports.trackers import Progress
from strop.run_directory import RunDirectory
from strop.runs.lineage import lineages, why_stale
from strop.stages.evaluation import Eval
from strop.stages.harness import Harness
from strop.stages.model import ModelStage, find_model


def train(
    recipe: Recipe | None = None, /, *, runs: str | Path = "runs", progress: Progress | None = None, **keys: Any
) -> TrainResult:
    """Run, or resume, a recipe, and return when it is done. Not for use in an event loop.

    Args:
        recipe: what to run; instead of `keys`.
        runs: where run directories lie.
        progress: shows how far the run is; the console by default.
        **keys: keys of a recipe's root. `stages` may be a list: each stage is named by its kind (rl, rl-2), and a stage without
            `init` starts from the stage before it. `model` is a model directory or hub id, and becomes the first stage. `name`
            is the name of the script by default.

    Raises:
        UserError: a key is wrong, or the machine lacks what the recipe needs.
    """
    if (recipe is None) == (not keys):
        raise ConfigError("train() takes a recipe, or the keys of one. Give either.")
    found = recipe_of_keys(keys) if recipe is None else recipe
    return asyncio.run(run_recipe(found, Path(runs) / found.name, progress=progress or ConsoleProgress()))


def recipe_of_keys(keys: Mapping[str, Any]) -> Recipe:
    """The recipe that the arguments of `train` describe. Raises `ConfigError`."""
    tree = dict(keys)
    tree.setdefault("name", Path(sys.argv[0]).stem or "run")
    stages = tree.get("stages", {})
    named = dict(stages) if isinstance(stages, Mapping) else _named(stages)
    is_made = any(isinstance(each, Stage) for each in named.values())
    if "model" in tree:
        named = {"model": Stage.of({"kind": "model", "path": str(tree.pop("model"))}), **named}
    tree["stages"] = _with_init(named)
    if shared := [key for key in SHARED_TABLES if key in tree and is_made]:
        raise ConfigError(f"{shared[0]}: stages that are made in Python do not read it from the root. Give it to each stage.")
    return validate(Recipe, resolve(tree), place="train()")


def _named(stages: Sequence[Stage]) -> dict[str, Stage]:
    named: dict[str, Stage] = {}
    for stage in stages:
        kind = stage.kind.rpartition(":")[2].lower()
        number = sum(name == kind or name.startswith(f"{kind}-") for name in named) + 1
        named[kind if number == 1 else f"{kind}-{number}"] = stage
    return named


def _with_init(stages: Mapping[str, Stage]) -> dict[str, Stage]:
    """`stages`, each that has no `init` with the last stage before it that makes a model."""
    found: dict[str, Stage] = {}
    before = ""
    for name, stage in stages.items():
        if getattr(getattr(stage, "config", None), "init", None) == STAGE_BEFORE:
            if not before:
                raise ConfigError(f"stage {name!r} has no model to start from. Give train() a model, or the stage an init.")
            stage = stage.replaced(init=before)
        found[name] = stage
        before = name if getattr(stage, "makes", None) is Product.MODEL else before
    return found


def evaluations_in(recipe: Recipe) -> list[str]:
    """Return the names of the recipe's evaluations, in order."""
    return [name for name, each in recipe.stages.items() if isinstance(each, Eval | Harness)]


def choose_evaluation(recipe: Recipe, stage: str | None, overrides: Sequence[str] = ()) -> str:
    """Return `stage`, or the recipe's first evaluation.

    Raises:
        ConfigError: there is no such evaluation, or one of `overrides` (as of `--set`) has no effect on it.
    """
    evaluations = evaluations_in(recipe)
    if not evaluations or (stage is not None and stage not in evaluations):
        known = ", ".join(evaluations) or "none"
        guess = did_you_mean(stage or "", evaluations)
        raise ConfigError(f"recipe {recipe.name!r} has no evaluation {stage or ''!r}.{guess} Its evaluations: {known}.")
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
    run = RunDirectory(directory)
    if stale := why_stale(run, chosen, lineages(chosen, run)):  # else the message of `strop train`, which has --from
        lines = "\n".join(f"  {name}: {why}" for name, why in stale.items())
        raise RunError(
            f"{directory} holds another evaluation:\n{lines}\nGive this one another name with --name, or remove that directory."
        )
    result = await run_recipe(chosen, directory, progress=progress)
    return result.evaluations[0]


def evaluation_of(recipe: Recipe, model: str, name: str) -> Recipe:
    """The recipe with two stages: the model, and the evaluation `name` of it."""
    chosen = recipe.stages[name]
    assert isinstance(chosen, Eval | Harness)
    return recipe.model_copy(update={"stages": {"model": ModelStage(path=model), name: chosen.replaced(init="model")}})
