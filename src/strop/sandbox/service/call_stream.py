"""One long request for many runs, as the client sees it: lines of calls go out, lines of answers come in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from strop.errors import LinkBroken
from strop.sandbox.service.http_client import ServiceHttp
from strop.sandbox.service.lines import LineSplitter, TooLong

_MAX_LINE_BYTES = 256 << 20  # of an answer
_PROVEN_S = 2.0


class CallStream:
    """Open until `end`, or until the connection is lost. `run` is the life of it.

    Args:
        on_line: called with each line of an answer.
    """

    def __init__(self, http: ServiceHttp, on_line: Callable[[bytes], None]) -> None:
        self._http = http
        self._on_line = on_line
        self._outgoing: list[bytes] = [b"\n"]  # the headers leave with it
        self._wake = asyncio.Event()
        self._is_ended = False
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self.num_sent = 0
        self.num_open = 0
        self.made_at = self.used_at = self.heard_at = self._loop.time()
        self.num_answers = 0
        self.is_established = False  # the service took it

    @property
    def is_fruitful(self) -> bool:
        """Whether trying again at once is likely to help: it worked, for a while at least."""
        return self.is_established and (self.num_answers > 0 or self._loop.time() - self.made_at > _PROVEN_S)

    def send(self, lines: bytes, num: int) -> None:
        self.num_sent += num
        self.num_open += num
        self.used_at = self._loop.time()
        self._outgoing.append(lines)
        self._wake.set()

    def end(self) -> None:
        """Nothing more is sent; the service ends the stream with its last answer."""
        self._is_ended = True
        self._wake.set()

    def abort(self) -> None:
        """The service has fallen silent."""
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        """Raises as `ServiceHttp.request` does, and `LinkBroken` when it was aborted or ended too early."""
        self._task = asyncio.create_task(self._run())
        try:
            await asyncio.wait({self._task})
        finally:
            if not self._task.done():
                self._task.cancel()
                await asyncio.wait({self._task})
        if self._task.cancelled():
            raise LinkBroken("the service fell silent")
        self._task.result()
        if not self._is_ended or self.num_open:
            raise LinkBroken("the service ended the stream")

    async def _run(self) -> None:
        async with self._http.request("POST", "/v1/runs", self._body(), is_stream=True) as response:
            self.is_established = True
            splitter = LineSplitter(max_line_bytes=_MAX_LINE_BYTES)
            while part := await response.content.readany():
                self.heard_at = self._loop.time()
                for line in splitter.feed(part):
                    if isinstance(line, TooLong):
                        raise LinkBroken(f"the service sent a line of more than {_MAX_LINE_BYTES} bytes")
                    if line:
                        self._on_line(line)

    async def _body(self) -> AsyncIterator[bytes]:
        while self._outgoing or not self._is_ended:
            if self._outgoing:
                part = b"".join(self._outgoing)
                self._outgoing.clear()
                yield part
            else:
                await self._wake.wait()
                self._wake.clear()
