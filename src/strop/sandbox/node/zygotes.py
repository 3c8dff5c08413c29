"""The supervisor's end of the fork servers: children that are already shut in and wait for their work.

Every piece of work runs in a child that was forked before it came, if the machine had the time, so that a lone call does not
wait for a fork. A child is used once. Nothing that one writes reaches the fork server: the next is as clean as the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from strop.errors import MachineError
from strop.sandbox.inside import wire
from strop.sandbox.node.directories import Directory, check_temporary_directory
from strop.sandbox.node.processes import is_readable, pid_of
from strop.sandbox.protocol import IsolationLevel

_log = logging.getLogger(__name__)

_START_LIMIT_S = 60.0  # of a fork server; 0.1 s bare and 2 s with sympy when the machine is idle
_MAX_UNSTARTED = 16  # children asked of one fork server at once; more would only lengthen its queue
INSIDE = Path(wire.__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a child ended, as its parent saw it."""

    exit_code: int | None
    signal: int | None
    cpu_s: float
    peak_bytes: int
    is_lost: bool = False  # its fork server died under it: nobody knows how it would have ended


LOST = Ended(exit_code=None, signal=None, cpu_s=0.0, peak_bytes=0, is_lost=True)


class Child:
    """One confined process that waits for its work, does it, and ends."""

    __slots__ = (
        "_is_killed",
        "_on_end",
        "_pid",
        "_wake",
        "_zygote",
        "directory",
        "ended",
        "exchange",
        "number",
        "output",
        "pidfd",
        "started_at",
    )

    def __init__(
        self, zygote: Zygote, number: int, *, exchange: int, wake: int, output: int, directory: Directory | None
    ) -> None:
        self._zygote = zygote
        self._wake = wake
        self._is_killed = False
        self._pid = 0  # as its parent sees it
        self._on_end: Callable[[], None] | None = None
        self.number = number
        self.exchange = exchange  # a memory file: its record, then its work
        self.output = output  # the read end of its stdout and stderr
        self.directory = directory  # its own on disk; None where it has a private /tmp
        self.pidfd = -1
        self.started_at = 0.0  # 0 until its parent said so
        self.ended: Ended | None = None

    def give(self, work: bytes, on_end: Callable[[], None]) -> None:
        """Let it begin; `on_end` is called once, when it and everything that it started are dead."""
        os.pwrite(self.exchange, work, wire.RECORD_BYTES)
        os.eventfd_write(self._wake, 1)
        self.watch(on_end)

    def watch(self, on_end: Callable[[], None]) -> None:
        """`on_end` is called once, as for `give`, of a child that has its work from the start."""
        self._on_end = on_end
        if self.ended is not None:
            on_end()

    def kill(self) -> None:
        """Safe at any time. It is pid 1 of its namespace: with it dies everything that it started."""
        self._is_killed = True
        if self.pidfd >= 0 and self.ended is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            if self.directory is not None:  # no pid namespace, but a process group that it cannot leave
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._pid, signal.SIGKILL)

    @property
    def is_dead(self) -> bool:
        """Whether it is over, even if its parent has not said so yet."""
        return self.ended is not None or (self.pidfd >= 0 and is_readable(self.pidfd))

    def abandon(self) -> None:
        """Give up its fork server, which does not tell what became of it."""
        _log.warning("a fork server of the sandbox does not answer; giving it up")
        self._zygote.lose()

    def host_pid(self) -> int | None:
        """Its process id as this process sees it; None when it has ended."""
        try:
            return pid_of(self.pidfd) or None
        except OSError:  # there is no descriptor left to look through, or it was given back
            return None

    @property
    def num_others(self) -> int:
        """Processes that RLIMIT_NPROC counts besides its own: without namespaces and without root, all of this user."""
        return self._zygote.num_others

    @property
    def adopter(self) -> int:
        """The process that its orphans become children of; 0 where that is itself."""
        return self._zygote.pid if self.directory is not None else 0

    def close(self) -> None:
        """Give back its descriptors and its directory; kills it first when it still runs. Safe to call twice."""
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
        """It holds its ends now: the pipe of its output ends when the last of its processes does."""
        os.close(descriptors[2])
        if descriptors[1] != self._wake:  # of a line the other end is the supervisor's
            os.close(descriptors[1])

    def _release(self) -> None:
        for descriptor in (self.exchange, self._wake, self.output, self.pidfd):
            if descriptor >= 0:
                os.close(descriptor)
        self.exchange = self._wake = self.output = self.pidfd = -1
        if self.directory is not None:
            self.directory.remove()
            self.directory = None


class Zygote:
    """One fork server process. Belongs to one event loop."""

    def __init__(self, profile: str, level: IsolationLevel, *, modules: tuple[str, ...], on_lost: Callable[[], None]) -> None:
        check_temporary_directory(level)
        self._loop = asyncio.get_running_loop()
        self._level = level
        self._on_lost = on_lost
        self._numbers = itertools.count(1)
        self._children: dict[int, Child] = {}  # not reported as started yet
        self._by_pid: dict[int, Child] = {}
        self._spares: deque[Child] = deque()
        self._to_send: deque[tuple[Child, bytes, tuple[int, int, int]]] = deque()
        self._hello: asyncio.Future[None] = self._loop.create_future()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(self._socket.close)
            self._socket.setblocking(False)
            # In this thread, which lives as long as the event loop: where it has namespaces, and while it starts, the fork
            # server dies with the thread that started it.
            self._process = subprocess.Popen(
                command(INSIDE / "boot.py", level, profile, modules=modules, control=theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=ENVIRONMENT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
            undo.pop_all()
        self._loop.add_reader(self._socket, self._read)
        self.profile = profile
        self.num_spawned = 0
        self.is_lost = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def num_alive(self) -> int:
        return len(self._children) + len(self._by_pid)

    @property
    def num_others(self) -> int:
        if self._level.rank >= 2 or os.geteuid() == 0:
            return 0
        return _num_threads_of_user(int(time.monotonic()))

    @property
    def is_idle(self) -> bool:
        """Whether nothing but spare children is left of it."""
        return self.num_alive <= len(self._spares)

    async def hello(self) -> None:
        """Returns when it is ready. Raises `MachineError` with its words when it cannot isolate or start."""
        done, _ = await asyncio.wait({self._hello}, timeout=_START_LIMIT_S)
        if not done:
            self.lose()
            raise MachineError(f"a fork server of the sandbox did not start within {_START_LIMIT_S:.0f} s")
        await self._hello
        if self.is_lost:
            raise MachineError("a fork server of the sandbox died as it became ready")
        self._spares.append(self._spawn())

    def take(self) -> Child:
        """A child for one piece of work, and another one on its way for the next."""
        child = self._spares.popleft() if self._spares else self._spawn()
        if not self._spares and not self.is_lost:
            with contextlib.suppress(MachineError):  # no room for a spare; the next call asks again
                self._spares.append(self._spawn())
        return child

    def take_session(self, work: bytes) -> tuple[Child, socket.socket]:
        """A child that keeps its state, and the line to it."""
        try:
            line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise _no_room(error) from error
        with contextlib.ExitStack() as undo:
            undo.callback(line.close)
            line.setblocking(False)
            child = self._spawn(work=work, line=theirs.detach())
            undo.pop_all()
        return child, line

    def lose(self) -> None:
        """Kill it, with everything it runs, and tell those who wait. Safe to call twice."""
        if self.is_lost:
            return
        self.is_lost = True
        for child in self._by_pid.values():
            child.kill()  # where there is no pid namespace, what it started does not die with the fork server
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._process.kill()
        self._process.wait()
        for child, _, descriptors in self._to_send:
            child.close_sent(descriptors)
        self._to_send.clear()
        if not self._hello.done():
            self._hello.set_exception(MachineError("a fork server of the sandbox ended before it was ready"))
            self._hello.exception()  # marks it as seen: nobody may be waiting for it
        for child in [*self._children.values(), *self._by_pid.values()]:
            child.take_end(LOST)
        for child in self._spares:
            child.close()
        self._spares.clear()
        self._children.clear()
        self._by_pid.clear()
        self._on_lost()

    def _spawn(self, *, work: bytes = b"", line: int = -1) -> Child:
        """A child that waits for its work or, with a `line`, has it already and lives on."""
        number = next(self._numbers)
        self.num_spawned += 1
        wake, directory = -1, None
        with contextlib.ExitStack() as undo:
            if line >= 0:
                undo.callback(os.close, line)
            try:
                exchange = os.memfd_create("exchange", os.MFD_CLOEXEC)
                undo.callback(os.close, exchange)
                os.ftruncate(exchange, wire.RECORD_BYTES)
                if line < 0:
                    wake = os.eventfd(0, os.EFD_CLOEXEC)
                    undo.callback(os.close, wake)
                output_read, output_write = os.pipe2(os.O_CLOEXEC)
                undo.callback(os.close, output_read)
                undo.callback(os.close, output_write)
                os.set_blocking(output_read, False)
                if line >= 0:
                    os.pwrite(exchange, work, wire.RECORD_BYTES)
                if self._level.rank < IsolationLevel.NAMESPACES.rank:
                    directory = Directory.for_call()
            except OSError as error:
                raise _no_room(error) from error
            undo.pop_all()
        child = Child(self, number, exchange=exchange, wake=wake, output=output_read, directory=directory)
        self._children[number] = child
        mark = wire.SESSION_MARK if line >= 0 else ""
        # The fork server reads it into a buffer that holds the packet before: what is shorter must say where it ends.
        message = wire.SPAWN.pack(number) + f"{mark}{directory.path if directory else ''}\0".encode()
        self._to_send.append((child, message, (exchange, wake if line < 0 else line, output_write)))
        self._send()
        return child

    def _send(self) -> None:
        while self._to_send and len(self._children) - len(self._to_send) < _MAX_UNSTARTED:
            child, message, descriptors = self._to_send.popleft()
            try:
                socket.send_fds(self._socket, [message], list(descriptors))
            except OSError:
                self._to_send.appendleft((child, message, descriptors))
                self.lose()
                return
            child.close_sent(descriptors)

    def _read(self) -> None:
        while not self.is_lost:
            try:
                message, descriptors, _, _ = socket.recv_fds(self._socket, 4096, 1)
            except BlockingIOError:
                return
            except ConnectionError:
                message, descriptors = b"", []
            except OSError as error:  # no descriptor left for the one that came
                _log.warning("the supervisor cannot take what a fork server sends: %s", error)
                message, descriptors = b"", []
            is_start = message[:4] == wire.KIND_STARTED.to_bytes(4, "little")
            if len(message) < wire.REPORT.size or (is_start and not descriptors):
                self.lose()
                return
            self._take(message, descriptors)

    def _take(self, message: bytes, descriptors: list[int]) -> None:
        kind, status, number, pid, cpu_us, peak_kib = wire.REPORT.unpack_from(message)
        if kind == wire.KIND_STARTED:
            child = self._by_pid[pid] = self._children.pop(number)
            child.take_start(pid, descriptors[0])
            self._send()
        elif kind in (wire.KIND_EXITED, wire.KIND_SIGNALED):
            is_exit = kind == wire.KIND_EXITED
            if (ended := self._by_pid.pop(pid, None)) is None:
                return  # an orphan of a program, adopted
            ended.take_end(
                Ended(
                    exit_code=status if is_exit else None,
                    signal=None if is_exit else status,
                    cpu_s=cpu_us / 1e6,
                    peak_bytes=peak_kib << 10,
                )
            )
        elif kind == wire.KIND_REFUSED:
            _log.warning("the machine refused to fork another program: %s", os.strerror(status))
            self._children.pop(number).take_end(LOST)
            self._send()
        elif kind == wire.KIND_HELLO:
            self._hello.set_result(None)
        else:
            self._hello.set_exception(MachineError(message[wire.REPORT.size :].decode("utf-8", "replace")))


def _no_room(error: OSError) -> MachineError:
    return MachineError(f"there is no room for another program: {error}. Raise `ulimit -n`, or make room for temporary files.")


@functools.lru_cache(maxsize=1)
def _num_threads_of_user(second: int) -> int:
    """Of the user of this process, as /proc shows them in the given `second`: reading them takes a millisecond or more."""
    count = 0
    for process in Path("/proc").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if process.name.isdecimal() and process.stat().st_uid == os.geteuid():
                count += len(os.listdir(process / "task"))
    return count


ENVIRONMENT = {  # all that a program sees of an environment; nothing of ours
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": wire.WORK_DIRECTORY,
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # each thread would reserve 64 MiB of the address space that a program may have
}


def command(script: Path, level: IsolationLevel, profile: str, *, modules: tuple[str, ...] = (), **more: object) -> list[str]:
    """Runs `script` clean of all that is ours, with the settings of a fork server as its argument."""
    libraries = list(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))
    system = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives"]
    shown: list[str] = []
    for path in [*system, sys.base_prefix, sys.prefix, *libraries]:
        if not any(Path(path).is_relative_to(other) for other in shown):
            shown.append(path)
    settings: dict[str, object] = {"level": level.value, "profile": profile, "modules": modules, "shown": shown}
    settings |= {"libraries": libraries, "supervisor": os.getpid(), **more}
    # -P and -s rather than -I, which would also ignore PYTHONHASHSEED.
    return [sys.executable, "-s", "-P", "-S", "-B", str(script), json.dumps(settings)]
