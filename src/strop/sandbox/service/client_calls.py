"""The client's runs: gathered into batches, sent over one stream, sent again when that is lost, answered once each."""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections import deque
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from strop.deadline import StoppedClock, clock_stopped
from strop.errors import DeadlineExceeded, LinkBroken, MachineError, NoNodes, Overloaded, SessionLost, StropError, UserError
from strop.sandbox.protocol import IsolationLevel, RunOutcome, RunRequest, RunResult, RunTimings
from strop.sandbox.service.call_stream import CallStream
from strop.sandbox.service.http_client import (
    CONNECTION_ERRORS,
    NodeWait,
    ServiceHttp,
    back_off,
    backoff_s,
    exception_of,
    unreachable,
)
from strop.sandbox.service.lines import CancelRequest, ErrorLine, ResultLine, RunLine, StartLine

_log = logging.getLogger(__name__)

_BATCH = 64
_BATCH_S = 0.003  # to fill one
_NUM_BUSY = 16  # calls under way from which on a further one may wait for others to leave with it
_MAX_UNDER_WAY = 16_384  # further ones wait here
_LINES_PER_STREAM = 50_000  # then a new one: the service limits the lines of a request
_IDLE_S = 20.0  # a stream without calls is ended
SILENCE_S = 10.0  # the service says something every second
_SWEEP_S = 0.5
_CELL_RETURN_S = 60.0  # the service keeps its answer twice as long: asked for later, it might run twice

_RUN_LINE: TypeAdapter[RunLine] = TypeAdapter(RunLine)
_ANSWERS: tuple[TypeAdapter[Any], ...] = (TypeAdapter(ResultLine), TypeAdapter(StartLine), TypeAdapter(ErrorLine))
_CANCEL: TypeAdapter[CancelRequest] = TypeAdapter(CancelRequest)


class _Call:
    """One run until its answer."""

    __slots__ = (
        "clock",
        "future",
        "id",
        "is_cell",
        "line",
        "lost_at",
        "node_wait",
        "num_overloads",
        "started_at",
        "stream",
    )

    def __init__(
        self, line: bytes, call_id: str, *, is_cell: bool, clock: StoppedClock, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.line = line
        self.id = call_id
        self.is_cell = is_cell
        self.future: asyncio.Future[RunResult] = loop.create_future()
        self.clock = clock  # of whoever waits, stopped until a node takes the call
        self.started_at = loop.time()
        self.stream: CallStream | None = None  # on which it was sent; None while it waits
        self.lost_at = math.inf  # with its connection
        self.num_overloads = 0
        self.node_wait: NodeWait | None = None  # since the service said that it had no nodes


class Calls:
    """Sends at once while little is under way, and in batches under load.

    Every call has an id, so that sending it again after a lost connection finds the running call, or its answer.

    Args:
        patience_s: the longest a call may take in all, queue and tries included.
        no_node_s: how long the service may be without nodes.
        reconnect_s: how long it may be out of reach, once it was in reach.
    """

    def __init__(self, http: ServiceHttp, *, patience_s: float, no_node_s: float, reconnect_s: float, connect_s: float) -> None:
        self._http = http
        self._patience_s = patience_s
        self._no_node_s = no_node_s
        self._reconnect_s = reconnect_s
        self._connect_s = connect_s
        self._loop = asyncio.get_running_loop()
        self._prefix = uuid.uuid4().hex
        self._last_key = 0
        self._calls: dict[int, _Call] = {}  # without an answer; oldest first
        self._outbox: deque[_Call] = deque()
        self._num_under_way = 0
        self._stream: CallStream | None = None  # the one that takes new calls
        self._streams: set[CallStream] = set()
        self._flush_timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._to_cancel: list[str] = []
        self._num_failures = 0
        self._down_since = self._loop.time()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_sweeping = False
        self._closed: MachineError | None = None

    async def run(self, request: RunRequest) -> RunResult:
        if self._closed is not None:
            raise self._closed
        self._last_key = key = self._last_key + 1
        if not request.id:
            request = replace(request, id=f"{self._prefix}-{key}")
        try:
            line = _RUN_LINE.dump_json(RunLine(key=key, request=request)) + b"\n"
        except PydanticSerializationError:
            return _rejected("the request holds a lone surrogate, which has no encoding")
        with clock_stopped() as clock:  # a service that falls silent is given up, and one that is not in `patience_s`
            call = _Call(line, request.id, is_cell=bool(request.session), clock=clock, loop=self._loop)
            self._calls[key] = call
            self._outbox.append(call)
            self._schedule_flush()
            if not self._is_sweeping:
                self._spawn(self._sweep())
            try:
                return await call.future
            finally:
                del self._calls[key]
                if call.stream is not None:  # it was given up here, and not answered there
                    self._under_way(call.stream, -1)
                    self._cancel_there(call.id)

    async def close(self) -> None:
        """Have every call ended there, and fail it here."""
        self._closed = MachineError("the client of the code service was closed")
        sent = [call.id for call in self._calls.values() if call.stream is not None]
        self._fail_all(self._closed)
        if sent:
            await self._send_cancel(sent)
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # Out

    def _schedule_flush(self) -> None:
        is_waiting = isinstance(self._flush_timer, asyncio.TimerHandle)
        is_busy = self._num_under_way >= _NUM_BUSY and len(self._outbox) < _BATCH
        if self._flush_timer is None:
            self._flush_timer = self._loop.call_later(_BATCH_S, self._flush) if is_busy else self._loop.call_soon(self._flush)
        elif is_waiting and not is_busy:
            self._flush_timer.cancel()
            self._flush_timer = self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_timer = None
        if self._stream is None:
            if self._outbox and self._closed is None:
                self._stream = CallStream(self._http, self._on_line)
                self._streams.add(self._stream)
                self._spawn(self._live(self._stream))
            else:
                return
        stream = self._stream
        batch: list[bytes] = []
        while self._outbox and self._num_under_way + len(batch) < _MAX_UNDER_WAY:
            call = self._outbox.popleft()
            if not call.future.done():
                if call.is_cell and self._loop.time() - call.lost_at > _CELL_RETURN_S:
                    call.future.set_exception(SessionLost("the connection was lost under a cell for too long"))
                    continue
                call.stream = stream
                batch.append(call.line)
        if batch:
            self._num_under_way += len(batch)
            stream.send(b"".join(batch), len(batch))
        if stream.num_sent >= _LINES_PER_STREAM:
            stream.end()
            self._stream = None

    def _cancel_there(self, call_id: str) -> None:
        self._to_cancel.append(call_id)
        if len(self._to_cancel) == 1:
            self._spawn(self._cancel_soon())

    async def _cancel_soon(self) -> None:
        await asyncio.sleep(0)  # all that are cancelled together leave together
        ids, self._to_cancel = self._to_cancel, []
        await self._send_cancel(ids)

    async def _send_cancel(self, ids: list[str]) -> None:
        try:
            async with asyncio.timeout(2.0):
                await self._http.ask("POST", "/v1/cancel", _CANCEL.dump_json(CancelRequest(ids=tuple(ids))))
        except (StropError, *CONNECTION_ERRORS) as error:
            _log.debug("%d calls could not be cancelled; they end with their limits: %s", len(ids), error)

    # In

    def _on_line(self, line: bytes) -> None:
        answer = _read(line)
        if not isinstance(answer.key, int):
            _log.warning("the service could not read a call: %s", line[:300])
            return
        call = self._calls.get(answer.key)
        if call is None or call.stream is None or call.future.done():
            return  # nobody waits for it any more
        if isinstance(answer, StartLine):
            call.clock.go_on()
            return
        call.stream.num_answers += 1
        self._under_way(call.stream, -1)
        call.stream = None
        if isinstance(answer, ErrorLine):
            self._on_error(call, exception_of(answer.error))
        elif answer.result.outcome is RunOutcome.OVERLOADED:
            if call.node_wait is not None:
                call.node_wait.start_over()
            self._send_later(call)
        else:
            if answer.result.node:
                self._http.note_node()
            call.future.set_result(answer.result)

    def _on_error(self, call: _Call, error: StropError) -> None:
        if isinstance(error, NoNodes):
            call.node_wait = call.node_wait or NodeWait(self._http, limit_s=self._no_node_s)
            try:
                call.node_wait.go_on()
            except StropError as too_late:
                error = too_late
            else:
                self._send_later(call)
                return
        call.future.set_exception(error)

    def _send_later(self, call: _Call) -> None:
        call.num_overloads += 1
        self._loop.call_later(backoff_s(call.num_overloads), self._send_again, call)

    def _send_again(self, call: _Call) -> None:
        if not call.future.done():
            self._outbox.append(call)
            self._schedule_flush()

    def _under_way(self, stream: CallStream, change: int) -> None:
        self._num_under_way += change
        stream.num_open += change
        if self._outbox and self._flush_timer is None:
            self._schedule_flush()

    # The life of a stream

    async def _live(self, stream: CallStream) -> None:
        reason = "the stream ended"
        try:
            await stream.run()
        except (UserError, SessionLost) as error:
            self._fail_all(error)
        except (MachineError, *CONNECTION_ERRORS) as error:
            reason = str(error) or type(error).__name__
            await self._pause_after(stream, is_overload=isinstance(error, Overloaded), reason=reason)
        finally:
            self._streams.discard(stream)
            if self._stream is stream:
                self._stream = None
            self._take_back(stream)
        if self._outbox:
            self._schedule_flush()

    async def _pause_after(self, stream: CallStream, *, is_overload: bool, reason: str) -> None:
        now = self._loop.time()
        if stream.is_fruitful:
            self._num_failures = 0
            self._down_since = now
        self._num_failures += 1
        limit_s = self._patience_s if is_overload else self._reconnect_s if self._http.was_up else self._connect_s
        if now - self._down_since > limit_s:
            self._fail_all(unreachable(self._http, reason, limit_s=limit_s))
        elif self._num_failures > 1:
            await back_off(self._num_failures)

    def _take_back(self, stream: CallStream) -> None:
        """What was sent on it and has no answer is sent again, in its old order."""
        lost = [call for call in self._calls.values() if call.stream is stream]
        self._num_under_way -= len(lost)
        for call in reversed(lost):
            call.stream = None
            call.lost_at = min(call.lost_at, self._loop.time())
            if not call.future.done():
                self._outbox.appendleft(call)

    def _fail_all(self, error: StropError) -> None:
        for call in self._calls.values():
            if not call.future.done():
                call.future.set_exception(type(error)(*error.args))
        self._outbox.clear()

    # What is late

    async def _sweep(self) -> None:
        self._is_sweeping = True
        try:
            last_at = self._loop.time()
            while self._calls or self._streams:
                await asyncio.sleep(_SWEEP_S)
                now = self._loop.time()
                is_late = now - last_at > 3 * _SWEEP_S  # this process stood still: what was said lies unread
                last_at = now
                for stream in self._streams:
                    if now - stream.heard_at > SILENCE_S and not is_late:
                        stream.abort()
                if (current := self._stream) is not None and not current.num_open and now - current.used_at > _IDLE_S:
                    current.end()
                    self._stream = None
                self._end_overdue(now)
        finally:
            self._is_sweeping = False

    def _end_overdue(self, now: float) -> None:
        for call in list(self._calls.values()):
            if now - call.started_at < self._patience_s:
                break
            if not call.future.done():
                late = f"the code service at {self._http.url} did not answer a call within {self._patience_s:g} s"
                call.future.set_exception(DeadlineExceeded(late))

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _read(line: bytes) -> ResultLine | StartLine | ErrorLine:
    """Raises `LinkBroken` for what is none of them."""
    fault: ValidationError | None = None
    for shape in _ANSWERS:
        try:
            answer: ResultLine | StartLine | ErrorLine = shape.validate_json(line)
        except ValidationError as error:
            fault = error
        else:
            return answer
    raise LinkBroken(f"the service sent a line of {len(line)} bytes that is no answer") from fault


def _rejected(reason: str) -> RunResult:
    return RunResult(
        outcome=RunOutcome.REJECTED,
        reason=reason,
        text=f"Not run: {reason}.",
        exit_code=None,
        timings=RunTimings(),
        level=IsolationLevel.PROCESS,
    )
