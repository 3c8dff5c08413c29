"""The service over HTTP: who may call, what a body must look like, and which status says what went wrong."""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from pydantic import TypeAdapter, ValidationError

from strop.errors import MachineError, StropError, UserError
from strop.sandbox.code_tests import CodeTestReport, run_tests
from strop.sandbox.protocol import RunRequest, RunResult, SessionLimits, VerifyRequest
from strop.sandbox.service.config import ServeConfig
from strop.sandbox.service.dispatcher import Dispatcher
from strop.sandbox.service.jobs import Answer
from strop.sandbox.service.lines import (
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
from strop.sandbox.service.metrics import exposition
from strop.sandbox.service.openapi import CLIENT_HEADER, description
from strop.sandbox.service.run_stream import RunStream
from strop.sandbox.service.verdict_lines import VerdictLines

_log = logging.getLogger(__name__)

_READ_S = 60.0  # for the body of a request that is read whole
_UNHEARD_MS = 10_000  # a client that acknowledges nothing for so long is gone
_ESCAPED = 6  # bytes that one byte of text may take in JSON
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
    """Routes of one dispatcher. `app` is what a server runs; `openapi.ROUTES` describes the same routes."""

    def __init__(self, dispatcher: Dispatcher, config: ServeConfig) -> None:
        self._dispatcher = dispatcher
        self._config = config
        self._streams: set[RunStream] = set()
        self._num_requests = 0
        self._is_stopping = False
        limits = dispatcher.config.limits
        self._max_line_bytes = _ESCAPED * (limits.max_code_bytes + limits.max_stdin_bytes) + 65_536
        self._description = description()
        self.app = web.Application(client_max_size=config.max_body_bytes, middlewares=[self._guard])
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
        """Every stream ends with its last call; health says so from now on."""
        self._is_stopping = True
        for stream in self._streams:
            stream.stop()

    # Routes

    async def _run(self, request: web.Request) -> web.StreamResponse:
        call = await self._body(request, RunRequest)
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def listen(answer: Answer) -> None:
            if not answered.done():
                answered.set_result(answer)

        leave = self._dispatcher.submit(call, listen, client=self._client_name(request))
        try:
            answer = await answered
        finally:
            if leave is not None:
                leave(may_return=True)
        if isinstance(answer, MachineError):
            raise answer
        return _json(RunResult, answer)

    async def _runs(self, request: web.Request) -> web.StreamResponse:
        stream = RunStream(
            self._dispatcher,
            self._client_name(request),
            max_lines=self._config.max_lines,
            max_line_bytes=self._max_line_bytes,
            max_unread_bytes=self._config.max_unread_bytes,
            tells_starts=STARTS_HEADER in request.headers,
        )
        response = await self._start_lines(request)
        self._streams.add(stream)
        if self._is_stopping:
            stream.stop()
        try:
            await stream.serve(request, response)
        except HttpProcessingError as error:  # of the request, while it was read: a broken chunk
            await response.write(write_error_line(None, ProblemKind.INVALID, f"the request cannot be read: {error.message}"))
        finally:
            self._streams.discard(stream)
        await response.write_eof()
        return response

    async def _cancel(self, request: web.Request) -> web.StreamResponse:
        cancel = await self._body(request, CancelRequest)
        num = sum(self._dispatcher.cancel(call_id, client=self._client_name(request)) for call_id in cancel.ids)
        return _json(CancelReply, CancelReply(num_cancelled=num))

    async def _verify(self, request: web.Request) -> web.StreamResponse:
        asked = await self._body(request, VerifyRequest)
        async with aclosing(self._dispatcher.verify(asked, client=self._client_name(request))) as verdicts:
            lines = VerdictLines(verdicts)
            try:
                await lines.wait()
                if lines.error is not None:  # until something is sent the status is still open
                    raise lines.error
                response = await self._start_lines(request)
                await response.write(lines.take())
                while not lines.is_over:
                    await lines.wait()
                    await response.write(lines.take())
            finally:
                await lines.close()
        await response.write_eof()
        return response

    async def _tests(self, request: web.Request) -> web.StreamResponse:
        asked = await self._body(request, TestsRequest)
        if len(asked.tests) > (most := self._dispatcher.config.limits.max_cases):
            raise UserError(f"the request has {len(asked.tests)} tests, the limit is {most}.")
        report = await run_tests(
            self._dispatcher.of_client(self._client_name(request)),
            asked.code,
            asked.tests,
            wall_s=asked.wall_s,
            memory_mib=asked.memory_mib,
            stop_at_first_failure=asked.stop_at_first_failure,
        )
        return _json(CodeTestReport, report)

    async def _open_session(self, request: web.Request) -> web.StreamResponse:
        session = await self._dispatcher.open_session(await self._body(request, SessionLimits, default=SessionLimits()))
        return _json(SessionReply, SessionReply(session=session))

    async def _fork_session(self, request: web.Request) -> web.StreamResponse:
        session = await self._dispatcher.fork_session(request.match_info["session"])
        return _json(SessionReply, SessionReply(session=session))

    async def _close_session(self, request: web.Request) -> web.StreamResponse:
        session = request.match_info["session"]
        await self._dispatcher.close_session(session)
        return _json(SessionReply, SessionReply(session=session))

    async def _health(self, request: web.Request) -> web.StreamResponse:
        seats = self._dispatcher.floor.seats
        status = "stopping" if self._is_stopping else "ok" if seats else "no nodes"
        nodes = tuple(
            NodeHealth(
                name=seat.node.name,
                level=seat.node.level,
                num_slots=seat.node.num_slots,
                num_running=len(seat.running),
                is_draining=seat.is_draining,
            )
            for seat in seats
        )
        health = Health(status=status)
        if self._client_of(request) is not None:
            num_held = self._dispatcher.admission.held.num
            health = Health(status=status, num_held=num_held, num_sessions=len(self._dispatcher.sessions), nodes=nodes)
        return _json(Health, health, status=200 if status == "ok" else 503)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        text, content_type = exposition(self._dispatcher)
        return web.Response(body=text, headers={"Content-Type": content_type})

    async def _openapi(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self._description)

    # What all routes share

    @property
    def _guard(self) -> Any:
        @web.middleware
        async def guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
            self._num_requests += 1
            try:
                return await self._answer(request, handler)
            finally:
                self._num_requests -= 1

        return guard

    async def _answer(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        client = self._client_of(request)
        if client is None and request.path not in _OPEN_TO_ALL:
            return _problem(ProblemKind.UNAUTHORIZED, _why_unauthorized(request))
        if self._num_requests > self._config.max_connections:
            return _problem(ProblemKind.OVERLOADED, f"the service has {self._config.max_connections} requests open")
        _notice_silence(request.transport)
        try:
            return await handler(request)
        except StropError as error:
            return _problem(kind_of(error), str(error))
        except web.HTTPRequestEntityTooLarge:
            return _problem(ProblemKind.TOO_LARGE, f"the body has more than {self._config.max_body_bytes} bytes")
        except HttpProcessingError as error:
            return _problem(ProblemKind.INVALID, f"the request cannot be read: {error.message}")
        except web.HTTPMethodNotAllowed as error:
            allowed = error.headers["Allow"]
            refusal = _problem(ProblemKind.METHOD_NOT_ALLOWED, f"{request.path} takes {allowed}, not {request.method}")
            refusal.headers["Allow"] = allowed
            return refusal
        except web.HTTPException as error:  # no such route
            return _problem(ProblemKind.NOT_FOUND, f"{request.method} {request.path}: {error.reason}", status=error.status)

    def _client_of(self, request: web.Request) -> str | None:
        """Who asks, as the queue and the ids know them; None when the token is wrong or missing."""
        name = "" if not self._config.tokens else None
        sent = _bearer_token(request)
        for token_name, token in self._config.tokens.items():  # all of them, so that time tells nothing
            if sent is not None and hmac.compare_digest(sent, token.encode()):
                name = token_name
        return None if name is None else f"{name}/{request.headers.get(CLIENT_HEADER, '')[:128]}"

    def _client_name(self, request: web.Request) -> str:
        """Of a request that has passed the guard."""
        return self._client_of(request) or ""

    async def _body(self, request: web.Request, shape: type[_BodyT], *, default: _BodyT | None = None) -> _BodyT:
        """Raises `UserError` for what is not of this shape, and for an empty body where there is no default."""
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

    async def _start_lines(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
        await response.prepare(request)
        return response


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def _adapter(shape: Any) -> TypeAdapter[Any]:
    if shape not in _ADAPTERS:
        _ADAPTERS[shape] = TypeAdapter(shape)
    return _ADAPTERS[shape]


def _json(shape: type[_BodyT], body: _BodyT, *, status: int = 200) -> web.Response:
    return web.Response(body=_adapter(shape).dump_json(body), content_type="application/json", status=status)


def _bearer_token(request: web.Request) -> bytes | None:
    """What follows the scheme; None when the header is missing or is of another scheme."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip().encode("utf-8", "surrogateescape") if scheme.lower() == "bearer" else None


def _why_unauthorized(request: web.Request) -> str:
    if "Authorization" not in request.headers:
        return "this service asks for a token: send 'Authorization: Bearer <token>'"
    if _bearer_token(request) is None:
        return "the header Authorization does not begin with 'Bearer ': send 'Authorization: Bearer <token>'"
    return "the token in 'Authorization: Bearer <token>' is not the one that this service was started with"


def _problem(kind: ProblemKind, message: str, *, status: int | None = None) -> web.Response:
    message = message.encode("utf-8", "backslashreplace").decode()
    response = _json(ErrorReply, ErrorReply(error=Problem(kind=kind, message=message)), status=status or _STATUS[kind])
    if kind in _RETRY_AFTER_S:
        response.headers["Retry-After"] = str(_RETRY_AFTER_S[kind])
    if kind is ProblemKind.UNAUTHORIZED:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _notice_silence(transport: asyncio.Transport | None) -> None:
    """Have the kernel end a connection whose other end is cut off, where nothing else would ever tell."""
    connection = None if transport is None else transport.get_extra_info("socket")
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNHEARD_MS)
