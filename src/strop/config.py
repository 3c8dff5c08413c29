"""The strict base of every config model, and how a recipe becomes one: file, then `--set`, then validation.

Command line beats file beats default. A default is written once, in the model. An unknown key is an error that names the
nearest real one, with its full path in the recipe.
"""

from __future__ import annotations

import difflib
import importlib
import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from strop.errors import ConfigError


class Config(BaseModel):
    """Frozen and strict: no unknown keys, no silent conversion of a string into a number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)


ConfigT = TypeVar("ConfigT", bound=Config)


def load_toml(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The recipe at `path` as a tree, with each `a.b=c` of `overrides` put in its place.

    Raises:
        ConfigError: the file is missing or not TOML, or an override has no `=` or goes through a value.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such recipe.{_nearest_file(path)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a recipe: {error}.") from error
    try:
        tree: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}.") from error
    for override in overrides:
        _apply(tree, override)
    return tree


def validate(model: type[ConfigT], tree: Mapping[str, Any], *, place: str) -> ConfigT:
    """`tree` as a `model`; every mistake in one `ConfigError`, one line each, with the path of the key.

    The tree is validated in JSON mode: lists become tuples, strings become paths and enums, and nothing else is converted.
    """
    try:
        return model.model_validate_json(json.dumps(tree, default=str))
    except ValidationError as error:
        lines = [_explain(model, tree, dict(detail)) for detail in error.errors(include_url=False)]
        raise ConfigError(f"{place}: " + ("\n  ".join(["", *lines]) if len(lines) > 1 else lines[0])) from error


def import_object(path: str, *, key: str) -> Any:
    """What `module:name` names, for recipes that use a user's own code; the working directory counts as importable.

    Raises:
        ConfigError: `key` of the recipe holds no such path, or importing it fails.
    """
    module, colon, name = path.partition(":")
    if not module or not colon or not name:
        raise ConfigError(f"{key}: {path!r} is not of the form module:name, as in my_tools:word_count.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, SyntaxError, NameError) as error:
        raise ConfigError(
            f"{key}: {path!r} cannot be imported: {error}. Run strop where {module}.py lies, or install the module."
        ) from error


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, raw = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {override}: expected key=value, as in --set stages.rl.steps=10.")
    try:
        value: Any = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()  # a bare word is a string: --set stages.rl.method=grpo
    node = tree
    for depth, part in enumerate(parts[:-1]):
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override}: {'.'.join(parts[: depth + 1])} is {child!r}, which has no keys of its own.")
        node = child
    node[parts[-1]] = value


def _explain(model: type[BaseModel], tree: Mapping[str, Any], detail: Mapping[str, Any]) -> str:
    location = [str(part) for part in detail["loc"]]
    path = ".".join(_without_tags(tree, location)) or "the recipe"
    if detail["type"] == "extra_forbidden":
        nearest = difflib.get_close_matches(location[-1], _known_keys(model, location[:-1]), n=1, cutoff=0.5)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else " Remove it, or see docs/recipes.md for the keys that exist."
        return f"{path}: unknown key.{hint}"
    if detail["type"] == "missing":
        return f"{path}: required, but not set."
    if detail["type"] == "union_tag_invalid":
        context = detail["ctx"]
        expected = [tag.strip(" '") for tag in str(context["expected_tags"]).split(",")]
        nearest = difflib.get_close_matches(str(context["tag"]), expected, n=1, cutoff=0.4)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        key = str(context["discriminator"]).strip("'").removesuffix("()")  # a field, or a function of the same name
        return f"{path}.{key}: {context['tag']!r} is not one of {', '.join(expected)}.{hint}"
    message = str(detail["msg"]).removeprefix("Value error, ")
    shown = repr(detail["input"])
    if detail["type"] == "value_error":  # a validator of ours: its message names the value and the remedy itself
        return f"{path}: {message}" if path != "the recipe" else message
    return f"{path}: {message} (got {shown if len(shown) <= 80 else shown[:77] + '...'})."


def _without_tags(tree: Mapping[str, Any], location: Sequence[str]) -> list[str]:
    """`location` less the members of tagged unions, which stand in pydantic's path but not in the recipe."""
    node: Any = tree
    path = []
    for index, step in enumerate(location):
        if isinstance(node, Mapping) and step in node:
            node = node[step]
        elif isinstance(node, list) and step.isdigit() and int(step) < len(node):
            node = node[int(step)]
        elif step == node or (isinstance(node, Mapping) and step in node.values()):
            continue
        elif isinstance(node, Mapping) and location[index + 1 : index + 2] and location[index + 1] in node:
            continue  # a tag that the recipe left to its default
        path.append(step)
    return path


def _known_keys(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    """The keys that exist where `path` leads, over every member of a union on the way."""
    models: list[type[BaseModel]] = [model]
    for part in path:
        models = [
            child
            for parent in models
            for child in (_models_in(parent.model_fields[part].annotation) if part in parent.model_fields else [parent])
        ]
    return sorted({name for reached in models for name in reached.model_fields})


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    names = [entry.name for entry in path.parent.glob("*.toml")]
    nearest = difflib.get_close_matches(path.name, names, n=1)
    return f" Did you mean {path.parent / nearest[0]}?" if nearest else ""
