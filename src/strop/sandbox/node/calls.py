"""One call: a child with its work, its output and its clock; and what is known when it is over."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from dataclasses import dataclass

from strop.sandbox.inside import wire
from strop.sandbox.node.output import OutputTail
from strop.sandbox.node.zygotes import Child, Ended
from strop.sandbox.protocol import RunRequest

SETUP_LIMIT_S = 5.0  # from the work to its first instruction; 1 ms when the machine is idle
_KILL_LIMIT_S = 0.25  # from a kill to the report of the end, once it is dead
_DEATH_LIMIT_S = 5.0  # from a kill to the death; giving back a gigabyte takes a while
_MAX_EXTENSION_S = 0.25  # how late a child may say that its work began: nobody can check that


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedCall:
    """The facts about a run, from its parent, the clock and its output pipe; and its own record, which proves nothing."""

    ended: Ended
    stopped_for: str  # why it was killed: timeout, output, memory or setup; empty when it ended by itself
    output: OutputTail
    record_kind: bytes
    record_text: str
    setup_s: float
    run_s: float


class Call:
    """Runs one request in one child. `wait` returns when everything it started is dead."""

    __slots__ = (
        "_admitted_at",
        "_deadline",
        "_finished",
        "_given_at",
        "_is_reading",
        "_loop",
        "_stopped_at",
        "_stopped_for",
        "child",
        "output",
        "request",
    )

    def __init__(self, child: Child, request: RunRequest, *, admitted_at: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[None] = self._loop.create_future()
        self._is_reading = False
        self._stopped_for = ""
        self._stopped_at = 0.0
        self._admitted_at = admitted_at
        self._given_at = time.monotonic()
        self._deadline = 0.0
        self.child = child
        self.request = request
        self.output = OutputTail(limit=request.output_bytes, skip=len(wire.READY))
        child.give(work_of(request, num_others=child.num_others), self._end)

    async def wait(self) -> FinishedCall:
        """On every way out the child is dead, or killed and given back when it is."""
        try:
            await self._finished
            self.output.drain(self.child.output)
            if self.output.is_flood and not self._stopped_for:
                self._stopped_for = "output"
            return self._facts()
        finally:
            self.stop_reading()
            self.child.close()

    def stop(self, reason: str) -> None:
        """Kill it; the first reason counts."""
        if not self._finished.done() and not self._stopped_for:
            self._stopped_for = reason
            self._stopped_at = time.monotonic()
            self.child.kill()

    def look(self, now: float) -> None:
        """Once every few milliseconds: take its output, which a pipe no longer holds, and stop it when its time is over."""
        if self._finished.done():
            return
        if self._stopped_for:
            late_s = now - self._stopped_at
            if late_s > _DEATH_LIMIT_S or (late_s > _KILL_LIMIT_S and self.child.is_dead):  # and nobody said so
                self.child.abandon()
            return
        if not self._is_reading:
            # Not from the start: most programs are over by now, and what they print fits into the pipe.
            self._is_reading = True
            self._loop.add_reader(self.child.output, self._read)
        if self.child.started_at and now >= (self._deadline or self._earliest_deadline):
            self._check_deadline(now)
        elif now - self._given_at > SETUP_LIMIT_S and not self.child.started_at:
            self.stop("setup")

    @property
    def _earliest_deadline(self) -> float:
        return max(self.child.started_at, self._given_at) + self.request.wall_s

    def stop_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self.child.output)

    def _check_deadline(self, now: float) -> None:
        if self.child.is_dead:
            # It ended in time, and its parent has not said so: no timeout, but a fault of ours.
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
            self.stop("timeout")

    def _began_at(self, now: float) -> float:
        """When its work began, as far as its own word is possible."""
        (stamp,) = wire.STAMP.unpack(os.pread(self.child.exchange, wire.STAMP.size, 0))
        latest = min(now, max(self._given_at, self.child.started_at) + _MAX_EXTENSION_S)
        return float(min(max(stamp, self._given_at), latest)) if math.isfinite(stamp) else self._given_at

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            part = os.read(self.child.output, 262_144)
            self.output.add(part)
            if self.output.is_flood:
                self.stop("output")
            if not part or self.output.is_flood:
                self._loop.remove_reader(self.child.output)  # nothing more is wanted, or will ever come

    def _end(self) -> None:
        if not self._finished.done():  # else whoever waited was cancelled
            self._finished.set_result(None)

    def _facts(self) -> FinishedCall:
        ended = self.child.ended
        assert ended is not None
        now = time.monotonic()
        kind, length = wire.RECORD_HEADER.unpack(os.pread(self.child.exchange, wire.RECORD_HEADER.size, wire.STAMP.size))
        start = wire.STAMP.size + wire.RECORD_HEADER.size
        text = os.pread(self.child.exchange, min(length, wire.RECORD_BYTES - start), start) if length else b""
        began_at = self._began_at(now)
        return FinishedCall(
            ended=ended,
            stopped_for=self._stopped_for,
            output=self.output,
            record_kind=kind,
            record_text=text.decode("utf-8", "replace"),
            setup_s=began_at - self._admitted_at,
            run_s=now - began_at,
        )


def work_of(request: RunRequest, *, num_others: int = 0) -> bytes:
    """The work as the child reads it; `num_others` is how many processes its limit of them counts that are not its own."""
    code, stdin = request.code.encode(), request.stdin.encode()
    header = wire.WORK.pack(
        wire.JOB_PROGRAM,
        request.seed & 0xFFFF_FFFF_FFFF_FFFF,
        request.memory_mib << 20,
        math.ceil(request.wall_s + 1 if request.cpu_s is None else request.cpu_s),
        request.max_processes + num_others,
        request.file_mib,
        len(code),
        len(stdin),
    )
    return header + code + stdin
