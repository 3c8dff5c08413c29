"""The processes that run programs and cells, as the supervisor sees them: their work, their output, their end.

A `Child` of a fork server runs one program. An `Interpreter` holds the state of a session. The first one of a session is a
child. A fork makes it the stem of two copies, which die with it; so it lives as long as one of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from strop.sandbox.inside import seccomp, wire
from strop.sandbox.supervisor.directories import Directory
from strop.sandbox.supervisor.process_status import ProcessStatus, is_readable, pid_of

if TYPE_CHECKING:
    from strop.sandbox.supervisor.fork_servers import ForkServer

_log = logging.getLogger(__name__)

_MAX_REFUSED_AT_ONCE = 8
_MAX_UNREAD = 1_000  # packets that may wait on a line; its queue holds fewer


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a child ended, as its parent saw it."""

    exit_code: int | None
    signal: int | None
    cpu_s: float
    peak_bytes: int
    is_lost: bool = False  # its fork server died first, so its own end is unknown


LOST = Ended(exit_code=None, signal=None, cpu_s=0.0, peak_bytes=0, is_lost=True)


class Child:
    """One confined process that waits for its work, does it, and ends."""

    def __init__(self, server: ForkServer, *, exchange: int, wake: int, output: int, directory: Directory | None) -> None:
        self.server = server
        self._wake = wake
        self._is_killed = False
        self._pid = 0  # in the pid namespace of its parent
        self._on_end: Callable[[], None] | None = None
        self.exchange = exchange  # a memory file: its record, then its work
        self.output = output  # the read end of its stdout and stderr
        self.directory = directory  # its directory on disk; None where it has a private /tmp
        self.pidfd = -1
        self.started_at = 0.0  # 0 until its parent reports it
        self.ended: Ended | None = None

    def give(self, work: bytes, on_end: Callable[[], None]) -> None:
        """Give it its work. `on_end` is called once, when it and everything that it started are dead."""
        os.pwrite(self.exchange, work, wire.RECORD_BYTES)
        os.eventfd_write(self._wake, 1)
        self.watch(on_end)

    def watch(self, on_end: Callable[[], None]) -> None:
        """Call `on_end` once, as `give` does, for a child that has its work from the start."""
        self._on_end = on_end
        if self.ended is not None:
            on_end()

    def kill(self) -> None:
        """Safe at any time. It is pid 1 of its namespace, so everything that it started dies too."""
        self._is_killed = True
        if self.pidfd >= 0 and self.ended is None:
            self.signal(signal.SIGKILL)
            if self.directory is not None:  # no pid namespace, but a process group that it cannot leave
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._pid, signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send a signal to a child that has started."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    @property
    def is_dead(self) -> bool:
        """Whether it has ended, reported or not."""
        return self.ended is not None or (self.pidfd >= 0 and is_readable(self.pidfd))

    def abandon(self) -> None:
        """Give up its fork server, which does not report its end."""
        _log.warning("a fork server of the sandbox does not answer; giving it up")
        self.server.lose()

    def host_pid(self) -> int | None:
        """Its pid in our namespace; None when it has ended."""
        with contextlib.suppress(OSError):  # no descriptor is left to read it, or the child is closed
            return pid_of(self.pidfd) or None
        return None

    @property
    def adopter(self) -> int:
        """The process that adopts its orphans; 0 if that is itself."""
        return self.server.pid if self.directory is not None else 0

    def close(self) -> None:
        """Release its descriptors and its directory; kills it first when it still runs. Safe to call twice."""
        if self.ended is None:
            self.kill()
            self._on_end = self._release
        else:
            self._release()

    def take_start(self, pid: int, pidfd: int) -> None:
        self._pid = pid
        self.pidfd = pidfd
        self.started_at = time.monotonic()
        if self._is_killed:
            self.kill()

    def take_end(self, ended: Ended) -> None:
        if self.ended is None:
            self.ended = ended
            if self._on_end is not None:
                self._on_end()

    def close_sent(self, descriptors: tuple[int, int, int]) -> None:
        """Close our copies of its descriptors: the pipe of its output then ends with the last of its processes."""
        os.close(descriptors[2])
        if descriptors[1] != self._wake:  # for a session it is the other end of the line
            os.close(descriptors[1])

    def _release(self) -> None:
        for descriptor in (self.exchange, self._wake, self.output, self.pidfd):
            if descriptor >= 0:
                os.close(descriptor)
        self.exchange = self._wake = self.output = self.pidfd = -1
        if self.directory is not None:
            self.directory.remove()
            self.directory = None


@dataclass(slots=True, kw_only=True)
class Family:
    """What a session and all its copies have in common. Its first process, the last to end, closes the listener."""

    listener: int  # receives their requests for namespaces; -1 where there are none
    owner: int  # uid on this machine that owns their namespaces
    max_processes: int  # that each may start
    forking: asyncio.Lock = field(default_factory=asyncio.Lock)  # one fork at a time, since all requests arrive at one listener

    def refuse_questions(self) -> None:
        """Refuse programs that ask for namespaces or mounts. A few at a time: asking costs a program more than answering us."""
        if self.listener < 0 or self.forking.locked():
            return
        for _ in range(_MAX_REFUSED_AT_ONCE):
            if (question := self.next_question()) is None:
                return
            seccomp.refuse(self.listener, question.id)

    def next_question(self) -> seccomp.Notification | None:
        """The next request, or None. Never waits."""
        with contextlib.suppress(OSError):  # all processes that could ask are dead
            return seccomp.receive(self.listener) if is_readable(self.listener) else None  # else the kernel would wait for one
        return None


@dataclass(slots=True, eq=False)
class Interpreter:
    """One living process. `on_end` is called once, when the process and everything that it started are dead."""

    line: socket.socket  # our end of a seqpacket socket to the process
    output: int  # what the process prints, in all cells
    pidfd: int  # of the process
    _: KW_ONLY
    status: ProcessStatus  # of the process; closed by this object
    family: Family  # of its session and all copies
    stem: Interpreter | None = None  # the process whose namespaces contain its own; None for a child of a fork server
    child: Child | None = None  # that child; None for a copy
    num_copies: int = field(default=0, init=False)  # of a stem: those that are not released
    ended: Ended | None = field(default=None, init=False)
    on_end: Callable[[], None] | None = field(default=None, init=False)
    _is_closed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.child is None:
            asyncio.get_running_loop().add_reader(self.pidfd, self._take_end)
        else:
            self.child.watch(self._take_end)

    @property
    def pid(self) -> int:
        return self.status.pid

    @property
    def depth(self) -> int:
        return 0 if self.stem is None else self.stem.depth + 1

    @property
    def adopter(self) -> int:
        return 0 if self.child is None else self.child.adopter

    def host_pid(self) -> int | None:
        return self.pid if self.ended is None else None

    @property
    def root(self) -> Interpreter:
        """The first process of its family, whose namespaces contain all others."""
        return self if self.stem is None else self.stem.root

    def send(self, packet: bytes, descriptors: Sequence[int] = ()) -> None:
        """Raises `OSError` when the process closed its end, or no longer reads."""
        socket.send_fds(self.line, [packet], list(descriptors))

    def signal(self, number: signal.Signals) -> None:
        if self.ended is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        """Kill pid 1 of a namespace, and so everything in it."""
        if self.child is not None:
            self.child.kill()
        else:
            self.signal(signal.SIGKILL)

    def abandon(self) -> None:
        """Give up its fork server, which does not report the end of a killed process."""
        if self.child is not None:
            self.child.abandon()

    @property
    def is_dead(self) -> bool:
        """Whether it has ended, reported or not."""
        return self.ended is not None or is_readable(self.pidfd)

    def close(self) -> None:
        """Kill it, and release its resources as soon as it is dead. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.ended is None:
            self.kill()
        else:
            self._release()

    def _take_end(self) -> None:
        was_closed = self._is_closed
        if self.child is not None:
            self.ended = self.child.ended
        else:
            asyncio.get_running_loop().remove_reader(self.pidfd)
            self.ended = _end_of(self.status)
        if self.on_end is not None:
            self.on_end()
        if was_closed:
            self._release()

    def _release(self) -> None:
        self.line.close()
        self.status.close()
        if self.child is not None:
            self.child.close()  # with its descriptors
        else:
            os.close(self.pidfd)
            os.close(self.output)
        if self.stem is not None:
            self.stem.num_copies -= 1
            if not self.stem.num_copies:
                self.stem.close()
        elif self.family.listener >= 0:
            os.close(self.family.listener)
            self.family.listener = -1


def drain(line: socket.socket) -> None:
    """Drop the packets that wait on a line."""
    with contextlib.suppress(BlockingIOError):
        for _ in range(_MAX_UNREAD):
            line.recv(1)


async def readable(descriptor: int) -> None:
    """Return when there is something to read."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


def _end_of(status: ProcessStatus) -> Ended:
    """How a copy ended. No parent waits for it, so its entry in /proc stays until its stem is killed."""
    fields = status.stat
    if not fields or fields[0] not in "ZX":
        return LOST
    code = int(fields[49])
    number = code & 0x7F or None
    return Ended(exit_code=None if number else (code >> 8) & 0xFF, signal=number, cpu_s=status.cpu_s, peak_bytes=0)
