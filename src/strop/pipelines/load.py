"""From the words of the command line to a recipe: file, `--set`, shared tables, paths, validation."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from strop.config import load_toml, validate
from strop.errors import ConfigError
from strop.pipelines.answers import check_answers
from strop.pipelines.recipe import Recipe, relative_to, resolve, written_at
from strop.runs import RunDirectory, read_json

_PATH_KEYS = ("path", "test_path")


def load_recipe(path: Path, overrides: Sequence[str] = (), *, name: str | None = None) -> Recipe:
    """The recipe in `path`. Relative paths in it are looked for beside it first, then in the working directory.

    Raises:
        ConfigError: naming each mistake and its place; or a prompt and a reward that do not fit.
    """
    tree = load_toml(path, overrides)
    _check_stages(tree, overrides)
    if name is not None:
        tree["name"] = name
    recipe = validate(Recipe, _with_paths(resolve(tree), path.parent), place=str(path), written_at=partial(written_at, tree))
    check_answers(recipe, place=str(path))
    return recipe


def recipe_of(run: RunDirectory) -> Recipe:
    """The recipe that a run directory holds. Raises `RunError` when it holds none."""
    return validate(Recipe, read_json(run.manifest)["recipe"], place=str(run.manifest))


def _check_stages(tree: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Every stage that an override changes is one of the file's, or one that overrides give a kind."""
    stages = tree.get("stages")
    if not isinstance(stages, Mapping):
        return
    known = [name for name, stage in stages.items() if not isinstance(stage, Mapping) or "kind" in stage]
    for override in overrides:
        table, *key = override.partition("=")[0].strip().split(".")
        if table == "stages" and len(key) > 1 and key[0] not in known:
            nearest = difflib.get_close_matches(key[0], known, n=1)
            hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
            raise ConfigError(f"--set {override}: no stage {key[0]!r}.{hint} The recipe's stages: {', '.join(known)}.")


def _with_paths(tree: Any, directory: Path) -> Any:
    if isinstance(tree, list):
        return [_with_paths(each, directory) for each in tree]
    if not isinstance(tree, dict):
        return tree
    return {
        key: relative_to(directory, value) if key in _PATH_KEYS and isinstance(value, str) else _with_paths(value, directory)
        for key, value in tree.items()
    }
