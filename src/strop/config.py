"""The strict base of every config model, and how a recipe becomes one: file, then `--set`, then validation.

Command line beats file beats default. A default is written once, in the model. An unknown key is an error that names the
nearest real one, with its full path in the recipe.
"""

from __future__ import annotations

import difflib
import importlib
import json
import shlex
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, ValidationError, model_serializer
from pydantic_core import ErrorDetails

from strop.errors import ConfigError, UserError


class Config(BaseModel):
    """Frozen and strict: no unknown keys, no silent conversion of a string into a number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)

    also_called: ClassVar[Mapping[str, str]] = {}
    """Keys by names that others give them: not accepted, but whoever writes one is told ours."""
    newer: ClassVar[tuple[str, ...]] = ()
    """Keys that some runs are older than. At its default such a key is not written down: recipes and digests of those runs stay
    what they were, so that they go on. A class names its own."""

    @classmethod
    def newer_keys(cls) -> frozenset[str]:
        """What is named in `newer` of this class and of all that it is made from."""
        return frozenset(key for each in cls.__mro__ for key in vars(each).get("newer", ()))

    @model_serializer(mode="wrap")
    def _as_older_runs_have_it(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = serialize(self)
        fields = type(self).model_fields
        idle = {key for key in self.newer_keys() if getattr(self, key) == fields[key].get_default(call_default_factory=True)}
        return {key: value for key, value in found.items() if key not in idle}


ConfigT = TypeVar("ConfigT", bound=Config)


def load_toml(path: Path, overrides: Sequence[str] = (), *, model: type[Config] | None = None) -> dict[str, Any]:
    """The recipe at `path` as a tree, with each `a.b=c` of `overrides` put in its place.

    Args:
        model: what the tree is to become, by which an override that goes through a word is told what to write instead.

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
        _apply(tree, override, model)
    return tree


def _as_it_is(path: tuple[str, ...]) -> tuple[str, ...]:
    return path


def validate(
    model: type[ConfigT],
    tree: Mapping[str, Any],
    *,
    place: str,
    written_at: Callable[[tuple[str, ...]], tuple[str, ...]] = _as_it_is,
) -> ConfigT:
    """`tree` as a `model`; every mistake in one `ConfigError`, one line each, with the path of the key.

    The tree is validated in JSON mode: lists become tuples, strings become paths and enums, and nothing else is converted.

    Args:
        written_at: where the user wrote what lies at a path of `tree`; a mistake is told for that place, and once.
    """
    try:
        return model.model_validate_json(json.dumps(tree, default=str))
    except ValidationError as error:
        details = error.errors(include_url=False)
        explained = [_explain(model, dict(detail), written_at) for detail in details if not _is_of_others(detail, details)]
        lines = list(dict.fromkeys(explained))
        raise ConfigError(f"{place}: " + ("\n  ".join(["", *lines]) if len(lines) > 1 else lines[0])) from error


def _is_of_others(detail: ErrorDetails, details: Sequence[ErrorDetails]) -> bool:
    """Whether a list is called too short only because of an item of it that has a mistake of its own."""
    place = detail["loc"]
    return detail["type"] == "too_short" and any(
        len(each["loc"]) > len(place) and each["loc"][: len(place)] == place for each in details
    )


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
        found = importlib.import_module(module)
    except (ImportError, AttributeError, SyntaxError, NameError) as error:
        is_missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        remedy = f"Run strop where {module}.py lies, or install the module." if is_missing else f"Mend {module}."
        raise ConfigError(f"{key}: {path!r} cannot be imported: {type(error).__name__}: {error}. {remedy}") from error
    except UserError as error:  # a decorator of ours refused something there
        raise ConfigError(f"{key}: {path!r} cannot be imported: {error}") from error
    try:
        return getattr(found, name)
    except AttributeError as error:
        place = getattr(found, "__file__", None) or f"module {module}"
        raise ConfigError(f"{key}: {path!r}: {place} has no attribute {name!r}.{_hint_at_names(found, name)}") from error


def _hint_at_names(module: ModuleType, name: str) -> str:
    """What of `module` may have been meant by `name`: what resembles it, or else what was defined there."""
    public = [each for each in vars(module) if not each.startswith("_")]
    if nearest := difflib.get_close_matches(name, public, n=1, cutoff=0.5):
        return f" Did you mean {nearest[0]!r}?"
    own = [each for each in public if getattr(vars(module)[each], "__module__", None) == module.__name__]
    return f" It defines {', '.join(own[:8])}." if own else ""


def _apply(tree: dict[str, Any], override: str, model: type[Config] | None) -> None:
    key, equals, raw = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {override}: expected key=value, as in --set stages.rl.steps=10.")
    try:
        value: Any = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError as error:
        value = raw.strip()  # a bare word is a string: --set stages.rl.method=grpo
        if value[:1] in ("[", "{", '"', "'"):
            raise ConfigError(
                f"--set {override}: the value is not valid TOML: {error}. If the shell took its quotes, put the whole in single"
                " ones, as in --set 'trainer.lora.targets=[\"q_proj\"]'."
            ) from error
    node = tree
    for depth, part in enumerate(parts[:-1]):
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            through, below = parts[: depth + 1], ".".join(parts[depth + 1 :])
            remedy = "" if model is None else _table_for_word(model, through, child, f"{below}={_as_toml(value)}")
            raise ConfigError(f"--set {override}: {'.'.join(through)} is {child!r}, which has no keys of its own.{remedy}")
        node = child
    node[parts[-1]] = value


def _table_for_word(model: type[BaseModel], path: Sequence[str], word: object, setting: str) -> str:
    """What to write for the word at `path`, so that it has `setting`, if the word stands for a table; else ""."""
    members = _members(_place(model, path).expected)
    key = _tag_key(members)
    if word not in [tag for each in members for tag in _tags(each, key)]:
        return ""
    table = f"{'.'.join(path)}={{{key}={_as_toml(word)}, {setting}}}"
    return f" Write a table, as in --set {shlex.quote(table)}."


def _as_toml(value: object) -> str:
    """As it may stand in an override."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)}={_as_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_as_toml, value)) + "]"
    return json.dumps(value, default=str)  # of words, numbers and truths the two agree


def _explain(
    model: type[BaseModel], detail: Mapping[str, Any], written_at: Callable[[tuple[str, ...]], tuple[str, ...]]
) -> str:
    kind, message = detail["type"], str(detail["msg"]).removeprefix("Value error, ")
    place = _place(model, [str(step) for step in detail["loc"]])
    path = ".".join(written_at(place.path)) or "the recipe"
    if kind == "extra_forbidden":
        return f"{path}: unknown key.{_hint_at_keys(model, [str(step) for step in detail['loc']])}"
    if kind == "missing":
        return f"{path}: required, but not set."
    if kind in ("union_tag_not_found", "dict_type") and _tag_key(members := _members(place.expected)):
        return _explain_untagged(path, members, detail["input"])
    if kind == "tuple_type" and isinstance(detail["input"], Mapping) and _members(_inside(place.expected, "0")):
        return f"{path}: one table, where a list of them belongs. Write [[{_list_at(path)}]]."
    if kind == "union_tag_invalid":
        expected, tag = [_unquoted(each) for each in detail["ctx"]["expected_tags"].split(",")], detail["ctx"]["tag"]
        nearest = difflib.get_close_matches(str(tag), expected, n=1, cutoff=0.4)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        key = _unquoted(detail["ctx"]["discriminator"]).removesuffix("()")  # a field, or a function of the same name
        return f"{path}.{key}: {tag!r} is not one of {', '.join(expected)}.{hint}"
    shown = repr(detail["input"])
    if kind == "value_error":  # a validator of ours: its message names the value and the remedy itself, some the key as well
        return message if path == "the recipe" or message.startswith(f"{path}.") else f"{path}: {message}"
    return f"{path}: {message} (got {shown if len(shown) <= 80 else shown[:77] + '...'})."


def _unquoted(text: object) -> str:
    return str(text).strip(" '")


def _hint_at_keys(model: type[BaseModel], location: Sequence[str]) -> str:
    """What may have been meant by the last step of `location`, a key that the table there does not have."""
    *above, key = location
    place = _place(model, above)
    own, all_members = _members(place.expected), place.family
    keys = dict.fromkeys(name for each in (*own, *all_members) for name in each.model_fields)
    ours = [each.also_called[key] for each in own if issubclass(each, Config) and key in each.also_called]
    nearest = ours or difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
    if not nearest:
        return " Remove it, or see docs/recipes.md for the keys that exist."
    if any(nearest[0] in each.model_fields for each in own):
        return f" Did you mean {nearest[0]!r}?"
    meant = "It" if nearest[0] == key else f"Did you mean {nearest[0]!r}? That"
    tag_key = _tag_key(all_members)
    kinds = [tag for each in all_members if nearest[0] in each.model_fields for tag in _tags(each, tag_key)]
    where = " or ".join(f'"{each}"' for each in kinds)
    return f' {meant} is a key of {".".join((*place.path, tag_key))} = {where}; here that is "{above[-1]}".'


def _explain_untagged(path: str, members: Sequence[type[BaseModel]], given: Any) -> str:
    """What to write where nothing says which of `members` is meant."""
    key = _tag_key(members)
    tags = [tag for each in members for tag in _tags(each, key)]
    known = ", ".join(tags)
    if isinstance(given, Mapping):
        said = f"{given[key]!r} is not one of {known}" if key in given else f"required, but not set; one of {known}"
        return f"{path}.{key}: {said}."
    tag, others = (given, "") if given in tags else (tags[0], f" (one of {known})")
    if path.rpartition(".")[2].isdigit():
        return f'{path}: {given!r} is not a table. Write [[{_list_at(path)}]] with {key} = "{tag}"{others}.'
    return f'{path}: {given!r} is not a table. Write [{path}] with {key} = "{tag}", or --set {path}.{key}={tag}{others}.'


def _list_at(path: str) -> str:
    """As TOML has the list of tables at `path`, or that of which one lies there."""
    return ".".join(step for step in path.split(".") if not step.isdigit())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where pydantic's path of a mistake leads."""

    path: tuple[str, ...]  # in the recipe: without the tags of unions, which stand in pydantic's path
    expected: Any  # the annotation there
    family: tuple[type[BaseModel], ...]  # every member of the union that `expected` was chosen from by a tag, or empty


def _place(model: type[BaseModel], location: Sequence[str]) -> _Place:
    path: list[str] = []
    expected: Any = model
    family: list[type[BaseModel]] = []
    for step in location:
        members = _members(expected)
        tagged = [each for each in members if step in _tags(each, _tag_key(members))]
        if tagged and not family:
            family, expected = members, tagged[0]
        else:
            path.append(step)
            family, expected = [], _inside(expected, step)
    return _Place(path=tuple(path), expected=expected, family=tuple(family))


def _inside(annotation: Any, step: str) -> Any:
    """The annotation of what `step` leads to: a field, or an element of a container. None where it leads nowhere."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        field = annotation.model_fields.get(step)
        return field and field.annotation
    if origin is Annotated:
        return _inside(arguments[0], step)
    if origin in (Union, UnionType):
        return next((found for each in arguments if (found := _inside(each, step)) is not None), None)
    if origin is dict:
        return arguments[1]
    return arguments[0] if origin in (tuple, list) else None


def _members(annotation: Any) -> list[type[BaseModel]]:
    """The models that a value of `annotation` may be of, containers left aside."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [model for argument in get_args(annotation) for model in _members(argument)]
    return []


def _tag_key(members: Sequence[type[BaseModel]]) -> str:
    """The key whose value tells `members` apart: each has it, and no two the same word in it. Empty where there is none."""
    for key in members[0].model_fields if len(members) > 1 else ():
        tags = [tag for each in members for tag in _tags(each, key)]
        if all(_tags(each, key) for each in members) and len(set(tags)) == len(tags):
            return key
    return ""


def _tags(model: type[BaseModel], key: str) -> list[str]:
    """The words that `key` of `model` may hold, if it is limited to words."""
    field = model.model_fields.get(key)
    return [str(tag) for tag in get_args(field.annotation)] if field and get_origin(field.annotation) is Literal else []


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    names = [entry.name for entry in path.parent.glob("*.toml")]
    nearest = difflib.get_close_matches(path.name, names, n=1)
    return f" Did you mean {path.parent / nearest[0]}?" if nearest else ""
