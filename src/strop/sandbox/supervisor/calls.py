"""Runs one request in one process, keeps its output, and makes its result from the facts that are known at its end."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import math
import os
import signal
import sys
import sysconfig
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from strop.sandbox.inside import wire
from strop.sandbox.inside.confine import place_inside
from strop.sandbox.protocol import IsolationLevel, RunOutcome, RunRequest, RunResult, RunTimings, SessionLimits
from strop.sandbox.supervisor.processes import Child, Ended, Interpreter

SETUP_LIMIT_S = 5.0  # until the first instruction of the work; 1 ms on an idle machine
_KILL_LIMIT_S = 0.25  # from a kill to the report of the end, when the process is dead
_DEATH_LIMIT_S = 5.0  # from a kill to the death; giving back a gigabyte takes a while
_FLUSH_S = 0.05  # from the deadline of a program to its kill: it writes out the line that it has begun
_MAX_EXTENSION_S = 0.25  # how late a child may claim that its work began: nothing can check that
_CPU_ERROR_S = 0.25  # between the count for the limit and the report at the end; 0.1 on a machine with twenty runnable programs
FLOOD_FACTOR, MAX_FLOOD_BYTES = 64, 32 << 20  # output beyond so many times its limit, or beyond so much, ends the program
_MAX_READS = 16  # each takes all that a pipe holds; a living writer may fill it as fast as it is read


class OutputTail:
    """Output of one program as UTF-8. Bytes that are not UTF-8 are replaced on arrival, so the limit holds for the result.

    Up to `limit` bytes are kept whole; of more, the first and the last half of `limit`.

    Args:
        limit: bytes of UTF-8 to keep.
        skip: how many bytes come before the output of the program: the mark that it was ready to run.
    """

    def __init__(self, *, limit: int, skip: int) -> None:
        self._limit = limit
        self._num_to_skip = skip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._head = bytearray()
        self._tail = bytearray()
        self.num_bytes = 0

    @property
    def is_ready(self) -> bool:
        """Whether the program began to run."""
        return self._num_to_skip == 0

    @property
    def is_flood(self) -> bool:
        return self.num_bytes > max(2 * self._limit, min(FLOOD_FACTOR * self._limit, MAX_FLOOD_BYTES))

    def add(self, part: bytes) -> None:
        num_skipped = min(len(part), self._num_to_skip)
        self._num_to_skip -= num_skipped
        self._keep(self._decoder.decode(part[num_skipped:]))

    def drain(self, descriptor: int) -> None:
        """Add what is left in a pipe whose writers are dead. Never waits."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MAX_READS):
                if not (part := os.read(descriptor, 262_144)):
                    return
                self.add(part)

    def text(self) -> str:
        """What is kept. The middle says how many bytes are left out."""
        self._finish()
        if self.num_bytes <= self._limit:
            return self._head.decode()
        half = self._limit // 2
        head = self._head[:half].decode("utf-8", "ignore")  # a cut may split a character
        tail = (self._head + self._tail)[-half:] if len(self._tail) < half else self._tail[-half:]
        return f"{head}\n[... {self.num_bytes - 2 * half} bytes left out ...]\n{tail.decode('utf-8', 'ignore')}"

    def head_text(self) -> str:
        """For a program that was stopped in the middle of a flood: the part that does not depend on the time of the stop."""
        self._finish()
        return f"{self._head.decode('utf-8', 'ignore')}\n[... output went on; the program was stopped ...]\n"

    @classmethod
    def cut(cls, text: str, *, limit: int) -> str:
        """Return `text` as if a program had printed it."""
        output = cls(limit=limit, skip=0)
        output.add(text.encode("utf-8", "replace"))
        return output.text()

    def _keep(self, text: str) -> None:
        part = text.encode()
        self.num_bytes += len(part)
        room = self._limit - len(self._head)
        self._head += part[:room]
        self._tail += part[room:]
        if len(self._tail) > 2 * self._limit:  # seldom, so that many short writes cost no quadratic copying
            del self._tail[: -self._limit]

    def _finish(self) -> None:
        """Replace a character that was cut off at the end of the output."""
        self._keep(self._decoder.decode(b"", final=True))


_NAMES = {
    str(Path(wire.__file__).parent): "runner",
    **{sysconfig.get_path(name): "python" for name in ("stdlib", "platstdlib")},
    **{sysconfig.get_path(name): "site-packages" for name in ("purelib", "platlib")},
    sys.prefix: "python-prefix",
    sys.base_prefix: "python-prefix",
}
_COMMON = {"/", "/usr", "/usr/local"}  # prefixes that reveal nothing about this machine
_PATHS = sorted(
    {(seen, name) for path, name in _NAMES.items() if path not in _COMMON for seen in (path, place_inside(path))},
    key=lambda pair: -len(pair[0]),
)


def hide_paths(text: str) -> str:
    """Return `text` with neutral names for the paths of the interpreter and its libraries: it is the same on every machine."""
    for path, name in _PATHS:
        text = text.replace(path, name)
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedCall:
    """The facts about a run, from its parent, the clock and its output pipe; and its own record, which is not trusted."""

    ended: Ended
    stopped_for: str  # why it was killed: timeout, output, memory or setup; empty when it ended by itself
    output: OutputTail
    record_kind: bytes
    record_text: str
    setup_s: float
    run_s: float


class Execution(ABC):
    """One request in one process: its output, its end, and who stops it. `wait` returns when it is done.

    Args:
        child: the process, which has its work already or gets it from the subclass.
        admitted_at: when the request got its slot.
        skip: see `OutputTail`.
    """

    def __init__(self, child: Child | Interpreter, request: RunRequest, *, admitted_at: float, skip: int = 0) -> None:
        self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[None] = self._loop.create_future()
        self._is_reading = False
        self._stopped_for = ""
        self._killed_at = 0.0  # 0 while it is not killed
        self._admitted_at = admitted_at
        self._given_at = time.monotonic()
        self.child = child
        self.request = request
        self.output = OutputTail(limit=request.output_bytes, skip=skip)

    async def wait(self) -> FinishedCall:
        try:
            await self._finished
            self.output.drain(self.child.output)
            if self.output.is_flood and not self._stopped_for:
                self._stopped_for = "output"
            ended, kind, text, began_at, ended_at = self._facts()
            return FinishedCall(
                ended=ended,
                stopped_for=self._stopped_for,
                output=self.output,
                record_kind=kind,
                record_text=text.decode("utf-8", "replace"),
                setup_s=began_at - self._admitted_at,
                run_s=ended_at - began_at,
            )
        finally:
            if self._is_reading:
                self._loop.remove_reader(self.child.output)
            self._release()

    def look(self, now: float) -> None:
        """Called every few milliseconds: read its output before the pipe is full, and stop it at its deadline."""
        if self._finished.done():
            return
        if self._killed_at:
            late_s = now - self._killed_at
            if late_s > _DEATH_LIMIT_S or (late_s > _KILL_LIMIT_S and self.child.is_dead):  # and not reported
                self.child.abandon()
            return
        if not self._is_reading:
            # Not from the start: most programs have ended by now, and their output fits into the pipe.
            self._is_reading = True
            self._loop.add_reader(self.child.output, self._read_output)
        self._check(now)

    @abstractmethod
    def stop(self, reason: str) -> None:
        """End it; the first reason counts."""

    @abstractmethod
    def _check(self, now: float) -> None:
        """Stop it if it is too late."""

    @abstractmethod
    def _facts(self) -> tuple[Ended, bytes, bytes, float, float]:
        """How it ended, kind and text of its record, and when its work began and ended."""

    @abstractmethod
    def _release(self) -> None:
        """Give back what it held."""

    def _read_output(self) -> None:
        with contextlib.suppress(BlockingIOError):
            part = os.read(self.child.output, 262_144)
            self.output.add(part)
            if not part:
                self._loop.remove_reader(self.child.output)
            elif self.output.is_flood:
                self.stop("output")

    def _kill(self) -> None:
        self._killed_at = time.monotonic()
        self.child.kill()

    def _finish(self) -> None:
        if not self._finished.done():  # else the waiting call was cancelled
            self._finished.set_result(None)


class Call(Execution):
    """A program in its own child. Done when everything that it started is dead; `wait` always leaves a dead or closed child."""

    child: Child

    def __init__(self, child: Child, request: RunRequest, *, admitted_at: float) -> None:
        super().__init__(child, request, admitted_at=admitted_at, skip=len(wire.READY))
        self._deadline = 0.0  # 0 until its work is known to have begun
        self._overdue_at = 0.0
        cpu_s = math.ceil(request.wall_s + 1 if request.cpu_s is None else request.cpu_s)
        code, stdin = request.code.encode(), request.stdin.encode()
        work = header_of(request, wire.JOB_PROGRAM, cpu_s, child.server.num_others, len(code), len(stdin)) + code + stdin
        child.give(work, self._finish)

    def stop(self, reason: str) -> None:
        if not self._finished.done() and not self._stopped_for:
            self._stopped_for = reason
            self._kill()

    def _check(self, now: float) -> None:
        if self._stopped_for:
            if now - self._overdue_at > _FLUSH_S:
                self._kill()
        elif not self.child.started_at:
            if now - self._given_at > SETUP_LIMIT_S:
                self.stop("setup")
        elif now >= (self._deadline or max(self.child.started_at, self._given_at) + self.request.wall_s):
            self._check_deadline(now)

    def _check_deadline(self, now: float) -> None:
        if self.child.is_dead:
            # It ended in time, and its parent has not reported it: a fault of ours, not a timeout.
            self.child.abandon()
            return
        self.output.drain(self.child.output)
        if not self.output.is_ready:
            if now - self._given_at > SETUP_LIMIT_S:
                self.stop("setup")
            return
        if not self._deadline:
            self._deadline = self._began_at(now) + self.request.wall_s
        if now >= self._deadline:
            self._stopped_for, self._overdue_at = "timeout", now
            self.child.signal(wire.FLUSH_SIGNAL)

    def _began_at(self, now: float) -> float:
        """When its work began: its own claim, within the possible range."""
        (stamp,) = wire.STAMP.unpack(os.pread(self.child.exchange, wire.STAMP.size, 0))
        latest = min(now, max(self._given_at, self.child.started_at) + _MAX_EXTENSION_S)
        return float(min(max(stamp, self._given_at), latest)) if math.isfinite(stamp) else self._given_at

    def _release(self) -> None:
        self.child.close()

    def _facts(self) -> tuple[Ended, bytes, bytes, float, float]:
        assert self.child.ended is not None
        now = time.monotonic()
        kind, length = wire.RECORD_HEADER.unpack(os.pread(self.child.exchange, wire.RECORD_HEADER.size, wire.STAMP.size))
        start = wire.STAMP.size + wire.RECORD_HEADER.size
        text = os.pread(self.child.exchange, min(length, wire.RECORD_BYTES - start), start) if length else b""
        return self.child.ended, kind, text, self._began_at(now), now


def to_result(run: FinishedCall, request: RunRequest, *, level: IsolationLevel, queue_s: float, node: str) -> RunResult:
    """Turn the facts into a result. The program chooses the text, and never the outcome."""
    outcome, reason, text, exit_code = _decide(run, request)
    return RunResult(
        outcome=outcome,
        reason=reason,
        text=hide_paths(text),
        exit_code=exit_code,
        timings=RunTimings(queue_s=queue_s, setup_s=run.setup_s, run_s=run.run_s, cpu_s=run.ended.cpu_s),
        level=level,
        peak_memory_bytes=run.ended.peak_bytes,
        node=node,
    )


def _decide(run: FinishedCall, request: RunRequest) -> tuple[RunOutcome, str, str, int | None]:
    output, ended, text = run.output, run.ended, run.output.text()
    if not output.is_ready:
        return RunOutcome.INTERNAL, run.record_text or run.stopped_for or f"the child ended with {ended}", "", None
    if run.stopped_for == "timeout":
        return RunOutcome.TIMEOUT, "", text, None
    if run.stopped_for == "output":
        return RunOutcome.KILLED, "output", output.head_text(), None
    if run.stopped_for:
        return RunOutcome.KILLED, run.stopped_for, text, None
    if ended.signal in (signal.SIGKILL, signal.SIGXCPU) and ended.cpu_s >= (request.cpu_s or request.wall_s) - _CPU_ERROR_S:
        return RunOutcome.TIMEOUT, "cpu", text, None
    if ended.signal is not None:
        return RunOutcome.KILLED, f"signal {ended.signal}", text, None
    if ended.exit_code != 0:
        said = f"The program exited with code {ended.exit_code}.\n"
        if run.record_kind == wire.RECORD_ERROR:
            said = OutputTail.cut(run.record_text, limit=wire.RECORD_BYTES)
        return RunOutcome.ERROR, "", text + ("\n" if text and not text.endswith("\n") else "") + said, ended.exit_code
    if output.num_bytes == 0 and run.record_kind == wire.RECORD_ECHO:
        return RunOutcome.ECHO, "", OutputTail.cut(run.record_text, limit=request.output_bytes), 0
    return (RunOutcome.STDOUT if output.num_bytes else RunOutcome.EMPTY), "", text, 0


def header_of(limits: RunRequest | SessionLimits, job: bytes, cpu_s: int, num_others: int, *lengths: int) -> bytes:
    """The limits of the work as the child reads them. That of processes also counts `num_others` that are not its own."""
    seed, max_processes = limits.seed & 0xFFFF_FFFF_FFFF_FFFF, limits.max_processes + num_others
    return wire.WORK.pack(job, seed, limits.memory_mib << 20, cpu_s, max_processes, limits.file_mib, *lengths)
