"""The supervisor of one machine: fork servers by profile, slots, a clock, and the self-test of the level of isolation.

    request -> slot -> child of the profile that has its imports -> Call -> result

No code of a program runs here, and nothing that a program wrote is trusted. `node_process.spawn_node` runs this module as a
process, which answers the calls of a link with a node.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from typing import Protocol

from strop.errors import MachineError, StropError
from strop.sandbox.config import SandboxConfig
from strop.sandbox.node_process import HEARTBEAT_S, Link, LogLine, NodeStatus
from strop.sandbox.protocol import (
    AsyncContext,
    CodeService,
    IsolationLevel,
    PairVerdict,
    RunOutcome,
    RunRequest,
    RunResult,
    SessionLimits,
    VerifyRequest,
)
from strop.sandbox.supervisor.calls import Call, to_result
from strop.sandbox.supervisor.directories import remove_leftovers
from strop.sandbox.supervisor.fork_servers import ForkServerPool, profile_of
from strop.sandbox.supervisor.self_test import Canaries, SelfTestReport, refusal, run_self_test
from strop.sandbox.supervisor.sessions import Sessions
from strop.sandbox.supervisor.watchdog import Slots, Watchdog
from strop.sandbox.verify_process import VerifyChild, verify

_log = logging.getLogger(__name__)

_NUM_BUSY = 16  # open calls from which on an answer waits a moment, so that several leave in one write
_GATHER_S = 0.003
_SLOTS_S = 0.05  # how often the number of slots is looked at
_PR_SET_PDEATHSIG = 1
_NUM_TESTS = 2  # of a level that fails at first: on a busy machine an attack may end before it is seen
_SLOTS_FACTOR = 3  # accepted calls for each that computes: enough that the next is ready, few enough to be fair


class Node(AsyncContext, CodeService):
    """A code service in this process; use as `async with`, or call `start` and `close`. Belongs to one event loop.

    It checks no limit of a request; `LocalSandbox` does that before a call comes here.

    Args:
        config: the limits, the number of programs at once, and the lowest accepted level of isolation.
        name: the name in every reply.
    """

    def __init__(self, config: SandboxConfig | None = None, *, name: str = "local") -> None:
        self.config = config or SandboxConfig()
        self.name = name
        self.level = self.config.level or IsolationLevel.NAMESPACES
        self.tried: dict[IsolationLevel, SelfTestReport | str] = {}  # the last level is in use
        self.slots = Slots(num_busy=self.config.max_running, num_alive=self.config.max_alive)
        self._pools: dict[str, ForkServerPool] = {}
        self.watchdog = Watchdog(self.slots)
        self._is_closed = False
        self._sessions = Sessions(self)

    async def start(self) -> None:
        """Start the first fork servers and test the level of isolation by attacks. Before any call.

        Raises:
            UserError: this machine cannot give `config.min_level`; the message says what is missing.
        """
        # Each call holds four descriptors, and a fifth for a directory on disk.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        remove_leftovers()
        await self._find_level()
        await asyncio.gather(*(self.pool(profile).start(self.config.fork_servers) for profile in self.config.warm))

    async def run(self, request: RunRequest) -> RunResult:
        if request.session:
            return await self._sessions.run(request)
        arrived_at = time.monotonic()
        await self.slots.acquire()
        try:
            return await self._run_program(request, queue_s=time.monotonic() - arrived_at)
        finally:
            self.slots.release()

    async def _run_program(self, request: RunRequest, *, queue_s: float = 0.0) -> RunResult:
        """Run it now; the caller holds its slot."""
        admitted_at = time.monotonic()
        server = await self.pool(request.profile or profile_of(request.code)).server()
        facts = await self.watchdog.watch(Call(server.take(), request, admitted_at=admitted_at))
        if facts.ended.is_lost and facts.stopped_for in ("", "setup"):
            raise MachineError("the sandbox was closed" if self._is_closed else "its fork server died")
        result = to_result(facts, request, level=self.level, queue_s=queue_s, node=self.name)
        if result.outcome is RunOutcome.INTERNAL:
            raise MachineError(result.reason)
        return result

    def verify(self, request: VerifyRequest) -> AsyncIterator[tuple[int, PairVerdict]]:
        return verify(self._verify_child, request)

    async def open_session(self, limits: SessionLimits) -> str:
        return await self._sessions.open(limits)

    async def fork_session(self, session: str) -> str:
        self._refuse_if_closed()
        return await self._sessions.fork(session)

    async def close_session(self, session: str) -> None:
        self._sessions.close_session(session)

    async def close(self) -> None:
        self._is_closed = True
        self.watchdog.close()
        await self._sessions.close()
        self._close_pools()

    async def _verify_child(self) -> VerifyChild:
        self._refuse_if_closed()
        await self.slots.acquire()
        try:
            return VerifyChild((await self.pool("verify").server()).take(), self.slots.release)
        except BaseException:
            self.slots.release()
            raise

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise MachineError("the sandbox was closed; a call came after that, or was still waiting")

    async def _find_level(self) -> None:
        """Raises `UserError` when no accepted level holds."""
        lowest = self.config.level or self.config.min_level
        best = self.config.level or max(lowest, IsolationLevel.NAMESPACES, key=lambda level: level.rank)
        for level in (level for level in IsolationLevel if lowest.rank <= level.rank <= best.rank):
            self.level = level
            for _ in range(_NUM_TESTS):
                found = self.tried[level] = await self._attack(level)
                if not isinstance(found, str) and not found.broken(level):
                    if why := self._why_not_more():
                        _log.warning("programs run at level L%d (%s), the best of this machine. %s", level.rank, level, why)
                    return
                self._close_pools()
        raise refusal(lowest, self.tried)

    async def _attack(self, level: IsolationLevel) -> SelfTestReport | str:
        """The report of the self-test, or why it did not start."""
        try:
            with Canaries() as canaries:  # planted before the first fork server, which could inherit them
                return await run_self_test(self._run_program, level, canaries=canaries)
        except MachineError as error:
            self._refuse_if_closed()
            return str(error)

    def _why_not_more(self) -> str:
        *higher, _ = self.tried.items()
        return "; ".join(
            f"{level}: {found if isinstance(found, str) else ', '.join(check.name for check in found.broken(level))}"
            for level, found in higher
        )

    def pool(self, profile: str) -> ForkServerPool:
        self._refuse_if_closed()
        if (pool := self._pools.get(profile)) is None:
            pool = self._pools[profile] = ForkServerPool(
                profile,
                self.level,
                num_servers=self.config.fork_servers,
                modules=self.config.modules if profile == "full" else (),
            )
        return pool

    def _close_pools(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    @property
    def num_slots(self) -> int:
        return min(self.config.max_alive, _SLOTS_FACTOR * self.config.max_running + self.watchdog.num_asleep)


class Served(CodeService, Protocol):
    """What is called over a link, such as a `Node`."""

    level: IsolationLevel

    @property
    def num_slots(self) -> int: ...

    async def start(self) -> None: ...


async def serve_node(node: Served, connection: socket.socket, *, sends_log: bool = False) -> None:
    """Start the node, answer calls until the other end hangs up, and close the node."""
    loop = asyncio.get_running_loop()
    lost: asyncio.Future[str] = loop.create_future()
    calls = _Calls(node)
    link = calls.link = await Link.open(connection, calls.take, lost.set_result)
    if sends_log:
        logging.getLogger().addHandler(_LinkHandler(link))
    try:
        await node.start()
        reporting = loop.create_task(calls.report_status())
        await lost
        reporting.cancel()
    except Exception as error:  # noqa: BLE001 - the other end raises it
        link.send((0, error if isinstance(error, StropError) else f"{type(error).__name__}: {error}", False))
    finally:
        await calls.cancel()
        await node.close()
        link.close()


class _Calls:
    """The calls of one link, as tasks by their number."""

    link: Link

    def __init__(self, node: Served) -> None:
        self._node = node
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def take(self, message: tuple[int, str, object]) -> None:
        number, method, argument = message
        if method != "cancel":
            task = self._tasks[number] = asyncio.create_task(self._answer(number, method, argument))
            task.add_done_callback(lambda _: self._tasks.pop(number))
        elif number in self._tasks:
            self._tasks[number].cancel()

    async def cancel(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def report_status(self) -> None:
        loop = asyncio.get_running_loop()
        reported, reported_at = None, 0.0
        while True:
            status = NodeStatus(self._node.level, self._node.num_slots)
            if status != reported or loop.time() - reported_at >= HEARTBEAT_S - _SLOTS_S:
                self.link.send((0, status, False))
                reported, reported_at = status, loop.time()
            await asyncio.sleep(_SLOTS_S)

    async def _answer(self, number: int, method: str, argument: object) -> None:
        answer: object = None
        try:
            if method == "verify":
                async for judged in self._node.verify(argument):  # type: ignore[arg-type]
                    self.link.send((number, judged, False))
            else:
                answer = await getattr(self._node, method)(argument)
        except StropError as error:
            answer = error
        except Exception as error:  # noqa: BLE001 - every call needs an answer
            _log.exception("unexpected error in a call")
            answer = MachineError(f"{type(error).__name__} in the supervisor: {error}")
        self.link.send((number, answer, True), within_s=_GATHER_S if len(self._tasks) > _NUM_BUSY else 0.0)


class _LinkHandler(logging.Handler):
    """Sends log lines to the other end, which logs them; from any thread."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        self._loop.call_soon_threadsafe(self._link.send, (0, LogLine(record.levelno, self.format(record)), False))


async def _serve(descriptor: int, name: str, config: str) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):  # it ends with its link: the process that started it decides
        asyncio.get_running_loop().add_signal_handler(number, lambda: None)
    node = Node(SandboxConfig.model_validate_json(config), name=name)
    await serve_node(node, socket.socket(fileno=descriptor), sends_log=True)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    logging.getLogger().setLevel(logging.getLevelNamesMapping().get(os.environ.get("STROP_LOG", "").upper(), logging.WARNING))
    asyncio.run(_serve(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
