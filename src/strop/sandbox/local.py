"""Runs programs on this machine: the supervisor of the fork server. Deadlines, caps and classes are decided here.

No program runs in this process and nothing a program writes is trusted: its class comes from the clock, from how it ended
and from whether its output pipe delivered a byte. Its own record may only choose the text of its error or of its echo.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from strop.errors import MachineError, UserError
from strop.sandbox import zygote as wire
from strop.sandbox.config import SandboxConfig
from strop.sandbox.output import OutputTail
from strop.sandbox.protocol import CodeRunner, IsolationLevel, RunOutcome, RunRequest, RunResult, RunTimings

_log = logging.getLogger(__name__)

_START_LIMIT_S = 20.0  # of the fork server; 0.1 s when the machine is idle
_FORK_LIMIT_S = 5.0  # from a request to its child
_KILL_LIMIT_S = 5.0  # from SIGKILL to the report of the end
_PROBE = RunRequest(code="print(6 * 7)", wall_s=_FORK_LIMIT_S)


_ReportT = TypeVar("_ReportT")


class _ZygoteLost(Exception):  # noqa: N818 - named for what happened; never leaves this module
    """The fork server died or hung, with all programs in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Started:
    pid: int  # in the fork server's namespace
    pidfd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    exit_code: int | None
    signal: int | None


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    """The two reports that a request gets from the fork server."""

    started: asyncio.Future[_Started]
    ended: asyncio.Future[_Ended]


class _Zygote:
    """The supervisor's end of one fork server process."""

    def __init__(self, level: IsolationLevel) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, _Call] = {}
        self._by_pid: dict[int, _Call] = {}
        self._ids = itertools.count(1)
        self._hello: asyncio.Future[None] = self._loop.create_future()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        with theirs:
            # In this thread, which lives as long as the event loop: the fork server dies with the thread that started it.
            self._process = subprocess.Popen(
                _command(theirs.fileno(), level),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=_environment(),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._loop.add_reader(self._socket, self._read)
        self.is_lost = False

    async def hello(self) -> None:
        """Returns when it is ready. Raises `MachineError` with its words when it cannot isolate or start."""
        try:
            await asyncio.wait_for(asyncio.shield(self._hello), _START_LIMIT_S)
        except TimeoutError as error:
            raise MachineError(f"the fork server of the sandbox did not start within {_START_LIMIT_S:.0f} s") from error

    def request(self, descriptors: tuple[int, int, int, int]) -> _Call:
        """Ask for a child that runs with `descriptors`: payload, stdin, output, record."""
        if self.is_lost:
            raise _ZygoteLost
        call_id = next(self._ids)
        call = _Call(started=self._loop.create_future(), ended=self._loop.create_future())
        self._calls[call_id] = call
        try:
            socket.send_fds(self._socket, [call_id.to_bytes(8, sys.byteorder)], list(descriptors))
        except OSError as error:  # gone, or so far behind that its queue of requests is full
            del self._calls[call_id]
            self.lose()
            raise _ZygoteLost from error
        return call

    def lose(self) -> None:
        """Kill it, with every program it runs, and tell those who wait. Safe to call twice."""
        if self.is_lost:
            return
        self.is_lost = True
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._process.kill()
        self._process.wait()
        for call in [*self._calls.values(), *self._by_pid.values()]:
            for future in (call.started, call.ended):
                if not future.done():
                    future.set_exception(_ZygoteLost())
                    future.exception()  # marks it as seen: nobody may be waiting for this one
        self._calls.clear()
        self._by_pid.clear()
        if not self._hello.done():
            self._hello.set_exception(MachineError("the fork server of the sandbox ended before it was ready"))
            self._hello.exception()

    def _read(self) -> None:
        while not self.is_lost:
            try:
                message, descriptors, _, _ = socket.recv_fds(self._socket, 4096, 1)
            except BlockingIOError:
                return
            except ConnectionError:
                message, descriptors = b"", []
            if len(message) < wire.REPORT.size:
                self.lose()
                return
            self._take(message, descriptors)

    def _take(self, message: bytes, descriptors: list[int]) -> None:
        kind, status, call_id, pid = wire.REPORT.unpack_from(message)
        if kind == wire.KIND_HELLO:
            self._hello.set_result(None)
        elif kind == wire.KIND_FAILED:
            self._hello.set_exception(MachineError(message[wire.REPORT.size :].decode()))
        elif kind == wire.KIND_STARTED:
            call = self._by_pid[pid] = self._calls.pop(call_id)
            if call.started.cancelled():  # whoever asked is gone, and so must the program be
                with contextlib.suppress(ProcessLookupError):  # unless it ended by itself meanwhile
                    signal.pidfd_send_signal(descriptors[0], signal.SIGKILL)
                os.close(descriptors[0])
            else:
                call.started.set_result(_Started(pid=pid, pidfd=descriptors[0]))
        elif (ended := self._by_pid.pop(pid, None)) is not None and not ended.ended.done():
            is_exit = kind == wire.KIND_EXITED
            ended.ended.set_result(_Ended(exit_code=status if is_exit else None, signal=None if is_exit else status))


@dataclass(slots=True, kw_only=True)
class _Files:
    """The four descriptors of one call, and the read end of its output."""

    payload: int
    stdin: int
    record: int
    output_read: int
    output_write: int

    @property
    def to_send(self) -> tuple[int, int, int, int]:
        return self.payload, self.stdin, self.output_write, self.record

    def close_output_write(self) -> None:
        """The program holds it now: the pipe ends when the last of its processes does."""
        os.close(self.output_write)
        self.output_write = -1

    def close(self) -> None:
        for descriptor in (self.payload, self.stdin, self.record, self.output_read, self.output_write):
            if descriptor >= 0:
                os.close(descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What is known about one run when it is over."""

    ended: _Ended
    stopped_for: str  # why the supervisor killed it: "timeout", "output", or "" when it ended by itself
    output: OutputTail
    record_kind: bytes
    record_text: str
    run_s: float


class LocalSandbox(CodeRunner):
    """A `CodeRunner` on this machine; use as `async with`, or call `start` and `close`. Belongs to one event loop.

    Args:
        config: the limits, how many programs run at once, and the least isolation that is accepted.
    """

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self.config = config or SandboxConfig()
        self.level = IsolationLevel.NAMESPACES  # lowered by `start`, and only if the configuration allows it
        self._zygote: _Zygote | None = None
        self._slots = asyncio.Semaphore(self.config.max_running)
        self._starting = asyncio.Lock()
        self._is_probed = False
        self._is_closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the fork server and prove, by one program, the level of isolation. Safe to call twice.

        Raises:
            UserError: this machine cannot give `config.min_level`; the message says what it lacks.
        """
        async with self._starting:
            if self._is_probed:
                return
            try:
                await self._probe(IsolationLevel.NAMESPACES)
            except MachineError as error:
                if self.config.min_level is not IsolationLevel.PROCESS:
                    raise UserError(_no_namespaces(str(error))) from error
                _log.warning("programs run WITHOUT isolation (min_level = 'process'): no namespaces here: %s", error)
                await self._probe(IsolationLevel.PROCESS)
            self._is_probed = True

    async def run(self, request: RunRequest) -> RunResult:
        if self._is_closed:
            raise MachineError("the sandbox was closed; a call came after that")
        if not self._is_probed:
            await self.start()
        if refusal := self._refusal(request):
            return self._result(RunOutcome.REJECTED, reason=refusal, text=f"Not run: {refusal}.")
        queued_at = time.perf_counter()
        async with self._slots:
            queue_s = time.perf_counter() - queued_at
            for _ in range(2):  # a program is stateless: when its fork server died it may run once more
                try:
                    run = await self._run_once(await self._running_zygote(), request)
                except _ZygoteLost:
                    continue
                return self._judge(run, request, queue_s)
        raise MachineError("the fork server of the sandbox died twice under one call")

    async def close(self) -> None:
        self._is_closed = True
        if self._zygote is not None:
            self._zygote.lose()
            self._zygote = None

    async def _probe(self, level: IsolationLevel) -> None:
        self.level = level
        zygote = _Zygote(level)
        try:
            await zygote.hello()
            run = await self._run_once(zygote, _PROBE)
            if run.output.kept() != b"42\n":
                raise MachineError(run.record_text or f"a first program ended with {run.ended}")
        except (MachineError, _ZygoteLost, asyncio.CancelledError) as error:
            zygote.lose()
            if isinstance(error, _ZygoteLost):
                raise MachineError("the fork server ended during its first program") from error
            raise
        self._zygote = zygote

    async def _running_zygote(self) -> _Zygote:
        async with self._starting:
            if self._is_closed:
                raise MachineError("the sandbox was closed while a call was waiting")
            if self._zygote is None or self._zygote.is_lost:
                _log.warning("the fork server of the sandbox died; starting another")
                await self._probe(self.level)
            assert self._zygote is not None
            return self._zygote

    def _refusal(self, request: RunRequest) -> str:
        """Why the request is over a limit; empty when it is not."""
        try:
            code, stdin = request.code.encode(), request.stdin.encode()
        except UnicodeEncodeError:
            return "the code or the input holds a lone surrogate, which has no encoding"
        if b"\0" in code:
            return "the code holds a NUL character"
        if len(code) > self.config.max_code_bytes:
            return f"the code has {len(code)} bytes, the limit is {self.config.max_code_bytes}"
        if len(stdin) > self.config.max_stdin_bytes:
            return f"the input has {len(stdin)} bytes, the limit is {self.config.max_stdin_bytes}"
        return ""

    async def _run_once(self, zygote: _Zygote, request: RunRequest) -> _Run:
        """Raises `_ZygoteLost`. On every way out the program is dead and its files are closed."""
        if self.level is IsolationLevel.NAMESPACES:
            return await self._run_in(zygote, request, directory="")  # a child makes its own
        with tempfile.TemporaryDirectory(prefix="strop-", ignore_cleanup_errors=True) as directory:
            return await self._run_in(zygote, request, directory=directory)

    async def _run_in(self, zygote: _Zygote, request: RunRequest, *, directory: str) -> _Run:
        files = _open_files(request, directory)
        loop = asyncio.get_running_loop()
        output = OutputTail(limit=request.output_bytes, skip=len(wire.READY))
        flooded = loop.create_future()
        call: _Call | None = None

        def read() -> None:
            with contextlib.suppress(BlockingIOError):
                if not (part := os.read(files.output_read, 262_144)):
                    loop.remove_reader(files.output_read)
                output.add(part)
                if output.is_flood and not flooded.done():
                    loop.remove_reader(files.output_read)
                    flooded.set_result(None)

        try:
            call = zygote.request(files.to_send)
            files.close_output_write()
            loop.add_reader(files.output_read, read)
            started = await _within(_FORK_LIMIT_S, call.started, zygote)
            started_at = time.perf_counter()
            # asyncio.wait, not a timeout: a program that ended in time must not be called late by a busy event loop.
            await asyncio.wait({call.ended, flooded}, timeout=request.wall_s, return_when=asyncio.FIRST_COMPLETED)
            stopped_for = "" if call.ended.done() else "output" if flooded.done() else "timeout"
            self._kill(started)
            ended = await _within(_KILL_LIMIT_S, call.ended, zygote)
            run_s = time.perf_counter() - started_at
            output.drain(files.output_read)
            if output.is_flood and not stopped_for:
                stopped_for = "output"
            kind, text = _read_record(files.record)
            return _Run(ended=ended, stopped_for=stopped_for, output=output, record_kind=kind, record_text=text, run_s=run_s)
        finally:
            loop.remove_reader(files.output_read)
            files.close()
            # If it has not started yet, cancelling tells the reader of the reports to kill it when it does.
            if call is not None and not call.started.cancel() and call.started.exception() is None:
                self._kill(call.started.result())
                os.close(call.started.result().pidfd)

    def _kill(self, started: _Started) -> None:
        """The program is pid 1 of its namespace: with it dies everything it started."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(started.pidfd, signal.SIGKILL)
        if self.level is IsolationLevel.PROCESS:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(started.pid, signal.SIGKILL)

    def _judge(self, run: _Run, request: RunRequest, queue_s: float) -> RunResult:
        """The class from facts outside the program; the text from its output, its echo or its traceback."""
        exit_code = run.ended.exit_code
        outcome, reason, text = RunOutcome.STDOUT, "", run.output.text()
        if run.stopped_for == "timeout":
            outcome, exit_code = RunOutcome.TIMEOUT, None
        elif run.stopped_for == "output":
            outcome, reason, exit_code, text = RunOutcome.KILLED, "output", None, run.output.head_text()
        elif not run.output.is_ready:
            outcome, reason, text = RunOutcome.INTERNAL, run.record_text or f"the child ended with {run.ended}", ""
        elif run.ended.signal is not None:
            outcome, reason = RunOutcome.KILLED, f"signal {run.ended.signal}"
        elif exit_code != 0:
            outcome = RunOutcome.ERROR
            said = run.record_text if run.record_kind == wire.RECORD_ERROR else f"The program exited with code {exit_code}.\n"
            text += ("\n" if text and not text.endswith("\n") else "") + said
        elif run.output.num_bytes == 0 and run.record_kind == wire.RECORD_ECHO:
            outcome, text = RunOutcome.ECHO, OutputTail.cut(run.record_text, limit=request.output_bytes)
        elif run.output.num_bytes == 0:
            outcome = RunOutcome.EMPTY
        return self._result(outcome, reason=reason, text=text, exit_code=exit_code, queue_s=queue_s, run_s=run.run_s)

    def _result(
        self,
        outcome: RunOutcome,
        *,
        reason: str,
        text: str,
        exit_code: int | None = None,
        queue_s: float = 0.0,
        run_s: float = 0.0,
    ) -> RunResult:
        return RunResult(
            outcome=outcome,
            reason=reason,
            text=text,
            exit_code=exit_code,
            timings=RunTimings(queue_s=queue_s, run_s=run_s),
            level=self.level,
        )


async def _within(limit_s: float, future: asyncio.Future[_ReportT], zygote: _Zygote) -> _ReportT:
    """What the fork server owes within `limit_s`; when it is late it is hung, so it is given up."""
    await asyncio.wait({future}, timeout=limit_s)
    if not future.done():
        _log.warning("the fork server of the sandbox did not answer within %.0f s; giving it up", limit_s)
        zygote.lose()
    return await future


def _open_files(request: RunRequest, directory: str) -> _Files:
    path = directory.encode()
    header = wire.PAYLOAD_HEADER.pack(request.seed & 0xFFFF_FFFF_FFFF_FFFF, request.memory_mib << 20, len(path))
    files = _Files(payload=-1, stdin=-1, record=-1, output_read=-1, output_write=-1)
    try:
        files.payload = _memory_file(header + path + request.code.encode())
        files.stdin = _memory_file(request.stdin.encode()) if request.stdin else os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        files.record = os.memfd_create("record", os.MFD_CLOEXEC)
        os.ftruncate(files.record, wire.RECORD_BYTES)
        files.output_read, files.output_write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(files.output_read, False)
    except OSError as error:
        files.close()
        raise MachineError(f"no descriptors left for another program ({error}). Raise `ulimit -n`.") from error
    return files


def _memory_file(content: bytes) -> int:
    descriptor = os.memfd_create("strop", os.MFD_CLOEXEC)
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _read_record(descriptor: int) -> tuple[bytes, str]:
    """What the program says of itself. Untrusted: any bytes, any length in its header."""
    content = os.pread(descriptor, wire.RECORD_BYTES, 0)
    if len(content) < wire.RECORD_HEADER.size:
        return b"", ""
    kind, length = wire.RECORD_HEADER.unpack_from(content)
    text = content[wire.RECORD_HEADER.size : wire.RECORD_HEADER.size + length]
    return kind, text.decode("utf-8", "replace")


def _command(control: int, level: IsolationLevel) -> list[str]:
    libraries = list(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))
    system = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives"]
    shown: list[str] = []
    for path in [*system, sys.base_prefix, sys.prefix, *libraries]:
        if not any(Path(path).is_relative_to(other) for other in shown):
            shown.append(path)
    # -P and -s rather than -I, which would also ignore PYTHONHASHSEED.
    flags = ["-s", "-P", "-S", "-B"]
    return [sys.executable, *flags, wire.__file__, str(control), level.value, ":".join(shown), ":".join(libraries)]


def _environment() -> dict[str, str]:
    """All that a program sees of an environment; nothing of ours."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": wire.WORK_DIRECTORY,
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def _no_namespaces(lacks: str) -> str:
    return (
        f"sandbox.min_level is 'namespaces', but this machine does not allow them: {lacks}."
        " Allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces>0; on Ubuntu"
        " kernel.apparmor_restrict_unprivileged_userns=0; in a container --cap-add SYS_ADMIN or"
        " --security-opt seccomp=unconfined), or accept programs that can read your files and use your network with"
        " sandbox.min_level = 'process'."
    )
