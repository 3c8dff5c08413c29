"""A `CodeService` that shares one fair queue among many nodes, without the network.

    submit -> limits -> admission -> fair queue -> a slot of the least loaded node -> every listener, once

`floor` assigns work to slots; `runs`, `judging` and `sessions` own the three kinds of calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self

from strop.errors import MachineError, NoNodes, Overloaded, UserError
from strop.sandbox.limits import is_readable, require_verifiable, session_refusal
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
from strop.sandbox.server.config import DispatchConfig
from strop.sandbox.server.floor import Floor, Seat
from strop.sandbox.server.jobs import Answer, Job, JudgeJob, Leave, Listener, OnStart
from strop.sandbox.server.metrics import Tally
from strop.sandbox.server.queueing import Admission
from strop.sandbox.server.runs import Runs
from strop.sandbox.server.sessions import Sessions

_SWEEP_S = 0.5
_NUM_PAIRS = 32  # of one job


def _ignore() -> None:
    """The default of `on_start`."""


class Dispatcher(CodeService):
    """Decides whose call is next, and on which node. Create it inside a running event loop, to which it belongs.

    A call that cannot be done is answered `overloaded` or `internal`; `run` raises only `SessionLost`, for a cell, `NoNodes`
    when there has been no node for `no_node_s`, and `MachineError` after `close`. `client` names the caller: clients take
    turns, and each has its own ids of calls.
    """

    def __init__(self, config: DispatchConfig | None = None) -> None:
        self.config = config or DispatchConfig()
        self.tally = Tally()
        self.admission = Admission(self.config)
        self.floor = Floor(self.config, self.tally, self._on_seat_gone)
        self.sessions = Sessions(self.floor, self.tally, max_sessions=self.config.max_sessions)
        self.runs = Runs(self.config, self.floor, self.sessions, self.admission, self.tally)
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
        """The lowest level of all nodes."""
        return self.floor.level

    async def run(self, request: RunRequest, *, client: str = "") -> RunResult:
        answered: asyncio.Future[Answer] = self._loop.create_future()

        def listen(answer: Answer) -> None:
            if not answered.done():  # it was cancelled, and `leave` is called one turn of the loop later
                answered.set_result(answer)

        leave = self.submit(request, listen, client=client)
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
        """Call `listener` with the answer: once, and perhaps before this returns.

        Args:
            on_start: called once, before `listener`, when a node takes the call; not called if none does.

        Returns:
            A function that stops listening, or None if the answer was known at once. The call is cancelled with its last
            listener; a call with an id runs on for `linger_s` if that listener `may_return`.
        """
        if self._is_closed:
            listener(MachineError("the code service was closed; a call came after that"))
            return None
        return self.runs.submit(request, listener, on_start, client)

    def cancel(self, call_id: str, *, client: str = "") -> bool:
        """End the call of this id, also if others listen; False if there is none."""
        return self.runs.cancel(call_id, client)

    async def verify(self, request: VerifyRequest, *, client: str = "") -> AsyncGenerator[tuple[int, PairVerdict]]:
        """See `CodeService`. Raises `Overloaded` before the first verdict, `UserError` for impossible limits, `NoNodes`."""
        self._raise_if_refusing()
        require_verifiable(request)
        if (no_nodes := self.floor.no_nodes()) is not None:
            raise no_nodes
        verdicts: asyncio.Queue[tuple[int, PairVerdict] | NoNodes] = asyncio.Queue()
        pairs = [(index, pair) for index, pair in enumerate(request.pairs) if is_readable(pair)]
        for index in set(range(len(request.pairs))) - {index for index, _ in pairs}:
            verdicts.put_nowait((index, PairVerdict.UNREADABLE))
        now = self._loop.time()
        jobs = [
            JudgeJob(dict(pairs[first : first + _NUM_PAIRS]), request.pair_wall_s, client, verdicts, self._release, now=now)
            for first in range(0, len(pairs), _NUM_PAIRS)
        ]
        for number, job in enumerate(jobs):
            if refusal := self.admission.admit(client, job.num_bytes):
                for admitted in jobs[:number]:
                    self._release(admitted)
                raise Overloaded(refusal)
        try:
            for job in jobs:
                self.floor.put(job)
            for _ in request.pairs:
                judged = await verdicts.get()
                if isinstance(judged, NoNodes):
                    raise judged
                self.tally.verdicts[judged[1]] += 1
                yield judged
        finally:
            for job in jobs:
                self.floor.withdraw(job)

    async def open_session(self, limits: SessionLimits) -> str:
        """See `CodeService`. Raises `Overloaded` if there are too many, `UserError` for impossible limits, `NoNodes`."""
        self._raise_if_refusing()
        if refusal := session_refusal(limits):
            raise UserError(f"{refusal}.")
        return await self.sessions.open(limits)

    async def fork_session(self, session: str) -> str:
        """See `CodeService`. Raises `Overloaded` if there are too many."""
        self._raise_if_refusing()
        return await self.sessions.fork(session)

    async def close_session(self, session: str) -> None:
        await self.sessions.close(session)

    def of_client(self, client: str) -> CodeRunner:
        """A `CodeRunner` that calls this service as one client."""
        return _ClientRunner(self, client)

    def add_node(self, node: CodeNode) -> None:
        """Use the node from now on. The dispatcher closes it at the end, or when it is lost."""
        self.floor.add(node)

    async def drain_node(self, node: CodeNode, *, grace_s: float = 60.0) -> None:
        """Give the node nothing new; close it once its calls and sessions have ended, or after `grace_s`."""
        for seat in [seat for seat in self.floor.seats if seat.node is node]:
            await self.floor.drain(seat, is_empty=lambda seat: not self.sessions.has_any_on(seat), grace_s=grace_s)

    async def finish(self, *, grace_s: float) -> None:
        """Refuse new calls, and return once every accepted call is answered, or after `grace_s`."""
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

    def _release(self, job: Job) -> None:
        self.admission.release(job.client, job.num_bytes)

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
        """Does nothing: the service has other clients."""
