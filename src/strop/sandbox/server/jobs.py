"""The jobs that wait for a slot of a node: one program, one cell of a session, or some answers to compare."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from strop.errors import MachineError, NoNodes
from strop.sandbox.protocol import AnswerPair, CodeNode, PairVerdict, RunRequest, RunResult, VerifyRequest

if TYPE_CHECKING:
    from strop.sandbox.server.floor import Seat
    from strop.sandbox.server.sessions import Session

Answer = RunResult | MachineError
Listener = Callable[[Answer], None]
OnStart = Callable[[], None]


class Leave(Protocol):
    """Stops listening for the answer of a call; no effect after the answer."""

    def __call__(self, *, may_return: bool) -> None:
        """`may_return`: the connection was lost, and the client may ask again if the call has an id."""


_CALL_BYTES = 1024  # memory of this process for a waiting call, beyond its texts


class Job(ABC):
    """Work for one slot of a node."""

    def __init__(self, client: str, num_bytes: int, *, now: float, home: Seat | None = None) -> None:
        self.client = client
        self.num_bytes = num_bytes + _CALL_BYTES
        self.home = home  # the only node that can do it; None: any node
        self.arrived_at = now
        self.started_at = now
        self.due = 0.0  # when its node must have answered; set at the start
        self.is_overdue = False
        self.num_failures = 0  # of nodes that had it
        self.failure: MachineError | None = None  # the last one
        self.seat: Seat | None = None  # where it runs or ran last

    @property
    @abstractmethod
    def limit_s(self) -> float:
        """The longest time that its own limits allow."""

    @property
    def may_run_again(self) -> bool:
        """Whether it goes to another node after a failure of its node."""
        return self.home is None and self.num_failures < 2

    def begin(self) -> None:
        """Called when a node takes it; called again if that node fails and another one takes it."""
        return None  # noqa: RET501 - not abstract: only some jobs need it

    @abstractmethod
    async def work(self, node: CodeNode) -> None:
        """Do it on this node. Raises `MachineError` if it, or a part of it, was not done."""

    @abstractmethod
    def give_up(self, error: MachineError) -> None:
        """It will not be done."""

    @abstractmethod
    def end(self) -> None:
        """Called once, when it is done, given up or withdrawn."""


class RunJob(Job):
    """One program, or one cell of a session."""

    def __init__(
        self, request: RunRequest, client: str, session: Session | None, on_end: Callable[[RunJob], None], *, now: float
    ) -> None:
        home = None if session is None else session.seat
        super().__init__(client, len(request.code) + len(request.stdin), now=now, home=home)
        self.request = request
        self.session = session
        self.key = (client, request.id)
        self.listeners: list[Listener] = []
        self.on_start: list[OnStart] = []  # called when a node takes it
        self.has_begun = False
        self.answer: Answer | None = None  # None if it was withdrawn
        self._on_end = on_end

    @property
    def limit_s(self) -> float:
        return self.request.wall_s

    def begin(self) -> None:
        self.has_begun = True
        callbacks, self.on_start = self.on_start, []
        for callback in callbacks:
            callback()

    async def work(self, node: CodeNode) -> None:
        request = self.request if self.session is None else replace(self.request, session=self.session.remote_id)
        result = await node.run(request)
        queue_s = result.timings.queue_s + self.started_at - self.arrived_at
        self.answer = replace(result, node=node.name, timings=replace(result.timings, queue_s=queue_s))

    def give_up(self, error: MachineError) -> None:
        self.answer = error

    def end(self) -> None:
        self._on_end(self)


class JudgeJob(Job):
    """Pairs of one verify request, compared one after another by one process. Verdicts are passed on as they arrive."""

    def __init__(
        self,
        pairs: dict[int, AnswerPair],
        pair_wall_s: float,
        client: str,
        verdicts: asyncio.Queue[tuple[int, PairVerdict] | NoNodes],
        on_end: Callable[[JudgeJob], None],
        *,
        now: float,
    ) -> None:
        super().__init__(client, sum(len(pair.gold) + len(pair.answer) for pair in pairs.values()), now=now)
        self.open = pairs  # by index in the request; those without a verdict
        self._pair_wall_s = pair_wall_s
        self._verdicts = verdicts
        self._on_end = on_end

    @property
    def limit_s(self) -> float:
        return self._pair_wall_s * len(self.open)

    async def work(self, node: CodeNode) -> None:
        asked = list(self.open)
        request = VerifyRequest(pairs=tuple(self.open.values()), pair_wall_s=self._pair_wall_s)
        async for position, verdict in node.verify(request):
            if not 0 <= position < len(asked) or asked[position] not in self.open:
                raise MachineError(f"node {node.name!r} judged pair {position} of {len(asked)} twice or unasked")
            del self.open[asked[position]]
            self._verdicts.put_nowait((asked[position], verdict))
        if self.open:
            raise MachineError(f"node {node.name!r} left {len(self.open)} of {len(asked)} pairs without a verdict")

    def give_up(self, error: MachineError) -> None:
        for index in self.open:
            self._verdicts.put_nowait(error if isinstance(error, NoNodes) else (index, PairVerdict.INTERNAL))
        self.open = {}

    def end(self) -> None:
        self._on_end(self)
