"""Splits pairs of answers among killable children, keeps the time of each pair, and says what became of it.

The supervisor's half of `inside/verify.py`. A pair is judged by `math_verify`, unless the two are the same text or plain
numbers: those are compared here, exactly. What stops a pair from outside is that pair's TIMEOUT: its own limit, or its child's
memory. What goes wrong within is UNREADABLE, a crash of the interpreter included. Only a child that ended for no such reason is
ours: what it had left is judged by another one, and is INTERNAL when that is lost too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Protocol, TypeAlias

from strop.sandbox.inside.verify import EQUAL, STARTED, UNEQUAL, UNREADABLE
from strop.sandbox.numbers import exact_match
from strop.sandbox.protocol import AnswerPair, PairVerdict, VerifyRequest

BATCH_SIZE = 32  # pairs a child: more would amortise its fork better, and wait longer behind a pair that hangs
MAX_CHARS = 10_000  # of one answer; a longer one is not read

_START_S = 10.0  # from the payload to the first line: a child that is that late will not come
_GRACE_S = 0.05  # a supervisor that stood still itself finds the verdict waiting when it wakes
_VERDICTS = {EQUAL: PairVerdict.EQUAL, UNEQUAL: PairVerdict.UNEQUAL, UNREADABLE: PairVerdict.UNREADABLE}


class ChildEnd(StrEnum):
    """Why a child ended, as far as it tells whose doing that was."""

    DONE = "done"  # it answered all it was asked
    CRASHED = "crashed"  # a signal that only its own instructions raise, such as SIGSEGV
    MEMORY = "memory"  # it was stopped for taking too much
    LOST = "lost"  # anything else


class VerifyChild(Protocol):
    """A process of its own that runs `inside.verify.judge` on one payload."""

    def send(self, payload: bytes) -> None:
        """Called once. What cannot be delivered shows as the end of the child."""

    def lines(self) -> AsyncIterator[bytes]:
        """Each line that the child emits, without its end, until the child is done or gone. Never raises."""

    async def ended(self) -> ChildEnd:
        """Returns when the child is gone, or free for the next payload."""

    def kill(self) -> None:
        """End it now, whatever it is doing. Does nothing to a child that is done."""


StartChild: TypeAlias = Callable[[], Awaitable[VerifyChild]]
"""Waits until there is room for one more child. Raises `MachineError` when there will never be."""

_Indexed: TypeAlias = tuple[int, AnswerPair]
_Found: TypeAlias = "asyncio.Queue[tuple[int, PairVerdict] | BaseException]"


async def verify(
    start_child: StartChild, request: VerifyRequest, *, batch_size: int = BATCH_SIZE
) -> AsyncIterator[tuple[int, PairVerdict]]:
    """Yields (index of the pair, its verdict) as each is known, every index once. No child outlives it.

    Raises:
        MachineError: no child could be started.
    """
    left = []
    for index, pair in enumerate(request.pairs):
        verdict = _compare_exactly(pair)
        if verdict is None:
            left.append((index, pair))
        else:
            yield index, verdict
    found: _Found = asyncio.Queue()
    batches = [
        asyncio.create_task(_judge(start_child, left[first : first + batch_size], request.pair_wall_s, found))
        for first in range(0, len(left), batch_size)
    ]

    def tell_failure(batch: asyncio.Task[None]) -> None:
        if not batch.cancelled() and (error := batch.exception()) is not None:
            found.put_nowait(error)

    try:
        for batch in batches:
            batch.add_done_callback(tell_failure)
        for _ in left:
            item = await found.get()
            if isinstance(item, BaseException):
                raise item
            yield item
        await asyncio.gather(*batches)  # a child that is let go in peace may be of further use
    finally:
        for batch in batches:
            batch.cancel()
        await asyncio.gather(*batches, return_exceptions=True)


def _compare_exactly(pair: AnswerPair) -> PairVerdict | None:
    if len(pair.gold) > MAX_CHARS or len(pair.answer) > MAX_CHARS:
        return PairVerdict.UNREADABLE
    is_equal = exact_match(pair.gold, pair.answer)
    return None if is_equal is None else PairVerdict.EQUAL if is_equal else PairVerdict.UNEQUAL


async def _judge(start_child: StartChild, pairs: Sequence[_Indexed], pair_wall_s: float, found: _Found) -> None:
    """Put the verdict on each pair into `found`, with as many children as that takes."""
    lost_at = -1
    while pairs:
        attempt = _Attempt(await start_child(), pairs, pair_wall_s, found)
        await attempt.run()
        pairs = pairs[attempt.num_judged :]
        if not pairs or attempt.is_overtaken:
            continue
        verdict, (head, _) = attempt.blame, pairs[0]
        if verdict is None and lost_at != head:
            lost_at = head
            continue
        # A child that did not even start says nothing of the first pair, and a third one would not start either.
        num_blamed = 1 if attempt.has_started else len(pairs)
        for index, _ in pairs[:num_blamed]:
            found.put_nowait((index, verdict or PairVerdict.INTERNAL))
        pairs = pairs[num_blamed:]


class _Attempt:
    """One child with what is left of a batch, until it is gone. Its clock runs from line to line."""

    def __init__(self, child: VerifyChild, pairs: Sequence[_Indexed], pair_wall_s: float, found: _Found) -> None:
        self._loop = asyncio.get_running_loop()
        self._child, self._pairs, self._pair_wall_s, self._found = child, pairs, pair_wall_s, found
        self._timer: asyncio.TimerHandle | None = None
        self._end = ChildEnd.LOST
        self._expired_at = -1
        self.has_started = False
        self.num_judged = 0

    async def run(self) -> None:
        try:
            self._wait(_START_S)
            self._child.send(json.dumps([[pair.gold, pair.answer, *pair.differences] for _, pair in self._pairs]).encode())
            async for line in self._child.lines():
                if not self._take(line):
                    self._child.kill()
                    break
                self._wait(self._pair_wall_s)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._child.kill()
            self._end = await self._child.ended()

    @property
    def is_overtaken(self) -> bool:
        """Its pair was judged after all, between the decision to kill and the kill: the one after has done nothing wrong."""
        return 0 <= self._expired_at < self.num_judged

    @property
    def blame(self) -> PairVerdict | None:
        """The verdict on the pair that it did not come back from; None when it is not that pair's doing."""
        if not self.has_started:
            return None
        if self._expired_at >= 0 or self._end is ChildEnd.MEMORY:
            return PairVerdict.TIMEOUT
        return PairVerdict.UNREADABLE if self._end is ChildEnd.CRASHED else None

    def _take(self, line: bytes) -> bool:
        """Whether it is the line that must come now."""
        if not self.has_started:
            self.has_started = line == STARTED
            return self.has_started
        index, _, word = line.partition(b" ")
        if self.num_judged == len(self._pairs) or index != b"%d" % self.num_judged or word not in _VERDICTS:
            return False
        self._found.put_nowait((self._pairs[self.num_judged][0], _VERDICTS[word]))
        self.num_judged += 1
        return True

    def _wait(self, limit_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(limit_s, self._look_once_more)

    def _look_once_more(self) -> None:
        self._timer = self._loop.call_later(_GRACE_S, self._expire)

    def _expire(self) -> None:
        self._expired_at = self.num_judged
        self._child.kill()
