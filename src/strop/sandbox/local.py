"""This machine as a `CodeService`: queues calls for the supervisor, restarts it, keeps sessions; and `open_service`."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeAlias, TypeVar

from strop.deadline import clock_stopped
from strop.errors import MachineError, NodeGone, NodeLost, NoNodes, SessionLost, UserError
from strop.sandbox.config import TOKEN_VARIABLE, SandboxConfig
from strop.sandbox.node_process import Spawn, spawn_node
from strop.sandbox.protocol import (
    NUM_PAIRS,
    AnswerPair,
    AsyncContext,
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
    is_readable,
    require_verifiable,
    run_refusal,
    session_refusal,
)

_log = logging.getLogger(__name__)
_ItemT = TypeVar("_ItemT")
_Found: TypeAlias = asyncio.Queue[tuple[int, PairVerdict] | Exception]

_LEASE_SLACK_S = 60.0  # the supervisor ends a session at its lease; its entry here goes so much later
_CHECK_S = 0.1  # how often slots that the supervisor has gained, and what is late, are looked for
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0  # before a supervisor is started again; doubles with each start that fails


class FairQueue(Generic[_ItemT]):
    """Clients take turns, and within one client the oldest item is next.

    An item waits for at most one item of every other client, however many these have. It is in the queue at most once.
    """

    def __init__(self) -> None:
        self._clients: OrderedDict[Hashable, OrderedDict[_ItemT, None]] = OrderedDict()  # next turn first; none is empty

    def __bool__(self) -> bool:
        return bool(self._clients)

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    def push(self, client: Hashable, item: _ItemT, *, is_first: bool = False) -> None:
        """Put the item after the others of its client, or with `is_first` before them."""
        if (items := self._clients.get(client)) is None:
            items = self._clients[client] = OrderedDict()
        items[item] = None
        if is_first:
            items.move_to_end(item, last=False)

    def pop(self) -> _ItemT:
        """Remove the next item, if there is one."""
        client, items = next(iter(self._clients.items()))
        item, _ = items.popitem(last=False)
        if items:
            self._clients.move_to_end(client)
        else:
            del self._clients[client]
        return item

    def remove(self, client: Hashable, item: _ItemT) -> bool:
        """Remove one item; False if it is not in the queue."""
        items = self._clients.get(client)
        if items is None or item not in items:
            return False
        del items[item]
        if not items:
            del self._clients[client]
        return True


@dataclass(slots=True, eq=False)
class _Session:
    """A session of the supervisor. Its cells and forks take turns."""

    name: str
    node: CodeNode
    limits: SessionLimits
    used_at: float
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    lost_for: str = ""


class LocalSandbox(AsyncContext, CodeService):
    """A `CodeService` on this machine; use as `async with`, or call `start` and `close`. Belongs to one event loop.

    The supervisor is a separate process, so that deadlines hold while this process is busy. It is restarted when it dies, and
    ends with this process. A call waits here until the supervisor has a free slot; then its deadline begins. Clients take
    turns, and so do the programs and the cells of one client. A program or a pair of answers that was lost with its supervisor
    runs once more; a cell does not, and its session is lost.

    Args:
        config: the limits, the number of programs at once, and the lowest accepted level of isolation.
        name: of the machine in replies.
        no_node_s: how long a call waits without a supervisor before it raises `NoNodes`.
        spawn: starts a supervisor.
    """

    def __init__(
        self, config: SandboxConfig | None = None, *, name: str = "local", no_node_s: float = 30.0, spawn: Spawn = spawn_node
    ) -> None:
        self.config = config or SandboxConfig()
        self.node: CodeNode | None = None  # the supervisor; None while there is none
        self.queue: FairQueue[asyncio.Future[CodeNode]] = FairQueue()  # calls that wait for a slot
        self.num_running = 0
        self.num_retries = self.num_nodes_lost = self.num_sessions_lost = 0
        self._level: IsolationLevel | None = None  # None before the start
        self._name = name
        self._no_node_s = no_node_s
        self._spawn_node = spawn
        self._no_node_since = 0.0
        self._sessions: dict[str, _Session] = {}
        self._starting = asyncio.Lock()
        self._is_closed = False
        self._keepers: list[asyncio.Task[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()  # that end by themselves, at the latest with the supervisor

    @property
    def level(self) -> IsolationLevel:
        """The level of isolation. Raises `MachineError` before the start."""
        if self._level is None:
            raise MachineError("the sandbox has not been started")
        return self._level

    @property
    def num_sessions(self) -> int:
        return sum(not session.lost_for for session in self._sessions.values())

    async def start(self) -> None:
        """Start the supervisor, which tests its level of isolation first. Safe to call twice.

        Raises:
            UserError: this machine cannot give `config.min_level`; the message says which checks failed.
        """
        async with self._starting:
            if self._is_closed:
                raise MachineError("the sandbox was closed; a call came after that")
            if self._level is None:
                node = await self._spawn_node(self.config, self._name)
                self._use(node)
                self._keepers = [asyncio.create_task(self._keep_alive(node)), asyncio.create_task(self._check_forever())]

    async def run(self, request: RunRequest, *, client: str = "") -> RunResult:
        demand("the argument of run()", request, RunRequest, hint=', as in run(RunRequest(code="print(1)"))')
        await self.start()
        if refusal := run_refusal(request):
            return RunResult.not_run(RunOutcome.REJECTED, refusal, level=self.level)
        with clock_stopped() as clock:
            return await self.dispatch(request, client, clock.go_on)

    async def dispatch(self, request: RunRequest, client: str, begin: Callable[[], None]) -> RunResult:
        """Run a call that is within the limits, after `start`.

        Args:
            begin: called when the supervisor takes the call, and once more if it dies and another one takes it.
        """
        arrived_at = asyncio.get_running_loop().time()
        if request.session:
            return await self._run_cell(request, client, begin, arrived_at)
        failure: MachineError | None = None
        while True:
            try:
                return await self._run_once(request, (client, False), begin, arrived_at, is_retry=failure is not None)
            except NodeGone:
                continue  # it was not sent
            except MachineError as error:
                if failure is None and isinstance(error, NoNodes):
                    raise
                if failure is not None or self._is_closed:  # it may have run, so the caller must not send it again
                    reason = str(error) if failure is None else f"{failure}; then {error}"
                    return RunResult.not_run(RunOutcome.INTERNAL, reason, level=self.level)
                failure = error
                self.num_retries += 1

    async def verify(self, request: VerifyRequest, *, client: str = "") -> AsyncGenerator[tuple[int, PairVerdict]]:
        require_verifiable(request)
        await self.start()
        found: _Found = asyncio.Queue()
        pairs = [(index, pair) for index, pair in enumerate(request.pairs) if is_readable(pair)]
        for index in set(range(len(request.pairs))) - {index for index, _ in pairs}:
            found.put_nowait((index, PairVerdict.UNREADABLE))
        batches = [
            asyncio.create_task(self._judge(dict(pairs[first : first + NUM_PAIRS]), request.pair_wall_s, client, found))
            for first in range(0, len(pairs), NUM_PAIRS)
        ]
        try:
            for _ in request.pairs:
                judged = await found.get()
                if isinstance(judged, Exception):
                    raise judged
                yield judged
        finally:
            for batch in batches:
                batch.cancel()
            await asyncio.gather(*batches, return_exceptions=True)

    async def open_session(self, limits: SessionLimits, *, client: str = "") -> str:
        if refusal := session_refusal(limits):
            raise UserError(f"{refusal}.")
        await self.start()
        try:
            return await self._open_session(limits, client)
        except NodeLost:
            return await self._open_session(limits, client)

    async def fork_session(self, session: str) -> str:
        async with self._turn(session) as origin:
            return self._add_session(await origin.node.fork_session(session), origin.node, origin.limits)

    async def close_session(self, session: str) -> None:
        if (closed := self._sessions.pop(session, None)) is not None:
            closed.lost_for = closed.lost_for or "it was closed"  # for the cells that wait
            with suppress(NodeLost):  # the session is gone too
                await closed.node.close_session(session)

    async def close(self) -> None:
        self._is_closed = True
        async with self._starting:
            while self.queue:
                if not (turn := self.queue.pop()).done():
                    turn.set_exception(MachineError("the sandbox was closed"))
            for keeper in self._keepers:
                keeper.cancel()
            node, self.node = self.node, None
            if node is not None:
                await node.close()
            await asyncio.gather(*self._keepers, *self._tasks, return_exceptions=True)

    # Calls of the supervisor

    async def _run_cell(self, request: RunRequest, client: str, begin: Callable[[], None], arrived_at: float) -> RunResult:
        async with self._turn(request.session) as session:
            try:
                return await self._run_once(request, (client, True), begin, arrived_at, session=session)
            except MachineError as error:  # it is unknown what the cell has done, so no other cell may build on it
                raise error if isinstance(error, SessionLost) else NodeLost(str(error)) from error

    async def _run_once(
        self,
        request: RunRequest,
        client: tuple[str, bool],
        begin: Callable[[], None],
        arrived_at: float,
        *,
        session: _Session | None = None,
        is_retry: bool = False,
    ) -> RunResult:
        node = await self._take_slot(client, is_first=is_retry)
        with self._releasing(node):
            if session is not None:
                self._require_alive(session)
            begin()
            queue_s = asyncio.get_running_loop().time() - arrived_at
            result = await node.run(request)
        return replace(result, node=node.name, timings=replace(result.timings, queue_s=result.timings.queue_s + queue_s))

    async def _judge(self, pairs: dict[int, AnswerPair], pair_wall_s: float, client: str, found: _Found) -> None:
        """Put a verdict on each pair into `found`; an error instead if there is none to come."""
        num_failures = 0
        while pairs and num_failures < 2:
            indices = list(pairs)
            asked = VerifyRequest(pairs=tuple(pairs.values()), pair_wall_s=pair_wall_s)
            try:
                node = await self._take_slot((client, False), is_first=num_failures > 0)
                with self._releasing(node):
                    async for position, verdict in node.verify(asked):
                        del pairs[indices[position]]
                        found.put_nowait((indices[position], verdict))
                num_failures += bool(pairs)
            except NodeGone:
                continue  # they were not sent
            except Exception as error:  # noqa: BLE001 - the caller raises it
                if isinstance(error, NoNodes) or not isinstance(error, MachineError):
                    found.put_nowait(error)
                    return
                num_failures += 1
        for index in pairs:
            found.put_nowait((index, PairVerdict.INTERNAL))

    # Slots

    async def _take_slot(self, client: tuple[str, bool], *, is_first: bool = False) -> CodeNode:
        """Wait for a free slot of the supervisor. Use the node within `_releasing`.

        Raises:
            NoNodes: there has been no supervisor for too long.
        """
        if self._is_closed:
            raise MachineError("the sandbox was closed")
        if not self.queue and self.node is not None and self.num_running < self.node.num_slots:
            self.num_running += 1
            return self.node
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[CodeNode] = loop.create_future()
        self.queue.push(client, turn, is_first=is_first)
        began = loop.time()
        try:
            while not turn.done():
                since = loop.time() if self.node is not None else max(began, self._no_node_since)
                left_s = since + self._no_node_s - loop.time()
                if left_s <= 0 and self.queue.remove(client, turn):
                    raise NoNodes(f"the sandbox has had no supervisor for {loop.time() - self._no_node_since:.0f} s")
                await asyncio.wait({turn}, timeout=left_s)
            return turn.result()
        except asyncio.CancelledError:
            if not self.queue.remove(client, turn) and not turn.cancelled() and turn.exception() is None:
                self._release_slot()  # it was granted in this turn of the event loop
            raise

    @contextmanager
    def _releasing(self, node: CodeNode) -> Iterator[None]:
        try:
            yield
        except NodeLost as error:
            self._lose(node, str(error))
            raise
        finally:
            self._release_slot()

    def _grant_slots(self) -> None:
        while self.queue and self.node is not None and self.num_running < self.node.num_slots:
            if not (turn := self.queue.pop()).done():
                turn.set_result(self.node)
                self.num_running += 1

    def _release_slot(self) -> None:
        self.num_running -= 1
        self._grant_slots()

    async def _check_forever(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            self._grant_slots()
            now = asyncio.get_running_loop().time()
            for session in list(self._sessions.values()):
                if not session.turn.locked() and now > session.used_at + session.limits.lease_s + _LEASE_SLACK_S:
                    del self._sessions[session.name]

    # Supervisors

    async def _keep_alive(self, node: CodeNode) -> None:
        """Start the supervisor again each time that it is lost."""
        while True:
            self._lose(node, await node.wait_lost())
            pause_s = _FIRST_PAUSE_S  # a start takes a second, so one that dies early needs no longer pause
            while self.node is None:
                await asyncio.sleep(pause_s)
                try:
                    node = await self._spawn_node(self.config, self._name)
                except (MachineError, UserError, OSError) as error:
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                    _log.error("the supervisor could not be started again, next try in %.1f s: %s", pause_s, error)
                else:
                    self._use(node)

    def _use(self, node: CodeNode) -> None:
        self.node, self._level = node, node.level
        _log.info("the supervisor works: %d slots, level %s (L%d)", node.num_slots, node.level, node.level.rank)
        self._grant_slots()

    def _lose(self, node: CodeNode, reason: str) -> None:
        if node is not self.node:
            return
        self.node, self._no_node_since = None, asyncio.get_running_loop().time()
        self.num_nodes_lost += 1
        _log.warning("the supervisor is lost: %s", reason)
        for session in list(self._sessions.values()):
            self._end_session(session, f"its supervisor is gone: {reason}")
        self._spawn(node.close())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Sessions

    async def _open_session(self, limits: SessionLimits, client: str) -> str:
        node = await self._take_slot((client, True), is_first=True)
        with self._releasing(node):
            return self._add_session(await node.open_session(limits), node, limits)

    def _add_session(self, name: str, node: CodeNode, limits: SessionLimits) -> str:
        session = self._sessions[name] = _Session(name, node, limits, asyncio.get_running_loop().time())
        if node is not self.node:
            self._end_session(session, "its supervisor was lost while the session was opened")
        return name

    @asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[_Session]:
        """Wait for the turn of a cell or a fork. `SessionLost` and `NodeLost` in it end the session."""
        if self._is_closed:
            raise MachineError("the sandbox was closed; a call came after that")
        if (session := self._sessions.get(name)) is None:
            raise SessionLost(f"session {name!r} is lost: there is no such session, or it was closed")
        async with session.turn:
            self._require_alive(session)
            try:
                yield session
            except (SessionLost, NodeLost) as error:
                self._end_session(session, str(error))
                if isinstance(error, SessionLost):
                    raise
                raise SessionLost(f"session {name!r} is lost: {error}") from error
            finally:
                session.used_at = asyncio.get_running_loop().time()

    @staticmethod
    def _require_alive(session: _Session) -> None:
        if session.lost_for:
            raise SessionLost(f"session {session.name!r} is lost: {session.lost_for}")

    def _end_session(self, session: _Session, reason: str) -> None:
        """End it without a request of its client, also on the supervisor."""
        if not session.lost_for:
            self.num_sessions_lost += 1
            session.lost_for = reason
            if session.node is self.node:
                self._spawn(_close_quietly(session.node, session.name))


async def _close_quietly(node: CodeNode, session: str) -> None:
    with suppress(MachineError):  # it may be lost there too
        await node.close_session(session)


@asynccontextmanager
async def open_service(config: SandboxConfig, *, token: str | None = None) -> AsyncIterator[CodeService]:
    """Open the service or the services that `config` names, for the time of an `async with`.

    Args:
        token: of the services; by default the environment variable `STROP_SANDBOX_TOKEN`.

    Raises:
        UserError: the level is below `config.min_level`, or the address or the token is wrong.
    """
    if not config.url:
        async with LocalSandbox(config) as box:
            yield box
        return
    from strop.sandbox.client import open_services  # needs the extra `serve`

    async with open_services(config, token or os.environ.get(TOKEN_VARIABLE)) as client:
        yield client
