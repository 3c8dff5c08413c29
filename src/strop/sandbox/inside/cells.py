"""A session from the inside: an interpreter whose state lasts from one cell to the next, errors included.

    supervisor --(cell: its word, number and limits, its code and stdin as files)--> line
    line --(began: the word)(done: the word, exit code, echo or traceback)--> supervisor

The word is drawn for each cell, so that nothing that earlier cells left running can speak for a later one in advance.
What a cell prints goes through one pipe for all cells, so threads and processes that outlive a cell print into the next one's
output. Ctrl-C is how a cell is stopped: outside a cell it is nothing.
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
    """The session's end of its line. A seqpacket socket, so a packet is whole or is not there."""

    def __init__(self, descriptor: int) -> None:
        self._socket = _socket.socket(fileno=descriptor)
        self.descriptor = descriptor

    def send(self, packet: bytes, descriptor: int = -1) -> None:
        rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, descriptor.to_bytes(4, sys.byteorder))] if descriptor >= 0 else []
        self._socket.sendmsg([packet], rights)

    def receive(self) -> tuple[bytes, list[int]]:
        """The next packet with its descriptors; waits for it. Empty when the supervisor has hung up."""
        packet, control, _, _ = self._socket.recvmsg(LINE_BYTES, _socket.CMSG_SPACE(16), _socket.MSG_CMSG_CLOEXEC)
        given = b"".join(content for _, _, content in control)
        return packet, [int.from_bytes(given[at : at + 4], sys.byteorder) for at in range(0, len(given), 4)]

    def close(self) -> None:
        self._socket.close()

    def forget(self) -> None:
        """Leave the descriptor to whoever has it now."""
        self._socket.detach()


class Session:
    """What the process of a session does all its life: the next packet on its line."""

    def __init__(self, cage: confine.Confinement, line: Line) -> None:
        self._cage = cage
        self._line = line
        self._names = program.fresh_main()
        self._streams = sys.stdout, sys.stderr
        self._is_interruptible = False
        signal.signal(signal.SIGINT, self._interrupt)

    def live(
        self,
        # Bound now: a cell may replace any of them.
        exit_now: Callable[[int], NoReturn] = os._exit,
        getpid: Callable[[], int] = os.getpid,
    ) -> NoReturn:
        own_pid = getpid()
        try:
            while True:
                packet, descriptors = self._line.receive()
                if not packet:
                    exit_now(0)
                branching.reap()
                if packet[:1] == wire.LINE_CELL:
                    word, exit_code, kind, text = self._cell(packet, descriptors)
                    if getpid() != own_pid:  # a fork of the cell that came back here; it has no next cell
                        if kind == wire.RECORD_ERROR:
                            program.attempt(self._streams[1].write, text)
                        exit_now(exit_code)
                    self._line.send(DONE.pack(wire.LINE_DONE, word, exit_code, kind) + program.encode_record(text))
                elif packet[:1] == wire.LINE_FORK:
                    self._line = branching.fork(self._line, FORK.unpack(packet)[1], descriptors, Line)
                    own_pid = getpid()
                elif packet[:1] == wire.LINE_STEM:
                    branching.become_stem()
        except BaseException as error:  # a cell closed the line, or took a function that is needed here
            os.write(2, f"The session ends here: {type(error).__name__}: {error}\n".encode("utf-8", "backslashreplace"))
            exit_now(_FAILED)

    def _cell(self, packet: bytes, descriptors: list[int]) -> tuple[int, int, bytes, str]:
        """Its word and exit code, and what there is to show: of which kind, and the text."""
        _, word, number, code_length, memory_bytes, file_mib = CELL.unpack(packet)
        began = wire.BEGAN.pack(wire.LINE_BEGAN, word)
        if len(descriptors) < 2:
            self._line.send(began)
            for descriptor in descriptors:
                os.close(descriptor)
            return (
                word,
                _FAILED,
                wire.RECORD_ERROR,
                "OSError: earlier cells left no file descriptor that this one could come by\n",
            )
        code = os.pread(descriptors[0], code_length, 0).decode()
        os.close(descriptors[0])
        self._cage.limit_cell(memory_bytes=memory_bytes, file_bytes=file_mib << 20)
        _take_stdin(descriptors[1])
        self._line.send(began)
        try:
            try:
                self._is_interruptible = True
                exit_code, kind, text = self._run(code, f"<cell {number}>")
            finally:
                self._is_interruptible = False
        except KeyboardInterrupt:  # too late for the cell's own traceback
            exit_code, kind, text = _FAILED, wire.RECORD_ERROR, "KeyboardInterrupt\n"
        return word, exit_code, kind, text

    def _run(self, code: str, file: str) -> tuple[int, bytes, str]:
        exit_code, kind, text = 0, b" ", ""
        try:
            value = program.execute(code, self._names, file)
            if value is not None:
                kind, text = wire.RECORD_ECHO, repr(value)
        except SystemExit as error:
            exit_code = program.exit_code_of(error, self._streams[1])
        except BaseException as error:
            exit_code, kind, text = _FAILED, wire.RECORD_ERROR, program.format_error(error)
        for stream in (sys.stdout, *self._streams):
            program.attempt(stream.flush)
        return exit_code, kind, text

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_interruptible:
            raise KeyboardInterrupt


def live(
    cage: confine.Confinement, exchange: int, line: int, output: int, directory: str, seed_all: Callable[[int], None]
) -> NoReturn:
    """From the fork to the end of the session."""
    speech = Line(line)
    try:
        header = os.pread(exchange, wire.WORK.size, wire.RECORD_BYTES)
        _, seed, memory_bytes, _, max_processes, file_mib, _, _ = wire.WORK.unpack(header)
        speech.send(wire.LINE_HELLO, cage.apply_to_session(directory, max_processes=max_processes))
        confine.take_streams(exchange, line, output)
        speech.forget()
        speech = Line(LINE)
        os.close(confine.EXCHANGE)
        cage.limit_session(memory_bytes=memory_bytes, file_bytes=file_mib << 20)
        seed_all(seed)
        session = Session(cage, speech)
        speech.send(wire.LINE_BORN)
    except BaseException as error:
        speech.send(wire.LINE_FAILED + f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace"))
        os._exit(_FAILED)
    session.live()


def _take_stdin(descriptor: int) -> None:
    """What the cell reads from its standard input: a sealed file, or nothing."""
    os.dup2(descriptor, 0)
    os.close(descriptor)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115 - until the next cell
    sys.__dict__.update(__stdin__=sys.stdin)
