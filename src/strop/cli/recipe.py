"""`strop recipe`: facts about recipe files."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, help="Facts about recipe files.")


class File(StrEnum):
    """The kinds of TOML files that strop reads."""

    RECIPE = "recipe"
    SWEEP = "sweep"
    CURATION = "curation"


@app.callback()
def _group() -> None:
    """Keeps `schema` a command of its own while it is the only one."""


@app.command()
def schema(
    file: Annotated[File, typer.Argument(help="Which kind of file the schema describes.")] = File.RECIPE,
) -> None:
    """Print the JSON schema of a file, for editors and for `taplo check --schema file:///PATH/schema.json FILE`."""
    from strop.curation.config import CurationConfig
    from strop.pipeline.sweep_file import SweepFile
    from strop.recipe.schema import file_schema, recipe_schema

    schemas: dict[File, Callable[[], dict[str, Any]]] = {
        File.RECIPE: recipe_schema,
        File.SWEEP: lambda: file_schema(SweepFile),
        File.CURATION: lambda: file_schema(CurationConfig),
    }
    typer.echo(json.dumps(schemas[file](), indent=2))
