"""Whether this machine has what a recipe names, asked before time is spent on anything."""

from __future__ import annotations

from collections.abc import Collection

from strop.engine.config import EngineConfig
from strop.engine.servers.remedies import check_interpreter
from strop.pipelines.recipe import PlayedStage, Recipe


def check_machine(recipe: Recipe, *, done: Collection[str] = ()) -> None:
    """Look for what the stages of `recipe` will open, those that are `done` left aside.

    Raises:
        UserError: `engine.python` cannot be run here, and a stage will sample.
    """
    samples = any(isinstance(stage, PlayedStage) and name not in done for name, stage in recipe.stages.items())
    if samples and not isinstance(recipe.engine, EngineConfig):
        check_interpreter(recipe.engine)
