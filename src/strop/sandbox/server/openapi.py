"""The OpenAPI description of the HTTP API: a table of routes, and the schemas of the types that are read and written.

No framework generates it: none knows streams of lines, and one with a server of its own would be slower than aiohttp.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

from pydantic import TypeAdapter

from strop.sandbox.code_tests import CodeTestReport
from strop.sandbox.protocol import RunRequest, RunResult, SessionLimits, VerifyRequest
from strop.sandbox.server.ndjson import (
    CLIENT_HEADER,
    STARTS_HEADER,
    CancelReply,
    CancelRequest,
    ErrorLine,
    ErrorReply,
    Health,
    ResultLine,
    RunLine,
    SessionReply,
    StartLine,
    TestsRequest,
    VerdictLine,
)

_PROBLEMS = {
    400: "The request has another shape, or an impossible limit.",
    401: "The token is wrong or missing.",
    410: "The session is lost; `error.message` says why.",
    413: "The body is too large.",
    500: "An error of the service.",
    503: "The service is full, has no supervisor or is shutting down: try again a little later.",
}


@dataclass(frozen=True, slots=True)
class Route:
    """One path with one method. A reply of several types is a stream of lines; one without a type is text or any JSON."""

    method: str
    path: str
    summary: str
    body: type | None = None
    replies: tuple[type, ...] = ()
    detail: str = ""
    is_open: bool = False


ROUTES = (
    Route("post", "/v1/run", "Run one program", RunRequest, (RunResult,),
        "The status is 200 for every outcome, also `rejected` and `overloaded`. A request that names a session is a cell of it."
        " When the connection is lost the program is ended; one with an `id` waits a little for the same request to come again,"
        " and both are one call."),
    Route("post", "/v1/runs", "Run many programs", RunLine, (ResultLine, ErrorLine, StartLine),
        "Each line is a call and starts as it arrives. Each answer is a line with the key of its call and leaves at once, in"
        " any order. Body and reply stream at the same time, so one request can serve a client for long. An empty line in the"
        " reply only says that the service is alive. A line that is no call is answered `rejected` and affects no other."
        " With the header `X-Strop-Starts`, a line also reports each call that a slot has taken and not answered soon."),
    Route("post", "/v1/cancel", "End calls by their ids", CancelRequest, (CancelReply,)),
    Route("post", "/v1/verify", "Compare mathematical answers", VerifyRequest, (VerdictLine, ErrorLine),
        "Verdicts are lines, in any order, each once. A last line with an `error` means that the rest is lost."),
    Route("post", "/v1/tests", "Run a program against tests of its output", TestsRequest, (CodeTestReport,)),
    Route("post", "/v1/sessions", "Open a session", SessionLimits, (SessionReply,),
        "An empty body stands for the default limits."),
    Route("post", "/v1/sessions/{session}/fork", "Copy a session, after the cells that were sent before", None,
        (SessionReply,)),
    Route("delete", "/v1/sessions/{session}", "Close a session; no error if it is gone", None, (SessionReply,)),
    Route("get", "/v1/health", "Whether the service works", None, (Health,),
        "503 with the same body when it does not. Details only with a token.", is_open=True),
    Route("get", "/metrics", "Metrics for Prometheus"),
    Route("get", "/openapi.json", "This description", is_open=True),
)  # fmt: skip


@cache
def description() -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    read = dict.fromkeys(route.body for route in ROUTES if route.body is not None)
    written = dict.fromkeys([*(reply for route in ROUTES for reply in route.replies), ErrorReply])
    keyed: list[Any] = [(shape, "validation", TypeAdapter(shape)) for shape in read]
    keyed += [(shape, "serialization", TypeAdapter(shape)) for shape in written]
    references, schemas = TypeAdapter.json_schemas(keyed, ref_template="#/components/schemas/{model}")
    shapes: dict[type, Any] = {shape: reference for (shape, _), reference in references.items()}
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route, shapes)
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
    problem, statuses = (shapes[Health], [503]) if route.is_open else (shapes[ErrorReply], list(_PROBLEMS))
    operation: dict[str, Any] = {
        "operationId": f"{route.method}_{route.path.strip('/').replace('/', '_').translate(str.maketrans('', '', '{}.'))}",
        "summary": route.summary,
        "description": route.detail,
        "parameters": [_parameter(CLIENT_HEADER, "header", "Clients take turns in the queue, and have ids of their own.")],
        "responses": {"200": {"description": "As asked.", "content": _reply(route, shapes)}}
        | {
            str(status): {"description": _PROBLEMS[status], "content": {"application/json": {"schema": problem}}}
            for status in statuses
        },
    }
    if route.is_open:
        operation["security"] = []
    if route.body is RunLine:
        operation["parameters"].append(
            _parameter(STARTS_HEADER, "header", "Any value: report calls that the supervisor has taken.")
        )
    if "{session}" in route.path:
        operation["parameters"].append(_parameter("session", "path", "From an earlier reply."))
    if route.body is not None:
        content = {"application/x-ndjson" if route.body is RunLine else "application/json": {"schema": shapes[route.body]}}
        operation["requestBody"] = {"required": route.body is not SessionLimits, "content": content}
    return operation


def _reply(route: Route, shapes: dict[type, Any]) -> dict[str, Any]:
    if len(route.replies) > 1:
        return {"application/x-ndjson": {"schema": {"oneOf": [shapes[reply] for reply in route.replies]}}}
    if route.replies:
        return {"application/json": {"schema": shapes[route.replies[0]]}}
    if route.path == "/metrics":
        return {"text/plain": {"schema": {"type": "string"}}}
    return {"application/json": {"schema": {"type": "object"}}}


def _parameter(name: str, place: str, text: str) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "description": text, "schema": {"type": "string"}}
