"""From the words of the command line to a recipe: file, `--set`, shared tables, paths, validation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strop.config import load_toml, validate
from strop.pipelines.answers import check_answers
from strop.pipelines.recipe import Recipe, relative_to, resolve
from strop.runs import RunDirectory, read_json

_PATH_KEYS = ("path", "test_path")


def load_recipe(path: Path, overrides: Sequence[str] = (), *, name: str | None = None) -> Recipe:
    """The recipe in `path`. Relative paths in it are looked for beside it first, then in the working directory.

    Raises:
        ConfigError: naming each mistake and its place; or a prompt and a reward that do not fit.
    """
    tree = load_toml(path, overrides)
    if name is not None:
        tree["name"] = name
    recipe = validate(Recipe, _with_paths(resolve(tree), path.parent), place=str(path))
    check_answers(recipe, place=str(path))
    return recipe


def recipe_of(run: RunDirectory) -> Recipe:
    """The recipe that a run directory holds. Raises `RunError` when it holds none."""
    return validate(Recipe, read_json(run.manifest)["recipe"], place=str(run.manifest))


def _with_paths(tree: Any, directory: Path) -> Any:
    if isinstance(tree, list):
        return [_with_paths(each, directory) for each in tree]
    if not isinstance(tree, dict):
        return tree
    return {
        key: relative_to(directory, value) if key in _PATH_KEYS and isinstance(value, str) else _with_paths(value, directory)
        for key, value in tree.items()
    }
