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
from strop.sandbox.node.judge import judge, refuse
from strop.sandbox.node.pools import ZygotePool, profile_of
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
    VerifyRequest,
)

_log = logging.getLogger(__name__)

_TICK_S = 0.01  # how often running calls are looked at
_SLOTS_FACTOR = 3  # calls that are here for each that computes: enough that none waits for the front, few enough to be fair
_TRIES = 2  # of one call, when its fork server died under it
_PROFILES = ("bare", "numpy", "full", "verify")
_PROBE = RunRequest(code="print(6 * 7)", wall_s=5.0)


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
        self._slots = Slots(num_busy=self.config.max_running, num_alive=self.config.max_alive)
        self._pools: dict[str, ZygotePool] = {}
        self._watchdog = Watchdog(self._slots)
        self._tick_timer: asyncio.TimerHandle | None = None
        self._starting = asyncio.Lock()
        self._closed = asyncio.Event()
        self._is_proven = False

    @property
    def num_slots(self) -> int:
        """Grows with every program that sleeps."""
        return min(self.config.max_alive, _SLOTS_FACTOR * self.config.max_running + self._watchdog.num_asleep)

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
            faults = []
            for level in self._levels():
                try:
                    await self._prove(level)
                except MachineError as error:
                    self._refuse_if_closed()
                    faults.append(f"{level.value}: {error}")
                    self._close_pools()
                    continue
                if faults:
                    _log.warning(
                        "programs run at level %s (L%d); higher ones fail here: %s", level, level.rank, "; ".join(faults)
                    )
                self._is_proven = True
                await asyncio.gather(*(self._pool(profile).fill() for profile in self.config.warm))
                return
            raise UserError(_too_little(self.config, faults))

    async def run(self, request: RunRequest) -> RunResult:
        self._refuse_if_closed()
        if not self._is_proven:
            await self.start()
        if refusal := self._refusal(request):
            return refuse(refusal, level=self.level, node=self.name)
        arrived_at = time.monotonic()
        await self._slots.acquire()
        admitted_at = time.monotonic()
        try:
            for _ in range(_TRIES):  # a program is stateless: when its fork server died it may run once more
                child = await self._pool(request.profile or profile_of(request.code)).take()
                facts = await self._watch(Call(child, request, admitted_at=admitted_at))
                if facts.ended.is_lost and facts.stopped_for in ("", "setup"):
                    if self._closed.is_set():
                        raise MachineError("the sandbox was closed while a call was running")
                    fault = "its fork server died"
                    continue
                result = judge(facts, request, level=self.level, queue_s=admitted_at - arrived_at, node=self.name)
                if result.outcome is not RunOutcome.INTERNAL:
                    return result
                fault = result.reason
            raise MachineError(f"a call failed {_TRIES} times through no fault of its program; the last time {fault}")
        finally:
            self._slots.release()

    async def verify(self, request: VerifyRequest) -> AsyncIterator[tuple[int, PairVerdict]]:
        if not self._is_proven:
            await self.start()
        async for index, verdict in verify(self._verify_child, request):
            yield index, verdict

    async def wait_lost(self) -> str:
        await self._closed.wait()
        return "it was closed"

    async def close(self) -> None:
        self._closed.set()
        if self._tick_timer is not None:
            self._tick_timer.cancel()
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

    async def _prove(self, level: IsolationLevel) -> None:
        self.level = level
        facts = await self._watch(Call(await self._pool("bare").take(), _PROBE, admitted_at=time.monotonic()))
        result = judge(facts, _PROBE, level=level, queue_s=0.0, node=self.name)
        if result.text != "42\n":
            raise MachineError(result.reason or f"a first program ended with {facts.ended}")

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
        if request.profile and request.profile not in _PROFILES[:3]:
            return f"there is no profile {request.profile!r}; the profiles are bare, numpy and full"
        return ""

    async def _watch(self, call: Call) -> FinishedCall:
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


def _raise_descriptor_limit() -> None:
    """Each call holds four descriptors here."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _too_little(config: SandboxConfig, faults: list[str]) -> str:
    wanted = config.level or config.min_level
    return (
        f"sandbox.min_level is {wanted.value!r}, but this machine does not allow that: {'; '.join(faults)}."
        " Allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces>0; on Ubuntu"
        " kernel.apparmor_restrict_unprivileged_userns=0; in a container --cap-add SYS_ADMIN or"
        " --security-opt seccomp=unconfined), or accept less isolation with sandbox.min_level = 'confined' (Landlock and"
        " seccomp) or, for programs that can read your files and use your network, 'process'."
    )
