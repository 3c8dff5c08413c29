"""The description of the HTTP API: a table of routes, and the schemas of the very types that are read and written."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

from pydantic import TypeAdapter

from strop.sandbox.code_tests import CodeTestReport
from strop.sandbox.protocol import RunRequest, RunResult, SessionLimits, VerifyRequest
from strop.sandbox.service.lines import (
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

CLIENT_HEADER = "X-Strop-Client"
_JSON, _LINES = "application/json", "application/x-ndjson"
_PROBLEMS = {
    "400": "The request is not of this shape, or asks for limits that cannot be.",
    "401": "The token is wrong or missing.",
    "410": "The session is lost, and `error.message` says why.",
    "413": "The body is too large.",
    "500": "A fault of ours.",
    "503": "Too much is held, there is no node, or the service is shutting down: try again a little later.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One path with one method. Streams are described by the type of their lines."""

    method: str
    path: str
    summary: str
    detail: str = ""
    body: type | None = None
    is_body_optional: bool = False
    reply: tuple[type, ...] | str = ()  # a type of text, where it is no JSON
    is_stream: tuple[bool, bool] = (False, False)  # of the body, of the reply
    problems: tuple[str, ...] = ("401", "500")
    is_open: bool = False


ROUTES = (
    Route(
        method="post",
        path="/v1/run",
        summary="Run one program",
        detail="Answers 200 with whatever became of it, `rejected` and `overloaded` included. A request that names a session is"
        " a cell of it. When the connection is lost the program is ended; one with an `id` waits a little for the same"
        " request to come again, and both are one call.",
        body=RunRequest,
        reply=(RunResult,),
        problems=("400", "401", "410", "413", "500", "503"),
    ),
    Route(
        method="post",
        path="/v1/runs",
        summary="Run many programs",
        detail="Each line is a call, and starts as it arrives; each answer is a line, and leaves as soon as it is there, in any"
        " order, with the key of its call. Body and reply stream at the same time, so one request can serve a client"
        " for long. An empty line in the reply only says that the service is alive. A line that is no call is answered"
        " `rejected`, and harms no other. Who sends `X-Strop-Starts` is also told, by a line, of"
        " calls that a node has taken and not answered within a second or two.",
        body=RunLine,
        reply=(ResultLine, ErrorLine, StartLine),
        is_stream=(True, True),
        problems=("401", "503"),
    ),
    Route(
        method="post",
        path="/v1/cancel",
        summary="End calls by their ids",
        body=CancelRequest,
        reply=(CancelReply,),
        problems=("400", "401", "413", "500"),
    ),
    Route(
        method="post",
        path="/v1/verify",
        summary="Compare mathematical answers",
        detail="Verdicts come as lines, in any order, each once. A last line with an `error` means that the rest is lost.",
        body=VerifyRequest,
        reply=(VerdictLine, ErrorLine),
        is_stream=(False, True),
        problems=("400", "401", "413", "500", "503"),
    ),
    Route(
        method="post",
        path="/v1/tests",
        summary="Run a program against tests of what it must print",
        body=TestsRequest,
        reply=(CodeTestReport,),
        problems=("400", "401", "413", "500", "503"),
    ),
    Route(
        method="post",
        path="/v1/sessions",
        summary="Open a session",
        detail="An empty body asks for the default limits.",
        body=SessionLimits,
        is_body_optional=True,
        reply=(SessionReply,),
        problems=("400", "401", "413", "500", "503"),
    ),
    Route(
        method="post",
        path="/v1/sessions/{session}/fork",
        summary="Copy a session, after the cells that were sent before",
        reply=(SessionReply,),
        problems=("401", "410", "500", "503"),
    ),
    Route(
        method="delete",
        path="/v1/sessions/{session}",
        summary="Close a session; no error if it is gone",
        reply=(SessionReply,),
    ),
    Route(
        method="get",
        path="/v1/health",
        summary="Whether the service works",
        detail="503 with the same body when it does not. Details only with a token.",
        reply=(Health,),
        problems=("503",),
        is_open=True,
    ),
    Route(method="get", path="/metrics", summary="Metrics for Prometheus", reply="text/plain"),
    Route(method="get", path="/openapi.json", summary="This description", reply=_JSON, problems=(), is_open=True),
)


@cache
def description() -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    read = [route.body for route in ROUTES if route.body is not None]
    written = [reply for route in ROUTES if not isinstance(route.reply, str) for reply in route.reply] + [ErrorReply]
    keyed: list[Any] = [(shape, "validation", TypeAdapter(shape)) for shape in dict.fromkeys(read)]
    keyed += [(shape, "serialization", TypeAdapter(shape)) for shape in dict.fromkeys(written)]
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
    operation: dict[str, Any] = {
        "operationId": f"{route.method}_{route.path.strip('/').replace('/', '_').translate(str.maketrans('', '', '{}.'))}",
        "summary": route.summary,
        "responses": {"200": {"description": "As asked.", "content": _reply_content(route, shapes)}},
    }
    if route.detail:
        operation["description"] = route.detail
    if route.is_open:
        operation["security"] = []
    parameters = [_parameter(CLIENT_HEADER, "header", "Who takes turns with whom in the queue; also the owner of ids.")]
    if route.body is RunLine:
        parameters.append(_parameter(STARTS_HEADER, "header", "With any value: tell of calls that a node has taken."))
    if "{session}" in route.path:
        parameters.append(_parameter("session", "path", "Of an earlier reply."))
    operation["parameters"] = parameters
    if route.body is not None:
        content_type = _LINES if route.is_stream[0] else _JSON
        content = {content_type: {"schema": shapes[route.body]}}
        operation["requestBody"] = {"required": not route.is_body_optional, "content": content}
    for status in route.problems:
        shape = Health if route.path == "/v1/health" else ErrorReply
        operation["responses"][status] = {"description": _PROBLEMS[status], "content": {_JSON: {"schema": shapes[shape]}}}
    return operation


def _reply_content(route: Route, shapes: dict[type, Any]) -> dict[str, Any]:
    if isinstance(route.reply, str):
        return {route.reply: {"schema": {"type": "object" if route.reply == _JSON else "string"}}}
    schema = shapes[route.reply[0]] if len(route.reply) == 1 else {"oneOf": [shapes[reply] for reply in route.reply]}
    return {_LINES if route.is_stream[1] else _JSON: {"schema": schema}}


def _parameter(name: str, place: str, text: str) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "description": text, "schema": {"type": "string"}}
