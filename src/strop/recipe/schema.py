"""The JSON schema of a recipe file, for editors and `taplo check`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from strop.recipe.recipe import SHARED_TABLES, Recipe


def recipe_schema() -> dict[str, Any]:
    """Return the schema of a recipe as it is written, before shared tables are merged into its stages."""
    schema = file_schema(Recipe)
    shared: dict[str, list[Any]] = {key: [] for key in SHARED_TABLES}
    for stage in schema["$defs"]["Stage"]["anyOf"]:
        for key in SHARED_TABLES:
            table = stage.get("properties", {}).get(key)
            if table is not None and table not in shared[key]:
                shared[key].append(table)
    schema["properties"] |= {
        key: {"description": "Shared by all stages that have this key.", "anyOf": tables} for key, tables in shared.items()
    }
    return schema


def file_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of a TOML file with the keys of `model`."""
    return {"$schema": "http://json-schema.org/draft-07/schema#", **_without_required(model.model_json_schema())}


def _without_required(node: Any) -> Any:
    """Return a part of a schema that asks for no key of strop's tables, not even `kind`.

    Any key may come from a shared table, from a default or from `--set`; `strop train --dry-run` says what is missing.
    """
    if isinstance(node, list):
        return [_without_required(each) for each in node]
    if not isinstance(node, Mapping):
        return node
    is_table_of_strop = node.get("additionalProperties") is False
    dropped = {"discriminator", *(["required"] if is_table_of_strop else [])}
    out = {key: _without_required(value) for key, value in node.items() if key not in dropped}
    if "oneOf" in out:
        out["anyOf"] = out.pop("oneOf")
    return out
