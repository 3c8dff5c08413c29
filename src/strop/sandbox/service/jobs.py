"""What waits for a slot: one program, one cell, or some answers to compare. Each knows how it is done and how it fails."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from strop.errors import MachineError, NoNodes
from strop.sandbox.protocol import AnswerPair, CodeNode, PairVerdict, RunRequest, RunResult, RunTimings, VerifyRequest

if TYPE_CHECKING:
    from strop.sandbox.service.seats import Seat
    from strop.sandbox.service.sessions import Session

Answer = RunResult | MachineError
Listener = Callable[[Answer], None]
OnStart = Callable[[], None]


class Leave(Protocol):
    """How one who waits for a call stops listening; without effect once they were told."""

    def __call__(self, *, may_return: bool) -> None:
        """`may_return`: they lost their connection, and may come back for the answer if the call has an id."""


_CALL_BYTES = 1024  # what the front itself needs for a call that waits


class Job(ABC):
    """Work for one slot of a node."""

    __slots__ = (
        "arrived_at",
        "client",
        "due",
        "failure",
        "home",
        "is_overdue",
        "num_bytes",
        "num_failures",
        "seat",
        "started_at",
    )

    def __init__(self, client: str, num_bytes: int, *, now: float, home: Seat | None = None) -> None:
        self.client = client
        self.num_bytes = num_bytes + _CALL_BYTES
        self.home = home  # the only node that can do it; None for any
        self.arrived_at = now
        self.started_at = now
        self.due = 0.0  # when its node has to have answered; set as it starts
        self.is_overdue = False
        self.num_failures = 0  # of nodes, under it
        self.failure: MachineError | None = None  # the last of them
        self.seat: Seat | None = None  # where it runs, or ran last

    @property
    @abstractmethod
    def limit_s(self) -> float:
        """How long it may run by its own limits."""

    @property
    def may_run_again(self) -> bool:
        """Whether it goes to another node when its own has failed."""
        return self.home is None and self.num_failures < 2

    def begin(self) -> None:
        """A node has it from now on; called once more where that node fails it and it is placed anew."""
        return None  # noqa: RET501 - a body, so that a kind of job need not write one

    @abstractmethod
    async def work(self, node: CodeNode) -> None:
        """Have it done. Raises `MachineError` when it, or a part of it, was not."""

    @abstractmethod
    def give_up(self, error: MachineError) -> None:
        """It will not be done."""

    @abstractmethod
    def end(self) -> None:
        """It has left the floor: done, given up or withdrawn. Called once."""


class RunJob(Job):
    """One program, or one cell of a session."""

    __slots__ = ("_on_end", "answer", "has_begun", "key", "listeners", "on_start", "request", "session")

    def __init__(
        self, request: RunRequest, client: str, session: Session | None, on_end: Callable[[RunJob], None], *, now: float
    ) -> None:
        home = None if session is None else session.seat
        super().__init__(client, len(request.code) + len(request.stdin), now=now, home=home)
        self.request = request
        self.session = session
        self.key = (client, request.id)
        self.listeners: list[Listener] = []
        self.on_start: list[OnStart] = []  # to be told when it waits no more
        self.has_begun = False
        self.answer: Answer | None = None  # None when it was withdrawn: nobody waits for one
        self._on_end = on_end

    @property
    def limit_s(self) -> float:
        return self.request.wall_s

    def begin(self) -> None:
        self.has_begun = True
        told, self.on_start = self.on_start, []
        for each in told:
            each()

    async def work(self, node: CodeNode) -> None:
        request = self.request if self.session is None else replace(self.request, session=self.session.remote_id)
        result = await node.run(request)
        timings = result.timings
        self.answer = RunResult(
            outcome=result.outcome,
            reason=result.reason,
            text=result.text,
            exit_code=result.exit_code,
            timings=RunTimings(
                queue_s=timings.queue_s + (self.started_at - self.arrived_at),
                setup_s=timings.setup_s,
                run_s=timings.run_s,
                cpu_s=timings.cpu_s,
            ),
            level=result.level,
            peak_memory_bytes=result.peak_memory_bytes,
            node=node.name,
        )

    def give_up(self, error: MachineError) -> None:
        self.answer = error

    def end(self) -> None:
        self._on_end(self)


class Judgement:
    """One verify request as its verdicts come in."""

    def __init__(self) -> None:
        self.verdicts: asyncio.Queue[tuple[int, PairVerdict] | NoNodes] = asyncio.Queue()
        self.is_awaited = True


class JudgeJob(Job):
    """Some pairs of one or several verify requests, which one child compares one after another."""

    __slots__ = ("_on_end", "carrier", "open", "pair_wall_s")

    def __init__(
        self,
        pairs: list[tuple[Judgement, int, AnswerPair]],
        pair_wall_s: float,
        client: str,
        on_end: Callable[[JudgeJob], None],
        *,
        now: float,
    ) -> None:
        super().__init__(client, sum(len(pair.gold) + len(pair.answer) for _, _, pair in pairs), now=now)
        self.open = pairs  # those without a verdict
        self.pair_wall_s = pair_wall_s
        self.carrier: JudgeJob | None = None  # the one that took these pairs along
        self._on_end = on_end

    @property
    def limit_s(self) -> float:
        return self.pair_wall_s * len(self.open)

    @property
    def is_awaited(self) -> bool:
        return any(judgement.is_awaited for judgement, _, _ in self.open)

    def absorb(self, other: JudgeJob) -> None:
        """Take the pairs of another along; one start of a child serves both."""
        self.open = self.open + other.open
        other.open = []
        other.carrier = self

    async def work(self, node: CodeNode) -> None:
        asked = self.open
        is_open = [True] * len(asked)
        try:
            request = VerifyRequest(pairs=tuple(pair for _, _, pair in asked), pair_wall_s=self.pair_wall_s)
            async for position, verdict in node.verify(request):
                if not 0 <= position < len(asked) or not is_open[position]:
                    raise MachineError(f"node {node.name!r} judged pair {position} of {len(asked)}, twice or unasked")
                is_open[position] = False
                judgement, index, _ = asked[position]
                judgement.verdicts.put_nowait((index, verdict))
        finally:
            self.open = [one for one, still in zip(asked, is_open, strict=True) if still]
        if self.open:
            raise MachineError(f"node {node.name!r} left {len(self.open)} of {len(asked)} pairs without a verdict")

    def give_up(self, error: MachineError) -> None:
        for judgement, index, _ in self.open:
            judgement.verdicts.put_nowait(error if isinstance(error, NoNodes) else (index, PairVerdict.INTERNAL))
        self.open = []

    def end(self) -> None:
        self._on_end(self)
