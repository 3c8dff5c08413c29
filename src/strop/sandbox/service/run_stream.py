"""One request for many runs: its lines become calls as they arrive, and each answer leaves as soon as it is there."""

from __future__ import annotations

import asyncio
from functools import partial

from aiohttp import web

from strop.sandbox.protocol import RunOutcome, RunResult, RunTimings
from strop.sandbox.service.dispatcher import Dispatcher
from strop.sandbox.service.jobs import Answer, Leave
from strop.sandbox.service.lines import (
    LineSplitter,
    RunLine,
    TooLong,
    kind_of,
    read_run_line,
    write_error_line,
    write_result_line,
    write_start_line,
)

_NUM_BUSY = 16  # calls under way from which on an answer may wait for others to leave with it: their client has enough to do
_GATHER_S = 0.005
HEARTBEAT_S = 1.0  # an empty line, when there is no answer: a client that hears nothing for long knows that we are gone
_IDLE_S = 120.0  # without a call; then the stream ends
_PAUSE_BYTES = 8 << 20  # answers that the client has not read: no more of its calls are read
MAX_OPEN = 8192  # calls without an answer: the same; further ones wait on the side of the client


class RunStream:
    """Reads and writes at the same time, so that one request can serve a client for as long as it likes.

    Calls that have an id survive the loss of the connection for a while; the others are cancelled with it.

    Args:
        max_unread_bytes: of answers; a client that leaves more of them unread is cut off.
        tells_starts: whether the client is told, within a second or two, that a node has taken a call.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        client: str,
        *,
        max_lines: int,
        max_line_bytes: int,
        max_unread_bytes: int,
        tells_starts: bool = False,
    ) -> None:
        self._dispatcher = dispatcher
        self._client = client
        self._max_lines = max_lines
        self._max_line_bytes = max_line_bytes
        self._max_unread_bytes = max_unread_bytes
        self._tells_starts = tells_starts
        self._num_lines = 0
        self._open: dict[int, Leave] = {}
        self._begun: dict[int, str | int] = {}  # keys of those that a node has taken, until that is told
        self._outgoing: list[bytes] = []
        self._outgoing_bytes = 0
        self._wake = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._gather_timer: asyncio.TimerHandle | None = None
        self._is_stopping = False
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._line_at = self._said_at = self._told_at = self._loop.time()

    def stop(self) -> None:
        """End with the last call that is open, though the client might send more."""
        self._is_stopping = True
        self._wake.set()

    async def serve(self, request: web.Request, response: web.StreamResponse) -> None:
        """Until the client has ended its request and has every answer."""
        self._transport = request.transport
        reading = self._loop.create_task(self._read(request))
        reading.add_done_callback(lambda _: self._wake.set())
        try:
            await response.write(b"\n")  # the headers leave with it: a client may wait for them before its first call
            while not self._is_over(reading):
                await self._wait()
                if part := self._next_part():
                    await response.write(part)
                    self._said_at = self._loop.time()
            if reading.done():
                reading.result()
        finally:
            reading.cancel()
            for leave in list(self._open.values()):
                leave(may_return=True)

    def _is_over(self, reading: asyncio.Task[None]) -> bool:
        is_idle = self._loop.time() - self._line_at > _IDLE_S
        return (reading.done() or self._is_stopping or is_idle) and not self._open and not self._outgoing

    async def _wait(self) -> None:
        """For something to say, or the time to say nothing."""
        timer = self._loop.call_later(HEARTBEAT_S, self._wake.set)
        await self._wake.wait()
        timer.cancel()
        self._wake.clear()
        if self._gather_timer is not None:
            self._gather_timer.cancel()
            self._gather_timer = None

    def _next_part(self) -> bytes:
        self._tell_starts()
        if not self._outgoing:
            return b"\n" if self._loop.time() - self._said_at >= HEARTBEAT_S / 2 else b""
        part = b"".join(self._outgoing)
        self._outgoing.clear()
        self._outgoing_bytes = 0
        if len(self._open) < MAX_OPEN:
            self._has_room.set()
        return part

    async def _read(self, request: web.Request) -> None:
        splitter = LineSplitter(max_line_bytes=self._max_line_bytes)
        while part := await request.content.readany():
            for line in splitter.feed(part):
                self._take(line)
            if self._num_lines > self._max_lines:
                return
            if len(self._open) >= MAX_OPEN or self._outgoing_bytes > _PAUSE_BYTES:
                self._has_room.clear()
            await self._has_room.wait()
        for line in splitter.end():
            self._take(line)

    def _take(self, line: bytes | TooLong) -> None:
        self._line_at = self._loop.time()
        if not isinstance(line, TooLong) and not line.strip():
            return
        self._num_lines += 1
        if self._num_lines > self._max_lines + 1:
            return
        if self._num_lines > self._max_lines:
            self._reject(None, f"the request has more than {self._max_lines} lines; the rest was not read")
            return
        read = read_run_line(line, max_line_bytes=self._max_line_bytes)
        if not isinstance(read, RunLine):
            self._reject(read.key, f"line {self._num_lines} is no call: {read.why}")
            return
        number = self._num_lines
        leave = self._dispatcher.submit(
            read.request,
            partial(self._on_answer, number, read.key),
            on_start=partial(self._on_start, number, read.key),
            client=self._client,
        )
        if leave is not None:
            self._open[number] = leave

    def _reject(self, key: str | int | None, reason: str) -> None:
        result = RunResult(
            outcome=RunOutcome.REJECTED,
            reason=reason,
            text=f"Not run: {reason}.",
            exit_code=None,
            timings=RunTimings(),
            level=self._dispatcher.level,
        )
        self._say(write_result_line(key, result))

    def _on_start(self, number: int, key: str | int) -> None:
        if self._tells_starts:
            self._begun[number] = key

    def _tell_starts(self) -> None:
        """Once a second, of what has no answer yet: most calls have theirs by then, and cost nothing."""
        now = self._loop.time()
        if self._begun and now - self._told_at >= HEARTBEAT_S:
            self._told_at = now
            lines = [write_start_line(key) for key in self._begun.values()]
            self._begun.clear()
            self._outgoing += lines
            self._outgoing_bytes += sum(map(len, lines))

    def _on_answer(self, number: int, key: str | int, answer: Answer) -> None:
        self._open.pop(number, None)
        self._begun.pop(number, None)
        if isinstance(answer, RunResult):
            self._say(write_result_line(key, answer))
        else:
            self._say(write_error_line(key, kind_of(answer), str(answer)))

    def _say(self, line: bytes) -> None:
        """All that is said in one turn of the event loop leaves in one write, and under load in a few of them."""
        self._outgoing.append(line)
        self._outgoing_bytes += len(line)
        if self._outgoing_bytes > self._max_unread_bytes and self._transport is not None:
            self._transport.abort()
        if len(self._open) < _NUM_BUSY:
            self._wake.set()
        elif self._gather_timer is None:
            self._gather_timer = self._loop.call_later(_GATHER_S, self._wake.set)
