"""The process of a session: an interpreter whose state lasts from one cell to the next, also after errors.

    supervisor --(cell: its nonce, number and limits, its code and stdin as files)--> line
    line --(began: the nonce)(done: the nonce, exit code, echo or traceback)--> supervisor

Each cell has a new nonce, so that processes of earlier cells cannot report the end of a later one in advance. All cells print
to one pipe, so threads and processes that outlive a cell print into the output of the next one. SIGINT stops a cell; between
cells it is ignored.
"""

from __future__ import annotations

import _socket
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from . import branching, confine, program, wire
from .wire import CELL, DONE, FORK, LINE_BYTES

LINE = confine.WAKE
_FAILED = 1
program.OWN_FILES.add(__file__)


class Line:
    """The session's end of its line. A seqpacket socket, so packets are never split."""

    def __init__(self, descriptor: int) -> None:
        self._socket = _socket.socket(fileno=descriptor)
        self.descriptor = descriptor

    def send(self, packet: bytes, descriptor: int = -1) -> None:
        rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, descriptor.to_bytes(4, sys.byteorder))] if descriptor >= 0 else []
        self._socket.sendmsg([packet], rights)

    def receive(self) -> tuple[bytes, list[int]]:
        """Wait for the next packet, and return it with its descriptors. Empty when the supervisor has closed the line."""
        packet, control, _, _ = self._socket.recvmsg(LINE_BYTES, _socket.CMSG_SPACE(16), _socket.MSG_CMSG_CLOEXEC)
        given = b"".join(content for _, _, content in control)
        return packet, [int.from_bytes(given[at : at + 4], sys.byteorder) for at in range(0, len(given), 4)]

    def close(self) -> None:
        self._socket.close()

    def forget(self) -> None:
        """Leave the descriptor open."""
        self._socket.detach()


class Session:
    """Handles the packets on the line of a session, until its end."""

    def __init__(self, confinement: confine.Confinement, line: Line) -> None:
        self._confinement = confinement
        self._line = line
        self._names = program.fresh_main()
        self._streams = sys.stdout, sys.stderr
        self._is_interruptible = False
        signal.signal(signal.SIGINT, self._interrupt)

    def live(
        self,
        # Bound here: a cell may replace any of them.
        exit_now: Callable[[int], NoReturn] = os._exit,
        getpid: Callable[[], int] = os.getpid,
    ) -> NoReturn:
        own_pid = getpid()
        try:
            while True:
                packet, descriptors = self._line.receive()
                if not packet:
                    exit_now(0)
                if packet[:1] == wire.LINE_CELL:
                    nonce, exit_code, kind, text = self._cell(packet, descriptors)
                    if getpid() != own_pid:  # a fork of the cell that returned here; it has no next cell
                        if kind == wire.RECORD_ERROR:
                            program.attempt(self._streams[1].write, text)
                        exit_now(exit_code)
                    self._line.send(DONE.pack(wire.LINE_DONE, nonce, exit_code, kind) + program.encode_record(text))
                elif packet[:1] == wire.LINE_FORK:
                    self._line = branching.fork(self._line, FORK.unpack(packet)[1], descriptors, Line)
                    own_pid = getpid()
                elif packet[:1] == wire.LINE_STEM:
                    branching.become_stem()
        except BaseException as error:  # a cell closed the line, or replaced a function that is needed here
            os.write(2, f"The session ends here: {type(error).__name__}: {error}\n".encode("utf-8", "backslashreplace"))
            exit_now(_FAILED)

    def _cell(self, packet: bytes, descriptors: list[int]) -> tuple[bytes, int, bytes, str]:
        """Run a cell. Returns its nonce, its exit code, and the kind and text of what it shows."""
        _, nonce, number, code_length, memory_bytes, file_mib = CELL.unpack(packet)
        began = wire.BEGAN.pack(wire.LINE_BEGAN, nonce)
        if len(descriptors) < 2:
            self._line.send(began)
            for descriptor in descriptors:
                os.close(descriptor)
            return (nonce, _FAILED, wire.RECORD_ERROR, "OSError: earlier cells left no free file descriptor for this one\n")
        code = os.pread(descriptors[0], code_length, 0).decode()
        os.close(descriptors[0])
        self._confinement.limit_cell(memory_bytes=memory_bytes, file_bytes=file_mib << 20)
        _take_stdin(descriptors[1])
        self._line.send(began)
        try:
            try:
                self._is_interruptible = True
                exit_code, kind, text = program.run(code, self._names, f"<cell {number}>", stderr=self._streams[1])
                program.flush((sys.stdout, *self._streams))
            finally:
                self._is_interruptible = False
        except KeyboardInterrupt:  # after the code of the cell
            exit_code, kind, text = _FAILED, wire.RECORD_ERROR, "KeyboardInterrupt\n"
        return nonce, exit_code, kind, text

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_interruptible:
            raise KeyboardInterrupt


def live(
    confinement: confine.Confinement, exchange: int, line: int, output: int, directory: str, seed_all: Callable[[int], None]
) -> NoReturn:
    """Confine this process, and handle the packets of its line until the end of the session."""
    own_line = Line(line)
    try:
        header = os.pread(exchange, wire.WORK.size, wire.RECORD_BYTES)
        _, seed, memory_bytes, _, max_processes, file_mib, _, _ = wire.WORK.unpack(header)
        own_line.send(wire.LINE_HELLO, confinement.apply(directory, max_processes=max_processes))
        confine.take_streams(exchange, line, output)
        own_line.forget()
        own_line = Line(LINE)
        os.close(confine.EXCHANGE)
        confinement.limit_session(memory_bytes=memory_bytes, file_bytes=file_mib << 20)
        seed_all(seed)
        session = Session(confinement, own_line)
        own_line.send(wire.LINE_BORN)
    except BaseException as error:
        own_line.send(wire.LINE_FAILED + f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace"))
        os._exit(_FAILED)
    session.live()


def _take_stdin(descriptor: int) -> None:
    """Make `descriptor`, a sealed file, the standard input of the cell."""
    os.dup2(descriptor, 0)
    os.close(descriptor)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115 - until the next cell
    sys.__dict__.update(__stdin__=sys.stdin)
