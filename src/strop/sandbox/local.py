"""Opens the code service that a config names: a sandbox on this machine, or a service at an address."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from strop.deadline import StoppedClock, clock_stopped
from strop.errors import MachineError, NodeGone, NodeLost, NoNodes, Overloaded, SessionLost, UserError
from strop.sandbox.config import SandboxConfig
from strop.sandbox.limits import is_readable, require_verifiable, run_refusal
from strop.sandbox.protocol import (
    AnswerPair,
    CodeNode,
    CodeService,
    IsolationLevel,
    PairVerdict,
    RunOutcome,
    RunRequest,
    RunResult,
    SessionLimits,
    VerifyRequest,
    demand,
)
from strop.sandbox.spawn import keep_alive, spawn_node

_MAX_WAIT_S = 1800.0  # for a slot
_NO_SUPERVISOR_S = 30.0  # then calls fail
_ANSWER_GRACE_S = 60.0  # after the limit of a call, until the supervisor is at fault
_SESSION_S = 30.0  # to open, fork or close a session
_CHECK_S = 0.1  # how often slots that the supervisor has gained, and calls that have waited too long, are looked for
_BATCH = 32  # pairs of answers in one call of the supervisor


@dataclass(slots=True, eq=False)
class _LocalSession:
    """A session of the supervisor. Its cells and forks take turns."""

    node: CodeNode
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    lost_for: str = ""


class LocalSandbox(CodeService):
    """A `CodeService` on this machine; use as `async with`, or call `start` and `close`. Belongs to one event loop.

    The supervisor is a separate process, so that deadlines hold while this process is busy. It is restarted when it dies, and
    ends with this process. A call waits here until the supervisor has a free slot, first come, first served; then its deadline
    begins. A program or a pair of answers that was lost with its supervisor runs once more; a cell does not, and its session
    is lost.

    Args:
        config: the limits, the number of programs at once, and the lowest accepted level of isolation.
    """

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self.config = config or SandboxConfig()
        self._level: IsolationLevel | None = None  # None before the start
        self._node: CodeNode | None = None  # the supervisor; None while there is none
        self._no_node_since = 0.0
        self._num_running = 0
        self._waiting: deque[tuple[float, asyncio.Future[CodeNode]]] = deque()  # for a slot, and since when
        self._sessions: dict[str, _LocalSession] = {}
        self._starting = asyncio.Lock()
        self._is_closed = False
        self._keepers: list[asyncio.Task[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()  # that end by themselves, at the latest with the supervisor

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def level(self) -> IsolationLevel:
        """The level of isolation. Raises `MachineError` before the start."""
        if self._level is None:
            raise MachineError("the sandbox has not been started")
        return self._level

    async def start(self) -> None:
        """Start the supervisor, which tests its level of isolation first. Safe to call twice.

        Raises:
            UserError: this machine cannot give `config.min_level`; the message says which checks failed.
        """
        async with self._starting:
            if self._is_closed:
                raise MachineError("the sandbox was closed; a call came after that")
            if self._level is None:
                node = await spawn_node(self.config)
                self._use(node)
                keeping = keep_alive(node, self.config, use=self._use, lose=self._lose)
                self._keepers = [asyncio.create_task(keeping), asyncio.create_task(self._check_forever())]

    async def run(self, request: RunRequest) -> RunResult:
        demand("the argument of run()", request, RunRequest, hint=', as in run(RunRequest(code="print(1)"))')
        await self.start()
        if refusal := run_refusal(request):
            return RunResult.not_run(RunOutcome.REJECTED, refusal, level=self.level)
        with clock_stopped() as clock:
            return await (self._run_cell(request, clock) if request.session else self._run_program(request, clock))

    async def verify(self, request: VerifyRequest) -> AsyncIterator[tuple[int, PairVerdict]]:
        hint = ', as in verify(VerifyRequest(pairs=(AnswerPair(gold="1/2", answer="0.5"),)))'
        demand("the argument of verify()", request, VerifyRequest, hint=hint)
        require_verifiable(request)
        await self.start()
        found: asyncio.Queue[tuple[int, PairVerdict] | NoNodes] = asyncio.Queue()
        pairs = [(index, pair) for index, pair in enumerate(request.pairs) if is_readable(pair)]
        for index in set(range(len(request.pairs))) - {index for index, _ in pairs}:
            found.put_nowait((index, PairVerdict.UNREADABLE))
        batches = [
            asyncio.create_task(self._judge(dict(pairs[first : first + _BATCH]), request.pair_wall_s, found))
            for first in range(0, len(pairs), _BATCH)
        ]
        try:
            for _ in request.pairs:
                judged = await found.get()
                if isinstance(judged, NoNodes):
                    raise judged
                yield judged
        finally:
            for batch in batches:
                batch.cancel()
            await asyncio.gather(*batches, return_exceptions=True)

    async def open_session(self, limits: SessionLimits) -> str:
        demand("the argument of open_session()", limits, SessionLimits)
        await self.start()
        for is_last_try in (False, True):
            try:
                async with self._slot() as node, _in_time("open a session", _SESSION_S):
                    return self._add_session(await node.open_session(limits), node)
            except NodeLost:
                if is_last_try:
                    raise
        raise AssertionError("the last try returns or raises")

    async def fork_session(self, session: str) -> str:
        origin = self._session(session)
        async with origin.turn:
            self._require_alive(session, origin)
            try:
                async with _in_time("fork a session", _SESSION_S):
                    return self._add_session(await origin.node.fork_session(session), origin.node)
            except SessionLost as error:
                self._end_session(session, origin, str(error))
                raise
            except NodeLost as error:
                self._end_session(session, origin, str(error))
                raise SessionLost(f"session {session!r} is lost: {error}") from error

    async def close_session(self, session: str) -> None:
        if (closed := self._sessions.pop(session, None)) is not None:
            with suppress(NodeLost):  # the session is gone too
                async with _in_time("close a session", _SESSION_S):
                    await closed.node.close_session(session)

    async def close(self) -> None:
        self._is_closed = True
        async with self._starting:
            for _, waiting in self._waiting:
                if not waiting.done():
                    waiting.set_exception(MachineError("the sandbox was closed"))
            self._waiting.clear()
            for keeper in self._keepers:
                keeper.cancel()
            node, self._node = self._node, None
            if node is not None:
                await node.close()
            await asyncio.gather(*self._keepers, *self._tasks, return_exceptions=True)

    # Calls of the supervisor

    async def _run_program(self, request: RunRequest, clock: StoppedClock) -> RunResult:
        arrived_at = asyncio.get_running_loop().time()
        failure: MachineError | None = None
        while True:
            try:
                return await self._run_once(request, clock, arrived_at, is_retry=failure is not None)
            except NodeGone:
                continue  # it was not sent
            except NoNodes:
                raise
            except Overloaded as error:
                return RunResult.not_run(RunOutcome.OVERLOADED, str(error), level=self.level)
            except MachineError as error:
                if failure is not None or self._is_closed:
                    return RunResult.not_run(RunOutcome.INTERNAL, str(error), level=self.level)
                failure = error

    async def _run_cell(self, request: RunRequest, clock: StoppedClock) -> RunResult:
        session = self._session(request.session)
        arrived_at = asyncio.get_running_loop().time()
        async with session.turn:
            self._require_alive(request.session, session)
            try:
                return await self._run_once(request, clock, arrived_at, session=session)
            except SessionLost as error:
                self._end_session(request.session, session, str(error))
                raise
            except MachineError as error:  # it is unknown what the cell has done, so no other cell may build on it
                self._end_session(request.session, session, str(error))
                raise SessionLost(f"session {request.session!r} is lost: {error}") from error

    async def _run_once(
        self,
        request: RunRequest,
        clock: StoppedClock,
        arrived_at: float,
        *,
        session: _LocalSession | None = None,
        is_retry: bool = False,
    ) -> RunResult:
        async with self._slot(is_first=is_retry) as node:
            if session is not None:
                self._require_alive(request.session, session)
            clock.go_on()
            queue_s = asyncio.get_running_loop().time() - arrived_at
            async with _in_time("answer a call", request.wall_s + _ANSWER_GRACE_S):
                result = await node.run(request)
        return replace(result, timings=replace(result.timings, queue_s=result.timings.queue_s + queue_s))

    async def _judge(
        self, pairs: dict[int, AnswerPair], pair_wall_s: float, found: asyncio.Queue[tuple[int, PairVerdict] | NoNodes]
    ) -> None:
        """Put a verdict on each pair into `found`; an error instead if there is no supervisor."""
        num_failures = 0
        while pairs and num_failures < 2:
            indices = list(pairs)
            asked = VerifyRequest(pairs=tuple(pairs.values()), pair_wall_s=pair_wall_s)
            try:
                async with (
                    self._slot(is_first=num_failures > 0) as node,
                    _in_time("compare answers", pair_wall_s * len(pairs) + _ANSWER_GRACE_S),
                ):
                    async for position, verdict in node.verify(asked):
                        del pairs[indices[position]]
                        found.put_nowait((indices[position], verdict))
                num_failures += bool(pairs)
            except NodeGone:
                continue  # they were not sent
            except NoNodes as error:
                found.put_nowait(error)
                return
            except MachineError:
                num_failures += 1
        for index in pairs:
            found.put_nowait((index, PairVerdict.INTERNAL))

    # Slots

    @asynccontextmanager
    async def _slot(self, *, is_first: bool = False) -> AsyncIterator[CodeNode]:
        """Wait for a free slot of the supervisor, and hold it.

        Raises:
            NoNodes: there has been no supervisor for too long.
            Overloaded: no slot became free for too long.
        """
        if self._is_closed:
            raise MachineError("the sandbox was closed")
        loop = asyncio.get_running_loop()
        granted: asyncio.Future[CodeNode] = loop.create_future()
        (self._waiting.appendleft if is_first else self._waiting.append)((loop.time(), granted))
        self._grant_slots()
        try:
            node = await granted
        except asyncio.CancelledError:
            if not granted.cancelled() and granted.exception() is None:  # it was granted in this turn of the event loop
                self._release_slot()
            raise
        try:
            yield node
        except NodeLost as error:
            self._lose(node, str(error))
            raise
        finally:
            self._release_slot()

    def _grant_slots(self) -> None:
        while self._waiting and self._node is not None and self._num_running < self._node.num_slots:
            _, granted = self._waiting.popleft()
            if not granted.done():  # else its call was cancelled
                self._num_running += 1
                granted.set_result(self._node)

    def _release_slot(self) -> None:
        self._num_running -= 1
        self._grant_slots()

    async def _check_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_CHECK_S)
            self._grant_slots()
            now = loop.time()
            is_without_node = self._node is None and now - self._no_node_since > _NO_SUPERVISOR_S
            while self._waiting:
                since, granted = self._waiting[0]
                error: Overloaded
                if is_without_node and now - since > _NO_SUPERVISOR_S:
                    error = NoNodes(f"the sandbox has had no supervisor for {now - self._no_node_since:.0f} s")
                elif now - since > _MAX_WAIT_S:
                    error = Overloaded(f"the call waited {_MAX_WAIT_S:g} s for a slot")
                else:
                    break
                self._waiting.popleft()
                if not granted.done():
                    granted.set_exception(error)

    # Supervisors

    def _use(self, node: CodeNode) -> None:
        self._node, self._level = node, node.level
        self._grant_slots()

    def _lose(self, node: CodeNode, reason: str) -> None:
        if node is not self._node:
            return
        self._node, self._no_node_since = None, asyncio.get_running_loop().time()
        for session in self._sessions.values():
            if session.node is node:
                session.lost_for = session.lost_for or f"its supervisor is gone: {reason}"
        self._spawn(node.close())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Sessions

    def _add_session(self, name: str, node: CodeNode) -> str:
        lost_for = "" if node is self._node else "its supervisor was lost while the session was opened"
        self._sessions[name] = _LocalSession(node, lost_for=lost_for)
        return name

    def _session(self, name: str) -> _LocalSession:
        if self._is_closed:
            raise MachineError("the sandbox was closed; a call came after that")
        if (session := self._sessions.get(name)) is None:
            raise SessionLost(f"session {name!r} is lost: there is no such session, or it was closed")
        return session

    def _require_alive(self, name: str, session: _LocalSession) -> None:
        if session.lost_for:
            raise SessionLost(f"session {name!r} is lost: {session.lost_for}")

    def _end_session(self, name: str, session: _LocalSession, reason: str) -> None:
        """End it, also on the supervisor."""
        if not session.lost_for:
            session.lost_for = reason
            if session.node is self._node:
                self._spawn(_close_quietly(session.node, name))


async def _close_quietly(node: CodeNode, session: str) -> None:
    with suppress(MachineError):  # it may be lost there too
        await node.close_session(session)


@asynccontextmanager
async def _in_time(what: str, limit_s: float) -> AsyncIterator[None]:
    """Raise `MachineError` if the supervisor does not answer in time."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError as error:
        raise MachineError(f"the supervisor did not {what} within {limit_s:g} s") from error


@asynccontextmanager
async def open_service(config: SandboxConfig, *, token: str | None = None) -> AsyncIterator[CodeService]:
    """Open the service or the services that `config` names, for the time of an `async with`.

    Args:
        token: of the services; by default the environment variable `config.token_env`.

    Raises:
        UserError: the level is below `config.min_level`, or the address or the token is wrong.
    """
    if not config.url:
        async with LocalSandbox(config) as box:
            yield box
        return
    from strop.sandbox.client.client import SandboxClient  # needs the extra `serve`

    async with SandboxClient(config.url, token=token or os.environ.get(config.token_env)) as client:
        for url, health in (await client.health()).items():
            if not health.nodes:  # a healthy service has nodes, and lists them only for its token
                raise UserError(
                    f"the code service at {url} wants another token. Put its token into the"
                    f" environment variable {config.token_env}; `strop sandbox run` also takes it from --token-file."
                )
            for node in health.nodes:
                if node.level.rank < config.min_level.rank:
                    raise UserError(
                        f"sandbox.min_level is {config.min_level.value!r}, but the service at {url} gives"
                        f" {node.level.value!r}. Start it with --min-level {config.min_level.value},"
                        " or lower sandbox.min_level."
                    )
        yield client
