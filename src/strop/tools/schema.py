"""JSON schemas of arguments as a policy is shown them: without references, and without what only repeats a name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from strop.errors import UserError

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|Notes?):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^(\w+)(?: ?\([^)]*\))?: *(.*)$")


def parameters_schema(schema: Mapping[str, Any], *, tool: str) -> dict[str, Any]:
    """`schema`, of type object, with every `$ref` replaced by what it names, and without titles.

    Raises:
        UserError: a type refers to itself: written out it would have no end.
    """
    definitions = {**schema.get("definitions", {}), **schema.get("$defs", {})}
    inner = {key: value for key, value in schema.items() if key not in ("$defs", "definitions", "$schema")}
    if inner.get("additionalProperties") is False:  # which goes without saying
        del inner["additionalProperties"]
    inner.setdefault("type", "object")
    inner.setdefault("properties", {})
    written: dict[str, Any] = _written_out(inner, definitions, (), tool)
    return written


def _written_out(node: Any, definitions: Mapping[str, Any], inside: tuple[str, ...], tool: str) -> Any:
    if isinstance(node, list):
        return [_written_out(each, definitions, inside, tool) for each in node]
    if not isinstance(node, Mapping):
        return node
    if "$ref" in node:
        name = str(node["$ref"]).rpartition("/")[2]
        if name in inside or name not in definitions:
            raise UserError(
                f"tool {tool}: the type {name} of an argument holds itself, or is not defined; the policy cannot be shown it."
                " Take a flat type, or text that the tool reads."
            )
        if isinstance(definitions[name], bool):  # anything, or nothing: further keys narrow neither for a policy
            return definitions[name]
        siblings = {key: value for key, value in node.items() if key != "$ref"}
        return _written_out({**definitions[name], **siblings}, definitions, (*inside, name), tool)
    is_field_table = isinstance(node.get("properties"), Mapping)
    written = {}
    for key, value in node.items():
        if key == "title" and isinstance(value, str):
            continue
        if key == "properties" and is_field_table:  # whose keys are names, also one that is called title
            written[key] = {name: _written_out(each, definitions, inside, tool) for name, each in value.items()}
        else:
            written[key] = _written_out(value, definitions, inside, tool)
    return written


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the text above the sections of a docstring, and the description of each argument in its `Args:` section."""
    text = inspect.cleandoc(text)
    sections = list(_SECTION.finditer(text))
    description = text[: sections[0].start()].strip() if sections else text
    described: dict[str, str] = {}
    ends = [section.start() for section in sections[1:]] + [len(text)]
    for section, end in zip(sections, ends, strict=False):
        if section[1] in ("Args", "Arguments", "Parameters"):
            described |= _arguments(text[section.end() : end])
    return description, described


def _arguments(section: str) -> dict[str, str]:
    lines = [line for line in inspect.cleandoc(section).splitlines() if line.strip()]
    described: dict[str, str] = {}
    name = ""
    for line in lines:
        named = _ARGUMENT.match(line)
        if named:
            name, described[named[1]] = named[1], named[2].strip()
        elif name:
            described[name] = f"{described[name]} {line.strip()}".strip()
    return described
