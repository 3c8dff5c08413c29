"""Streaming replies: many runs on one request, and the verdicts of a verify request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial

from aiohttp import web

from strop.errors import StropError
from strop.sandbox import protocol
from strop.sandbox.protocol import PairVerdict, RunOutcome, RunResult
from strop.sandbox.server import ndjson
from strop.sandbox.server.dispatcher import Dispatcher

HEARTBEAT_S = 0.5  # without an answer an empty line is sent; a client that hears nothing for long gives the service up
MAX_UNREAD_BYTES = 256 << 20  # of answers: a client that leaves more unread is disconnected
_NUM_AT_ONCE = 64  # lines of one stream that are read before other clients have their turn
MAX_OPEN = 8192  # calls without an answer: beyond it no more of the request is read
_STARTS_S = 1.0  # how often started calls are reported: by then most have their answer
_NUM_BUSY = 16  # open calls from which on an answer waits a moment, so that several leave in one write
_GATHER_S = 0.005
_MAX_BYTES_IN_JSON = 6  # of one byte of text, when it is escaped
_IDLE_S = 120.0  # a stream without calls ends after it
_PAUSE_BYTES = 8 << 20  # answers that are not written yet: beyond it no more of the request is read


class RunStream:
    """Reads calls and writes answers at the same time, so that one request can serve a client for as long as it likes.

    Calls that have an id survive the loss of the connection for a while; the others are cancelled with it.

    With `STARTS_HEADER` the client is informed, within a second or two, that the supervisor has taken a call.
    """

    def __init__(self, dispatcher: Dispatcher, request: web.Request, client: str) -> None:
        self._dispatcher = dispatcher
        self._request = request
        self._client = client
        self._max_line_bytes = _MAX_BYTES_IN_JSON * (protocol.MAX_CODE_BYTES + protocol.MAX_STDIN_BYTES) + 65_536
        self._reports_starts = ndjson.STARTS_HEADER in request.headers
        self._num_lines = 0
        self._open: dict[int, asyncio.Future[RunResult]] = {}
        self._begun: dict[int, str | int] = {}  # keys of started calls that are not reported yet
        self._outgoing: list[bytes] = []
        self._outgoing_bytes = 0
        self._wake = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_stopping = False
        self._loop = asyncio.get_running_loop()
        self._line_at = self._written_at = self._reported_at = self._loop.time()

    def stop(self) -> None:
        """End after the last open call, even if the client might send more."""
        self._is_stopping = True
        self._wake.set()

    async def serve(self, response: web.StreamResponse) -> None:
        """Return when the client has ended its request and has every answer."""
        reading = self._loop.create_task(self._read())
        reading.add_done_callback(lambda _: self._wake.set())
        try:
            await response.write(b"\n")  # sends the headers, which a client may wait for before its first call
            while not self._is_over(reading):
                await self._wait()
                if part := self._next_part():
                    await response.write(part)
                    self._written_at = self._loop.time()
            if reading.done():
                reading.result()
        finally:
            reading.cancel()
            for answer in self._open.values():
                answer.cancel()

    def _is_over(self, reading: asyncio.Task[None]) -> bool:
        is_idle = self._loop.time() - self._line_at > _IDLE_S
        return (reading.done() or self._is_stopping or is_idle) and not self._open and not self._outgoing

    async def _wait(self) -> None:
        """Return when there is something to write, or a heartbeat is due."""
        timer = self._loop.call_later(HEARTBEAT_S, self._wake.set)
        await self._wake.wait()
        timer.cancel()
        self._wake.clear()

    def _next_part(self) -> bytes:
        self._report_starts()
        if not self._outgoing:
            return b"\n" if self._loop.time() - self._written_at >= HEARTBEAT_S / 2 else b""
        part = b"".join(self._outgoing)
        self._outgoing.clear()
        self._outgoing_bytes = 0
        if len(self._open) < MAX_OPEN:
            self._has_room.set()
        return part

    async def _read(self) -> None:
        splitter = ndjson.LineSplitter(max_line_bytes=self._max_line_bytes)
        while part := await self._request.content.readany():
            for line in splitter.feed(part):
                self._take(line)
                if self._num_lines % _NUM_AT_ONCE == 0:
                    await asyncio.sleep(0)
            if len(self._open) >= MAX_OPEN or self._outgoing_bytes > _PAUSE_BYTES:
                self._has_room.clear()
            await self._has_room.wait()
        for line in splitter.end():
            self._take(line)

    def _take(self, line: bytes | ndjson.TooLong) -> None:
        self._line_at = self._loop.time()
        if not isinstance(line, ndjson.TooLong) and not line.strip():
            return
        self._num_lines += 1
        read = ndjson.read_run_line(line, max_line_bytes=self._max_line_bytes)
        if not isinstance(read, ndjson.RunLine):
            reason, level = f"line {self._num_lines} is no call: {read.why}", self._dispatcher.box.level
            self._write(ndjson.write_result_line(read.key, RunResult.not_run(RunOutcome.REJECTED, reason, level=level)))
            return
        number = self._num_lines
        on_start = partial(self._on_start, number, read.key)
        answer = self._open[number] = self._dispatcher.submit(read.request, on_start=on_start, client=self._client)
        answer.add_done_callback(partial(self._on_answer, number, read.key))

    def _on_start(self, number: int, key: str | int) -> None:
        if self._reports_starts:
            self._begun[number] = key

    def _report_starts(self) -> None:
        now = self._loop.time()
        if self._begun and now - self._reported_at >= _STARTS_S:
            self._reported_at = now
            for key in self._begun.values():
                self._outgoing.append(ndjson.StartLine(key=key).line())
            self._begun.clear()

    def _on_answer(self, number: int, key: str | int, answer: asyncio.Future[RunResult]) -> None:
        if answer.cancelled():  # the stream has ended
            return
        del self._open[number]
        self._begun.pop(number, None)
        error = answer.exception()
        if isinstance(error, StropError):
            self._write(ndjson.write_error_line(key, ndjson.kind_of(error), str(error)))
        else:
            self._write(ndjson.write_result_line(key, answer.result()))

    def _write(self, line: bytes) -> None:
        """Queue a line. The lines of one turn of the event loop leave in one write, and under load those of several turns."""
        self._outgoing.append(line)
        self._outgoing_bytes += len(line)
        if self._outgoing_bytes > MAX_UNREAD_BYTES and self._request.transport is not None:
            self._request.transport.abort()
        if len(self._open) < _NUM_BUSY:
            self._wake.set()
        elif len(self._outgoing) == 1:
            self._loop.call_later(_GATHER_S, self._wake.set)


async def start_lines(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
    await response.prepare(request)
    return response


async def write_verdicts(request: web.Request, verdicts: AsyncGenerator[tuple[int, PairVerdict]]) -> web.StreamResponse:
    """Write a line for each verdict. Raises an error that comes before anything is sent, so that the status can say it."""
    response: web.StreamResponse | None = None
    coming = asyncio.ensure_future(anext(verdicts, None))
    try:
        while True:
            await asyncio.wait({coming}, timeout=HEARTBEAT_S)
            line = b"\n"  # a sign of life
            if coming.done():
                if (judged := coming.result()) is None:
                    break
                line = ndjson.VerdictLine(index=judged[0], verdict=judged[1]).line()
                coming = asyncio.ensure_future(anext(verdicts, None))
            response = response or await start_lines(request)
            await response.write(line)
    except StropError as error:
        if response is None:
            raise
        await response.write(ndjson.write_error_line(None, ndjson.kind_of(error), str(error)))
    finally:
        coming.cancel()
        await asyncio.wait({coming})
    response = response or await start_lines(request)
    await response.write_eof()
    return response
