"""The HTTP side of the service: routes and their description, tokens, the shape of bodies, and the status of each error."""

from __future__ import annotations

import asyncio
import hmac
import inspect
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from pydantic import TypeAdapter, ValidationError

from strop.errors import StropError, UserError
from strop.sandbox import protocol
from strop.sandbox.code_tests import CodeTestReport, run_tests
from strop.sandbox.protocol import PairVerdict, RunOutcome, RunRequest, RunResult, SessionLimits, VerifyRequest
from strop.sandbox.server import ndjson
from strop.sandbox.server.dispatcher import Dispatcher
from strop.sandbox.server.ndjson import ProblemKind
from strop.sandbox.server.run_stream import RunStream, start_lines, write_verdicts

MAX_BODY_BYTES = 32 << 20  # except of a stream of runs
_READ_S = 60.0  # for a body that is read whole
_RETRY_AFTER_S = {ProblemKind.OVERLOADED: 1, ProblemKind.NO_NODES: 5}
_HandlerT = TypeVar("_HandlerT", bound=Callable[..., Awaitable[object]])
_STATUSES = (400, 401, 410, 413, 500, 503)
_LINES = "application/x-ndjson"


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


ROUTES: list[Route] = []


def _route(method: str, path: str, body: type | None = None, *replies: type, **more: bool) -> Callable[[_HandlerT], _HandlerT]:
    """Add the method below to the routes. It gets the request, and the body unless that is a stream; see `Route`."""

    def add(handler: _HandlerT) -> _HandlerT:
        ROUTES.append(Route(method=method, path=path, handler=handler, body=body, replies=replies, **more))
        return handler

    return add


class HttpFront:
    """The routes of one dispatcher. `app` is what a server runs. The docstring of a handler is the description of its route.

    Args:
        token: that requests must carry; empty for none.
    """

    def __init__(self, dispatcher: Dispatcher, token: str) -> None:
        self._dispatcher = dispatcher
        self._token = token
        self._streams: set[RunStream] = set()
        self._is_stopping = False
        self.app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        for route in ROUTES:
            add = self.app.router.add_get if route.method == "GET" else partial(self.app.router.add_route, route.method)
            add(route.path, partial(self._answer, route))

    def stop(self) -> None:
        """End every stream after its last open call, and say so in health."""
        self._is_stopping = True
        for stream in self._streams:
            stream.stop()

    @_route("POST", "/v1/run", RunRequest, RunResult)
    async def _run(self, request: web.Request, call: RunRequest) -> RunResult:
        """Run one program.

        The status is 200 for every outcome, also `rejected` and `overloaded`. A request that names a session is a cell of it.
        When the connection is lost the program is ended; one with an `id` waits a little for the same request to come again,
        and both are one call.
        """
        return await self._dispatcher.run(call, client=_client_of(request))

    @_route("POST", "/v1/runs", ndjson.RunLine, ndjson.ResultLine, ndjson.ErrorLine, ndjson.StartLine)
    async def _runs(self, request: web.Request) -> web.StreamResponse:
        """Run many programs.

        Each line is a call and starts as it arrives. Each answer is a line with the key of its call and leaves at once, in any
        order. Body and reply stream at the same time, so one request can serve a client for long. An empty line in the reply
        only says that the service is alive. A line that is no call is answered `rejected` and affects no other. With the header
        `X-Strop-Starts`, a line also reports each call that a slot has taken and not answered soon.
        """
        stream = RunStream(self._dispatcher, request, _client_of(request))
        response = await start_lines(request)
        self._streams.add(stream)
        if self._is_stopping:
            stream.stop()
        try:
            await stream.serve(response)
        except HttpProcessingError as error:  # a broken chunk of the request
            why = f"the request cannot be read: {error.message}"
            await response.write(ndjson.write_error_line(None, ProblemKind.INVALID, why))
        finally:
            self._streams.discard(stream)
        await response.write_eof()
        return response

    @_route("POST", "/v1/cancel", ndjson.CancelRequest, ndjson.CancelReply)
    async def _cancel(self, request: web.Request, asked: ndjson.CancelRequest) -> ndjson.CancelReply:
        """End calls by their ids."""
        num = sum(self._dispatcher.cancel(call_id, client=_client_of(request)) for call_id in asked.ids)
        return ndjson.CancelReply(num_cancelled=num)

    @_route("POST", "/v1/verify", VerifyRequest, ndjson.VerdictLine, ndjson.ErrorLine)
    async def _verify(self, request: web.Request, asked: VerifyRequest) -> web.StreamResponse:
        """Compare mathematical answers.

        Verdicts are lines, in any order, each once. A last line with an `error` means that the rest is lost.
        """
        async with aclosing(self._dispatcher.verify(asked, client=_client_of(request))) as verdicts:
            return await write_verdicts(request, verdicts)

    @_route("POST", "/v1/tests", ndjson.TestsRequest, CodeTestReport)
    async def _tests(self, request: web.Request, asked: ndjson.TestsRequest) -> CodeTestReport:
        """Run a program against tests of its output."""
        if len(asked.tests) > protocol.MAX_CASES:
            raise UserError(f"the request has {len(asked.tests)} tests, the limit is {protocol.MAX_CASES}.")
        runner, limits = self._dispatcher.of_client(_client_of(request)), asked.model_dump(exclude={"code", "tests"})
        return await run_tests(runner, asked.code, asked.tests, **limits)

    @_route("POST", "/v1/sessions", SessionLimits, ndjson.SessionReply, may_be_empty=True)
    async def _open_session(self, request: web.Request, asked: SessionLimits) -> ndjson.SessionReply:
        """Open a session. An empty body stands for the default limits."""
        return ndjson.SessionReply(session=await self._dispatcher.open_session(asked, client=_client_of(request)))

    @_route("POST", "/v1/sessions/{session}/fork", None, ndjson.SessionReply)
    async def _fork_session(self, request: web.Request) -> ndjson.SessionReply:
        """Copy a session, after the cells that were sent before."""
        return ndjson.SessionReply(session=await self._dispatcher.fork_session(request.match_info["session"]))

    @_route("DELETE", "/v1/sessions/{session}", None, ndjson.SessionReply)
    async def _close_session(self, request: web.Request) -> ndjson.SessionReply:
        """Close a session; no error if it is gone."""
        session = request.match_info["session"]
        await self._dispatcher.close_session(session)
        return ndjson.SessionReply(session=session)

    @_route("GET", "/v1/health", None, ndjson.Health, is_open=True)
    async def _health(self, request: web.Request) -> web.StreamResponse:
        """Whether the service works.

        503 with the same body when it does not. Details only with a token.
        """
        box = self._dispatcher.box
        status = "stopping" if self._is_stopping else "ok" if box.node is not None else "no nodes"
        health = ndjson.Health(status=status)
        if not self._why_unauthorized(request):
            nodes = tuple(
                ndjson.NodeHealth(name=node.name, level=node.level, num_slots=node.num_slots, num_running=box.num_running)
                for node in ([] if box.node is None else [box.node])
            )
            num_held = self._dispatcher.admission.held.num
            health = ndjson.Health(status=status, num_held=num_held, num_sessions=box.num_sessions, nodes=nodes)
        return _json(health, status=200 if status == "ok" else 503)

    @_route("GET", "/metrics")
    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        """Metrics for Prometheus."""
        return web.Response(text=_exposition(self._dispatcher), headers={"Content-Type": "text/plain; version=0.0.4"})

    @_route("GET", "/openapi.json", is_open=True)
    async def _description(self, request: web.Request) -> web.StreamResponse:
        """This description."""
        return web.json_response(_openapi())

    # What all routes share

    async def _answer(self, route: Route, request: web.Request) -> web.StreamResponse:
        is_stream = route.body is ndjson.RunLine
        bodies = () if route.body is None or is_stream else (await _body(request, route.body, may_be_empty=route.may_be_empty),)
        reply = await route.handler(self, request, *bodies)
        return reply if isinstance(reply, web.StreamResponse) else _json(reply)

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        is_open = any(route.is_open and route.path == request.path for route in ROUTES)
        if not is_open and (why := self._why_unauthorized(request)):
            return _problem(ProblemKind.UNAUTHORIZED, why)
        if (encoding := request.headers.get("Content-Encoding", "identity")) != "identity":
            return _problem(ProblemKind.INVALID, f"Content-Encoding: {encoding[:64]} is not supported; send the body as it is")
        try:
            return await handler(request)
        except StropError as error:
            return _problem(ndjson.kind_of(error), str(error))
        except web.HTTPRequestEntityTooLarge:
            return _problem(ProblemKind.TOO_LARGE, f"the body has more than {MAX_BODY_BYTES} bytes")
        except HttpProcessingError as error:
            return _problem(ProblemKind.INVALID, f"the request cannot be read: {error.message}")
        except web.HTTPMethodNotAllowed as error:
            allowed = error.headers["Allow"]
            refusal = _problem(ProblemKind.METHOD_NOT_ALLOWED, f"{request.path} takes {allowed}, not {request.method}")
            refusal.headers["Allow"] = allowed
            return refusal
        except web.HTTPException as error:  # no such route
            return _problem(ProblemKind.NOT_FOUND, f"{request.method} {request.path}: {error.reason}", status=error.status)

    def _why_unauthorized(self, request: web.Request) -> str:
        """Empty for a request with the right token, or when the service has none."""
        if not self._token:
            return ""
        scheme, _, sent = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return "this service asks for a token: send 'Authorization: Bearer <token>'"
        if not hmac.compare_digest(sent.strip().encode("utf-8", "surrogateescape"), self._token.encode()):
            return "the token in 'Authorization: Bearer <token>' is not the one that this service was started with"
        return ""


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


async def _body(request: web.Request, shape: type, *, may_be_empty: bool) -> object:
    """Raises `UserError` for a body of another shape, and for an empty one unless it may be empty."""
    try:
        async with asyncio.timeout(_READ_S):
            text = await request.read()
    except TimeoutError as error:
        raise UserError(f"the body did not arrive within {_READ_S:g} s.") from error
    if not text and may_be_empty:
        return shape()
    if not text:
        raise UserError(f"the body is empty; it has to be a {shape.__name__} in JSON.")
    try:
        body: object = _adapter(shape).validate_json(text, strict=True, extra="forbid")
    except ValidationError as error:
        raise UserError(f"the body is no {shape.__name__}: {ndjson.explain(error)}.") from error
    return body


def _exposition(dispatcher: Dispatcher) -> str:
    """The metrics in the text format of Prometheus, version 0.0.4."""
    tally, held, box, node = dispatcher.tally, dispatcher.admission.held, dispatcher.box, dispatcher.box.node
    outcomes = {f'{{outcome="{outcome}"}}': tally.outcomes[outcome] for outcome in RunOutcome}
    verdicts = {f'{{verdict="{verdict}"}}': tally.verdicts[verdict] for verdict in PairVerdict}
    families: list[tuple[str, str, str, Mapping[str, float]]] = [
        ("counter", "calls_total", "Runs by outcome.", outcomes),
        ("counter", "verdicts_total", "Pairs by verdict.", verdicts),
        ("counter", "cancelled_total", "Runs that no client waited for any more.", {"": tally.num_cancelled}),
        ("counter", "retries_total", "Runs sent once more after a fault of the supervisor.", {"": box.num_retries}),
        ("counter", "rejoined_total", "Requests that found the call or the answer of their id.", {"": tally.num_rejoined}),
        ("counter", "nodes_lost_total", "Supervisors that died.", {"": box.num_nodes_lost}),
        ("counter", "sessions_lost_total", "Sessions that their client did not end.", {"": box.num_sessions_lost}),
        ("summary", "queue_seconds", "From arrival to a slot.", {"_count": tally.num_run, "_sum": tally.queue_s}),
        ("summary", "run_seconds", "From start to end.", {"_count": tally.num_run, "_sum": tally.run_s}),
        ("gauge", "held", "Jobs that are accepted and not answered yet.", {"": held.num}),
        ("gauge", "held_bytes", "Bytes of these jobs.", {"": held.num_bytes}),
        ("gauge", "queued", "Jobs that wait for a slot.", {"": len(box.queue)}),
        ("gauge", "sessions", "Sessions that are open.", {"": box.num_sessions}),
        ("gauge", "kept_bytes", "Bytes of cached answers.", {"": dispatcher.kept.num_bytes}),
        ("gauge", "node_slots", "Slots of the supervisor.", {"": 0 if node is None else node.num_slots}),
        ("gauge", "node_running", "Jobs of the supervisor.", {"": box.num_running}),
    ]
    lines = []
    for kind, name, text, samples in families:
        lines += [f"# HELP strop_sandbox_{name} {text}", f"# TYPE strop_sandbox_{name} {kind}"]
        lines += [f"strop_sandbox_{name}{label} {value}" for label, value in samples.items()]
    return "\n".join([*lines, ""])


@cache
def _openapi() -> dict[str, Any]:
    """The OpenAPI 3.1 document of the routes, from their docstrings and the types that they read and write.

    No framework generates it: none knows streams of lines, and one with a server of its own would be slower than aiohttp.
    """
    read = dict.fromkeys(route.body for route in ROUTES if route.body is not None)
    written = dict.fromkeys([*(reply for route in ROUTES for reply in route.replies), ndjson.ErrorReply])
    keyed: list[Any] = [(shape, "validation", TypeAdapter(shape)) for shape in read]
    keyed += [(shape, "serialization", TypeAdapter(shape)) for shape in written]
    references, schemas = TypeAdapter.json_schemas(keyed, ref_template="#/components/schemas/{model}")
    shapes: dict[type, Any] = {shape: reference for (shape, _), reference in references.items()}
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, shapes)
    return {
        "openapi": "3.1.0",
        "info": {"title": "strop code service", "version": version("strop"), "license": {"name": "Apache-2.0"}},
        "servers": [{"url": "/"}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {"schemas": schemas["$defs"], "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(route: Route, shapes: dict[type, Any]) -> dict[str, Any]:
    summary, _, detail = (inspect.getdoc(route.handler) or "").partition("\n\n")
    problem, statuses = (shapes[ndjson.Health], (503,)) if route.is_open else (shapes[ndjson.ErrorReply], _STATUSES)
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__.strip("_"),
        "summary": summary.removesuffix("."),
        "description": " ".join(detail.split()),
        "parameters": [
            _parameter(ndjson.CLIENT_HEADER, "header", "Clients take turns in the queue, and have ids of their own.")
        ],
        "responses": {"200": {"description": "OK", "content": _reply(route, shapes)}}
        | {str(status): {"description": _problems(status), "content": _content(problem)} for status in statuses},
    }
    if route.is_open:
        operation["security"] = []
    if route.body is ndjson.RunLine:
        starts = "Any value: report calls that the supervisor has taken."
        operation["parameters"].append(_parameter(ndjson.STARTS_HEADER, "header", starts))
    if "{session}" in route.path:
        operation["parameters"].append(_parameter("session", "path", "From an earlier reply."))
    if route.body is not None:
        content = _content(shapes[route.body], _LINES if route.body is ndjson.RunLine else "application/json")
        operation["requestBody"] = {"required": not route.may_be_empty, "content": content}
    return operation


def _problems(status: int) -> str:
    return " ".join(text for known, _, text in ndjson.PROBLEMS.values() if known == status)


def _reply(route: Route, shapes: dict[type, Any]) -> dict[str, Any]:
    if len(route.replies) > 1:
        return _content({"oneOf": [shapes[reply] for reply in route.replies]}, _LINES)
    if route.path == "/metrics":
        return _content({"type": "string"}, "text/plain")
    return _content(shapes[route.replies[0]] if route.replies else {"type": "object"})


def _content(schema: dict[str, Any], kind: str = "application/json") -> dict[str, Any]:
    return {kind: {"schema": schema}}


def _parameter(name: str, place: str, text: str) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "description": text, "schema": {"type": "string"}}


def _client_of(request: web.Request) -> str:
    """The client as the queue and the ids of calls know it."""
    return request.headers.get(ndjson.CLIENT_HEADER, "")[:128]


def _json(body: object, *, status: int = 200) -> web.Response:
    return web.Response(body=_adapter(type(body)).dump_json(body), content_type="application/json", status=status)


def _problem(kind: ProblemKind, message: str, *, status: int | None = None) -> web.Response:
    response = _json(ndjson.ErrorReply(error=ndjson.problem_of(kind, message)), status=status or ndjson.PROBLEMS[kind][0])
    if kind in _RETRY_AFTER_S:
        response.headers["Retry-After"] = str(_RETRY_AFTER_S[kind])
    if kind is ProblemKind.UNAUTHORIZED:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response
