"""A client of the code service: a `CodeService` in this process, over HTTP."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from strop.errors import MachineError, Overloaded, UserError
from strop.sandbox.client.calls import SILENCE_S, Calls
from strop.sandbox.client.http_client import CONNECTION_ERRORS, Patience, ServiceHttp, Tries
from strop.sandbox.protocol import CodeService, PairVerdict, RunRequest, RunResult, SessionLimits, VerifyRequest
from strop.sandbox.server.ndjson import ErrorLine, Health, LineSplitter, SessionReply, TooLong, VerdictLine

_MAX_LINE_BYTES = 65_536

_VERIFY: TypeAdapter[VerifyRequest] = TypeAdapter(VerifyRequest)
_VERDICT: TypeAdapter[VerdictLine | ErrorLine] = TypeAdapter(VerdictLine | ErrorLine)
_LIMITS: TypeAdapter[SessionLimits] = TypeAdapter(SessionLimits)
_SESSION: TypeAdapter[SessionReply] = TypeAdapter(SessionReply)
_HEALTH: TypeAdapter[Health] = TypeAdapter(Health)


class SandboxClient(CodeService):
    """Runs many calls at once. Belongs to the event loop that it is first used in.

    async with SandboxClient("http://127.0.0.1:8517", token=token) as service:
        result = await service.run(RunRequest(code="print(1)"))

    It retries `overloaded` answers and lost connections; a call that is sent twice runs once.

    Args:
        url: the address of the service.
        token: the token of the service.
        client: the name in the service's queue, in which clients take turns; by default each object has its own.
        patience_s: the longest time of one call, with queue and retries; then it raises `DeadlineExceeded`.
        no_node_s: how long the service may have no nodes before calls raise `NoNodes`, or `UserError` if the service has done
            nothing for this object yet. The log has one warning.
        reconnect_s: how long the service may be out of reach before calls raise `MachineError`.
        connect_s: the same before its first answer; then calls raise `UserError`, as for a wrong address.
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
        patience = Patience(patience_s=patience_s, no_node_s=no_node_s, reconnect_s=reconnect_s, connect_s=connect_s)
        self._http = ServiceHttp(url, token=token, client=client or uuid.uuid4().hex, patience=patience)
        self._calls: Calls | None = None

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
        if self._calls is None:
            self._calls = Calls(self._http)
        return await self._calls.run(request)

    async def verify(self, request: VerifyRequest) -> AsyncGenerator[tuple[int, PairVerdict]]:
        """See `CodeService`. Pairs whose verdicts were lost with a connection are sent again, which changes no verdict."""
        verdicts: dict[int, PairVerdict] = {}
        tries = Tries(self._http)
        while rest := [index for index in range(len(request.pairs)) if index not in verdicts]:
            asked = VerifyRequest(pairs=tuple(request.pairs[index] for index in rest), pair_wall_s=request.pair_wall_s)
            try:
                async for line in self._verdicts(asked):
                    if (index := rest[line.index]) not in verdicts:
                        verdicts[index] = line.verdict
                        self._http.note_node()
                        tries.start_over()
                        yield index, line.verdict
                if len(verdicts) < len(request.pairs):
                    raise ConnectionResetError("the reply ended too early")
            except (Overloaded, *CONNECTION_ERRORS) as error:
                await tries.after(error)

    async def open_session(self, limits: SessionLimits) -> str:
        return await self._session("/v1/sessions", _LIMITS.dump_json(limits))

    async def fork_session(self, session: str) -> str:
        return await self._session(f"/v1/sessions/{session}/fork")

    async def close_session(self, session: str) -> None:
        await self._ask("DELETE", f"/v1/sessions/{session}")

    async def health(self) -> Health:
        """The state of the service, once it works. Raises `UserError` for a wrong address or token, or without nodes."""
        health = _HEALTH.validate_json(await self._ask("GET", "/v1/health"))
        self._http.note_node()
        return health

    async def close(self) -> None:
        if self._calls is not None:
            await self._calls.close()
        await self._http.close()

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

    async def _session(self, path: str, body: bytes | None = None) -> str:
        session = _SESSION.validate_json(await self._ask("POST", path, body)).session
        self._http.note_node()
        return session

    async def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        tries = Tries(self._http)
        while True:
            try:
                return await self._http.ask(method, path, body)
            except (Overloaded, *CONNECTION_ERRORS) as error:
                await tries.after(error)


def _verdict(line: bytes | TooLong) -> VerdictLine:
    try:
        read = _VERDICT.validate_json(line if isinstance(line, bytes) else line.head)
    except ValidationError as error:
        raise MachineError(f"the code service sent a line that is no verdict: {line!r:.100}") from error
    if isinstance(read, ErrorLine):
        raise read.error.exception()
    return read
