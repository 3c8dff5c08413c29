"""Limits how many programs run at once, and watches them from outside: which sleep, and which hold too much memory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass

from strop.sandbox.supervisor.calls import Execution, FinishedCall
from strop.sandbox.supervisor.process_status import TreeStatus

_log = logging.getLogger(__name__)

_TICK_S = 0.01  # how often running calls are checked
_FIRST_LOOK_S = 0.02  # most programs have ended by then
_LOOK_S, _LOOK_ASLEEP_S = 0.05, 0.2
_PAUSE_FACTOR = 20  # reading the status of many processes is slow: one call gets at most 1/20 of the time
_MAX_READING_S = 0.003  # at a time; deadlines and answers wait meanwhile
_BUSY_SHARE = 0.1  # of one core; below it a program is asleep


class Slots:
    """Two bounds: programs that compute, so that none times out because of too many others, and programs that exist.

    A program that sleeps lends its slot to one that computes.

    Args:
        num_busy: how many may compute at once.
        num_alive: how many may exist at once, sleeping ones included.
    """

    def __init__(self, *, num_busy: int, num_alive: int) -> None:
        self._busy_left = num_busy  # below 0 when programs wake up while their slots are lent
        self._alive_left = max(num_busy, num_alive)
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def acquire(self) -> None:
        """Return when a program may start; first come, first served."""
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
        """The program of a slot sleeps."""
        self._busy_left += 1
        self._wake()

    def take_back(self) -> None:
        """The program is awake again. No program is stopped for that, but none starts until there is room."""
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


@dataclass(slots=True, kw_only=True)
class _Watch:
    next_at: float
    last: TreeStatus | None = None
    is_asleep: bool = False
    has_failed: bool = False  # and was logged


class Watchdog:
    """Watches the calls that hold a slot: lends the slots of those that sleep, and stops those that hold too much memory."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._calls: dict[Execution, _Watch] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_asleep(self) -> int:
        return sum(watched.is_asleep for watched in self._calls.values())

    async def watch(self, call: Execution) -> FinishedCall:
        """Wait for its end. Its slot counts as busy again then; the caller releases it."""
        self._calls[call] = _Watch(next_at=time.monotonic() + _FIRST_LOOK_S)
        self._look_later()
        try:
            return await call.wait()
        finally:
            if self._calls.pop(call).is_asleep:
                self._slots.take_back()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._look)

    def _look(self) -> None:
        """Check the clock of every call, and read the status of as many as there is time for."""
        self._timer = None
        if self._calls:
            self._look_later()
        now = started_at = time.monotonic()
        for call, watched in list(self._calls.items()):
            try:
                call.look(now)
            except OSError as error:  # such as no descriptor left; the clocks of the other calls must go on
                _log.warning("a program cannot be watched (%s); stopping it", error)
                call.stop("setup")
            begun_at = time.monotonic()
            if now >= watched.next_at and begun_at - started_at < _MAX_READING_S:
                try:
                    self._read_status(call, watched)
                except OSError as error:  # no descriptor left; the next time there may be one
                    if not watched.has_failed:
                        _log.warning("the status of a program could not be read: %s", error)
                    watched.has_failed = True
                cost_s = time.monotonic() - begun_at
                pause_s = _LOOK_ASLEEP_S if watched.is_asleep else _LOOK_S
                watched.next_at = now + max(pause_s, _PAUSE_FACTOR * cost_s)

    def _read_status(self, call: Execution, watched: _Watch) -> None:
        if (pid := call.child.host_pid()) is None:
            return
        seen, before = TreeStatus.of(pid, adopter=call.child.adopter), watched.last
        watched.last = seen
        if seen.holds_too_much(call.request.memory_mib):
            call.stop("memory")
        has_computed = before is not None and seen.cpu_s - before.cpu_s > _BUSY_SHARE * (seen.taken_at - before.taken_at)
        is_asleep = not seen.num_running and not has_computed
        if is_asleep and not watched.is_asleep:
            self._slots.lend()
        elif watched.is_asleep and not is_asleep:
            self._slots.take_back()
        watched.is_asleep = is_asleep
