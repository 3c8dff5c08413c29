"""The OpenAPI description of the HTTP API, made from its routes, their docstrings, and the types that they read and write.

No framework generates it: none knows streams of lines, and one with a server of its own would be slower than aiohttp.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from pydantic import TypeAdapter

from strop.sandbox.server.ndjson import CLIENT_HEADER, PROBLEMS, STARTS_HEADER, ErrorReply, Health, RunLine

_STATUSES = (400, 401, 410, 413, 500, 503)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One path with one method. A reply of several types is a stream of lines; one without a type is text or any JSON."""

    method: str
    path: str
    handler: Callable[..., Any]
    body: type | None = None
    replies: tuple[type, ...] = ()
    may_be_empty: bool = False  # an empty body stands for the default of its type
    is_open: bool = False  # needs no token


def description(routes: Iterable[Route]) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    read = dict.fromkeys(route.body for route in routes if route.body is not None)
    written = dict.fromkeys([*(reply for route in routes for reply in route.replies), ErrorReply])
    keyed: list[Any] = [(shape, "validation", TypeAdapter(shape)) for shape in read]
    keyed += [(shape, "serialization", TypeAdapter(shape)) for shape in written]
    references, schemas = TypeAdapter.json_schemas(keyed, ref_template="#/components/schemas/{model}")
    shapes: dict[type, Any] = {shape: reference for (shape, _), reference in references.items()}
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, shapes)
    return {
        "openapi": "3.1.0",
        "info": {"title": "strop code service", "version": version("strop"), "license": {"name": "Apache-2.0"}},
        "servers": [{"url": "/"}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, shapes: dict[type, Any]) -> dict[str, Any]:
    summary, _, detail = (inspect.getdoc(route.handler) or "").partition("\n\n")
    problem, statuses = (shapes[Health], (503,)) if route.is_open else (shapes[ErrorReply], _STATUSES)
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__.strip("_"),
        "summary": summary.removesuffix("."),
        "description": " ".join(detail.split()),
        "parameters": [_parameter(CLIENT_HEADER, "header", "Clients take turns in the queue, and have ids of their own.")],
        "responses": {"200": {"description": "OK", "content": _reply(route, shapes)}}
        | {str(status): {"description": _problems(status), "content": _json(problem)} for status in statuses},
    }
    if route.is_open:
        operation["security"] = []
    if route.body is RunLine:
        starts = "Any value: report calls that the supervisor has taken."
        operation["parameters"].append(_parameter(STARTS_HEADER, "header", starts))
    if "{session}" in route.path:
        operation["parameters"].append(_parameter("session", "path", "From an earlier reply."))
    if route.body is not None:
        content = _lines(shapes[RunLine]) if route.body is RunLine else _json(shapes[route.body])
        operation["requestBody"] = {"required": not route.may_be_empty, "content": content}
    return operation


def _problems(status: int) -> str:
    return " ".join(text for known, _, text in PROBLEMS.values() if known == status)


def _reply(route: Route, shapes: dict[type, Any]) -> dict[str, Any]:
    if len(route.replies) > 1:
        return _lines({"oneOf": [shapes[reply] for reply in route.replies]})
    if route.path == "/metrics":
        return {"text/plain": {"schema": {"type": "string"}}}
    return _json(shapes[route.replies[0]] if route.replies else {"type": "object"})


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _lines(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/x-ndjson": {"schema": schema}}


def _parameter(name: str, place: str, text: str) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "description": text, "schema": {"type": "string"}}
