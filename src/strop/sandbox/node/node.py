"""The code service on this machine: fork servers by profile, slots, a clock, and the proof of the level of isolation.

    request -> slot -> child of the profile that has its imports -> Call -> judge -> result

Only waiting happens here; no program and nothing that one wrote is ever trusted.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from strop.errors import MachineError, UserError
from strop.sandbox.config import SandboxConfig
from strop.sandbox.node.calls import Call, FinishedCall
from strop.sandbox.node.canaries import Canaries
from strop.sandbox.node.cells import Cell
from strop.sandbox.node.directories import remove_leftovers
from strop.sandbox.node.judge import judge, refuse
from strop.sandbox.node.pools import ZygotePool, profile_of
from strop.sandbox.node.probes import ProbeReport, probe, refusal
from strop.sandbox.node.sessions import Sessions
from strop.sandbox.node.slots import Slots
from strop.sandbox.node.verification import verify
from strop.sandbox.node.verify_child import ConfinedVerifyChild
from strop.sandbox.node.watchdog import Watchdog
from strop.sandbox.protocol import (
    CodeNode,
    IsolationLevel,
    PairVerdict,
    RunOutcome,
    RunRequest,
    RunResult,
    SessionLimits,
    VerifyRequest,
)

_log = logging.getLogger(__name__)

_PROOFS = 2  # of a level that does not hold at first: on a busy machine an attack may end before anybody could look at it
_TICK_S = 0.01  # how often running calls are looked at
_SLOTS_FACTOR = 3  # calls that are here for each that computes: enough that none waits for the front, few enough to be fair
_PROGRAM_PROFILES = ("bare", "numpy", "full")


class Node(CodeNode):
    """A `CodeNode` in this process; use as `async with`, or call `start` and `close`. Belongs to one event loop.

    Args:
        config: the limits, how many programs run at once, and the least isolation that is accepted.
        name: in every reply.
    """

    def __init__(self, config: SandboxConfig | None = None, *, name: str = "local") -> None:
        self.config = config or SandboxConfig()
        self.name = name
        self.level = self.config.level or IsolationLevel.NAMESPACES
        self.tried: dict[IsolationLevel, ProbeReport | str] = {}  # what each level that was tried came to, the last one given
        self._slots = Slots(num_busy=self.config.max_running, num_alive=self.config.max_alive)
        self.num_slots = self._count_slots(num_asleep=0)
        self._pools: dict[str, ZygotePool] = {}
        self._watchdog = Watchdog(self._slots)
        self._tick_timer: asyncio.TimerHandle | None = None
        self._starting = asyncio.Lock()
        self._closed = asyncio.Event()
        self._is_proven = False
        self._opened_sessions: Sessions | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the first fork servers and prove, by programs that attack it, the level of isolation. Safe to call twice.

        Raises:
            UserError: this machine cannot give `config.min_level`; the message says what it lacks.
        """
        async with self._starting:
            if self._is_proven:
                return
            self._refuse_if_closed()
            _raise_descriptor_limit()
            remove_leftovers()
            await self._find_level()
            self._is_proven = True
            await asyncio.gather(*(self._pool(profile).fill() for profile in self.config.warm))

    async def run(self, request: RunRequest) -> RunResult:
        self._refuse_if_closed()
        if not self._is_proven:
            await self.start()
        if refusal := self._refusal(request):
            return refuse(refusal, level=self.level, node=self.name)
        if request.session:
            return await self._sessions.run(request)
        arrived_at = time.monotonic()
        await self._slots.acquire()
        admitted_at = time.monotonic()
        try:
            child = await self._pool(request.profile or profile_of(request.code)).take()
            facts = await self._watch(Call(child, request, admitted_at=admitted_at))
            if facts.ended.is_lost and facts.stopped_for in ("", "setup"):
                raise MachineError("the sandbox was closed" if self._closed.is_set() else "its fork server died")
            result = judge(facts, request, level=self.level, queue_s=admitted_at - arrived_at, node=self.name)
            if result.outcome is RunOutcome.INTERNAL:
                raise MachineError(result.reason)
            return result
        finally:
            self._slots.release()

    async def verify(self, request: VerifyRequest) -> AsyncIterator[tuple[int, PairVerdict]]:
        if not self._is_proven:
            await self.start()
        async for index, verdict in verify(self._verify_child, request):
            yield index, verdict

    async def open_session(self, limits: SessionLimits) -> str:
        self._refuse_if_closed()
        if not self._is_proven:
            await self.start()
        if limits.profile not in _PROGRAM_PROFILES:
            raise UserError(f"a session's profile is {limits.profile!r}; the profiles are {', '.join(_PROGRAM_PROFILES)}")
        return await self._sessions.open(limits)

    async def fork_session(self, session: str) -> str:
        self._refuse_if_closed()
        return await self._sessions.fork(session)

    async def close_session(self, session: str) -> None:
        self._sessions.close_session(session)

    async def wait_lost(self) -> str:
        await self._closed.wait()
        return "it was closed"

    async def close(self) -> None:
        self._closed.set()
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        if self._opened_sessions is not None:
            await self._opened_sessions.close()
        self._close_pools()

    async def _verify_child(self) -> ConfinedVerifyChild:
        self._refuse_if_closed()
        await self._slots.acquire()

        def give_back() -> None:
            self._slots.release()

        try:
            return ConfinedVerifyChild(await self._pool("verify").take(), give_back)
        except BaseException:
            give_back()
            raise

    def _refuse_if_closed(self) -> None:
        if self._closed.is_set():
            raise MachineError("the sandbox was closed; a call came after that, or was still waiting")

    def _levels(self) -> list[IsolationLevel]:
        """What to try, best first."""
        if self.config.level is not None:
            return [self.config.level]
        if self.config.min_level is IsolationLevel.STRICT:
            return [IsolationLevel.STRICT]
        return [level for level in IsolationLevel if self.config.min_level.rank <= level.rank < IsolationLevel.STRICT.rank]

    async def _find_level(self) -> None:
        """Raises `UserError` when none that is accepted holds."""
        for level in self._levels():
            self.level = level
            for _ in range(_PROOFS):
                self.tried[level] = await self._attack(level)
                if self._holds(level):
                    break
                self._close_pools()
            if self._holds(level):
                break
        else:
            raise refusal(self.config.level or self.config.min_level, self.tried)
        if len(self.tried) > 1:
            _log.warning(
                "programs run at level L%d (%s): this machine gives no more. %s", level.rank, level, self._why_not_more()
            )

    async def _attack(self, level: IsolationLevel) -> ProbeReport | str:
        """What came of the self-test, or why there was none."""
        try:
            with Canaries() as canaries:  # planted before the first fork server, so that it could inherit them
                return await probe(self._run_once, level, canaries=canaries)
        except MachineError as error:
            self._refuse_if_closed()
            return str(error)

    def _holds(self, level: IsolationLevel) -> bool:
        found = self.tried[level]
        return not isinstance(found, str) and not found.broken(level)

    def _why_not_more(self) -> str:
        *higher, _ = self.tried.items()
        return "; ".join(
            f"{level}: {found if isinstance(found, str) else ', '.join(probe.name for probe in found.broken(level))}"
            for level, found in higher
        )

    async def _run_once(self, request: RunRequest) -> RunResult:
        """One attempt, without a slot."""
        facts = await self._watch(Call(await self._pool("bare").take(), request, admitted_at=time.monotonic()))
        if facts.ended.is_lost:
            raise MachineError("a fork server died under a program of the self-test")
        result = judge(facts, request, level=self.level, queue_s=0.0, node=self.name)
        if result.outcome is RunOutcome.INTERNAL:
            raise MachineError(result.reason)
        return result

    def _pool(self, profile: str) -> ZygotePool:
        self._refuse_if_closed()
        if (pool := self._pools.get(profile)) is None:
            pool = self._pools[profile] = ZygotePool(
                profile,
                self.level,
                num_zygotes=self.config.zygotes,
                modules=self.config.modules if profile in ("full",) else (),
                recycle_after=self.config.recycle_after,
            )
        return pool

    def _close_pools(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def _refusal(self, request: RunRequest) -> str:
        """Why the request is over a limit; empty when it is not."""
        try:
            code, stdin = request.code.encode(), request.stdin.encode()
        except UnicodeEncodeError:
            return "the code or the input holds a lone surrogate, which has no encoding"
        config = self.config
        if b"\0" in code:
            return "the code holds a NUL character"
        if len(code) > config.max_code_bytes:
            return f"the code has {len(code)} bytes, the limit is {config.max_code_bytes}"
        if len(stdin) > config.max_stdin_bytes:
            return f"the input has {len(stdin)} bytes, the limit is {config.max_stdin_bytes}"
        if request.language != "python":
            return f"the language is {request.language!r}, and only 'python' runs here"
        if request.profile and request.profile not in _PROGRAM_PROFILES:
            return f"there is no profile {request.profile!r}; the profiles are bare, numpy and full"
        return ""

    @property
    def _sessions(self) -> Sessions:
        """At the level that was proven."""
        if self._opened_sessions is None:
            self._opened_sessions = Sessions(
                self.level,
                pool=self._pool,
                slots=self._slots,
                watch=self._watch,
                max_sessions=self.config.max_sessions,
                node=self.name,
            )
        return self._opened_sessions

    async def _watch(self, call: Call | Cell) -> FinishedCall:
        self._watchdog.add(call)
        self._tick_later()
        try:
            return await call.wait()
        finally:
            self._watchdog.remove(call)

    def _tick_later(self) -> None:
        if self._tick_timer is None:
            self._tick_timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        self._tick_timer = None
        if self._watchdog:
            self._tick_later()
            self._watchdog.look(time.monotonic())
        self.num_slots = self._count_slots(num_asleep=self._watchdog.num_asleep)

    def _count_slots(self, *, num_asleep: int) -> int:
        return min(self.config.max_alive, _SLOTS_FACTOR * self.config.max_running + num_asleep)


def _raise_descriptor_limit() -> None:
    """Each call holds four descriptors here, and a fifth where it has a directory on disk."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
