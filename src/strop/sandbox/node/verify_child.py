"""A confined child that compares answers: the same cage as a program's, in fork servers where no program ever runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable

from strop.sandbox.inside import wire
from strop.sandbox.node.verification import ChildEnd, VerifyChild
from strop.sandbox.node.zygotes import Child

_MEMORY_BYTES = 1 << 30
_CPU_S = 3_600  # each pair has its own clock, outside
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}


class ConfinedVerifyChild(VerifyChild):
    """Runs `inside.verify.judge` on one payload.

    Args:
        child: of a fork server of the profile `verify`.
        on_end: called once when it is gone; gives back its slot.
    """

    def __init__(self, child: Child, on_end: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._child = child
        self._on_end = on_end
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._rest = b""
        self._is_ready = False
        self._gone: asyncio.Future[None] = self._loop.create_future()

    def send(self, payload: bytes) -> None:
        work = wire.WORK.pack(wire.JOB_VERIFY, 0, _MEMORY_BYTES, _CPU_S, 32, 1, len(payload), 0)
        self._loop.add_reader(self._child.output, self._read)
        self._child.give(work + payload, self._end)

    async def lines(self) -> AsyncIterator[bytes]:
        while (line := await self._lines.get()) is not None:
            yield line

    async def ended(self) -> ChildEnd:
        await asyncio.shield(self._gone)
        ended = self._child.ended
        assert ended is not None
        if ended.signal in _CRASHES:
            return ChildEnd.CRASHED
        return ChildEnd.DONE if ended.exit_code == 0 else ChildEnd.LOST

    def kill(self) -> None:
        self._child.kill()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            part = os.read(self._child.output, 65_536)
            if not part:
                self._loop.remove_reader(self._child.output)
            if not self._is_ready and part:
                self._is_ready, part = True, part.removeprefix(wire.READY)
            *lines, self._rest = (self._rest + part).split(b"\n")
            for line in lines:
                self._lines.put_nowait(line)

    def _end(self) -> None:
        self._read()  # its last words may lie in the pipe
        self._loop.remove_reader(self._child.output)
        self._lines.put_nowait(None)
        self._gone.set_result(None)
        self._child.close()
        self._on_end()
