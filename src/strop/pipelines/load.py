"""From the words of the command line to a recipe: file, `--set`, shared tables, paths, validation."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from strop.config import load_toml, validate
from strop.errors import ConfigError
from strop.pipelines.answers import check_answers
from strop.pipelines.recipe import Recipe, relative_to, resolve, written_at
from strop.runs import RunDirectory, read_json

_PATH_KEYS = ("path", "test_path", "recipe")


def load_recipe(path: Path, overrides: Sequence[str] = (), *, name: str | None = None) -> Recipe:
    """The recipe in `path`. Relative paths in it are looked for beside it first, then in the working directory.

    Raises:
        ConfigError: naming each mistake and its place; or a prompt and a reward that do not fit.
    """
    tree = load_toml(path, overrides, model=Recipe)
    check_stages((override.partition("=")[0].strip() for override in overrides), _with_kind(tree), place="--set ")
    if name is not None:
        tree["name"] = name
    recipe = validate(Recipe, _with_paths(resolve(tree), path.parent), place=str(path), written_at=partial(written_at, tree))
    check_answers(recipe, place=str(path))
    return recipe


def recipe_of(run: RunDirectory) -> Recipe:
    """The recipe that a run directory holds. Raises `RunError` when it holds none."""
    return validate(Recipe, read_json(run.manifest)["recipe"], place=str(run.manifest))


def check_stages(keys: Iterable[str], stages: Collection[str], *, place: str = "") -> None:
    """A key of a stage that is not there would be taken for a new one, which lacks everything. Raises `ConfigError` for one."""
    for key in keys:
        table, *below = key.split(".")
        if table == "stages" and len(below) > 1 and below[0] not in stages:
            nearest = difflib.get_close_matches(below[0], stages, n=1, cutoff=0.5)
            hint = f"Did you mean {nearest[0]!r}?" if nearest else f"It has {', '.join(stages)}."
            raise ConfigError(f"{place}{key}: the recipe has no stage {below[0]!r}. {hint}")


def _with_kind(tree: Mapping[str, Any]) -> list[str]:
    """The stages of `tree` that say what they are, which those that only an override named do not."""
    stages = tree.get("stages")
    stages = stages if isinstance(stages, Mapping) else {}
    return [name for name, stage in stages.items() if not isinstance(stage, Mapping) or "kind" in stage]


def _with_paths(tree: Any, directory: Path) -> Any:
    if isinstance(tree, list):
        return [_with_paths(each, directory) for each in tree]
    if not isinstance(tree, dict):
        return tree
    return {
        key: relative_to(directory, value) if key in _PATH_KEYS and isinstance(value, str) else _with_paths(value, directory)
        for key, value in tree.items()
    }
