"""Compares pairs of answers in confined children, with a deadline per pair.

The supervisor's half of `inside/verify.py`. Equal texts and plain numbers are compared here, exactly; the other pairs go to a
child. A pair at its deadline is TIMEOUT, a pair that crashes the interpreter is UNREADABLE, and the rest goes to another child.
A pair whose child is lost for another reason is judged again, and is INTERNAL after the second time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from strop.sandbox.inside import wire
from strop.sandbox.inside.verify import EQUAL, STARTED, UNEQUAL, UNREADABLE
from strop.sandbox.numbers import exact_match
from strop.sandbox.protocol import AnswerPair, PairVerdict, VerifyRequest
from strop.sandbox.supervisor.processes import Child

MAX_CHARS = 10_000  # of one answer; a longer one is not read
VERDICTS = {EQUAL: PairVerdict.EQUAL, UNEQUAL: PairVerdict.UNEQUAL, UNREADABLE: PairVerdict.UNREADABLE}
CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
"""Signals that a process raises by its own instructions."""

_START_S = 10.0  # from the payload to the first line
_DEATH_LIMIT_S = 2.0  # of a killed child; its fork server, which has not reported it by then, is given up
_GRACE_S = 0.05  # a supervisor that was suspended itself finds the verdict when it resumes
_MEMORY_BYTES = 1 << 30
_CPU_S = 3_600  # each pair has its own deadline


async def verify(
    start_child: Callable[[], Awaitable[VerifyChild]], request: VerifyRequest
) -> AsyncGenerator[tuple[int, PairVerdict]]:
    """Yield (index of the pair, its verdict) as each is known, every index once. No child outlives the iterator.

    Args:
        start_child: waits until there is room for one more child.

    Raises:
        MachineError: no child could be started.
    """
    left = []
    for index, pair in enumerate(request.pairs):
        verdict = compare_exactly(pair)
        if verdict is None:
            left.append((index, pair))
        else:
            yield index, verdict
    lost_at = -1
    while left:
        child = await start_child()
        try:
            async with contextlib.aclosing(child.judge([pair for _, pair in left], request.pair_wall_s)) as verdicts:
                async for verdict in verdicts:
                    yield left.pop(0)[0], verdict
        finally:
            stopped_by = await child.end()
        if not left:
            return
        if stopped_by is None and lost_at != left[0][0]:
            lost_at = left[0][0]
            continue
        # If a second child does not even start, neither would a third: that says nothing about the first pair.
        blamed = left[:1] if child.has_started else left
        left = left[len(blamed) :]
        for index, _ in blamed:
            yield index, stopped_by or PairVerdict.INTERNAL


def compare_exactly(pair: AnswerPair) -> PairVerdict | None:
    """The verdict on equal texts, plain numbers and too long answers; None for all others."""
    if len(pair.gold) > MAX_CHARS or len(pair.answer) > MAX_CHARS:
        return PairVerdict.UNREADABLE
    is_equal = exact_match(pair.gold, pair.answer)
    return None if is_equal is None else PairVerdict.EQUAL if is_equal else PairVerdict.UNEQUAL


class VerifyChild:
    """A child with the confinement of a program, from a fork server of the profile `verify`, where no program runs.

    Args:
        on_end: called once when it has ended; releases its slot.
    """

    def __init__(self, child: Child, on_end: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._child, self._on_end = child, on_end
        self._rest = b""
        self._is_ready = False
        self._is_late = False
        self._ended = asyncio.Event()
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue()  # what it emits, line by line; None at its end
        self.has_started = False

    async def judge(self, pairs: Sequence[AnswerPair], pair_wall_s: float) -> AsyncGenerator[PairVerdict]:
        """Yield the verdicts in order, until it is done, gone, or late with one."""
        payload = json.dumps([[pair.gold, pair.answer, *pair.differences] for pair in pairs]).encode()
        work = wire.WORK.pack(wire.JOB_VERIFY, 0, _MEMORY_BYTES, _CPU_S, 32, 1, len(payload), 0)
        self._loop.add_reader(self._child.output, self._read)
        self._child.give(work + payload, self._end)
        try:
            self.has_started = await self._next_line(_START_S) == STARTED
            for number in range(len(pairs) if self.has_started else 0):
                index, _, word = (await self._next_line(pair_wall_s) or b"").partition(b" ")
                if index != b"%d" % number or word not in VERDICTS:
                    return
                yield VERDICTS[word]
        except TimeoutError:
            self._is_late = self.has_started

    async def end(self) -> PairVerdict | None:
        """Kill it. Returns the verdict on the pair that it did not judge; None if it was lost for another reason."""
        self._child.kill()
        try:
            await asyncio.wait_for(self._ended.wait(), _DEATH_LIMIT_S)
        except TimeoutError:
            self._child.abandon()
            await self._ended.wait()
        if self._is_late:
            return PairVerdict.TIMEOUT
        has_crashed = self._child.ended is not None and self._child.ended.signal in CRASHES
        return PairVerdict.UNREADABLE if has_crashed and self.has_started else None

    async def _next_line(self, limit_s: float) -> bytes | None:
        """Raises `TimeoutError`."""
        try:
            return await asyncio.wait_for(self._lines.get(), limit_s)
        except TimeoutError:
            await asyncio.sleep(_GRACE_S)
            if self._lines.empty():
                raise
            return self._lines.get_nowait()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            part = os.read(self._child.output, 65_536)
            if not part:
                self._loop.remove_reader(self._child.output)
            if not self._is_ready and part:
                self._is_ready, part = True, part.removeprefix(wire.READY)
            *lines, self._rest = (self._rest + part).split(b"\n")
            for line in lines:
                self._lines.put_nowait(line)

    def _end(self) -> None:
        self._read()  # the pipe may still hold its last lines
        self._loop.remove_reader(self._child.output)
        self._lines.put_nowait(None)
        self._ended.set()
        self._child.close()
        self._on_end()
