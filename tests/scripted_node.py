"""A node for tests: it runs nothing, and a script gives answers, delays, faults and deaths."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace

from strop.errors import MachineError, NodeGone, NodeLost, SessionLost
from strop.sandbox.protocol import (
    CodeNode,
    IsolationLevel,
    PairVerdict,
    RunRequest,
    RunResult,
    SessionLimits,
    VerifyRequest,
)
from strop.sandbox.scripted import scripted_result
from strop.types import derive_seed


@dataclass(slots=True, kw_only=True, eq=False)
class ScriptedNode(CodeNode):
    """A node of the code service that runs nothing. It records its requests, and `die` ends it.

    Answers, delays and faults depend only on the request, as for `ScriptedSandbox`. Two answers are equal if they are the same
    text. A session is the list of its cells: `answer` gets the request of a cell like any other, and `cells` has the ones
    before it.

    Args:
        answer: a mapping from code to text or result, or a function of the request.
        num_slots: a call beyond them raises `AssertionError`, since the queue must not send it.
        max_latency_s: the delay of an answer is drawn from [0, this] by `seed` and the request.
        fault_rate: share of requests that raise `MachineError`, drawn the same way.
    """

    answer: Callable[[RunRequest], str | RunResult] | Mapping[str, str | RunResult]
    name: str = "scripted"
    level: IsolationLevel = IsolationLevel.NAMESPACES
    num_slots: int = 4
    max_latency_s: float = 0.0
    fault_rate: float = 0.0
    seed: int = 0
    requests: list[RunRequest] = field(default_factory=list, init=False)  # in order of arrival
    num_cancelled: int = field(default=0, init=False)
    num_verify_calls: int = field(default=0, init=False)
    cells: dict[str, list[RunRequest]] = field(default_factory=dict, init=False)  # of the sessions that are open
    _num_sessions: int = field(default=0, init=False)
    _in_flight: set[asyncio.Future[None]] = field(default_factory=set, init=False)
    _death: str = field(default="", init=False)
    _died: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def start(self) -> None:
        """It is ready from the start."""

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def die(self, reason: str = "as its script says") -> None:
        """Make every call in flight and every later call raise `NodeLost`."""
        self._death = self._death or reason
        self._died.set()
        for waiting in self._in_flight:
            if not waiting.done():
                waiting.set_exception(NodeLost(f"node {self.name!r} died: {self._death}"))

    async def run(self, request: RunRequest) -> RunResult:
        self._raise_if_dead()
        self.requests.append(request)
        if request.session:
            self._cells_of(request.session).append(request)
        draw = random.Random(derive_seed(self.seed, request.code, request.stdin, request.seed))
        latency_s, is_fault = draw.uniform(0.0, self.max_latency_s), draw.random() < self.fault_rate
        await self._take(latency_s)
        if is_fault:
            raise MachineError("a scripted fault")
        answer = self.answer(request) if callable(self.answer) else self.answer[request.code]
        return replace(scripted_result(answer) if isinstance(answer, str) else answer, node=self.name)

    async def verify(self, request: VerifyRequest) -> AsyncIterator[tuple[int, PairVerdict]]:
        self._raise_if_dead()
        self.num_verify_calls += 1
        for index, pair in enumerate(request.pairs):
            draw = random.Random(derive_seed(self.seed, pair.gold, pair.answer))
            await self._take(draw.uniform(0.0, self.max_latency_s))
            yield index, PairVerdict.EQUAL if pair.gold == pair.answer else PairVerdict.UNEQUAL

    async def open_session(self, limits: SessionLimits) -> str:
        self._raise_if_dead()
        self._num_sessions += 1
        session = f"{self.name}-{self._num_sessions}"
        self.cells[session] = []
        return session

    async def fork_session(self, session: str) -> str:
        self._raise_if_dead()
        cells = list(self._cells_of(session))
        self._num_sessions += 1
        fork = f"{self.name}-{self._num_sessions}"
        self.cells[fork] = cells
        return fork

    async def close_session(self, session: str) -> None:
        self.cells.pop(session, None)

    async def wait_lost(self) -> str:
        await self._died.wait()
        return self._death

    async def close(self) -> None:
        self.die("it was closed")

    def _raise_if_dead(self) -> None:
        if self._death:
            raise NodeGone(f"node {self.name!r} died: {self._death}")

    def _cells_of(self, session: str) -> list[RunRequest]:
        if session not in self.cells:
            raise SessionLost(f"node {self.name!r} has no session {session!r}")
        return self.cells[session]

    async def _take(self, latency_s: float) -> None:
        """Hold a slot for `latency_s`."""
        assert len(self._in_flight) < self.num_slots, f"node {self.name!r} was sent more calls than its {self.num_slots} slots"
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        self._in_flight.add(ended)
        timer = loop.call_later(latency_s, _end, ended) if latency_s > 0 else None
        try:
            if timer is not None:
                await ended
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self._in_flight.discard(ended)
            if timer is not None:
                timer.cancel()


def _end(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
