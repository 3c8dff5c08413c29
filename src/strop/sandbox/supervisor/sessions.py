"""Runs, forks and ends the sessions of one machine.

    open ── cell ── cell ── fork ─┬─ cell ...      the same id
                                  └─ cell ...      another id

Cells of one session run in the order of their arrival. A cell runs once, also after a failure. When the interpreter of a
session ends, the session is lost, and every later cell raises `SessionLost` with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import time
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from strop.errors import MachineError, SessionLost, UserError
from strop.sandbox.inside import wire
from strop.sandbox.protocol import IsolationLevel, RunRequest, RunResult, SessionLimits
from strop.sandbox.supervisor import forking
from strop.sandbox.supervisor.calls import FinishedCall, header_of, to_result
from strop.sandbox.supervisor.cells import Cell
from strop.sandbox.supervisor.process_status import IdleUsage, ProcessStatus, TreeStatus
from strop.sandbox.supervisor.processes import LOST, Child, Ended, Family, Interpreter, readable

if TYPE_CHECKING:
    from strop.sandbox.supervisor.node import Node

_log = logging.getLogger(__name__)
_ResultT = TypeVar("_ResultT")

_START_LIMIT_S = 10.0  # of a session; 2 ms bare on an idle machine
_CHECK_S = 0.5  # how often sessions are checked between cells
_IDLE_CPU_S = 5.0  # CPU time of a session between its cells, in all its life
_MAX_REMEMBERED = 4_096  # lost sessions, with the reason
_LOSS_NOTICE_S = 0.1  # until the death of a fork server is known, which kills its children


class _Session:
    """One id and its current interpreter."""

    def __init__(self, name: str, interpreter: Interpreter, limits: SessionLimits, *, num_cells: int = 0) -> None:
        self.name = name
        self.interpreter = interpreter
        self.limits = limits
        self.num_cells = num_cells
        self.turn = asyncio.Lock()
        self.is_busy = False  # with a cell or a fork
        self.lost_for = ""
        self.lease: asyncio.TimerHandle | None = None
        self.idle = IdleUsage()


class Sessions:
    """The sessions of a node. A cell holds a slot while it runs; a session between cells holds none."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._helper = forking.NamespaceHelper()
        self._sessions: dict[str, _Session] = {}
        self._num_starting = 0
        self._gone: OrderedDict[str, str] = OrderedDict()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._check_timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._sessions)

    async def open(self, limits: SessionLimits) -> str:
        self._require_room()
        self._num_starting += 1
        try:
            interpreter = await self._start(limits)
        finally:
            self._num_starting -= 1
        return self._add(interpreter, limits).name

    async def fork(self, name: str) -> str:
        """Return the id of a copy. Raises `MachineError` when the session cannot be forked; it goes on then."""
        session = self._find(name)
        await session.turn.acquire()
        fork = self._keep(asyncio.create_task(self._fork(session)))
        try:
            return (await asyncio.shield(fork)).name
        except asyncio.CancelledError:
            fork.add_done_callback(self._close_copy)  # a fork that began is finished
            raise

    async def _fork(self, session: _Session) -> _Session:
        """Takes over the turn of the session."""
        try:
            self._require_alive(session)
            self._require_room()
            self._require_depth(session)
            self._num_starting += 1
            self._begin(session)
            try:
                session.interpreter, copy = await forking.fork(session.interpreter, level=self._node.level, helper=self._helper)
            except SessionLost as error:
                self._lose(session, str(error))
                raise
            finally:
                self._num_starting -= 1
                self._end(session)
            if session.lost_for:
                copy.close()
                self._require_alive(session)
            return self._add(copy, session.limits, num_cells=session.num_cells)
        finally:
            session.turn.release()

    def _close_copy(self, fork: asyncio.Task[_Session]) -> None:
        if not fork.cancelled() and fork.exception() is None:
            self._lose(fork.result(), "its fork was cancelled")

    async def run(self, request: RunRequest) -> RunResult:
        """Run one cell. Raises `SessionLost` when the session does not exist."""
        session, arrived_at = self._find(request.session), time.monotonic()
        await session.turn.acquire()
        try:
            self._require_alive(session)
            await self._node.slots.acquire()
            if session.lost_for:  # while it waited for a slot
                self._node.slots.release()
                self._require_alive(session)
        except BaseException:
            session.turn.release()
            raise
        # From here on it runs to its end, also when its caller is cancelled.
        admitted_at = time.monotonic()
        limits = session.limits
        request = replace(
            request, memory_mib=min(request.memory_mib, limits.memory_mib), file_mib=min(request.file_mib, limits.file_mib)
        )
        self._begin(session)
        try:
            cell = Cell(session.interpreter, request, session.num_cells + 1, admitted_at=admitted_at)
        except OSError as error:
            self._release(session)
            raise MachineError(f"a cell could not be sent to its session, which goes on without it: {error}") from error
        session.num_cells += 1
        playing = self._keep(asyncio.ensure_future(self._play(session, cell)))
        try:
            facts = await asyncio.shield(playing)
        except asyncio.CancelledError:
            cell.stop("cancelled")
            raise
        if facts.ended.is_lost:
            self._require_alive(session)
        return to_result(facts, request, level=self._node.level, queue_s=admitted_at - arrived_at, node=self._node.name)

    def close_session(self, name: str) -> None:
        """Safe to call twice, and for one that was lost."""
        if (session := self._sessions.get(name)) is not None:
            self._lose(session, "it was closed")

    async def close(self) -> None:
        for session in list(self._sessions.values()):
            self._lose(session, "its node was closed")
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._helper.close()

    async def _start(self, limits: SessionLimits) -> Interpreter:
        work = header_of(limits, wire.JOB_SESSION, 0, 0, 0, 0)
        try:
            if self._node.level.rank >= IsolationLevel.NAMESPACES.rank:
                self._helper.start()  # so that the first fork does not wait for it
            child, line = (await self._node.pool(limits.profile).server()).take_session(work)
            with contextlib.ExitStack() as undo:
                undo.callback(line.close)
                undo.callback(child.close)
                async with asyncio.timeout(_START_LIMIT_S):
                    listener = await _birth(child, line, undo)
                status = ProcessStatus.of(child.pidfd)
                undo.pop_all()
        except TimeoutError as error:
            raise MachineError(f"a session did not start within {_START_LIMIT_S:.0f} s") from error
        except (OSError, MachineError) as error:
            raise MachineError(f"a session did not start: {error}") from error
        family = Family(listener=listener, owner=status.owner, max_processes=limits.max_processes)
        return Interpreter(line, child.output, child.pidfd, status=status, family=family, child=child)

    def _add(self, interpreter: Interpreter, limits: SessionLimits, *, num_cells: int = 0) -> _Session:
        session = _Session(f"{self._node.name}-{secrets.token_hex(16)}", interpreter, limits, num_cells=num_cells)
        self._sessions[session.name] = session
        self._end(session)
        if self._check_timer is None:
            self._check_timer = asyncio.get_running_loop().call_later(_CHECK_S, self._check_all)
        return session

    async def _play(self, session: _Session, cell: Cell) -> FinishedCall:
        try:
            facts = await self._node.watchdog.watch(cell)
            if (ended := session.interpreter.ended) is None:
                return facts
            if ended.signal == signal.SIGKILL and not cell.is_killed:
                await asyncio.sleep(_LOSS_NOTICE_S)
            root = session.interpreter.root.ended
            if session.lost_for or ended.is_lost or (root is not None and root.is_lost):
                self._lose(session, "its fork server died")
                return replace(facts, ended=LOST)
            self._lose(session, _end_in_cell(facts, cell, session.num_cells))
            return facts
        finally:
            self._release(session)

    def _release(self, session: _Session) -> None:
        """Return what a cell holds."""
        self._node.slots.release()
        self._end(session)
        session.turn.release()

    def _begin(self, session: _Session) -> None:
        session.is_busy = True
        session.interpreter.on_end = None
        if session.lease is not None:
            session.lease.cancel()
            session.lease = None

    def _end(self, session: _Session) -> None:
        """After a cell or a fork: begin the lease again, or close a lost session."""
        session.is_busy = False
        interpreter = session.interpreter
        if interpreter.ended is not None and not session.lost_for:
            self._lose(session, f"it ended between two cells ({_how(interpreter.ended)})")
        if session.lost_for:
            interpreter.close()
            return
        session.idle.begin()
        interpreter.on_end = lambda: self._end(session)
        lease_s, loop = session.limits.lease_s, asyncio.get_running_loop()
        session.lease = loop.call_later(lease_s, self._lose, session, f"its lease of {lease_s:g} s ran out")

    def _lose(self, session: _Session, reason: str) -> None:
        if session.lost_for:
            return
        session.lost_for = reason
        del self._sessions[session.name]
        self._gone[session.name] = reason
        if len(self._gone) > _MAX_REMEMBERED:
            self._gone.popitem(last=False)
        if session.lease is not None:
            session.lease.cancel()
        if session.is_busy:  # its cell or fork closes it
            session.interpreter.kill()
        else:
            session.interpreter.on_end = None
            session.interpreter.close()

    def _check_all(self) -> None:
        """Check the sessions between their cells, where they hold no slot and so may do little."""
        self._check_timer = asyncio.get_running_loop().call_later(_CHECK_S, self._check_all) if self._sessions else None
        for session in list(self._sessions.values()):
            if session.is_busy:
                continue
            session.interpreter.family.refuse_questions()
            try:
                self._check(session)
            except OSError as error:  # no descriptor left; the next time there may be one
                _log.warning("session %s could not be checked between its cells: %s", session.name, error)

    def _check(self, session: _Session) -> None:
        interpreter = session.interpreter
        seen = TreeStatus.of(interpreter.pid, adopter=interpreter.adopter)
        if seen.holds_too_much(session.limits.memory_mib):
            self._lose(session, "between two cells it used more memory than it may")
            return
        session.idle.charge(seen)
        if session.idle.charged_s > _IDLE_CPU_S:
            self._lose(session, f"between its cells it computed for more than {_IDLE_CPU_S:g} s")

    def _require_room(self) -> None:
        most = self._node.config.max_sessions
        if len(self._sessions) + self._num_starting >= most:
            raise MachineError(
                f"node {self._node.name!r} has {most} sessions, which is its limit: close one, or raise sandbox.max_sessions"
            )

    def _require_depth(self, session: _Session) -> None:
        if self._node.level.rank < IsolationLevel.NAMESPACES.rank:
            raise UserError(
                f"a session can be forked at level L2 or above, and this node runs programs at L{self._node.level.rank}"
                f" ({self._node.level.value}): without namespaces a copy would not be isolated from its origin. Open a new"
                " session and run its cells again, or allow namespaces."
            )
        if session.interpreter.depth >= forking.MAX_DEPTH:
            raise UserError(
                f"session {session.name!r} is a copy of a copy, {forking.MAX_DEPTH} deep, and namespaces nest no deeper."
                " Open a new session and run its cells again."
            )

    def _require_alive(self, session: _Session) -> None:
        if session.lost_for:
            raise SessionLost(f"session {session.name!r} is gone: {session.lost_for}")

    def _find(self, name: str) -> _Session:
        if (session := self._sessions.get(name)) is not None:
            return session
        if name in self._gone:
            raise SessionLost(f"session {name!r} is gone: {self._gone[name]}")
        raise SessionLost(f"node {self._node.name!r} has no session {name!r}")

    def _keep(self, task: asyncio.Task[_ResultT]) -> asyncio.Task[_ResultT]:
        """Keep a reference until it is done."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _birth(child: Child, line: socket.socket, undo: contextlib.ExitStack) -> int:
    """Wait until the session is ready for its first cell. Returns its listener, which `undo` closes; -1 where it has none."""
    await readable(line.fileno())
    packet, descriptors, flags, _ = socket.recv_fds(line, wire.LINE_BYTES, 1)
    for descriptor in descriptors:
        undo.callback(os.close, descriptor)
    if flags & socket.MSG_CTRUNC:
        raise MachineError("no descriptor is left for it. Raise `ulimit -n`.")
    if packet[:1] == wire.LINE_HELLO:
        await readable(line.fileno())
        packet = line.recv(wire.LINE_BYTES)
    while child.pidfd < 0 and child.ended is None:  # noqa: ASYNC110 - the report of its parent is on its way
        await asyncio.sleep(0.001)
    if packet[:1] != wire.LINE_BORN or child.ended is not None:
        raise MachineError(packet[1:].decode("utf-8", "replace") or "its process ended")
    return descriptors[0] if descriptors else -1


def _how(ended: Ended) -> str:
    return f"exit code {ended.exit_code}" if ended.exit_code is not None else f"signal {ended.signal}"


def _end_in_cell(facts: FinishedCall, cell: Cell, number: int) -> str:
    if facts.stopped_for == "policy":
        return f"cell {number} was stopped (policy): its interpreter was busy after its end, or other code wrote to its line"
    if facts.stopped_for and cell.is_killed:
        return f"cell {number} was stopped ({facts.stopped_for}) and did not end when it was interrupted"
    return f"cell {number} ended it ({_how(facts.ended)})"
