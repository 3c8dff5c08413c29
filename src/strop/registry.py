"""What a recipe names by `kind`: one class with its keys (`Config`) and its behaviour, from strop or from a user's module.

A user's module is imported here. A mistake in it is one `ConfigError` that names the key of the recipe.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
import zlib
from abc import ABC, ABCMeta
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from strop import config as configs
from strop.errors import ConfigError, StropError, UserError, did_you_mean

SCRIPT = "strop_script_"
"""How the names of modules begin that were imported from a path."""


class Component(ABC):
    """Base of everything that a recipe names by `kind`. Building one opens nothing.

    A subclass gives its keys as a nested `Config`, and its behaviour as methods. A base class (`Stage`, `Method`, `Reward`)
    lists the built-in kinds; a user's class is named as `my_module:MyClass`, or as `path/to/script.py:MyClass`.
    """

    class Config(configs.Config):
        """A component has no keys by itself."""

    kinds: ClassVar[Mapping[str, str]] = {}
    """Of a base class: the built-in kinds, each with `module:Class`."""
    kind_key: ClassVar[str] = "kind"
    default_kind: ClassVar[str] = ""
    """Of a table that names none; "": it must."""
    own_base: ClassVar[str] = ""
    """The public class that a user's class is derived from, if it is another one."""
    config: Any

    def __init__(self, config: configs.Config | None = None, /, **keys: Any) -> None:
        self.config = configs.validate(self.Config, keys, place=type(self).__name__) if config is None else config

    @property
    def kind(self) -> str:
        """The word by which a recipe names this class: a built-in kind, or where a user's class is found."""
        return kind_of(type(self))

    def replaced(self, **keys: Any) -> Self:
        """Return a copy with other values for `keys`; they are not validated."""
        return type(self)(self.config.model_copy(update=keys))

    def table(self) -> dict[str, Any]:
        """Return the table that `of` reads back."""
        return {self.kind_key: self.kind, **self.config.model_dump(mode="json")}

    @classmethod
    def class_of(cls, kind: str) -> type[Self]:
        """Return the class that `kind` names. Raises `ConfigError` where there is none, or where importing it fails."""
        if place := cls.kinds.get(kind):
            module, _, name = place.partition(":")
            built_in: type[Self] = getattr(importlib.import_module(module), name)
            return built_in
        if ":" not in kind:
            hint = did_you_mean(kind, cls.kinds)
            raise ConfigError(
                f"{kind!r} is not one of {', '.join(cls.kinds)}.{hint} A class of your own is named as my_module:MyClass."
            )
        called = cls.own_base or cls.__name__
        return import_class(kind, cls, key=cls.kind_key, called=called, takes_functions="function" in cls.kinds)

    @classmethod
    def of(cls, value: Any) -> Self:
        """Return the component that a recipe's word or table names, or `value` itself if it is one already.

        Raises:
            ValueError: `value` names no kind, or one that does not exist.
            pydantic.ValidationError: its keys are wrong.
        """
        if isinstance(value, cls):
            return value
        table = {cls.kind_key: value} if isinstance(value, str) else value
        if not isinstance(table, Mapping):
            raise ValueError(f"{value!r} is neither a kind nor a table. Write {cls.kind_key} = {_one_of(cls)}.")
        if (built_before := configs.instance(table)) is not None:
            return cls.of(built_before)
        keys = {key: each for key, each in table.items() if key != cls.kind_key}
        kind = table.get(cls.kind_key, cls.default_kind or None)
        if not isinstance(kind, str):
            raise PydanticCustomError("no_kind", f"{cls.kind_key}: required, but not set; one of {_one_of(cls)}")
        try:
            found = cls.class_of(kind)
        except ConfigError as error:
            said = str(error).removeprefix(f"{cls.kind_key}: ")
            raise ValueError(f"{cls.kind_key}: {said}") from error
        built = found(configs.from_keys(found.Config, keys))
        if not hasattr(built, "config"):
            raise ValueError(f"{cls.kind_key}: {kind}: its __init__ does not call super().__init__(...). Add that call.")
        return built

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.of,
            ref=f"{cls.__module__}.{cls.__qualname__}",
            serialization=core_schema.plain_serializer_function_ser_schema(Component.table),
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return one object for each built-in kind, with exactly its keys; a user's class may have any keys.

        A component within one of its own sort, as a source of tasks in a mixture, is any table.
        """
        if cls in _described:
            return {"title": cls.__name__, "anyOf": [{"type": "string"}, {"type": "object"}]}
        _described.append(cls)
        try:
            return cls._schema_of_kinds(handler)
        finally:
            _described.remove(cls)

    @classmethod
    def _schema_of_kinds(cls, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        own = {"type": "string", "pattern": ":", "description": "A class of your own: my_module:MyClass."}
        members: list[JsonSchemaValue] = [{"enum": sorted(cls.kinds)}, own]
        for kind in cls.kinds:
            found = cls.class_of(kind)
            keys = handler.resolve_ref_schema(handler(found.Config.__pydantic_core_schema__))
            needed = [] if kind == cls.default_kind else [cls.kind_key]
            members.append(
                {
                    **keys,
                    "title": kind,
                    "description": (inspect.getdoc(found) or "").partition("\n\n")[0].replace("\n", " "),
                    "properties": {cls.kind_key: {"const": kind}, **keys.get("properties", {})},
                    "required": [*needed, *keys.get("required", [])],
                }
            )
        members.append({"type": "object", "properties": {cls.kind_key: own}, "required": [cls.kind_key]})
        return {"title": cls.__name__, "anyOf": members}

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.config == other.config

    def __hash__(self) -> int:
        return hash((type(self), str(self.config)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config!r})"


_described: list[type[Component]] = []
"""Classes whose schema is being made."""


def kind_of(found: type[Component]) -> str:
    """Return the word by which a recipe names `found`."""
    place = f"{found.__module__}:{found.__qualname__}"
    return next((kind for kind, where in found.kinds.items() if where == place), "") or place_of(found)


def place_of(found: type | Callable[..., Any]) -> str:
    """Return where `import_object` finds a class or function. One of a script is named by the script's path."""
    is_script = found.__module__ == "__main__" or found.__module__.startswith(SCRIPT)
    if is_script and (script := getattr(sys.modules[found.__module__], "__file__", None)):
        return f"{Path(script).resolve()}:{found.__qualname__}"
    return f"{found.__module__}:{found.__qualname__}"


def _one_of(cls: type[Component]) -> str:
    return ", ".join(cls.kinds) or "my_module:MyClass"


def import_object(path: str, *, key: str) -> Any:
    """Return what `module:name` or `path/to/script.py:name` names.

    A module is looked up next to the recipe (`look_next_to`), then in the working directory, then among installed modules.

    Raises:
        ConfigError: `key` of the recipe holds no such path, or importing it fails.
    """
    module, colon, name = path.rpartition(":")
    if not module or not colon or not name:
        raise ConfigError(f"{key}: {path!r} is not of the form module:name, as in my_tools:word_count.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = _import_script(Path(module)) if module.endswith(".py") else importlib.import_module(module)
    except (Exception, SystemExit) as error:
        if isinstance(error, UserError):  # a decorator of strop refused something there
            raise ConfigError(f"{key}: {path!r} cannot be imported: {error}") from error
        if isinstance(error, StropError):
            raise
        is_missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        remedy = f"Run strop where {module}.py lies, put it next to the recipe, or install it." if is_missing else ""
        where = "" if is_missing else _place_of_error(error)
        raise ConfigError(
            f"{key}: {path!r} cannot be imported: {type(error).__name__}: {error!s:.300}{where}."
            f" {remedy or f'Correct {module}.'}"
        ) from error
    try:
        return getattr(found, name)
    except AttributeError as error:
        place = getattr(found, "__file__", None) or f"module {module}"
        public = [each for each in vars(found) if not each.startswith("_")]
        raise ConfigError(f"{key}: {path!r}: {place} has no attribute {name!r}.{did_you_mean(name, public)}") from error


def import_class(path: str, base: ABCMeta, *, key: str, called: str, takes_functions: bool = False) -> type[Any]:
    """As `import_object`. Raises `ConfigError` also if `path` names no subclass of `base`, or an abstract one.

    Args:
        called: the public name of `base`.
        takes_functions: whether `key` may be "function".
    """
    found = import_object(path, key=key)
    if not (isinstance(found, ABCMeta) and issubclass(found, base)):
        remedy = "Derive the class from it."
        if callable(found) and not isinstance(found, type) and takes_functions:
            remedy = f'A function is named as {{ {key} = "function", function = "{path}" }}.'
        raise ConfigError(f"{path!r} is not a subclass of strop.{called}. {remedy}")
    if inspect.isabstract(found):
        raise ConfigError(f"{path!r} has no {', no '.join(sorted(found.__abstractmethods__))}. Define it.")
    return found


def look_next_to(recipe: Path) -> None:
    """Let `import_object` find the modules in the directory of `recipe`, before those of the working directory."""
    directory = str(recipe.resolve().parent)
    if directory in sys.path:
        sys.path.remove(directory)
    sys.path.insert(0, directory)


def _import_script(path: Path) -> ModuleType:
    """Return the module of a script. The script that is running is not run again."""
    main = sys.modules["__main__"]
    path = path.resolve()
    if (file := getattr(main, "__file__", None)) and Path(file).resolve() == path:
        return main
    name = f"{SCRIPT}{path.stem}_{zlib.crc32(str(path).encode()):x}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _place_of_error(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return ""  # its message names the file and line
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if len(frames) > 2 else ""
