"""Ends a call that takes too long. Its clock is stopped while the call waits for its turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar


class _Clock:
    """The clock of one call. It runs only while nothing in the call has stopped it."""

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._num_stops = 0
        self._left_s = 0.0  # while it is stopped
        self.is_over = False  # background tasks of the call may outlive it

    def stop(self) -> None:
        ends_at = self._timeout.when()
        if self._num_stops == 0 and ends_at is not None and self._may_change:
            self._left_s = ends_at - self._loop.time()
            self._timeout.reschedule(None)
        self._num_stops += 1

    def go_on(self) -> None:
        self._num_stops -= 1
        if self._num_stops == 0 and self._may_change:
            self._timeout.reschedule(self._loop.time() + self._left_s)

    @property
    def is_here(self) -> bool:
        """Whether it belongs to the running loop. Threads inherit a call's context and may have loops of their own."""
        return asyncio.get_running_loop() is self._loop

    @property
    def _may_change(self) -> bool:
        return not self.is_over and not self._timeout.expired()


_of_this_call: ContextVar[_Clock | None] = ContextVar("_of_this_call", default=None)


@asynccontextmanager
async def deadline(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """Limit the time of a block, as `asyncio.timeout` does, without the time within `clock_stopped`.

    Raises:
        TimeoutError: the time is up.
    """
    async with asyncio.timeout(seconds) as timeout:
        clock = _Clock(timeout)
        token = _of_this_call.set(clock)
        try:
            yield timeout
        finally:
            clock.is_over = True
            _of_this_call.reset(token)


class StoppedClock(ExitStack):
    """Stops the clock of a call until `go_on`. Does nothing without a call."""

    go_on = ExitStack.close  # safe to call twice


@contextmanager
def clock_stopped() -> Iterator[StoppedClock]:
    """Stop the clock of the current call within a `with`, or until `go_on` if that is earlier.

    Use it to wait for other calls that have deadlines of their own. Does nothing outside a call.
    """
    clock = _of_this_call.get()
    with StoppedClock() as stopped:
        if clock is not None and clock.is_here:
            clock.stop()
            stopped.callback(clock.go_on)
        yield stopped
