"""The sessions of the service: the node of each, the order of its cells, and why a session is gone."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import OrderedDict, deque
from collections.abc import Awaitable
from typing import TypeVar

from strop.errors import MachineError, NodeLost, NoNodes, Overloaded, SessionLost
from strop.sandbox.protocol import SessionLimits
from strop.sandbox.server.floor import Floor, Seat
from strop.sandbox.server.jobs import RunJob
from strop.sandbox.server.metrics import Tally

_MAX_REMEMBERED = 10_000  # reasons of sessions that are gone, for the errors of later cells
_LEASE_SLACK_S = 60.0  # the node ends a session; its entry here goes so much later
_ANSWER_S = 30.0  # to open, fork or close a session

_ResultT = TypeVar("_ResultT")


class Session:
    """One session. Its cells and forks take turns; `busy` is the current one."""

    def __init__(self, seat: Seat, remote_id: str, limits: SessionLimits, *, now: float) -> None:
        self.id = secrets.token_hex(16)  # unguessable: every client that knows it may use the session
        self.seat = seat
        self.remote_id = remote_id
        self.limits = limits
        self.used_at = now
        self.busy: RunJob | asyncio.Future[None] | None = None
        self.waiting: deque[RunJob | asyncio.Future[None]] = deque()


class Sessions:
    """Sessions by the id that clients know. A session lives on one node and is lost with it.

    Args:
        max_sessions: further ones are refused.
    """

    def __init__(self, floor: Floor, tally: Tally, *, max_sessions: int) -> None:
        self._floor = floor
        self._tally = tally
        self._max_sessions = max_sessions
        self._sessions: dict[str, Session] = {}
        self._gone: OrderedDict[str, str] = OrderedDict()
        self._num_opening = 0  # requested from a node, not there yet
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, session_id: str) -> Session:
        """Raises `SessionLost`, with the reason if it is known."""
        if (session := self._sessions.get(session_id)) is not None:
            return session
        raise _lost(session_id, self._gone.get(session_id, "there is no such session, or it ended long ago"))

    def has_any_on(self, seat: Seat) -> bool:
        return any(session.seat is seat for session in self._sessions.values())

    async def open(self, limits: SessionLimits) -> str:
        """Open a session on the node with the fewest for its size; on another one if that node dies meanwhile."""
        self._raise_if_full()
        self._num_opening += 1
        try:
            return await self._open(limits)
        except NodeLost:
            return await self._open(limits)
        finally:
            self._num_opening -= 1

    async def _open(self, limits: SessionLimits) -> str:
        seat = self._emptiest_seat()
        try:
            remote_id = await _in_time(seat, seat.node.open_session(limits))
        except NodeLost as error:
            self._floor.lose(seat, str(error))
            raise
        return self._add(seat, remote_id, limits)

    async def fork(self, session_id: str) -> str:
        """Copy a session, after the cells before it."""
        origin = self.find(session_id)
        self._raise_if_full()
        turn: asyncio.Future[None] = self._loop.create_future()
        self.enter(origin, turn)
        try:
            await turn
            remote_id = await _in_time(origin.seat, origin.seat.node.fork_session(origin.remote_id))
        except SessionLost as error:
            self.lose(origin, str(error))
            raise
        except NodeLost as error:
            self._floor.lose(origin.seat, str(error))
            raise _lost(session_id, str(error)) from error
        finally:
            self.leave(origin, turn)
        return self._add(origin.seat, remote_id, origin.limits)

    async def close(self, session_id: str) -> None:
        if (session := self._sessions.get(session_id)) is not None:
            self._remove(session, "it was closed")
            with contextlib.suppress(NodeLost):  # the session is gone too
                await _in_time(session.seat, session.seat.node.close_session(session.remote_id))

    def enter(self, session: Session, turn: RunJob | asyncio.Future[None]) -> None:
        """Wait for a turn. Always call `leave` afterwards."""
        session.waiting.append(turn)
        self._next_turn(session)

    def leave(self, session: Session, turn: RunJob | asyncio.Future[None]) -> None:
        """End a turn, or stop waiting for it."""
        session.used_at = self._loop.time()
        if session.busy is turn:
            session.busy = None
            self._next_turn(session)
        elif turn in session.waiting:
            session.waiting.remove(turn)

    def lose(self, session: Session, reason: str) -> None:
        """End a session without a request of its client. What waits in it fails with `SessionLost`."""
        if session.id in self._sessions:
            self._tally.num_sessions_lost += 1
            self._remove(session, reason)
            if session.seat in self._floor.seats:
                self._floor.spawn(self._close_quietly(session))

    def lose_all_on(self, seat: Seat, reason: str) -> None:
        for session in [session for session in self._sessions.values() if session.seat is seat]:
            self.lose(session, f"its node {seat.node.name!r} is gone: {reason}")

    def forget_expired(self) -> None:
        now = self._loop.time()
        for session in list(self._sessions.values()):
            if session.busy is None and now > session.used_at + session.limits.lease_s + _LEASE_SLACK_S:
                self._remove(session, "its lease ran out")

    def _remove(self, session: Session, reason: str) -> None:
        del self._sessions[session.id]
        self._floor.changed.set()
        self._gone[session.id] = reason
        while len(self._gone) > _MAX_REMEMBERED:
            self._gone.popitem(last=False)
        turns = [*session.waiting, *([session.busy] if session.busy else [])]
        session.waiting.clear()
        for turn in turns:
            if isinstance(turn, RunJob):
                turn.give_up(_lost(session.id, reason))
                if turn is session.busy:
                    self._floor.withdraw(turn)
                else:
                    turn.end()
            elif not turn.done():
                turn.set_exception(_lost(session.id, reason))

    def _next_turn(self, session: Session) -> None:
        while session.busy is None and session.waiting:
            turn = session.waiting.popleft()
            if isinstance(turn, RunJob):
                session.busy = turn
                self._floor.put(turn)
            elif not turn.done():
                session.busy = turn
                turn.set_result(None)

    def _add(self, seat: Seat, remote_id: str, limits: SessionLimits) -> str:
        session = Session(seat, remote_id, limits, now=self._loop.time())
        self._sessions[session.id] = session
        if seat not in self._floor.seats:
            self.lose(session, f"its node {seat.node.name!r} was lost while the session was opened")
        return session.id

    def _raise_if_full(self) -> None:
        if (num := len(self._sessions) + self._num_opening) >= self._max_sessions:
            raise Overloaded(f"the service has {num} sessions, which is the limit")

    def _emptiest_seat(self) -> Seat:
        nums = {seat: 0 for seat in self._floor.seats if not seat.is_draining}
        if not nums:
            raise NoNodes("the service has no node, or every node is being drained")
        for session in self._sessions.values():
            if session.seat in nums:
                nums[session.seat] += 1
        return min(nums, key=lambda seat: nums[seat] / max(1, seat.node.num_slots))

    async def _close_quietly(self, session: Session) -> None:
        with contextlib.suppress(MachineError):  # the node may have lost it too
            await _in_time(session.seat, session.seat.node.close_session(session.remote_id))


async def _in_time(seat: Seat, call: Awaitable[_ResultT]) -> _ResultT:
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await call
    except TimeoutError as error:
        raise MachineError(f"node {seat.node.name!r} did not answer a request for a session within {_ANSWER_S:g} s") from error


def _lost(session_id: str, reason: str) -> SessionLost:
    return SessionLost(f"session {session_id!r} is lost: {reason}")
