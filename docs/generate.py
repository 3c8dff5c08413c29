"""Copy the pages of docs/ to a folder and add those that are made from the code: recipe keys, command line, changelog.

`make docs` runs this before it builds the site. Keys come from the config classes of a recipe: the default and the bounds from
pydantic, the text from `Field(description=...)`.
"""

from __future__ import annotations

import functools
import inspect
import json
import shutil
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from strop.config import Config
from strop.registry import Component

ROOT = Path(__file__).resolve().parents[1]
KEYS_PAGE, CLI_PAGE, CHANGELOG_PAGE = "recipe-keys.md", "cli.md", "changelog.md"


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the config classes that a type annotation names, at any depth; of a component those of its built-in kinds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if isinstance(annotation, type) and issubclass(annotation, Component):
        return [annotation.class_of(kind).Config for kind in annotation.kinds]
    return [model for argument in typing.get_args(annotation) for model in models_in(argument)]


def reachable(model: type[BaseModel], seen: set[type[BaseModel]]) -> Iterator[type[BaseModel]]:
    """Yield `model`, its bases and every config class that its fields lead to, each once."""
    for each in model.__mro__:
        if issubclass(each, Config) and each is not Config and each not in seen:
            seen.add(each)
            if own_fields(each) or each in kinds() or each is model:
                yield each
            for field in each.model_fields.values():
                for child in models_in(field.annotation):
                    yield from reachable(child, seen)


@functools.cache
def kinds() -> dict[type[BaseModel], dict[str, type[Component]]]:
    """Return the config classes of all built-in components, each with what a recipe writes to choose a class that has it."""
    found: dict[type[BaseModel], dict[str, type[Component]]] = {}
    bases = list(Component.__subclasses__())
    for base in bases:
        for kind in vars(base).get("kinds", {}):
            component = base.class_of(kind)
            found.setdefault(component.Config, {})[f"`{base.kind_key} = {json.dumps(kind)}`"] = component
        bases += base.__subclasses__()
    return found


def title_of(model: type[BaseModel]) -> str:
    """Return the name of a table: that of its config class, or of the class that `Config` is nested in."""
    return model.__qualname__.removesuffix(".Config")


def owner_of(model: type[BaseModel]) -> type:
    """Return the class whose docstring describes a table."""
    owner: Any = sys.modules[model.__module__]
    for name in title_of(model).split("."):
        owner = getattr(owner, name)
    return owner


def own_fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields that the class itself declares, without those of its bases."""
    return {name: model.model_fields[name] for name in model.__annotations__ if name in model.model_fields}


def default_of(field: FieldInfo) -> str:
    """Return a field's default as the page shows it."""
    if field.default is PydanticUndefined and field.default_factory is None:
        return "required"
    if field.default_factory is not None:
        return "computed"
    if isinstance(field.default, BaseModel):
        return "table"
    if field.default is None:
        return "not set"
    value = to_jsonable_python(field.default, fallback=lambda component: component.table())
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def anchor_of(model: type[BaseModel]) -> str:
    """Return the anchor of a table's section."""
    return title_of(model).lower().replace(".", "-")


def type_of(annotation: Any) -> str:
    """Return a type as TOML's readers know it: number, text, list, table, or the values that are allowed."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_of(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in arguments)
    if origin in (list, tuple, set, frozenset):
        return "list"
    if origin in (dict,) or str(origin).endswith("Mapping'>"):
        return "table"
    if arguments and not isinstance(annotation, type):  # a union
        parts = [type_of(argument) for argument in arguments if argument is not type(None)]
        return " or ".join(dict.fromkeys(parts))
    if isinstance(annotation, type):
        if issubclass(annotation, BaseModel):
            return f"[`{title_of(annotation)}`](#{anchor_of(annotation)})"
        if hasattr(annotation, "__members__"):
            return ", ".join(f"`{json.dumps(each.value)}`" for each in annotation)  # type: ignore[attr-defined]
        if issubclass(annotation, Component):
            return f"{annotation.__name__.lower()}: a kind, or a table with `{annotation.kind_key}`"
    names = {"str": "text", "int": "whole number", "float": "number", "bool": "`true`, `false`", "Path": "path"}
    return names.get(getattr(annotation, "__name__", ""), "value")


def bounds_of(field: FieldInfo) -> str:
    """Return the bounds of a number, as in `≥ 1, ≤ 600`."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [f"{sign} {getattr(item, name)}" for item in field.metadata for name, sign in signs.items() if hasattr(item, name)]
    return ", ".join(found)


def meaning_of(name: str, field: FieldInfo) -> str:
    """Return what a key means."""
    if name == "kind" and typing.get_origin(field.annotation) is typing.Literal:
        return "Chooses this table."
    return field.description or ""


def row(cells: list[str]) -> str:
    """Return a row of a table."""
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def choice_of(model: type[BaseModel]) -> str:
    """Return what a recipe writes to choose this table, as in `kind = "rl"`; empty for a table without a kind."""
    if field := own_fields(model).get("kind"):
        return " or ".join(f"`kind = {json.dumps(value)}`" for value in typing.get_args(field.annotation))
    return "".join(kinds()[model]) if len(kinds().get(model, ())) == 1 else ""


def about_of(described: type) -> str:
    """Return the first paragraph of a docstring."""
    return (inspect.getdoc(described) or "").split("\n\n")[0].replace("\n", " ")


def section(model: type[BaseModel]) -> str:
    """Return the part of the page that describes one table of a recipe."""
    bases = [base for base in model.__mro__[1:] if issubclass(base, Config) and base is not Config and own_fields(base)]
    about, choice = about_of(owner_of(model)), choice_of(model)
    lines = [f"## `{title_of(model)}` {{#{anchor_of(model)}}}", "", f"{choice}: {about}" if choice else about, ""]
    if len(sharing := kinds().get(model, {})) > 1:
        lines += [*(f"- {written}: {about_of(component)}" for written, component in sharing.items()), ""]
    if bases:
        links = ", ".join(f"[`{title_of(base)}`](#{anchor_of(base)})" for base in bases)
        lines += [f"Also has the keys of {links}.", ""]
    if fields := own_fields(model):
        lines += ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in fields.items():
        bounds = bounds_of(field)
        cells = [f"`{name}`", type_of(field.annotation) + (f" ({bounds})" if bounds else ""), default_of(field)]
        lines.append(row([*cells, meaning_of(name, field)]))
    return "\n".join([*lines, ""])


def keys_page(root: type[BaseModel]) -> str:
    """Return the page of all keys of a recipe."""
    intro = (
        "# Recipe keys\n\n"
        "This page is generated from the config classes. [Recipes](recipes.md) explains how the tables fit together and shows"
        ' examples. "required" means that there is no default, "not set" that the key may be left out, "table" that the default'
        " is the other table's defaults.\n"
    )
    return "\n".join([intro, *(section(model) for model in reachable(root, set()))])


def commands(command: Any, path: str) -> Iterator[str]:
    """Yield the section of a command and of all commands below it."""
    about = inspect.cleandoc(command.help or "").replace("\b\n", "").replace("\f", "").strip()
    if children := getattr(command, "commands", None):
        yield f"## {path}\n\n{about}\n"
        for name, child in children.items():
            yield from commands(child, f"{path} {name}")
        return
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and each.name != "help"]
    usage = " ".join([path, *(f"{each.name.upper()}" for each in arguments), *(["[OPTIONS]"] if options else [])])
    lines = [f"## {path}", "", about, "", f"```text\n{usage}\n```", ""]
    if arguments or options:
        lines += ["| argument or option | default | meaning |", "| --- | --- | --- |"]
    for each in (*arguments, *options):
        names = ", ".join(f"`{name}`" for name in each.opts) if each in options else f"`{each.name.upper()}`"
        has_default = each.default not in (None, [], ()) and not callable(each.default)
        default = "required" if each.required else f"`{each.default}`" if has_default else ""
        lines.append(row([names, default, getattr(each, "help", "") or ""]))
    yield "\n".join([*lines, ""])


def cli_page(app: typer.Typer) -> str:
    """Return the page of all commands."""
    return "\n".join(
        ["# Command line\n\nThis page is generated from the code.\n", *commands(typer.main.get_command(app), "strop")]
    )


def changelog_page() -> str:
    """Return CHANGELOG.md with links that hold inside the site."""
    return (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")


def generated() -> dict[str, str]:
    """Return each generated page by its name."""
    from strop.cli import app
    from strop.recipe.recipe import Recipe

    return {KEYS_PAGE: keys_page(Recipe), CLI_PAGE: cli_page(app), CHANGELOG_PAGE: changelog_page()}


def main(target: Path) -> None:
    """Write all pages of the site to `target`."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "docs", target, ignore=shutil.ignore_patterns("*.py", "*.toml", "__pycache__"))
    for name, text in generated().items():
        (target / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "docs"))
