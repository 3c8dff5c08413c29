"""The code service at the other end of an HTTP connection, as a `CodeService` in this process."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from strop.errors import MachineError, Overloaded, UserError
from strop.sandbox.protocol import CodeService, PairVerdict, RunRequest, RunResult, SessionLimits, VerifyRequest
from strop.sandbox.service.client_calls import SILENCE_S, Calls
from strop.sandbox.service.http_client import CONNECTION_ERRORS, ServiceHttp, Tries, exception_of
from strop.sandbox.service.lines import ErrorLine, Health, LineSplitter, SessionReply, TooLong, VerdictLine

_MAX_LINE_BYTES = 65_536

_VERIFY: TypeAdapter[VerifyRequest] = TypeAdapter(VerifyRequest)
_VERDICT: TypeAdapter[VerdictLine | ErrorLine] = TypeAdapter(VerdictLine | ErrorLine)
_LIMITS: TypeAdapter[SessionLimits] = TypeAdapter(SessionLimits)
_SESSION: TypeAdapter[SessionReply] = TypeAdapter(SessionReply)
_HEALTH: TypeAdapter[Health] = TypeAdapter(Health)


class SandboxClient(CodeService):
    """Many calls may be under way at once. Belongs to the event loop that it is first used in.

    async with SandboxClient("http://127.0.0.1:8517", token=token) as service:
        result = await service.run(RunRequest(code="print(1)"))

    `overloaded` and lost connections are tried again here; a call that was sent twice runs once.

    Args:
        url: where the service is.
        token: what it asks for.
        client: who takes turns with whom in its queue; this object alone by default.
        patience_s: the longest one call may take, queue and tries included; then it raises `DeadlineExceeded`.
        no_node_s: how long the service may be without nodes before calls raise `NoNodes`; the log says what is waited for.
            `UserError` when it has not done a thing for this object yet.
        reconnect_s: how long the service may be out of reach before calls raise `MachineError`.
        connect_s: the same before it was ever in reach; then they raise `UserError`, as for a wrong address.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        client: str = "",
        patience_s: float = 3600.0,
        no_node_s: float = 60.0,
        reconnect_s: float = 60.0,
        connect_s: float = 5.0,
    ) -> None:
        self._http = ServiceHttp(url, token=token, client=client or uuid.uuid4().hex)
        self._patience_s = patience_s
        self._no_node_s = no_node_s
        self._reconnect_s = reconnect_s
        self._connect_s = connect_s
        self._running: Calls | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def run(self, request: RunRequest) -> RunResult:
        """See `CodeService`. Raises `UserError` for a wrong address or token, `SessionLost` for a cell without its session."""
        if not isinstance(request, RunRequest):
            raise TypeError(f"a program is run as RunRequest(code=...); this is of type {type(request).__name__}")
        return await self._calls.run(request)

    async def verify(self, request: VerifyRequest) -> AsyncGenerator[tuple[int, PairVerdict]]:
        """See `CodeService`. Pairs whose verdicts were lost with a connection are asked again; that changes none of them."""
        verdicts: dict[int, PairVerdict] = {}
        tries = self._tries()
        while rest := [index for index in range(len(request.pairs)) if index not in verdicts]:
            asked = VerifyRequest(pairs=tuple(request.pairs[index] for index in rest), pair_wall_s=request.pair_wall_s)
            try:
                async for line in self._verdicts(asked):
                    if (index := rest[line.index]) not in verdicts:
                        verdicts[index] = line.verdict
                        tries.note_progress()
                        yield index, line.verdict
                if len(verdicts) < len(request.pairs):
                    raise ConnectionResetError("the reply ended too early")
            except (Overloaded, *CONNECTION_ERRORS) as error:
                await tries.after(error)

    async def open_session(self, limits: SessionLimits) -> str:
        return await self._session("POST", "/v1/sessions", _LIMITS.dump_json(limits))

    async def fork_session(self, session: str) -> str:
        return await self._session("POST", f"/v1/sessions/{session}/fork")

    async def close_session(self, session: str) -> None:
        await self._ask("DELETE", f"/v1/sessions/{session}")

    async def health(self) -> Health:
        """What the service says of itself, once it works. Raises `UserError` for a wrong address or token, or without nodes."""
        health = _HEALTH.validate_json(await self._ask("GET", "/v1/health"))
        self._http.note_node()
        return health

    async def close(self) -> None:
        if self._running is not None:
            await self._running.close()
        await self._http.close()

    @property
    def _calls(self) -> Calls:
        if self._running is None:
            self._running = Calls(
                self._http,
                patience_s=self._patience_s,
                no_node_s=self._no_node_s,
                reconnect_s=self._reconnect_s,
                connect_s=self._connect_s,
            )
        return self._running

    async def _verdicts(self, request: VerifyRequest) -> AsyncGenerator[VerdictLine]:
        try:
            body = _VERIFY.dump_json(request)
        except PydanticSerializationError as error:
            raise UserError(f"the answers hold a lone surrogate, which has no encoding: {error}.") from error
        splitter = LineSplitter(max_line_bytes=_MAX_LINE_BYTES)
        async with self._http.request("POST", "/v1/verify", body, is_stream=True) as response:
            while part := await asyncio.wait_for(response.content.readany(), SILENCE_S):
                for line in splitter.feed(part):
                    if line:
                        yield _verdict(line)

    async def _session(self, method: str, path: str, body: bytes | None = None) -> str:
        session = _SESSION.validate_json(await self._ask(method, path, body)).session
        self._http.note_node()
        return session

    async def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        tries = self._tries()
        while True:
            try:
                return await self._http.ask(method, path, body)
            except (Overloaded, *CONNECTION_ERRORS) as error:
                await tries.after(error)

    def _tries(self) -> Tries:
        limit_s = self._reconnect_s if self._http.was_up else self._connect_s
        return Tries(self._http, patience_s=self._patience_s, no_node_s=self._no_node_s, limit_s=limit_s)


def _verdict(line: bytes | TooLong) -> VerdictLine:
    try:
        read = _VERDICT.validate_json(line if isinstance(line, bytes) else line.head)
    except ValidationError as error:
        raise MachineError(f"the code service sent a line that is no verdict: {line!r:.100}") from error
    if isinstance(read, ErrorLine):
        raise exception_of(read.error)
    return read
