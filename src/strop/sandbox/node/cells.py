"""One cell: its work on a session's line, its output and its clock; and what is known when it is over.

That a cell is done is the session's own word, as an exit code is a program's: it can only be about this cell, and it decides
nothing but when this cell ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import time

from strop.sandbox.inside import wire
from strop.sandbox.node.calls import FinishedCall
from strop.sandbox.node.interpreters import Interpreter
from strop.sandbox.node.output import OutputTail
from strop.sandbox.node.zygotes import Ended
from strop.sandbox.protocol import RunRequest

GRACE_S = 0.25  # from Ctrl-C to the kill
_KILL_LIMIT_S = 0.25  # from a kill to the report of the end
_MAX_EXTENSION_S = 0.15  # of a deadline, for a session that is late to begin
_MAX_STRAY_PACKETS = 64  # of a session that says what nobody asked
_CPU_LOOK_S = 0.05
_F_ADD_SEALS, _ALL_SEALS = 1033, 0xF


class Cell:
    """Runs one request in a session's interpreter. `wait` returns when it is done or the interpreter is dead."""

    def __init__(self, interpreter: Interpreter, request: RunRequest, number: int, *, admitted_at: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[None] = self._loop.create_future()
        self._number = number
        self._is_reading = False
        self._stopped_for = ""
        self._stopped_at = 0.0
        self._is_killed = False
        self._admitted_at = admitted_at
        self._given_at = time.monotonic()
        self._began_at = 0.0  # 0 until the session said so
        self._num_stray = 0
        self._next_cpu_look = self._given_at + _CPU_LOOK_S
        self._done = b""
        self._cpu_before_s = interpreter.cpu_s
        self.child = interpreter
        self.request = request
        self.output = OutputTail(limit=request.output_bytes, skip=0)
        interpreter.on_end = self._end
        self._loop.add_reader(interpreter.line, self._read_line)
        if interpreter.ended is not None:
            self._end()
        else:
            self._give()

    async def wait(self) -> FinishedCall:
        """On every way out it is over: done, or its interpreter dead."""
        try:
            await self._finished
            self.output.drain(self.child.output)
            if self.output.is_flood and not self._stopped_for:
                self._stopped_for = "output"
            return self._facts()
        finally:
            self._loop.remove_reader(self.child.line)
            self._stop_reading()
            self.child.on_end = None

    @property
    def is_killed(self) -> bool:
        """Whether the interpreter had to go because the cell did not."""
        return self._is_killed

    def stop(self, reason: str) -> None:
        """End it by Ctrl-C, and soon after by force; the first reason counts."""
        if self._finished.done() or self._stopped_for:
            return
        self._stopped_for = reason
        self._stopped_at = time.monotonic()
        if reason == "memory":
            self._kill()
        else:
            self.child.signal(signal.SIGINT)

    def look(self, now: float) -> None:
        """Once every few milliseconds: take its output, which a pipe no longer holds, and stop it when its time is over."""
        if self._finished.done():
            return
        self.child.family.refuse_questions()
        if not self._is_reading:
            self._is_reading = True
            self._loop.add_reader(self.child.output, self._read_output)
        if self._is_killed:
            if now - self._stopped_at > GRACE_S + _KILL_LIMIT_S:
                self.child.abandon()
        elif self._stopped_for:
            if now - self._stopped_at > GRACE_S:
                self._kill()
        elif now >= self._deadline or self._is_out_of_cpu(now):
            self.stop("timeout")

    @property
    def _deadline(self) -> float:
        began_at = min(self._began_at or self._given_at, self._given_at + _MAX_EXTENSION_S)
        return began_at + self.request.wall_s

    def _is_out_of_cpu(self, now: float) -> bool:
        if self.request.cpu_s is None or now < self._next_cpu_look:
            return False
        self._next_cpu_look = now + _CPU_LOOK_S
        return self.child.cpu_s - self._cpu_before_s > self.request.cpu_s

    def _give(self) -> None:
        request = self.request
        code, stdin = request.code.encode(), request.stdin.encode()
        memory_bytes = request.memory_mib << 20
        packet = wire.CELL.pack(wire.LINE_CELL, self._number, len(code), len(stdin), memory_bytes, request.file_mib)
        files = [_sealed(content) for content in (code, stdin)]
        try:
            self.child.send(packet, files)
        except OSError:  # it closed its end, or reads nothing any more
            self._kill()
        finally:
            for file in files:
                os.close(file)

    def _kill(self) -> None:
        self._is_killed = True
        self._stopped_at = self._stopped_at or time.monotonic()
        self.child.kill()

    def _read_line(self) -> None:
        try:
            packet = self.child.line.recv(wire.LINE_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            packet = b""
        if not packet:
            self._loop.remove_reader(self.child.line)
            self._kill()  # nobody would ever hear that it is done
        elif self._is_word(packet, wire.LINE_DONE, wire.DONE.size):
            self._done = packet
            self._finish()
        elif self._is_word(packet, wire.LINE_BEGAN, wire.BEGAN.size):
            self._began_at = self._began_at or time.monotonic()
        else:
            self._num_stray += 1
            if self._num_stray > _MAX_STRAY_PACKETS:
                self._loop.remove_reader(self.child.line)
                self._stopped_for = self._stopped_for or "policy"
                self._kill()

    def _is_word(self, packet: bytes, kind: bytes, size: int) -> bool:
        """Whether it is of this kind, and about this cell."""
        return len(packet) >= size and wire.BEGAN.unpack_from(packet) == (kind, self._number)

    def _read_output(self) -> None:
        with contextlib.suppress(BlockingIOError):
            part = os.read(self.child.output, 262_144)
            self.output.add(part)
            if not part or self._stopped_for == "output":
                self._loop.remove_reader(self.child.output)
            elif self.output.is_flood:
                self.stop("output")

    def _stop_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self.child.output)

    def _end(self) -> None:
        self._finish()

    def _finish(self) -> None:
        if not self._finished.done():
            self._finished.set_result(None)

    def _facts(self) -> FinishedCall:
        now, kind, text = time.monotonic(), b" ", b""
        began_at = self._began_at or self._given_at
        if (ended := self.child.ended) is None:
            _, _, exit_code, kind = wire.DONE.unpack_from(self._done)
            text = self._done[wire.DONE.size :]
            cpu_s = self.child.cpu_s - self._cpu_before_s
            ended = Ended(exit_code=exit_code, signal=None, cpu_s=cpu_s, peak_bytes=self.child.peak_bytes)
        return FinishedCall(
            ended=ended,
            stopped_for=self._stopped_for,
            output=self.output,
            record_kind=kind,
            record_text=text.decode("utf-8", "replace"),
            setup_s=began_at - self._admitted_at,
            run_s=now - began_at,
        )


def _sealed(content: bytes) -> int:
    """A file in memory that nobody can change."""
    file = os.memfd_create("cell", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(file, rest) :]
    os.lseek(file, 0, os.SEEK_SET)
    fcntl.fcntl(file, _F_ADD_SEALS, _ALL_SEALS)
    return file
