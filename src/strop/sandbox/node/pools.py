"""The fork servers of one profile: started when first needed, replaced when they die, renewed when they are old."""

from __future__ import annotations

import asyncio
import logging
import re
import socket

from strop.errors import MachineError
from strop.sandbox.node.zygotes import Child, Zygote
from strop.sandbox.protocol import IsolationLevel

_log = logging.getLogger(__name__)

_IMPORT = re.compile(r"^[ \t]*(?:from|import)[ \t]+([\w., \t]+)", re.MULTILINE)
_NUMPY_NAMES = {"numpy"}
_FULL_NAMES = {"sympy", "scipy", "mpmath"}


def profile_of(code: str) -> str:
    """The smallest profile that has what `code` imports. Advice only: a wrong guess costs time, never correctness."""
    if "import" not in code:
        return "bare"
    names = {name.strip().partition(" ")[0].partition(".")[0] for found in _IMPORT.findall(code) for name in found.split(",")}
    if names & _FULL_NAMES:
        return "full"
    return "numpy" if names & _NUMPY_NAMES else "bare"


class ZygotePool:
    """A few equal fork servers; each loaded its modules itself, since forks of one process contend for its pages.

    Args:
        profile: one of `inside.profiles.MODULES`.
        level: of all its children.
        num_zygotes: one for each core.
        modules: further modules to load.
        recycle_after: children of one fork server before another takes its place.
    """

    def __init__(
        self, profile: str, level: IsolationLevel, *, num_zygotes: int, modules: tuple[str, ...], recycle_after: int
    ) -> None:
        self.profile = profile
        self._level = level
        self._num_zygotes = num_zygotes
        self._modules = modules
        self._recycle_after = recycle_after
        self._zygotes: list[Zygote] = []
        self._retired: list[Zygote] = []
        self._start: asyncio.Task[None] | None = None
        self._is_closed = False

    async def take(self) -> Child:
        """A child from the least loaded fork server. Raises `MachineError` when none can be started."""
        zygote = await self._least_loaded()
        child = zygote.take()
        self._renew(zygote)
        return child

    async def take_session(self, work: bytes) -> tuple[Child, socket.socket]:
        """A child that keeps its state, and the line to it; raises as `take` does."""
        zygote = await self._least_loaded()
        child, line = zygote.take_session(work)
        self._renew(zygote)
        return child, line

    async def _least_loaded(self) -> Zygote:
        if not self._zygotes:
            await self.start()
        return min(self._zygotes, key=lambda one: one.num_alive)

    def _renew(self, zygote: Zygote) -> None:
        if zygote.num_spawned > self._recycle_after:
            self._zygotes.remove(zygote)
            self._retired.append(zygote)
            self._refill()
        for retired in [one for one in self._retired if one.is_idle]:
            retired.lose()

    async def start(self) -> None:
        """Returns when one fork server is ready; the others follow."""
        while not self._zygotes:
            if self._is_closed:
                raise MachineError("the sandbox was closed; a call came after that")
            self._refill()
            await self._wait_for_start()

    async def fill(self) -> None:
        """Returns when all fork servers are ready."""
        while len(self._zygotes) < self._num_zygotes and not self._is_closed:
            self._refill()
            await self._wait_for_start()

    def close(self) -> None:
        self._is_closed = True
        if self._start is not None:
            self._start.cancel()
        for zygote in [*self._zygotes, *self._retired]:
            zygote.lose()

    def _refill(self) -> None:
        is_needed = len(self._zygotes) < self._num_zygotes and not self._is_closed
        if is_needed and (self._start is None or self._start.done()):
            self._start = asyncio.get_running_loop().create_task(self._start_missing())
            self._start.add_done_callback(_note_failure)

    async def _wait_for_start(self) -> None:
        start = self._start
        assert start is not None
        await asyncio.wait({start})
        if not start.cancelled():  # else the pool was closed
            start.result()

    async def _start_missing(self) -> None:
        """The first alone, so that a failure is one failure and a call that waits need not wait for all."""
        num_missing = 1 if not self._zygotes else self._num_zygotes - len(self._zygotes)
        await asyncio.gather(*(self._start_one() for _ in range(num_missing)))
        if len(self._zygotes) < self._num_zygotes:
            asyncio.get_running_loop().call_soon(self._refill)

    async def _start_one(self) -> None:
        def lost() -> None:
            for zygotes in (self._zygotes, self._retired):
                if zygote in zygotes:
                    zygotes.remove(zygote)
                    if zygotes is self._zygotes and not self._is_closed:
                        _log.warning("a fork server of the sandbox (%s) died; starting another", self.profile)
                        self._refill()

        zygote = Zygote(self.profile, self._level, modules=self._modules, on_lost=lost)
        try:
            await zygote.hello()
        except BaseException:
            zygote.lose()
            raise
        self._zygotes.append(zygote)


def _note_failure(start: asyncio.Task[None]) -> None:
    if not start.cancelled() and (error := start.exception()) is not None:
        _log.warning("a fork server of the sandbox did not start: %s", error)
