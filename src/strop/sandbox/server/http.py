"""The HTTP side of the service: routes, tokens, the shape of bodies, and the status of each error."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import cache
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from pydantic import TypeAdapter, ValidationError

from strop.errors import StropError, UserError
from strop.sandbox import limits
from strop.sandbox.code_tests import CodeTestReport, run_tests
from strop.sandbox.protocol import RunRequest, RunResult, SessionLimits, VerifyRequest
from strop.sandbox.server.config import ServeConfig
from strop.sandbox.server.dispatcher import Dispatcher
from strop.sandbox.server.metrics import exposition
from strop.sandbox.server.ndjson import (
    CLIENT_HEADER,
    STARTS_HEADER,
    CancelReply,
    CancelRequest,
    ErrorReply,
    Health,
    NodeHealth,
    Problem,
    ProblemKind,
    SessionReply,
    TestsRequest,
    explain,
    kind_of,
    write_error_line,
)
from strop.sandbox.server.openapi import description
from strop.sandbox.server.run_stream import RunStream, start_lines, write_verdicts

MAX_BODY_BYTES = 32 << 20  # except of a stream of runs
_READ_S = 60.0  # for a body that is read whole
_MAX_BYTES_IN_JSON = 6  # of one byte of text, when it is escaped
_OPEN_TO_ALL = ("/v1/health", "/openapi.json")
_STATUS = {
    ProblemKind.INVALID: 400,
    ProblemKind.UNAUTHORIZED: 401,
    ProblemKind.NOT_FOUND: 404,
    ProblemKind.METHOD_NOT_ALLOWED: 405,
    ProblemKind.SESSION_LOST: 410,
    ProblemKind.TOO_LARGE: 413,
    ProblemKind.INTERNAL: 500,
    ProblemKind.OVERLOADED: 503,
    ProblemKind.NO_NODES: 503,
}
_RETRY_AFTER_S = {ProblemKind.OVERLOADED: 1, ProblemKind.NO_NODES: 5}
_BodyT = TypeVar("_BodyT")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpFront:
    """The routes of one dispatcher. `app` is what a server runs; `openapi.ROUTES` describes the same routes."""

    def __init__(self, dispatcher: Dispatcher, config: ServeConfig) -> None:
        self._dispatcher = dispatcher
        self._config = config
        self._streams: set[RunStream] = set()
        self._is_stopping = False
        self._max_line_bytes = _MAX_BYTES_IN_JSON * (limits.MAX_CODE_BYTES + limits.MAX_STDIN_BYTES) + 65_536
        self.app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        self.app.add_routes(
            [
                web.post("/v1/run", self._run),
                web.post("/v1/runs", self._runs),
                web.post("/v1/cancel", self._cancel),
                web.post("/v1/verify", self._verify),
                web.post("/v1/tests", self._tests),
                web.post("/v1/sessions", self._open_session),
                web.post("/v1/sessions/{session}/fork", self._fork_session),
                web.delete("/v1/sessions/{session}", self._close_session),
                web.get("/v1/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/openapi.json", self._openapi),
            ]
        )

    def stop(self) -> None:
        """End every stream after its last open call, and say so in health."""
        self._is_stopping = True
        for stream in self._streams:
            stream.stop()

    # Routes

    async def _run(self, request: web.Request) -> web.StreamResponse:
        call = await self._body(request, RunRequest)
        return _json(RunResult, await self._dispatcher.run(call, client=_client_of(request)))

    async def _runs(self, request: web.Request) -> web.StreamResponse:
        stream = RunStream(
            self._dispatcher,
            _client_of(request),
            max_line_bytes=self._max_line_bytes,
            reports_starts=STARTS_HEADER in request.headers,
        )
        response = await start_lines(request)
        self._streams.add(stream)
        if self._is_stopping:
            stream.stop()
        try:
            await stream.serve(request, response)
        except HttpProcessingError as error:  # a broken chunk of the request
            await response.write(write_error_line(None, ProblemKind.INVALID, f"the request cannot be read: {error.message}"))
        finally:
            self._streams.discard(stream)
        await response.write_eof()
        return response

    async def _cancel(self, request: web.Request) -> web.StreamResponse:
        cancel = await self._body(request, CancelRequest)
        num = sum(self._dispatcher.cancel(call_id, client=_client_of(request)) for call_id in cancel.ids)
        return _json(CancelReply, CancelReply(num_cancelled=num))

    async def _verify(self, request: web.Request) -> web.StreamResponse:
        asked = await self._body(request, VerifyRequest)
        async with aclosing(self._dispatcher.verify(asked, client=_client_of(request))) as verdicts:
            return await write_verdicts(request, verdicts)

    async def _tests(self, request: web.Request) -> web.StreamResponse:
        asked = await self._body(request, TestsRequest)
        if len(asked.tests) > limits.MAX_CASES:
            raise UserError(f"the request has {len(asked.tests)} tests, the limit is {limits.MAX_CASES}.")
        report = await run_tests(
            self._dispatcher.of_client(_client_of(request)),
            asked.code,
            asked.tests,
            wall_s=asked.wall_s,
            memory_mib=asked.memory_mib,
            stop_at_first_failure=asked.stop_at_first_failure,
        )
        return _json(CodeTestReport, report)

    async def _open_session(self, request: web.Request) -> web.StreamResponse:
        limits = await self._body(request, SessionLimits, default=SessionLimits())
        session = await self._dispatcher.open_session(limits, client=_client_of(request))
        return _json(SessionReply, SessionReply(session=session))

    async def _fork_session(self, request: web.Request) -> web.StreamResponse:
        session = await self._dispatcher.fork_session(request.match_info["session"])
        return _json(SessionReply, SessionReply(session=session))

    async def _close_session(self, request: web.Request) -> web.StreamResponse:
        session = request.match_info["session"]
        await self._dispatcher.close_session(session)
        return _json(SessionReply, SessionReply(session=session))

    async def _health(self, request: web.Request) -> web.StreamResponse:
        box = self._dispatcher.box
        status = "stopping" if self._is_stopping else "ok" if box.node is not None else "no nodes"
        health = Health(status=status)
        if not self._why_unauthorized(request):
            nodes = tuple(
                NodeHealth(name=node.name, level=node.level, num_slots=node.num_slots, num_running=box.num_running)
                for node in ([] if box.node is None else [box.node])
            )
            num_held = self._dispatcher.admission.held.num
            health = Health(status=status, num_held=num_held, num_sessions=box.num_sessions, nodes=nodes)
        return _json(Health, health, status=200 if status == "ok" else 503)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=exposition(self._dispatcher), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _openapi(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(description())

    # What all routes share

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        if request.path not in _OPEN_TO_ALL and (why := self._why_unauthorized(request)):
            return _problem(ProblemKind.UNAUTHORIZED, why)
        if (encoding := request.headers.get("Content-Encoding", "identity")) != "identity":
            return _problem(ProblemKind.INVALID, f"Content-Encoding: {encoding[:64]} is not supported; send the body as it is")
        try:
            return await handler(request)
        except StropError as error:
            return _problem(kind_of(error), str(error))
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
        if not self._config.token:
            return ""
        scheme, _, sent = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return "this service asks for a token: send 'Authorization: Bearer <token>'"
        if not hmac.compare_digest(sent.strip().encode("utf-8", "surrogateescape"), self._config.token.encode()):
            return "the token in 'Authorization: Bearer <token>' is not the one that this service was started with"
        return ""

    async def _body(self, request: web.Request, shape: type[_BodyT], *, default: _BodyT | None = None) -> _BodyT:
        """Raises `UserError` for a body of another shape, and for an empty one if there is no default."""
        try:
            async with asyncio.timeout(_READ_S):
                text = await request.read()
        except TimeoutError as error:
            raise UserError(f"the body did not arrive within {_READ_S:g} s.") from error
        if not text:
            if default is None:
                raise UserError(f"the body is empty; it has to be a {shape.__name__} in JSON.")
            return default
        try:
            body: _BodyT = _adapter(shape).validate_json(text, strict=True, extra="forbid")
        except ValidationError as error:
            raise UserError(f"the body is no {shape.__name__}: {explain(error)}.") from error
        return body


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def _client_of(request: web.Request) -> str:
    """The client as the queue and the ids of calls know it."""
    return request.headers.get(CLIENT_HEADER, "")[:128]


def _json(shape: type[_BodyT], body: _BodyT, *, status: int = 200) -> web.Response:
    return web.Response(body=_adapter(shape).dump_json(body), content_type="application/json", status=status)


def _problem(kind: ProblemKind, message: str, *, status: int | None = None) -> web.Response:
    message = message.encode("utf-8", "backslashreplace").decode()
    response = _json(ErrorReply, ErrorReply(error=Problem(kind=kind, message=message)), status=status or _STATUS[kind])
    if kind in _RETRY_AFTER_S:
        response.headers["Retry-After"] = str(_RETRY_AFTER_S[kind])
    if kind is ProblemKind.UNAUTHORIZED:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response
