"""The calls of many clients, before the sandbox of this machine and without the network.

    submit -> limits -> id -> admission -> the queue of the sandbox -> every listener, once

The answers of calls that have an id are cached: a client that asks again after a lost connection gets the same answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import Protocol, Self

from strop.errors import MachineError, NoNodes, Overloaded, SessionLost, UserError
from strop.sandbox.limits import require_verifiable, run_refusal, session_refusal
from strop.sandbox.local import NUM_PAIRS, LocalSandbox
from strop.sandbox.protocol import (
    CodeRunner,
    CodeService,
    PairVerdict,
    RunOutcome,
    RunRequest,
    RunResult,
    SessionLimits,
    VerifyRequest,
)
from strop.sandbox.server.admission import Admission, IdempotencyCache
from strop.sandbox.server.config import DispatchConfig
from strop.sandbox.server.metrics import Tally

_log = logging.getLogger(__name__)

_SWEEP_S = 0.5
_CALL_BYTES = 1024  # memory of this process for a waiting call, beyond its texts

Answer = RunResult | MachineError
Listener = Callable[[Answer], None]
OnStart = Callable[[], None]


class Leave(Protocol):
    """Stops listening for the answer of a call; no effect after the answer."""

    def __call__(self, *, may_return: bool) -> None:
        """`may_return`: the connection was lost, and the client may ask again if the call has an id."""


class _Call:
    """One program, or one cell of a session, until its answer."""

    def __init__(self, request: RunRequest, client: str, listener: Listener, on_start: OnStart) -> None:
        self.request = request
        self.client = client
        self.key = (client, request.id)
        self.num_bytes = _CALL_BYTES + len(request.code) + len(request.stdin)
        self.listeners = [listener]
        self.on_start = [on_start]  # called when the supervisor takes it
        self.has_begun = False
        self.task: asyncio.Task[RunResult] | None = None

    def begin(self) -> None:
        self.has_begun = True
        callbacks, self.on_start = self.on_start, []
        for callback in callbacks:
            callback()


class Dispatcher(CodeService):
    """Admits calls, joins those of one id, and answers each listener once. Belongs to the running event loop.

    A call that cannot be done is answered `overloaded` or `internal`; `run` raises only `SessionLost`, for a cell, `NoNodes`
    when there has been no supervisor for too long, and `MachineError` after `close`. `client` names the caller: clients take
    turns, and each has its own ids of calls.

    Args:
        box: runs the calls; closed by its owner, after `close`.
    """

    def __init__(self, box: LocalSandbox, config: DispatchConfig | None = None) -> None:
        self.box = box
        self.config = config or DispatchConfig()
        self.tally = Tally()
        self.admission = Admission(self.config)
        self.kept = IdempotencyCache(self.config)
        self._calls: set[_Call] = set()
        self._by_id: dict[tuple[str, str], _Call] = {}
        self._abandoned: dict[_Call, float] = {}  # since when; oldest first
        self._refusal = ""  # why nothing is admitted any more
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._sweeping = self._loop.create_task(self._sweep_forever())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

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

    def submit(
        self, request: RunRequest, listener: Listener, *, on_start: OnStart = lambda: None, client: str = ""
    ) -> Leave | None:
        """Call `listener` with the answer: once, and perhaps before this returns.

        Args:
            on_start: called once, before `listener`, when the supervisor takes the call; not called if it never does.

        Returns:
            A function that stops listening, or None if the answer was known at once. The call is cancelled with its last
            listener; a call with an id runs on for `linger_s` if that listener `may_return`.
        """
        if self._is_closed:
            listener(MachineError("the code service was closed; a call came after that"))
            return None
        refusal = run_refusal(request)
        if not refusal and request.id:
            running, kept = self._by_id.get((client, request.id)), self.kept.find((client, request.id), now=self._loop.time())
            if running is not None and running.request == request:
                return self._rejoin(running, listener, on_start)
            if running is None and kept is not None and kept.is_answer_to(request):
                self.tally.num_rejoined += 1
                listener(kept.result)
                return None
            if running is not None or kept is not None:
                refusal = f"the id {request.id!r} belongs to another call of this client"
        if refusal:
            self._answer_at_once(listener, RunOutcome.REJECTED, refusal)
            return None
        call = _Call(request, client, listener, on_start)
        if refusal := self.admission.admit(client, call.num_bytes):
            self._answer_at_once(listener, RunOutcome.OVERLOADED, refusal)
            return None
        self._calls.add(call)
        if request.id:
            self._by_id[call.key] = call
        call.task = self._loop.create_task(self.box.dispatch(request, client, call.begin))
        call.task.add_done_callback(partial(self._on_end, call))
        return partial(self._leave, call, listener)

    def cancel(self, call_id: str, *, client: str = "") -> bool:
        """End the call of this id with an error for every listener; False if there is none."""
        call = self._by_id.get((client, call_id))
        if call is None:
            return False
        listeners = call.listeners
        self._withdraw(call)
        for listener in listeners:
            listener(MachineError(f"the call {call_id!r} was cancelled by its id"))
        return True

    async def verify(self, request: VerifyRequest, *, client: str = "") -> AsyncGenerator[tuple[int, PairVerdict]]:
        """See `CodeService`. Raises `Overloaded` before the first verdict, `UserError` for impossible limits, `NoNodes`."""
        self._raise_if_refusing()
        require_verifiable(request)
        texts = [text for pair in request.pairs for text in (pair.gold, pair.answer, *map("".join, pair.differences))]
        num_slots = -(-len(request.pairs) // NUM_PAIRS)
        num_bytes = sum(map(len, texts)) + num_slots * _CALL_BYTES
        if refusal := self.admission.admit(client, num_bytes, num=num_slots):
            raise Overloaded(refusal)
        try:
            async with aclosing(self.box.verify(request, client=client)) as verdicts:
                async for index, verdict in verdicts:
                    self.tally.verdicts[verdict] += 1
                    yield index, verdict
        finally:
            self.admission.release(client, num_bytes, num=num_slots)

    async def open_session(self, limits: SessionLimits, *, client: str = "") -> str:
        """See `CodeService`. Raises `UserError` for impossible limits, `NoNodes`."""
        self._raise_if_refusing()
        if refusal := session_refusal(limits):
            raise UserError(f"{refusal}.")
        return await self.box.open_session(limits, client=client)

    async def fork_session(self, session: str) -> str:
        self._raise_if_refusing()
        return await self.box.fork_session(session)

    async def close_session(self, session: str) -> None:
        await self.box.close_session(session)

    def of_client(self, client: str) -> CodeRunner:
        """A `CodeRunner` that calls this service as one client."""
        return _ClientRunner(self, client)

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
        """Close the sandbox, which answers every call that is left."""
        self._is_closed = True
        self._sweeping.cancel()
        await self.box.close()
        if self._calls:
            await asyncio.wait({call.task for call in self._calls if call.task is not None})

    def _raise_if_refusing(self) -> None:
        if self._is_closed:
            raise MachineError("the code service was closed; a call came after that")
        if self._refusal:
            raise Overloaded(self._refusal)

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = self._loop.time()
            while self._abandoned:
                call, since = next(iter(self._abandoned.items()))
                if now - since < self.config.linger_s:
                    break
                if call.request.session and call.has_begun:
                    del self._abandoned[call]  # a cell that has begun is not stopped, because it cannot run again
                else:
                    self._withdraw(call)
            self.kept.expire(now=now)

    def _rejoin(self, call: _Call, listener: Listener, on_start: OnStart) -> Leave:
        self.tally.num_rejoined += 1
        self._abandoned.pop(call, None)
        call.listeners.append(listener)
        if call.has_begun:
            on_start()
        else:
            call.on_start.append(on_start)
        return partial(self._leave, call, listener)

    def _leave(self, call: _Call, listener: Listener, *, may_return: bool) -> None:
        if listener not in call.listeners:
            return  # it has its answer
        call.listeners.remove(listener)
        if call.listeners:
            return
        if may_return and call.request.id and self.config.linger_s > 0:
            self._abandoned[call] = self._loop.time()
        else:
            self._withdraw(call)

    def _withdraw(self, call: _Call) -> None:
        call.listeners = []
        self._forget(call)  # at once: the same id may come again before the supervisor has stopped the program
        assert call.task is not None
        call.task.cancel()

    def _forget(self, call: _Call) -> None:
        self._abandoned.pop(call, None)
        if self._by_id.get(call.key) is call:
            del self._by_id[call.key]

    def _on_end(self, call: _Call, task: asyncio.Task[RunResult]) -> None:
        self._calls.discard(call)
        self.admission.release(call.client, call.num_bytes)
        self._forget(call)
        if task.cancelled():
            self.tally.num_cancelled += 1
            return
        answer = self._answer_of(task)
        if isinstance(answer, RunResult):
            self.tally.add(answer)
            if call.request.id and not answer.outcome.is_ours:
                self.kept.add(call.key, call.request, answer, now=self._loop.time())
        listeners, call.listeners = call.listeners, []
        for listener in listeners:
            listener(answer)

    def _answer_of(self, task: asyncio.Task[RunResult]) -> Answer:
        error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, SessionLost | NoNodes):
            self.tally.num_without_node += isinstance(error, NoNodes)
            return error
        if not isinstance(error, MachineError):
            _log.error("unexpected error in a call", exc_info=error)
        return RunResult.not_run(RunOutcome.INTERNAL, str(error) or type(error).__name__, level=self.box.level)

    def _answer_at_once(self, listener: Listener, outcome: RunOutcome, reason: str) -> None:
        result = RunResult.not_run(outcome, reason, level=self.box.level)
        self.tally.add(result)
        listener(result)


class _ClientRunner(CodeRunner):
    def __init__(self, dispatcher: Dispatcher, client: str) -> None:
        self._dispatcher = dispatcher
        self._client = client

    async def run(self, request: RunRequest) -> RunResult:
        return await self._dispatcher.run(request, client=self._client)

    async def close(self) -> None:
        """Does nothing: the service has other clients."""
