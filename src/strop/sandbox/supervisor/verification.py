"""Compares pairs of answers in confined children, with a deadline per pair.

The supervisor's half of `inside/verify.py`. Equal texts and plain numbers are compared here, exactly; the other pairs are split
into batches, one child each. A pair at its deadline is TIMEOUT, a pair that crashes the interpreter is UNREADABLE, and the rest
of its batch goes to another child. A pair whose child is lost for another reason is judged again, and is INTERNAL after the
second time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeAlias

from strop.sandbox.inside import wire
from strop.sandbox.inside.verify import EQUAL, STARTED, UNEQUAL, UNREADABLE
from strop.sandbox.numbers import exact_match
from strop.sandbox.protocol import AnswerPair, PairVerdict, VerifyRequest
from strop.sandbox.supervisor.processes import Child

BATCH_SIZE = 32  # pairs per child: more would amortise the fork better, but wait longer for a pair that hangs
MAX_CHARS = 10_000  # of one answer; a longer one is not read
VERDICTS = {EQUAL: PairVerdict.EQUAL, UNEQUAL: PairVerdict.UNEQUAL, UNREADABLE: PairVerdict.UNREADABLE}
CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
"""Signals that a process raises by its own instructions."""

_START_S = 10.0  # from the payload to the first line
_GRACE_S = 0.05  # a supervisor that was suspended itself finds the verdict when it resumes
_MEMORY_BYTES = 1 << 30
_CPU_S = 3_600  # each pair has its own deadline


_StartChild: TypeAlias = "Callable[[], Awaitable[VerifyChild]]"
_Indexed: TypeAlias = tuple[int, AnswerPair]
_Found: TypeAlias = "asyncio.Queue[tuple[int, PairVerdict] | BaseException]"


async def verify(
    start_child: _StartChild, request: VerifyRequest, *, batch_size: int = BATCH_SIZE
) -> AsyncIterator[tuple[int, PairVerdict]]:
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
    found: _Found = asyncio.Queue()

    async def judge(pairs: Sequence[_Indexed]) -> None:
        try:
            await _judge(start_child, pairs, request.pair_wall_s, found)
        except Exception as error:  # noqa: BLE001 - raised again below
            found.put_nowait(error)

    batches = [asyncio.create_task(judge(left[first : first + batch_size])) for first in range(0, len(left), batch_size)]
    try:
        for _ in left:
            item = await found.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        for batch in batches:
            batch.cancel()
        await asyncio.gather(*batches, return_exceptions=True)


def compare_exactly(pair: AnswerPair) -> PairVerdict | None:
    """The verdict on equal texts, plain numbers and too long answers; None for all others."""
    if len(pair.gold) > MAX_CHARS or len(pair.answer) > MAX_CHARS:
        return PairVerdict.UNREADABLE
    is_equal = exact_match(pair.gold, pair.answer)
    return None if is_equal is None else PairVerdict.EQUAL if is_equal else PairVerdict.UNEQUAL


async def _judge(start_child: _StartChild, pairs: Sequence[_Indexed], pair_wall_s: float, found: _Found) -> None:
    """Put the verdict on each pair into `found`, with as many children as that takes."""
    lost_at = -1
    while pairs:
        num_judged, verdict = await _attempt(await start_child(), pairs, pair_wall_s, found)
        has_started, pairs = num_judged >= 0, pairs[max(num_judged, 0) :]
        if not pairs:
            return
        if verdict is None and lost_at != pairs[0][0]:
            lost_at = pairs[0][0]
            continue
        # If a second child does not even start, neither would a third: that says nothing about the first pair.
        num_blamed = 1 if has_started else len(pairs)
        for index, _ in pairs[:num_blamed]:
            found.put_nowait((index, verdict or PairVerdict.INTERNAL))
        pairs = pairs[num_blamed:]


async def _attempt(
    child: VerifyChild, pairs: Sequence[_Indexed], pair_wall_s: float, found: _Found
) -> tuple[int, PairVerdict | None]:
    """Have one child judge `pairs` until it is done or gone.

    Returns:
        The number of pairs that it judged, -1 if it did not start; and the verdict on the pair after them, None if the child
        was lost for a reason other than that pair.
    """
    num_judged, is_late = -1, False
    try:
        child.send(json.dumps([[pair.gold, pair.answer, *pair.differences] for _, pair in pairs]).encode())
        if await _next_line(child, _START_S) == STARTED:
            num_judged = 0
            while num_judged < len(pairs):
                index, _, word = (await _next_line(child, pair_wall_s) or b"").partition(b" ")
                if index != b"%d" % num_judged or word not in VERDICTS:
                    break
                found.put_nowait((pairs[num_judged][0], VERDICTS[word]))
                num_judged += 1
    except TimeoutError:
        is_late = num_judged >= 0
    finally:
        child.kill()
        has_crashed = await child.has_crashed()
    if is_late:
        return num_judged, PairVerdict.TIMEOUT
    return num_judged, PairVerdict.UNREADABLE if has_crashed and num_judged >= 0 else None


async def _next_line(child: VerifyChild, limit_s: float) -> bytes | None:
    """Raises `TimeoutError`."""
    try:
        return await asyncio.wait_for(child.lines.get(), limit_s)
    except TimeoutError:
        await asyncio.sleep(_GRACE_S)
        if child.lines.empty():
            raise
        return child.lines.get_nowait()


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
        self._ended = asyncio.Event()
        self.lines: asyncio.Queue[bytes | None] = asyncio.Queue()  # what it emits, line by line; None at its end

    def send(self, payload: bytes) -> None:
        work = wire.WORK.pack(wire.JOB_VERIFY, 0, _MEMORY_BYTES, _CPU_S, 32, 1, len(payload), 0)
        self._loop.add_reader(self._child.output, self._read)
        self._child.give(work + payload, self._end)

    def kill(self) -> None:
        """Safe to call at any time."""
        self._child.kill()

    async def has_crashed(self) -> bool:
        """Return when it has ended: whether by one of `CRASHES`."""
        await self._ended.wait()
        return self._child.ended is not None and self._child.ended.signal in CRASHES

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            part = os.read(self._child.output, 65_536)
            if not part:
                self._loop.remove_reader(self._child.output)
            if not self._is_ready and part:
                self._is_ready, part = True, part.removeprefix(wire.READY)
            *lines, self._rest = (self._rest + part).split(b"\n")
            for line in lines:
                self.lines.put_nowait(line)

    def _end(self) -> None:
        self._read()  # the pipe may still hold its last lines
        self._loop.remove_reader(self._child.output)
        self.lines.put_nowait(None)
        self._ended.set()
        self._child.close()
        self._on_end()
