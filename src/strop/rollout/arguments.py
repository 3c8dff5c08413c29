"""Checks the arguments of a tool call against the tool's JSON schema, in words that a policy can act on.

It knows the part of JSON Schema that function signatures use: type, properties, required, items, enum, anyOf, and true and
false in a schema's place. Other keywords are not enforced. A name that the signature neither lists nor requires is wrong unless
`additionalProperties` allows it; an object whose properties are not listed may hold anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def argument_problem(schema: Mapping[str, Any], arguments: Mapping[str, object]) -> str | None:
    """What is wrong with `arguments` under `schema` (of type object), naming the argument; None when nothing is."""
    return _object_problem(schema, arguments, path="")


def _object_problem(schema: Mapping[str, Any], value: Mapping[str, object], *, path: str) -> str | None:
    properties: Mapping[str, Any] = schema.get("properties", {})
    required = schema.get("required", ())
    for name in required:
        if name not in value:
            return f"missing required argument {path + name!r}"
    for name, each in value.items():
        of_name = properties.get(name, True if name in required else schema.get("additionalProperties", False))
        if of_name is False:
            known = ", ".join(each for each in dict.fromkeys((*properties, *required)) if properties.get(each) is not False)
            return f"unknown argument {path + name!r} (known: {known or 'none'})"
        problem = _value_problem(of_name, each, path=path + name)
        if problem is not None:
            return problem
    return None


def _value_problem(schema: Mapping[str, Any] | bool, value: object, *, path: str) -> str | None:
    if isinstance(schema, bool):
        return None if schema else f"argument {path!r} must be left out"
    if "anyOf" in schema:
        problems = [_value_problem(option, value, path=path) for option in schema["anyOf"]]
        return None if None in problems or not problems else problems[0]
    if "type" in schema:
        kinds = [schema["type"]] if isinstance(schema["type"], str) else list(schema["type"])
        if not any(_is_of_type(value, kind) for kind in kinds):
            return f"argument {path!r} must be of type {' or '.join(kinds)}, not {_type_name(value)}"
    if "enum" in schema and value not in schema["enum"]:
        return f"argument {path!r} must be one of {', '.join(map(repr, schema['enum']))}"
    if isinstance(value, dict) and "properties" in schema:
        return _object_problem(schema, value, path=f"{path}.")
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping | bool):
        for position, item in enumerate(value):
            problem = _value_problem(schema["items"], item, path=f"{path}[{position}]")
            if problem is not None:
                return problem
    return None


def _is_of_type(value: object, kind: str) -> bool:
    if isinstance(value, bool):  # which Python counts as an int, and JSON does not
        return kind == "boolean"
    return isinstance(value, _TYPES.get(kind, (object,)))


def _type_name(value: object) -> str:
    order = ("boolean", "null", "integer", "number", "string", "array", "object")
    return next(kind for kind in order if _is_of_type(value, kind))
