"""One cell: its work on a session's line, its output and its clock; and what is known when it is over.

That a cell is done is the session's own word, which anything that runs in it could say. It counts when it names the word that
was drawn for this cell, and when the interpreter is then seen to wait for the next one: so nothing that was said in advance
ends a later cell, and none computes on after its end, without a slot and a clock. A session in which something else speaks is
ended. What is left to a program is the text, and the end of its own cell, as with an exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import signal
import time

from strop.sandbox.inside import wire
from strop.sandbox.node.calls import FinishedCall
from strop.sandbox.node.interpreters import Interpreter
from strop.sandbox.node.output import OutputTail
from strop.sandbox.node.zygotes import Ended
from strop.sandbox.protocol import RunRequest

GRACE_S = 0.25  # from Ctrl-C to the kill
_KILL_LIMIT_S = 0.25  # from a kill to the report of the end, once it is dead
_DEATH_LIMIT_S = 5.0  # from a kill to the death; many processes, and much memory, take a while
_MAX_EXTENSION_S = 0.15  # of a deadline, for a session that is late to begin
_BEGIN_LIMIT_S = 5.0  # until it begins; a tenth of a millisecond when the machine is idle
_IDLE_LIMIT_S, _STARVED_LIMIT_S = 1.0, 5.0  # from its word that it is done until it is seen to wait; longer if it gets no turn
_IDLE_LOOK_S = 0.001
_STARVED_CPU_S = 0.1  # who computes less than this while it is runnable gets no turn
_MAX_UNREAD = 1_000  # packets that may lie on a line when a cell comes; its queue holds fewer
_MAX_LATE_FAILURES = 64  # words about a fork that was given up
_CPU_LOOK_S = 0.05
_F_ADD_SEALS, _ALL_SEALS = 1033, 0xF


class Cell:
    """Runs one request in a session's interpreter. `wait` returns when it is done or the interpreter is dead.

    Raises `OSError` when there is no descriptor for the work; the interpreter has heard nothing then.
    """

    def __init__(self, interpreter: Interpreter, request: RunRequest, number: int, *, admitted_at: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[None] = self._loop.create_future()
        self._number = number
        self._word = secrets.randbits(64)
        self._is_reading = False
        self._stopped_for = ""
        self._stopped_at = 0.0
        self._killed_at = 0.0  # 0 while it was not
        self._admitted_at = admitted_at
        self._given_at = time.monotonic()
        self._began_at = 0.0  # 0 until the session said so
        self._num_late_failures = 0
        self._next_cpu_look = self._given_at + _CPU_LOOK_S
        self._done = b""
        self._done_at = 0.0
        self._mute_at = 0.0  # 0 while somebody holds the other end of its line
        self._cpu_before_s = self._cpu_done_s = interpreter.sight.cpu_s
        self.child = interpreter
        self.request = request
        self.output = OutputTail(limit=request.output_bytes, skip=0)
        if interpreter.ended is not None:
            self._finish()
            return
        self._give()
        interpreter.on_end = self._finish
        if not self._killed_at and not self._mute_at:
            self._loop.add_reader(interpreter.line, self._read_line)

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
        return self._killed_at > 0

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
        if self._killed_at:
            late_s = now - self._killed_at
            if late_s > _DEATH_LIMIT_S or (late_s > _KILL_LIMIT_S and self.child.is_dead):  # and nobody said so
                self.child.abandon()
        elif self._mute_at and now - self._mute_at > _IDLE_LIMIT_S:
            self._break_off()  # it is not about to end: nobody would ever hear that it is done
        elif self._done:
            return  # it is looked at more often than here
        elif self._stopped_for:
            if now - self._stopped_at > GRACE_S:
                self._kill()
        elif self._is_late_to_begin(now) and not self._is_starved:
            self._break_off()  # an earlier cell goes on after its end, or something else took this one from the line
        elif now >= self._deadline or self._is_out_of_cpu(now):
            self.stop("timeout")

    @property
    def _deadline(self) -> float:
        began_at = min(self._began_at or self._given_at, self._given_at + _MAX_EXTENSION_S)
        return began_at + self.request.wall_s

    def _is_late_to_begin(self, now: float) -> bool:
        return not self._began_at and not self._mute_at and now >= min(self._deadline, self._given_at + _BEGIN_LIMIT_S)

    @property
    def _is_starved(self) -> bool:
        """Whether it would go on if the machine gave it a turn; since it had its work, or said that it is done."""
        sight = self.child.sight
        return sight.is_runnable and sight.cpu_s - self._cpu_done_s < _STARVED_CPU_S

    def _is_out_of_cpu(self, now: float) -> bool:
        if self.request.cpu_s is None or now < self._next_cpu_look:
            return False
        self._next_cpu_look = now + _CPU_LOOK_S
        return self.child.sight.cpu_s - self._cpu_before_s > self.request.cpu_s

    def _give(self) -> None:
        request = self.request
        code = request.code.encode()
        packet = wire.CELL.pack(wire.LINE_CELL, self._word, self._number, len(code), request.memory_mib << 20, request.file_mib)
        with contextlib.ExitStack() as opened:
            files = []
            for content in (code, request.stdin.encode()):
                files.append(_sealed(content) if content else os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
                opened.callback(os.close, files[-1])
            try:
                self._drain_line()
                self.child.send(packet, files)
            except BlockingIOError:  # it has closed its ears
                self._break_off()
            except OSError:
                self._mute_at = time.monotonic()

    def _drain_line(self) -> None:
        """Of what was said between cells, which nobody asked for."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MAX_UNREAD):
                self.child.line.recv(1)

    def _kill(self) -> None:
        self._killed_at = time.monotonic()
        self._loop.remove_reader(self.child.line)
        self.child.kill()

    def _break_off(self) -> None:
        """Something speaks for the interpreter, or keeps it from its work: no later word of it could be believed."""
        self._stopped_for = self._stopped_for or "policy"
        self._kill()

    def _read_line(self) -> None:
        try:
            packet = self.child.line.recv(wire.LINE_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            packet = b""
        if not packet:
            self._loop.remove_reader(self.child.line)
            self._mute_at = time.monotonic()
        elif packet[:1] == wire.LINE_FAILED and self._num_late_failures < _MAX_LATE_FAILURES:
            self._num_late_failures += 1
        elif self._is_word(packet, wire.LINE_BEGAN, wire.BEGAN.size) and not self._began_at:
            self._began_at = time.monotonic()
        elif self._is_word(packet, wire.LINE_DONE, wire.DONE.size) and self._began_at and not self._done:
            self._done = packet
            self._done_at = time.monotonic()
            self._cpu_done_s = self.child.sight.cpu_s
            self._finish_when_idle()
        else:
            self._break_off()

    def _is_word(self, packet: bytes, kind: bytes, size: int) -> bool:
        """Whether it is of this kind, and about this cell."""
        return len(packet) >= size and wire.BEGAN.unpack_from(packet) == (kind, self._word)

    def _finish_when_idle(self) -> None:
        """Done is a cell whose interpreter waits for the next one. That takes 20 us, or its turn among its own threads."""
        if self._finished.done() or self._killed_at:
            return
        late_s = time.monotonic() - self._done_at
        if self.child.sight.is_listening:
            self._finish()
        elif late_s > (_STARVED_LIMIT_S if self._is_starved else _IDLE_LIMIT_S):
            self._break_off()
        else:
            self._loop.call_later(_IDLE_LOOK_S, self._finish_when_idle)

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

    def _finish(self) -> None:
        if not self._finished.done():
            self._finished.set_result(None)

    def _facts(self) -> FinishedCall:
        done_at, kind, text = self._done_at or time.monotonic(), b" ", b""
        began_at = self._began_at or self._given_at
        if (ended := self.child.ended) is None:
            _, _, exit_code, kind = wire.DONE.unpack_from(self._done)
            text = self._done[wire.DONE.size :]
            cpu_s = self._cpu_done_s - self._cpu_before_s
            ended = Ended(exit_code=exit_code, signal=None, cpu_s=cpu_s, peak_bytes=self.child.sight.peak_bytes)
        return FinishedCall(
            ended=ended,
            stopped_for=self._stopped_for,
            output=self.output,
            record_kind=kind,
            record_text=text.decode("utf-8", "replace"),
            setup_s=began_at - self._admitted_at,
            run_s=done_at - began_at,
        )


def _sealed(content: bytes) -> int:
    """A file in memory that nobody can change."""
    file = os.memfd_create("cell", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(file, rest) :]
        os.lseek(file, 0, os.SEEK_SET)
        fcntl.fcntl(file, _F_ADD_SEALS, _ALL_SEALS)
    except BaseException:
        os.close(file)
        raise
    return file
