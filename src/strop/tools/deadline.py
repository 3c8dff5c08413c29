"""Ends a call that takes too long; while the call waits for its turn, its clock stands still."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar

_of_this_call: ContextVar[asyncio.Timeout | None] = ContextVar("_of_this_call", default=None)


@asynccontextmanager
async def deadline(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """As `asyncio.timeout`, but that `clock_stopped` within it takes nothing off its time.

    Raises:
        TimeoutError: the time is up.
    """
    async with asyncio.timeout(seconds) as timeout:
        token = _of_this_call.set(timeout)
        try:
            yield timeout
        finally:
            _of_this_call.reset(token)


@contextmanager
def clock_stopped() -> Iterator[None]:
    """For the time of a `with`, the clock of the call that this belongs to stands still; without a call nothing happens.

    For waiting behind other calls, each of which has a deadline of its own: what is waited for has to end by itself.
    """
    timeout = _of_this_call.get()
    ends_at = None if timeout is None or timeout.expired() else timeout.when()
    if timeout is None or ends_at is None:  # no call, no time left, or stopped already
        yield
        return
    now = asyncio.get_running_loop().time
    left_s = ends_at - now()
    timeout.reschedule(None)
    try:
        yield
    finally:
        timeout.reschedule(now() + left_s)
