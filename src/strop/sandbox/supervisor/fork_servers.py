"""Starts fork servers and takes confined children from them, in pools of equal servers by profile.

A call runs in a child that was forked before the call came, if there was time for that, so it does not wait for a fork. A
child is used once. Nothing that it writes reaches the fork server, so the next child is as clean as the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import logging
import os
import re
import socket
import subprocess
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from strop.errors import MachineError
from strop.sandbox.inside import wire
from strop.sandbox.protocol import IsolationLevel
from strop.sandbox.supervisor.directories import Directory, check_temporary_directory
from strop.sandbox.supervisor.process_status import num_threads_of_user
from strop.sandbox.supervisor.processes import LOST, Child, Ended

_log = logging.getLogger(__name__)

_START_LIMIT_S = 60.0  # of a fork server; 0.1 s bare and 2 s with sympy on an idle machine
_MAX_UNSTARTED = 16  # children that one fork server starts at once; more would only lengthen its queue
_NUM_DISCARDED = 3  # children of a new fork server
_DISCARD_LIMIT_S = 5.0  # for all of them; 10 ms on an idle machine
_RECYCLE_AFTER = 100_000  # children of one fork server before another takes its place
BOOT = Path(wire.__file__).with_name("boot.py")  # the script that runs a module of `inside`
_IMPORT = re.compile(r"^[ \t]*(?:from|import)[ \t]+([\w., \t]+)", re.MULTILINE)
_FULL_NAMES = {"sympy", "scipy", "mpmath"}

ENVIRONMENT = {  # the whole environment of a program
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": wire.WORK_DIRECTORY,
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # otherwise each thread reserves 64 MiB of the address space of a program
}


def command(*script: str, level: IsolationLevel, profile: str, modules: tuple[str, ...] = (), **more: object) -> list[str]:
    """The command that runs `script` in a clean interpreter, with the settings of a fork server as its last argument."""
    libraries = list(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))
    system = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives"]
    shown: list[str] = []
    for path in [*system, sys.base_prefix, sys.prefix, *libraries]:
        if not any(Path(path).is_relative_to(other) for other in shown):
            shown.append(path)
    settings: dict[str, object] = {"level": level.value, "profile": profile, "modules": modules, "shown": shown}
    settings |= {"libraries": libraries, "supervisor": os.getpid(), **more}
    # -P and -s rather than -I, which would also ignore PYTHONHASHSEED.
    return [sys.executable, "-s", "-P", "-S", "-B", *script, json.dumps(settings)]


def start_inside(
    make_command: Callable[..., list[str]], environment: dict[str, str], *, stderr: int | None = None
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a process of strop's own code that may die with the thread that calls this, so call it in that of the event loop.

    Args:
        make_command: returns the command, given as `control` the descriptor of the other end of the socket.
        stderr: as `Popen` takes it; None: that of this process.

    Returns:
        a seqpacket socket to the process, and the process.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, contextlib.ExitStack() as undo:
        undo.callback(ours.close)
        ours.setblocking(False)
        process = subprocess.Popen(
            make_command(control=theirs.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            cwd="/",
            env=environment,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
        undo.pop_all()
    return ours, process


def profile_of(code: str) -> str:
    """The smallest profile with the modules that `code` imports. A wrong guess costs time, never correctness."""
    if "import" not in code:
        return "bare"
    names = {name.strip().partition(" ")[0].partition(".")[0] for found in _IMPORT.findall(code) for name in found.split(",")}
    return "full" if names & _FULL_NAMES else "numpy" if "numpy" in names else "bare"


class ForkServer:
    """One fork server process. Belongs to one event loop."""

    def __init__(self, profile: str, level: IsolationLevel, *, modules: tuple[str, ...], on_lost: Callable[[], None]) -> None:
        check_temporary_directory(level)
        self._loop = asyncio.get_running_loop()
        self._level = level
        self._on_lost = on_lost
        self._numbers = itertools.count(1)
        self._children: dict[int, Child] = {}  # not reported as started yet
        self._by_pid: dict[int, Child] = {}
        self._spare: Child | None = None
        self._to_send: deque[tuple[Child, bytes, tuple[int, int, int]]] = deque()
        self._hello: asyncio.Future[None] = self._loop.create_future()
        make = functools.partial(command, str(BOOT), "main", level=level, profile=profile, modules=modules)
        self._socket, self._process = start_inside(make, ENVIRONMENT, stderr=subprocess.DEVNULL)
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
        """Processes that RLIMIT_NPROC counts next to those of a child: without namespaces and root, all of this user."""
        is_apart = self._level.rank >= IsolationLevel.NAMESPACES.rank or os.geteuid() == 0
        return 0 if is_apart else num_threads_of_user(int(time.monotonic()))

    @property
    def is_idle(self) -> bool:
        """Whether it has at most its spare child."""
        return self.num_alive <= (self._spare is not None)

    async def hello(self) -> None:
        """Return when it is ready.

        Raises:
            MachineError: with its own message, it cannot isolate or start. The caller then calls `lose`.
        """
        done, _ = await asyncio.wait({self._hello}, timeout=_START_LIMIT_S)
        if not done:
            raise MachineError(f"a fork server of the sandbox did not start within {_START_LIMIT_S:.0f} s")
        await self._hello
        # The first forks and deaths fill caches of its interpreter: addresses of objects are the same only in later children.
        try:
            async with asyncio.timeout(_DISCARD_LIMIT_S):
                for _ in range(_NUM_DISCARDED):
                    await self._discard_child()
        except TimeoutError as error:
            raise MachineError("a fork server of the sandbox does not answer") from error
        if self.is_lost:
            raise MachineError("a fork server of the sandbox died as it became ready")
        self._spare = self._spawn()

    async def _discard_child(self) -> None:
        ended, child = asyncio.Event(), self._spawn()
        child.watch(ended.set)
        child.kill()
        try:
            await ended.wait()
        finally:
            child.close()

    def take(self) -> Child:
        """Return a child for one piece of work, and start another one for the next."""
        child, self._spare = self._spare or self._spawn(), None
        if not self.is_lost:
            with contextlib.suppress(MachineError):  # no room for a spare; the next call tries again
                self._spare = self._spawn()
        return child

    def take_session(self, work: bytes) -> tuple[Child, socket.socket]:
        """Return a child that keeps its state, and the line to it."""
        try:
            line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise _no_room(error) from error
        try:
            line.setblocking(False)
            return self._spawn(work=work, line=theirs.detach()), line
        except BaseException:
            line.close()
            raise

    def lose(self) -> None:
        """Kill it with everything that it runs, and fail the waiting calls. Safe to call twice."""
        if self.is_lost:
            return
        self.is_lost = True
        for child in self._by_pid.values():
            child.kill()  # without a pid namespace, what it started survives the fork server
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._process.kill()
        self._process.wait()
        for child, _, descriptors in self._to_send:
            child.close_sent(descriptors)
        self._to_send.clear()
        if not self._hello.done():
            self._hello.set_exception(MachineError("a fork server of the sandbox ended before it was ready"))
            self._hello.exception()  # marks it as retrieved, if no caller waits
        for child in [*self._children.values(), *self._by_pid.values()]:
            child.take_end(LOST)
        if self._spare is not None:
            self._spare.close()
            self._spare = None
        self._children.clear()
        self._by_pid.clear()
        self._on_lost()

    def _spawn(self, *, work: bytes = b"", line: int = -1) -> Child:
        """Start a child that waits for its work or, with a `line`, has its work and lives on."""
        number = next(self._numbers)
        self.num_spawned += 1
        directory, wake = None, -1
        opened = [] if line < 0 else [line]
        try:
            opened.append(exchange := os.memfd_create("exchange", os.MFD_CLOEXEC))
            os.ftruncate(exchange, wire.RECORD_BYTES)
            if line < 0:
                opened.append(wake := os.eventfd(0, os.EFD_CLOEXEC))
            else:
                os.pwrite(exchange, work, wire.RECORD_BYTES)
            output_read, output_write = os.pipe2(os.O_CLOEXEC)
            opened += [output_read, output_write]
            os.set_blocking(output_read, False)
            if self._level.rank < IsolationLevel.NAMESPACES.rank:
                directory = Directory.make()
        except OSError as error:
            for descriptor in opened:
                os.close(descriptor)
            raise _no_room(error) from error
        child = Child(self, exchange=exchange, wake=wake, output=output_read, directory=directory)
        self._children[number] = child
        mark = wire.SESSION_MARK if line >= 0 else ""
        # NUL marks the end: the fork server reads it into a buffer that still holds the packet before.
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
            except OSError as error:
                if not isinstance(error, ConnectionError):  # no descriptor left for the one that came
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
            code, number = (status, None) if kind == wire.KIND_EXITED else (None, status)
            if (ended := self._by_pid.pop(pid, None)) is not None:  # else an orphan of a program, adopted
                ended.take_end(Ended(exit_code=code, signal=number, cpu_s=cpu_us / 1e6, peak_bytes=peak_kib << 10))
        elif kind == wire.KIND_REFUSED:
            _log.warning("the machine refused to fork another program: %s", os.strerror(status))
            self._children.pop(number).take_end(LOST)
            self._send()
        elif kind == wire.KIND_HELLO:
            self._hello.set_result(None)
        else:
            self._hello.set_exception(MachineError(message[wire.REPORT.size :].decode("utf-8", "replace")))


class ForkServerPool:
    """Equal fork servers of one profile: started when first needed, replaced when they die or are old.

    Each loads its modules itself, since forks of one process contend for its pages.

    Args:
        profile: one of `inside.main.MODULES`.
        level: of all its children.
        num_servers: one for each core.
        modules: more modules to load.
    """

    def __init__(self, profile: str, level: IsolationLevel, *, num_servers: int, modules: tuple[str, ...]) -> None:
        self.profile = profile
        self._level = level
        self._num_servers = num_servers
        self._modules = modules
        self._servers: list[ForkServer] = []
        self._retired: list[ForkServer] = []
        self._start: asyncio.Task[None] | None = None
        self._is_closed = False

    async def server(self) -> ForkServer:
        """Return the least loaded fork server. Raises `MachineError` when none can be started."""
        if not self._servers:
            await self.start(1)
        server = min(self._servers, key=lambda one: one.num_alive)
        if server.num_spawned > _RECYCLE_AFTER:  # it serves this call, and no other
            self._servers.remove(server)
            self._retired.append(server)
            self._refill()
        for retired in [one for one in self._retired if one.is_idle and one is not server]:
            retired.lose()
        return server

    async def start(self, num_needed: int) -> None:
        """Return when so many fork servers are ready; the others follow."""
        while len(self._servers) < num_needed:
            if self._is_closed:
                raise MachineError("the sandbox was closed; a call came after that")
            self._refill()
            start = self._start
            assert start is not None
            await asyncio.wait({start})
            if not start.cancelled():  # a closed pool cancels it
                start.result()

    def close(self) -> None:
        self._is_closed = True
        if self._start is not None:
            self._start.cancel()
        for server in [*self._servers, *self._retired]:
            server.lose()

    def _refill(self) -> None:
        is_needed = len(self._servers) < self._num_servers and not self._is_closed
        if is_needed and (self._start is None or self._start.done()):
            self._start = asyncio.get_running_loop().create_task(self._start_missing())
            self._start.add_done_callback(_note_failure)

    async def _start_missing(self) -> None:
        """Start the first one separately: then a failure is logged once, and a waiting call waits for only one."""
        num_missing = 1 if not self._servers else self._num_servers - len(self._servers)
        await asyncio.gather(*(self._start_one() for _ in range(num_missing)))
        if len(self._servers) < self._num_servers:
            asyncio.get_running_loop().call_soon(self._refill)

    async def _start_one(self) -> None:
        def lost() -> None:
            for servers in (self._servers, self._retired):
                if server in servers:
                    servers.remove(server)
                    if servers is self._servers and not self._is_closed:
                        _log.warning("a fork server of the sandbox (%s) died; starting another", self.profile)
                        self._refill()

        server = ForkServer(self.profile, self._level, modules=self._modules, on_lost=lost)
        try:
            await server.hello()
        except BaseException:
            server.lose()
            raise
        self._servers.append(server)


def _note_failure(start: asyncio.Task[None]) -> None:
    if not start.cancelled() and (error := start.exception()) is not None:
        _log.warning("a fork server of the sandbox did not start: %s", error)


def _no_room(error: OSError) -> MachineError:
    return MachineError(f"there is no room for another program: {error}. Raise `ulimit -n`, or make room for temporary files.")
