"""How many programs run at once. A program that sleeps lends its slot to one that computes."""

from __future__ import annotations

import asyncio
from collections import deque


class Slots:
    """Two bounds: programs that compute, so that none times out because of our own crowd; and programs that exist at all.

    Args:
        num_busy: how many may compute at once.
        num_alive: how many may exist at once, those that sleep included.
    """

    def __init__(self, *, num_busy: int, num_alive: int) -> None:
        self._busy_left = num_busy  # below 0 when sleepers wake up while their slots are lent
        self._alive_left = max(num_busy, num_alive)
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def acquire(self) -> None:
        """Returns when a program may start; in the order of asking."""
        if self._is_free and not self._waiting:
            self._take()
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()
            raise

    def release(self) -> None:
        self._alive_left += 1
        self._busy_left += 1
        self._wake()

    def lend(self) -> None:
        """The holder of a slot has fallen asleep."""
        self._busy_left += 1
        self._wake()

    def take_back(self) -> None:
        """It is awake again; nobody is stopped for that, but nobody starts until there is room."""
        self._busy_left -= 1

    @property
    def _is_free(self) -> bool:
        return self._busy_left > 0 and self._alive_left > 0

    def _take(self) -> None:
        self._busy_left -= 1
        self._alive_left -= 1

    def _wake(self) -> None:
        while self._waiting and self._is_free:
            turn = self._waiting.popleft()
            if not turn.done():
                self._take()
                turn.set_result(None)
