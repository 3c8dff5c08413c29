"""The calls of many clients, before the sandbox of this machine and without the network.

    submit -> limits -> id -> admission -> the queue of the sandbox -> every request of the call, once

The answers of calls that have an id are cached: a client that asks again after a lost connection gets the same answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial

from strop.errors import MachineError, NoNodes, Overloaded, SessionLost
from strop.sandbox.local import LocalSandbox
from strop.sandbox.protocol import (
    NUM_PAIRS,
    AsyncContext,
    CodeRunner,
    CodeService,
    PairVerdict,
    RunOutcome,
    RunRequest,
    RunResult,
    SessionLimits,
    VerifyRequest,
    require_verifiable,
    run_refusal,
)

_log = logging.getLogger(__name__)

_CALL_BYTES = 1024  # memory of this process for a waiting call, beyond its texts


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchConfig:
    """Limits of the queue. Held work is accepted and not answered yet: it waits or runs. Beyond a limit: `overloaded`."""

    max_held: int = 250_000  # calls
    max_held_bytes: int = 1 << 30
    client_share: float = 0.75  # of both, that one client may use
    no_node_s: float = 10.0  # that a call waits without a supervisor
    linger_s: float = 5.0  # that a call with an id outlives a lost connection
    keep_s: float = 120.0  # that the answer of a call with an id is cached
    max_kept_bytes: int = 64 << 20  # of cached answers


OnStart = Callable[[], None]
_Key = tuple[str, str]  # client and id


@dataclass(slots=True)
class Held:
    """Work that is accepted and not answered yet."""

    num: int = 0
    num_bytes: int = 0

    def add(self, num: int, num_bytes: int) -> None:
        self.num += num
        self.num_bytes += num_bytes


class Admission:
    """Counts held work. Each successful `admit` needs one `release`."""

    def __init__(self, config: DispatchConfig) -> None:
        self._config = config
        self.held = Held()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._by_client: dict[str, Held] = {}

    def admit(self, client: str, num_bytes: int, *, num: int = 1) -> str:
        """Count the work and return "", or return why it is refused."""
        own = self._by_client.get(client) or Held()
        for who, held, share in (("the service", self.held, 1.0), ("this client", own, self._config.client_share)):
            if held.num + num > (most := share * self._config.max_held):
                return f"{who} has {held.num} calls in the queue, the limit is {most:.0f}"
            if held.num_bytes + num_bytes > (most := share * self._config.max_held_bytes):
                return f"{who} has {held.num_bytes} bytes of calls in the queue, the limit is {most:.0f}"
        self._by_client[client] = own
        self.held.add(num, num_bytes)
        own.add(num, num_bytes)
        self._is_empty.clear()
        return ""

    def release(self, client: str, num_bytes: int, *, num: int = 1) -> None:
        own = self._by_client[client]
        self.held.add(-num, -num_bytes)
        own.add(-num, -num_bytes)
        if not own.num:
            del self._by_client[client]
            if not self.held.num:
                self._is_empty.set()

    async def wait_empty(self) -> None:
        """Return when nothing is held."""
        await self._is_empty.wait()


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """One answer with a digest of its request, which is not kept itself."""

    digest: int
    result: RunResult
    expires_at: float

    @property
    def num_bytes(self) -> int:
        return 512 + len(self.result.text) + len(self.result.reason)


class IdempotencyCache:
    """Answers by client and id. Limited in age and size; the oldest go first."""

    def __init__(self, config: DispatchConfig) -> None:
        self._config = config
        self._answers: OrderedDict[_Key, CachedAnswer] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, key: _Key, request: RunRequest, result: RunResult, *, now: float) -> None:
        """Replace the answer of this key, and drop what is too old or too much."""
        if key in self._answers:
            self._drop(key)
        answer = self._answers[key] = CachedAnswer(hash(request), result, now + self._config.keep_s)
        self.num_bytes += answer.num_bytes
        while self._answers:
            oldest, first = next(iter(self._answers.items()))
            if first.expires_at >= now and self.num_bytes <= self._config.max_kept_bytes:
                break
            self._drop(oldest)

    def find(self, key: _Key, *, now: float) -> CachedAnswer | None:
        answer = self._answers.get(key)
        return answer if answer is not None and answer.expires_at >= now else None

    def _drop(self, key: _Key) -> None:
        self.num_bytes -= self._answers.pop(key).num_bytes


class _Call:
    """One program, or one cell of a session, until its answer."""

    def __init__(self, request: RunRequest, client: str) -> None:
        self.request = request
        self.client = client
        self.key = (client, request.id)
        self.num_bytes = _CALL_BYTES + len(request.code) + len(request.stdin)
        self.answers: list[asyncio.Future[RunResult]] = []  # of all requests that wait for it
        self.on_start: list[OnStart] = []  # called when the supervisor takes it
        self.has_begun = False
        self.leaving: asyncio.TimerHandle | None = None  # ends it, unless its client comes back before
        self.task: asyncio.Task[RunResult] | None = None

    def begin(self) -> None:
        self.has_begun = True
        callbacks, self.on_start = self.on_start, []
        for callback in callbacks:
            callback()


@dataclass(slots=True)
class Tally:
    """Counts since the start of the service."""

    outcomes: Counter[RunOutcome] = field(default_factory=Counter)
    verdicts: Counter[PairVerdict] = field(default_factory=Counter)
    num_run: int = 0  # that a supervisor has run; the two times are theirs, together
    queue_s: float = 0.0
    run_s: float = 0.0
    num_cancelled: int = 0
    num_rejoined: int = 0

    def add(self, result: RunResult) -> None:
        self.outcomes[result.outcome] += 1
        if result.node:
            self.num_run += 1
            self.queue_s += result.timings.queue_s
            self.run_s += result.timings.run_s


class Dispatcher(AsyncContext, CodeService):
    """Admits calls, joins those of one id, and answers each request once. Belongs to the running event loop.

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
        self._refusal = ""  # why nothing is admitted any more
        self._is_closed = False
        self._loop = asyncio.get_running_loop()

    async def run(self, request: RunRequest, *, client: str = "") -> RunResult:
        return await self.submit(request, client=client)

    def submit(self, request: RunRequest, *, on_start: OnStart = lambda: None, client: str = "") -> asyncio.Future[RunResult]:
        """Return the future answer. To leave, cancel it.

        A call is cancelled when its last request leaves; one with an id `linger_s` later, unless its client asks again.

        Args:
            on_start: called once, before the answer, when the supervisor takes the call; not called if it never does.
        """
        answer: asyncio.Future[RunResult] = self._loop.create_future()
        if self._is_closed:
            answer.set_exception(MachineError("the code service was closed; a call came after that"))
            return answer
        call: _Call | None = None
        refusal = run_refusal(request)
        if not refusal and request.id:
            key = (client, request.id)
            call, kept = self._by_id.get(key), self.kept.find(key, now=self._loop.time())
            if call is None and kept is not None and kept.digest == hash(request):
                self.tally.num_rejoined += 1
                answer.set_result(kept.result)
                return answer
            if kept is not None or (call is not None and call.request != request):
                refusal = f"the id {request.id!r} belongs to another call of this client"
        if refusal:
            return self._answer_at_once(answer, RunOutcome.REJECTED, refusal)
        if call is None:
            call = _Call(request, client)
            if refusal := self._refusal or self.admission.admit(client, call.num_bytes):
                return self._answer_at_once(answer, RunOutcome.OVERLOADED, refusal)
            self._begin(call)
        else:
            self.tally.num_rejoined += 1
            if call.leaving is not None:
                call.leaving.cancel()
        call.answers.append(answer)
        answer.add_done_callback(partial(self._on_answer, call))
        if call.has_begun:
            on_start()
        else:
            call.on_start.append(on_start)
        return answer

    def cancel(self, call_id: str, *, client: str = "") -> bool:
        """End the call of this id with an error for all its requests; False if there is none."""
        call = self._by_id.get((client, call_id))
        if call is None:
            return False
        self._withdraw(call)
        for answer in call.answers:
            if not answer.done():
                answer.set_exception(MachineError(f"the call {call_id!r} was cancelled by its id"))
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
        with suppress(TimeoutError):
            await asyncio.wait_for(self.admission.wait_empty(), grace_s)

    async def close(self) -> None:
        """Close the sandbox, which answers every call that is left."""
        self._is_closed = True
        await self.box.close()
        if self._calls:
            await asyncio.wait({call.task for call in self._calls if call.task is not None})

    def _raise_if_refusing(self) -> None:
        if self._is_closed:
            raise MachineError("the code service was closed; a call came after that")
        if self._refusal:
            raise Overloaded(self._refusal)

    def _begin(self, call: _Call) -> None:
        self._calls.add(call)
        if call.request.id:
            self._by_id[call.key] = call
        call.task = self._loop.create_task(self.box.dispatch(call.request, call.client, call.begin))
        call.task.add_done_callback(partial(self._on_end, call))

    def _on_answer(self, call: _Call, answer: asyncio.Future[RunResult]) -> None:
        """A request of the call was answered, or has left."""
        call.answers.remove(answer)
        if call.answers or not answer.cancelled():
            return
        if call.request.id:
            call.leaving = self._loop.call_later(self.config.linger_s, self._give_up, call)
        else:
            self._withdraw(call)

    def _give_up(self, call: _Call) -> None:
        """Its client has not come back. A cell that has begun is not stopped, because it cannot run again."""
        if not (call.request.session and call.has_begun):
            self._withdraw(call)

    def _withdraw(self, call: _Call) -> None:
        self._forget(call)  # at once: the same id may come again before the supervisor has stopped the program
        assert call.task is not None
        call.task.cancel()

    def _forget(self, call: _Call) -> None:
        if call.leaving is not None:
            call.leaving.cancel()
        if self._by_id.get(call.key) is call:
            del self._by_id[call.key]

    def _on_end(self, call: _Call, task: asyncio.Task[RunResult]) -> None:
        self._calls.discard(call)
        self.admission.release(call.client, call.num_bytes)
        self._forget(call)
        if task.cancelled():
            self.tally.num_cancelled += 1
            return
        found = self._answer_of(task)
        if isinstance(found, RunResult):
            self.tally.add(found)
            if call.request.id and not found.outcome.is_ours:
                self.kept.add(call.key, call.request, found, now=self._loop.time())
        for answer in call.answers:
            if answer.done():  # its request leaves
                continue
            if isinstance(found, RunResult):
                answer.set_result(found)
            else:
                answer.set_exception(found)

    def _answer_of(self, task: asyncio.Task[RunResult]) -> RunResult | MachineError:
        error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, SessionLost | NoNodes):
            return error
        if not isinstance(error, MachineError):
            _log.error("unexpected error in a call", exc_info=error)
        return RunResult.not_run(RunOutcome.INTERNAL, str(error) or type(error).__name__, level=self.box.level)

    def _answer_at_once(self, answer: asyncio.Future[RunResult], outcome: RunOutcome, reason: str) -> asyncio.Future[RunResult]:
        result = RunResult.not_run(outcome, reason, level=self.box.level)
        self.tally.add(result)
        answer.set_result(result)
        return answer


class _ClientRunner(CodeRunner):
    def __init__(self, dispatcher: Dispatcher, client: str) -> None:
        self._dispatcher = dispatcher
        self._client = client

    async def run(self, request: RunRequest) -> RunResult:
        return await self._dispatcher.run(request, client=self._client)

    async def close(self) -> None:
        """Does nothing: the service has other clients."""
