"""The front without its network: a `CodeService` that shares one fair queue among many nodes.

    submit -> limits -> admission -> fair queue -> a slot of the least loaded node -> every listener, once

`floor` brings work and slots together; `runs`, `judging` and `sessions` own the three kinds of calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self

from strop.deadline import clock_stopped
from strop.errors import MachineError, Overloaded, UserError
from strop.sandbox.protocol import (
    CodeNode,
    CodeRunner,
    CodeService,
    IsolationLevel,
    PairVerdict,
    RunRequest,
    RunResult,
    SessionLimits,
    VerifyRequest,
)
from strop.sandbox.service.admission import Admission
from strop.sandbox.service.config import DispatchConfig
from strop.sandbox.service.floor import Floor
from strop.sandbox.service.jobs import Answer, Leave, Listener, OnStart
from strop.sandbox.service.judging import Judging
from strop.sandbox.service.limits import session_refusal
from strop.sandbox.service.runs import Runs
from strop.sandbox.service.seats import Seat
from strop.sandbox.service.sessions import Sessions
from strop.sandbox.service.tally import Tally

_SWEEP_S = 0.5


def _ignore() -> None:
    """Nobody asked when a call begins."""


class Dispatcher(CodeService):
    """Whose turn it is, and on which node. Make it inside a running event loop, to which it then belongs.

    A call that cannot be done is answered `overloaded` or `internal`; `run` raises only `SessionLost`, for a cell, `NoNodes`
    when there has been no node for `no_node_s`, and `MachineError` once the dispatcher was closed. `client` is who asks: the
    one who takes turns with others, and to whom the ids of calls belong.

    Args:
        refuses_at_once: once there has been no node for `no_node_s`, a call that comes does not wait as long itself: for
            callers who try again by themselves.
    """

    def __init__(self, config: DispatchConfig | None = None, *, refuses_at_once: bool = False) -> None:
        self.config = config or DispatchConfig()
        self.tally = Tally()
        self.admission = Admission(self.config)
        self.floor = Floor(self.config, self.tally, self._on_seat_gone, refuses_at_once=refuses_at_once)
        self.sessions = Sessions(self.floor, self.tally, max_sessions=self.config.max_sessions)
        self.runs = Runs(self.config, self.floor, self.sessions, self.admission, self.tally)
        self._judging = Judging(self.config.limits, self.floor, self.admission, self.tally)
        self._refusal = ""  # why nothing is admitted any more
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self.floor.spawn(self._sweep_forever())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def level(self) -> IsolationLevel:
        """What every node gives at least."""
        return self.floor.level

    @property
    def is_admitting(self) -> bool:
        return not self._refusal

    async def run(self, request: RunRequest, *, client: str = "") -> RunResult:
        answered: asyncio.Future[Answer] = self._loop.create_future()

        def listen(answer: Answer) -> None:
            if not answered.done():  # cancelled, and `leave` comes one turn of the loop too late
                answered.set_result(answer)

        with clock_stopped() as clock:  # the queue lets nobody wait for longer than `max_wait_s`
            leave = self.submit(request, listen, on_start=clock.go_on, client=client)
            try:
                answer = await answered
            except asyncio.CancelledError:
                if leave is not None:
                    leave(may_return=False)
                raise
        if isinstance(answer, MachineError):
            raise answer
        return answer

    def submit(self, request: RunRequest, listener: Listener, *, on_start: OnStart = _ignore, client: str = "") -> Leave | None:
        """Have `listener` called with the answer: once, and perhaps before this returns.

        Args:
            on_start: called once, before `listener`, when a node takes the call; never for one that is answered without.

        Returns:
            How to stop listening, or None when the answer was known at once. The call is cancelled with its last listener;
            one that has an id lives on for `linger_s` after one who `may_return`.
        """
        if self._is_closed:
            listener(MachineError("the code service was closed; a call came after that"))
            return None
        return self.runs.submit(request, listener, on_start, client)

    def cancel(self, call_id: str, *, client: str = "") -> bool:
        """End the call of this id, whoever else listens; False when there is none."""
        return self.runs.cancel(call_id, client)

    async def verify(self, request: VerifyRequest, *, client: str = "") -> AsyncGenerator[tuple[int, PairVerdict]]:
        """See `CodeService`. Raises `Overloaded` before the first verdict, `UserError` for limits that cannot be, `NoNodes`."""
        self._raise_if_refusing()
        async for verdict in self._judging.verify(request, client):
            yield verdict

    async def open_session(self, limits: SessionLimits) -> str:
        """See `CodeService`. Raises `Overloaded` when there are too many, `UserError` for limits that cannot be, `NoNodes`."""
        self._raise_if_refusing()
        if refusal := session_refusal(limits, self.config.limits):
            raise UserError(f"{refusal}.")
        return await self.sessions.open(limits)

    async def fork_session(self, session: str) -> str:
        """See `CodeService`. Raises `Overloaded` when there are too many."""
        self._raise_if_refusing()
        return await self.sessions.fork(session)

    async def close_session(self, session: str) -> None:
        await self.sessions.close(session)

    def of_client(self, client: str) -> CodeRunner:
        """The same service for one client, where a `CodeRunner` is asked for."""
        return _ClientRunner(self, client)

    def add_node(self, node: CodeNode) -> None:
        """Let it work from now on. It belongs to the dispatcher, which closes it at the end, or when it is lost."""
        self.floor.add(node)

    async def drain_node(self, node: CodeNode, *, grace_s: float = 60.0) -> None:
        """Give it nothing new; let it go once its calls and sessions have ended, or `grace_s` later."""
        for seat in [seat for seat in self.floor.seats if seat.node is node]:
            await self.floor.drain(seat, is_empty=lambda seat: not self.sessions.has_any_on(seat), grace_s=grace_s)

    async def finish(self, *, grace_s: float) -> None:
        """Take nothing new, and return once everything that was accepted is answered, or `grace_s` later."""
        self._refusal = "the service is shutting down"
        self.admission.stop(self._refusal)
        try:
            async with asyncio.timeout(grace_s):
                await self.admission.wait_empty()
        except TimeoutError:
            return

    async def close(self) -> None:
        if self._is_closed:
            return
        self._refusal = self._refusal or "the service was closed"
        self._is_closed = True
        await self.floor.close()

    def _raise_if_refusing(self) -> None:
        if self._is_closed:
            raise MachineError("the code service was closed; a call came after that")
        if self._refusal:
            raise Overloaded(self._refusal)

    def _on_seat_gone(self, seat: Seat, reason: str) -> None:
        self.sessions.lose_all_on(seat, reason)

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.runs.end_abandoned()
            self.sessions.forget_expired()


class _ClientRunner(CodeRunner):
    def __init__(self, dispatcher: Dispatcher, client: str) -> None:
        self._dispatcher = dispatcher
        self._client = client

    async def run(self, request: RunRequest) -> RunResult:
        return await self._dispatcher.run(request, client=self._client)

    async def close(self) -> None:
        """The service belongs to everybody and goes on."""
