"""The strict base of every config model, and how a recipe becomes one: file, then `--set`, then validation.

Command line beats file beats default. A default is written once, in the model. An unknown key is an error that names the
nearest real one, with its full path in the recipe.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
import shlex
import tomllib
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from strop.errors import ConfigError, did_you_mean

_LARGEST, _LARGEST_FLOAT = 10**12, 1e38  # about what float32 holds
_INSTANCE = "\0instance"  # stands for what is no data, while its table goes through JSON
_instances: ContextVar[list[Any] | None] = ContextVar("instances", default=None)


class Config(BaseModel):
    """Frozen and strict: no unknown keys, no silent conversion of a string into a number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)

    also_called: ClassVar[Mapping[str, str]] = {}
    """Keys by names that others give them: not accepted; the error names ours."""

    @model_validator(mode="after")
    def _can_be_held(self) -> Self:
        """Refuse whole numbers that no loop and no memory can hold, and others whose products no float can."""
        for key in type(self).model_fields:
            value = getattr(self, key)
            for number in value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else (value,):
                largest = _LARGEST if isinstance(number, int) else _LARGEST_FLOAT
                if isinstance(number, int | float) and abs(number) > largest and key != "seed":
                    raise ValueError(f"{key} is {str(number)[:20]}. The size of a number is at most {largest:.0e}.")
        return self

    def import_code(self, key: str) -> None:
        """Import the user's function that this table, at `key` of the recipe, names. Raises `ConfigError` if that fails."""


def import_code(tables: Any, key: str) -> None:
    """Import every user's function that `tables`, or a table in them, names. Raises `ConfigError` for the first that fails."""
    tables = getattr(tables, "config", tables)  # of what `strop.registry` made of a table
    if isinstance(tables, Config):
        tables.import_code(key)
        tables = {name: getattr(tables, name) for name in type(tables).model_fields}
    if isinstance(tables, Mapping):
        for name, table in tables.items():
            import_code(table, f"{key}.{name}")


ConfigT = TypeVar("ConfigT", bound=Config)
ModelT = TypeVar("ModelT", bound=BaseModel)


class Choice:
    """Stands in the annotation of a union of configs: the key `kind` of a table says which of them it is.

    Args:
        default: the kind of a table that names none; None: it must.
        own: finds a user's config by its kind, `my_module:MyClass`; None if a user cannot give one.
    """

    def __init__(self, default: str | None = None, own: Callable[[str], type[Config]] | None = None) -> None:
        self.default, self.own = default, own

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        kinds = _kinds_of(_members(source))
        return core_schema.no_info_wrap_validator_function(lambda value, _: self._chosen(kinds, value), handler(source))

    def _chosen(self, kinds: Mapping[str, type[BaseModel]], value: Any) -> Any:
        if isinstance(value, Config):
            return value
        if not isinstance(value, Mapping):
            raise PydanticCustomError("no_table", "not a table", {"kinds": list(kinds)})
        kind = value.get("kind", self.default)
        if kind is None:
            raise PydanticCustomError("no_kind", f"kind: required, but not set; one of {', '.join(kinds)}.")
        if self.own is not None and ":" in str(kind):
            return from_keys(self.own(str(kind)), {key: each for key, each in value.items() if key != "kind"})
        if not isinstance(kind, str) or kind not in kinds:
            raise ValueError(f"kind: {kind!r} is not one of {', '.join(kinds)}.{did_you_mean(str(kind), kinds)}")
        return from_keys(kinds[kind], value)


def from_keys(model: type[ModelT], keys: Mapping[str, Any]) -> ModelT:
    """Return `keys` as a `model`. Values may be those of a recipe (lists, words, numbers), configs and components.

    They pass through JSON, where lists become tuples and strings become paths and enums, and nothing else is converted.
    """
    before = _instances.get()
    instances = [] if before is None else before
    token = _instances.set(instances)
    try:
        return model.model_validate_json(json.dumps(keys, default=partial(_as_json, instances)))
    finally:
        _instances.reset(token)


def instance(table: Mapping[str, Any]) -> Any:
    """Return the component or function that `table` stands for in `from_keys`; None if it is a table of a recipe."""
    number = table.get(_INSTANCE)
    return (_instances.get() or [])[number] if isinstance(number, int) else None


def _as_json(instances: list[Any], value: Any) -> Any:
    if hasattr(type(value), "class_of") or inspect.isfunction(value):  # a component of `strop.registry`
        instances.append(value)
        return {_INSTANCE: len(instances) - 1}
    return value.model_dump(mode="json") if isinstance(value, Config) else str(value)


def load_toml(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The recipe at `path` as a tree, with each `a.b=c` of `overrides` put in its place.

    Raises:
        ConfigError: the file is missing or not TOML, or an override has no `=` or goes through a value.
    """
    try:
        content = path.read_bytes().removeprefix(BOM_UTF8)
        tree: dict[str, Any] = tomllib.loads(content.decode().replace("\r\n", "\n"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such recipe.{nearest_file(path, '*.toml')}") from error
    except OSError as error:
        raise ConfigError(f"{str(path)[:200]}: cannot be read as a recipe: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}, line {line}: not UTF-8: byte 0x{content[error.start]:02x}. Save the file in the encoding UTF-8."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {str(error)[:200]}.") from error
    for override in overrides:
        _apply(tree, override)
    return tree


def with_paths(tree: Any, file: Path, keys: Collection[str]) -> Any:
    """Return `tree`, which `file` holds, with the paths at `keys`, however deep, as `next_to` has them."""
    if isinstance(tree, list):
        return [with_paths(each, file, keys) for each in tree]
    if not isinstance(tree, dict):
        return tree
    return {
        key: next_to(file, value, key=key) if key in keys and isinstance(value, str) else with_paths(value, file, keys)
        for key, value in tree.items()
    }


def next_to(file: Path, path: str, *, key: str) -> str:
    """Return `path` below the directory of `file` if it exists there, else as written (a hub id, for example).

    Raises:
        ConfigError: no file system has such a path; names `key`.
    """
    local = file.parent / os.path.expanduser(path)
    try:
        return str(local) if local.exists() else path
    except OSError as error:
        raise ConfigError(f"{file}: {key}: {path[:60]!r}...: {error.strerror}. Shorten it.") from error


def validate(
    model: type[ConfigT],
    tree: Mapping[str, Any],
    *,
    place: str,
    written_at: Callable[[tuple[str, ...]], tuple[str, ...]] = lambda path: path,
) -> ConfigT:
    """`tree` as a `model`; every mistake in one `ConfigError`, one line each, with the path of the key. See `from_keys`.

    Args:
        place: what has the keys.
        written_at: where the user wrote what lies at a path of `tree`; a mistake is reported for that place, once.
    """
    try:
        return from_keys(model, tree)
    except ValidationError as error:
        details = error.errors(include_url=False)
        each = [_explain(model, tree, dict(detail), written_at) for detail in details if not _is_of_others(detail, details)]
        lines = list(dict.fromkeys(each))
        raise ConfigError(f"{place}: " + ("\n  ".join(["", *lines]) if len(lines) > 1 else lines[0])) from error


def _is_of_others(detail: ErrorDetails, details: Sequence[ErrorDetails]) -> bool:
    """Whether a list is called too short only because of an item of it that has a mistake of its own."""
    place = detail["loc"]
    return detail["type"] == "too_short" and any(
        len(each["loc"]) > len(place) and each["loc"][: len(place)] == place for each in details
    )


def _apply(tree: dict[str, Any], override: str) -> None:
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
                ' ones, as in --set \'stages.mixed.data=["rejection","general"]\'.'
            ) from error
    node = tree
    for depth, part in enumerate(parts[:-1]):
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            through, below = parts[: depth + 1], ".".join(parts[depth + 1 :])
            table = f"{'.'.join(through)}={{kind={json.dumps(child)}, {below}={raw.strip()}}}"
            remedy = f" Write a table, as in --set {shlex.quote(table)}." if isinstance(child, str) else ""
            raise ConfigError(f"--set {override}: {'.'.join(through)} is {child!r}, which has no keys of its own.{remedy}")
        node = child
    node[parts[-1]] = value


def _explain(
    model: type[BaseModel], tree: Any, detail: Mapping[str, Any], written_at: Callable[[tuple[str, ...]], tuple[str, ...]]
) -> str:
    kind, message = detail["type"], str(detail["msg"]).removeprefix("Value error, ")
    location = tuple(str(step) for step in detail["loc"])
    path = ".".join(written_at(location)) or "the recipe"
    if kind == "extra_forbidden":
        return f"{path}: unknown key.{_hint_at_keys(model, tree, location)}"
    if kind == "missing":
        return f"{path}: required, but not set."
    if kind == "no_table":
        return _explain_no_table(path, detail["ctx"]["kinds"], detail["input"])
    in_list = _inside(_place(model, location, tree).expected, "0") if kind == "tuple_type" else None
    if _members(in_list) and isinstance(detail["input"], Mapping):
        return f"{path}: one table, where a list of them belongs. Write [[{_list_at(path)}]]."
    shown = repr(detail["input"])
    if kind == "no_kind" or (kind == "value_error" and message.startswith(("kind: ", "name: "))):
        return f"{path}.{message}"
    if kind == "value_error":  # a validator of ours: its message names the value and the remedy itself, some the key as well
        return message if path == "the recipe" or message.startswith(f"{path}.") else f"{path}: {message}"
    return f"{path}: {message} (got {shown if len(shown) <= 80 else shown[:77] + '...'})."


def _hint_at_keys(model: type[BaseModel], tree: Any, location: Sequence[str]) -> str:
    """What may have been meant by the last step of `location`, a key that the table there does not have."""
    *above, key = location
    place = _place(model, above, tree)
    own = _members(place.expected)
    keys = dict.fromkeys(name for each in (*own, *place.kinds.values()) for name in each.model_fields)
    ours = [each.also_called[key] for each in own if issubclass(each, Config) and key in each.also_called]
    nearest = ours or difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
    if not nearest:
        return " Remove it, or see the recipe reference for the keys that exist."
    if any(nearest[0].partition(".")[0] in each.model_fields for each in own):
        return f" Did you mean {nearest[0]!r}?"
    meant = "It" if nearest[0] == key else f"Did you mean {nearest[0]!r}? That"
    kinds = " or ".join(f'"{kind}"' for kind, each in place.kinds.items() if nearest[0] in each.model_fields)
    return f' {meant} is a key of {".".join((*above, place.kind_key))} = {kinds}; here that is "{place.kind}".'


def _explain_no_table(path: str, kinds: Sequence[str], given: Any) -> str:
    """What to write in place of a value where a table of one of `kinds` belongs."""
    kind, others = (given, "") if given in kinds else (kinds[0], f" (one of {', '.join(kinds)})")
    if path.rpartition(".")[2].isdigit():
        return f'{path}: {given!r} is not a table. Write [[{_list_at(path)}]] with kind = "{kind}"{others}.'
    return f'{path}: {given!r} is not a table. Write [{path}] with kind = "{kind}", or --set {path}.kind={kind}{others}.'


def _list_at(path: str) -> str:
    """As TOML has the list of tables at `path`, or that of which one lies there."""
    return ".".join(step for step in path.split(".") if not step.isdigit())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where pydantic's path of a mistake leads."""

    expected: Any  # the annotation there; of a table that says which kind it is, the keys of that kind
    kinds: Mapping[str, type[BaseModel]]  # where a table says which kind it is: the keys of every kind
    kind_key: str = ""
    kind: str = ""


def _place(model: type[BaseModel], location: Sequence[str], tree: Any) -> _Place:
    place = _Place(expected=model, kinds={})
    for step in location:
        tree = _value_at(tree, step)
        place = _kind_at(_inside(place.expected, step), tree)
    return place


def _kind_at(annotation: Any, tree: Any) -> _Place:
    """Where a value of `annotation` is, which `tree` has there."""
    alternatives = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    component: Any = next((each for each in alternatives if isinstance(each, type) and hasattr(each, "class_of")), None)
    if component is not None:  # of `strop.registry`
        key, default = component.kind_key, component.default_kind
        kind = str(tree.get(key, default) if isinstance(tree, Mapping) else tree)
        try:
            kinds = {each: component.class_of(each).Config for each in component.kinds}
            return _Place(expected=component.class_of(kind).Config, kinds=kinds, kind_key=key, kind=kind)
        except ConfigError:
            return _Place(expected=None, kinds={}, kind_key=key, kind=kind)
    kinds = _kinds_of(members) if len(members := _members(annotation)) > 1 else {}
    if not kinds or not isinstance(tree, Mapping):
        return _Place(expected=annotation, kinds={})
    kind = str(tree.get("kind", next(iter(kinds))))
    bases = [each for each in members if each not in kinds.values()]  # of a user's class
    return _Place(expected=kinds.get(kind, bases[0] if bases else None), kinds=kinds, kind_key="kind", kind=kind)


def _value_at(tree: Any, step: str) -> Any:
    if isinstance(tree, Mapping):
        return tree.get(step)
    return tree[int(step)] if isinstance(tree, list) and step.isdigit() and int(step) < len(tree) else None


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


def _kinds_of(members: Sequence[type[BaseModel]]) -> dict[str, type[BaseModel]]:
    """Return the configs by the words that the key `kind` of each may hold."""
    fields = [(each, each.model_fields["kind"]) for each in members if "kind" in each.model_fields]
    return {kind: each for each, field in fields for kind in get_args(field.annotation)}


def nearest_file(path: Path, pattern: str = "*") -> str:
    """Return a question with the file of the directory whose name is nearest to that of `path`; "" if none is near."""
    names = [entry.name for entry in path.parent.glob(pattern)] if path.parent.is_dir() else []
    nearest = difflib.get_close_matches(path.name, names, n=1)
    return f" Did you mean {path.parent / nearest[0]}?" if nearest else ""
