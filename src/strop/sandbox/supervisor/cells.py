"""One cell: its work on the line of a session, its output and its clock; and the facts that are known at its end.

The session itself reports that a cell is done, and any code in it can write that report. The report counts if it has the nonce
of this cell, and if the interpreter is then seen to wait for the next cell: so no earlier cell can end a later one, and no cell
runs on without a slot and a clock. Any other packet ends the session. A program controls the text and the end of its own cell,
as with an exit code, and nothing else.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import time

from strop.sandbox.inside import wire
from strop.sandbox.protocol import RunRequest
from strop.sandbox.supervisor.calls import Execution
from strop.sandbox.supervisor.processes import Ended, Interpreter, drain

GRACE_S = 0.25  # from SIGINT to the kill
_MAX_EXTENSION_S = 0.15  # of a deadline, when a session begins late
_BEGIN_LIMIT_S = 5.0  # until it begins; 0.1 ms on an idle machine
_IDLE_LIMIT_S, _STARVED_LIMIT_S = 1.0, 5.0  # from its report until it is seen to wait; longer if it gets no CPU time
_IDLE_POLL_S = 0.001
_STARVED_CPU_S = 0.1  # a runnable process with less CPU time than this is starved
_MAX_LATE_FAILURES = 64  # packets about a fork that was given up
_CPU_CHECK_S = 0.05
_F_ADD_SEALS, _ALL_SEALS = 1033, 0xF


class Cell(Execution):
    """Runs one request in the interpreter of a session. Done when the interpreter waits for the next cell, or is dead.

    Raises `OSError` when there is no descriptor for the work; the interpreter has received nothing then.
    """

    child: Interpreter

    def __init__(self, interpreter: Interpreter, request: RunRequest, number: int, *, admitted_at: float) -> None:
        super().__init__(interpreter, request, admitted_at=admitted_at)
        self._number = number
        self._nonce = secrets.token_bytes(8)
        # 0 until it is stopped, until the session reports its begin and its end, and until the other end of its line closes
        self._stopped_at = self._began_at = self._done_at = self._mute_at = 0.0
        self._num_late_failures = 0
        self._next_cpu_look = self._given_at + _CPU_CHECK_S
        self._done = b""
        self._cpu_before_s = self._cpu_done_s = interpreter.status.cpu_s
        if interpreter.ended is not None:
            self._finish()
            return
        self._give()
        interpreter.on_end = self._finish
        if not self._killed_at and not self._mute_at:
            self._loop.add_reader(interpreter.line, self._read_line)

    @property
    def is_killed(self) -> bool:
        """Whether the interpreter was killed because the cell did not end."""
        return self._killed_at > 0

    def stop(self, reason: str) -> None:
        """Send SIGINT, and kill it soon after; the first reason counts."""
        if self._finished.done() or self._stopped_for:
            return
        self._stopped_for = reason
        self._stopped_at = time.monotonic()
        if reason == "memory":
            self._kill()
        else:
            self.child.signal(signal.SIGINT)

    def _check(self, now: float) -> None:
        self.child.family.refuse_questions()
        if self._mute_at and now - self._mute_at > _IDLE_LIMIT_S:
            self._break_off()  # it closed its line, so it could never report its end
        elif self._done:
            return  # `_finish_when_idle` watches it
        elif self._stopped_for:
            if now - self._stopped_at > GRACE_S:
                self._kill()
        elif self._is_late_to_begin(now) and not self._is_starved:
            self._break_off()  # an earlier cell still runs, or another process read this one from the line
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
        """Whether it is runnable and has got no CPU time, since it got its work or reported its end."""
        status = self.child.status
        return status.is_runnable and status.cpu_s - self._cpu_done_s < _STARVED_CPU_S

    def _is_out_of_cpu(self, now: float) -> bool:
        if self.request.cpu_s is None or now < self._next_cpu_look:
            return False
        self._next_cpu_look = now + _CPU_CHECK_S
        return self.child.status.cpu_s - self._cpu_before_s > self.request.cpu_s

    def _give(self) -> None:
        request = self.request
        code, limits = request.code.encode(), (request.memory_mib << 20, request.file_mib)
        packet = wire.CELL.pack(wire.LINE_CELL, self._nonce, self._number, len(code), *limits)
        with contextlib.ExitStack() as opened:
            files = []
            for content in (code, request.stdin.encode()):
                files.append(_sealed(content) if content else os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
                opened.callback(os.close, files[-1])
            try:
                drain(self.child.line)  # what was written between cells
                self.child.send(packet, files)
            except BlockingIOError:  # it no longer reads
                self._break_off()
            except OSError:
                self._mute_at = time.monotonic()

    def _kill(self) -> None:
        self._loop.remove_reader(self.child.line)
        super()._kill()

    def _break_off(self) -> None:
        """Something writes for the interpreter, or blocks it: no later report could be trusted."""
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
        elif self._is_report(packet, wire.LINE_BEGAN, wire.BEGAN.size) and not self._began_at:
            self._began_at = time.monotonic()
        elif self._is_report(packet, wire.LINE_DONE, wire.DONE.size) and self._began_at and not self._done:
            self._done = packet
            self._done_at = time.monotonic()
            self._cpu_done_s = self.child.status.cpu_s
            self._finish_when_idle()
        else:
            self._break_off()

    def _is_report(self, packet: bytes, kind: bytes, size: int) -> bool:
        """Whether it is of this kind, and has the nonce of this cell."""
        return len(packet) >= size and wire.BEGAN.unpack_from(packet) == (kind, self._nonce)

    def _finish_when_idle(self) -> None:
        """A cell is done when its interpreter waits for the next one. That takes 20 us, or longer among its own threads."""
        if self._finished.done() or self._killed_at:
            return
        late_s = time.monotonic() - self._done_at
        if self.child.status.is_listening:
            self._finish()
        elif late_s > (_STARVED_LIMIT_S if self._is_starved else _IDLE_LIMIT_S):
            self._break_off()
        else:
            self._loop.call_later(_IDLE_POLL_S, self._finish_when_idle)

    def _release(self) -> None:
        self._loop.remove_reader(self.child.line)
        self.child.on_end = None

    def _facts(self) -> tuple[Ended, bytes, bytes, float, float]:
        done_at, kind, text = self._done_at or time.monotonic(), b" ", b""
        if (ended := self.child.ended) is None:
            _, _, exit_code, kind = wire.DONE.unpack_from(self._done)
            text = self._done[wire.DONE.size :]
            cpu_s = self._cpu_done_s - self._cpu_before_s
            ended = Ended(exit_code=exit_code, signal=None, cpu_s=cpu_s, peak_bytes=self.child.status.peak_bytes)
        return ended, kind, text, self._began_at or self._given_at, done_at


def _sealed(content: bytes) -> int:
    """Return a file in memory that no process can change."""
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
