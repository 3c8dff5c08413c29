"""The runs of a client: sent in batches over one stream, sent again when it is lost, and answered once each."""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from strop.deadline import StoppedClock, clock_stopped
from strop.errors import DeadlineExceeded, LinkBroken, MachineError, Overloaded, SessionLost, StropError, UserError
from strop.sandbox.client.http_client import CONNECTION_ERRORS, ServiceHttp, Tries, backoff_s
from strop.sandbox.protocol import IsolationLevel, RunOutcome, RunRequest, RunResult
from strop.sandbox.server.ndjson import CancelRequest, ErrorLine, LineSplitter, ResultLine, RunLine, StartLine, TooLong

_log = logging.getLogger(__name__)

_BATCH = 64
_BATCH_S = 0.003  # to fill a batch
_NUM_BUSY = 16  # calls under way from which on further ones wait to leave in a batch
_MAX_UNDER_WAY = 16_384  # further ones wait here
SILENCE_S = 10.0  # the service sends at least an empty line every second
_SWEEP_S = 0.5
_CELL_RETURN_S = 60.0  # the service caches an answer for twice as long; later a cell might run twice

_MAX_LINE_BYTES = 256 << 20  # of an answer
_PROVEN_S = 2.0

_RUN_LINE: TypeAdapter[RunLine] = TypeAdapter(RunLine)
_ANSWERS: tuple[TypeAdapter[Any], ...] = (TypeAdapter(ResultLine), TypeAdapter(StartLine), TypeAdapter(ErrorLine))
_CANCEL: TypeAdapter[CancelRequest] = TypeAdapter(CancelRequest)


class CallStream:
    """Open until the service ends it or the connection is lost. `run` drives it.

    Args:
        on_line: called with each line of an answer.
    """

    def __init__(self, http: ServiceHttp, on_line: Callable[[bytes], None]) -> None:
        self._http = http
        self._on_line = on_line
        self._outgoing: list[bytes] = [b"\n"]  # sends the headers
        self._wake = asyncio.Event()
        self._wake.set()
        self._is_established = False  # the service accepted the request
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self.num_answers = 0
        self._made_at = self.heard_at = self._loop.time()

    @property
    def has_worked(self) -> bool:
        """Whether the connection was good for a while, so that a failure is a new one."""
        return self._is_established and (self.num_answers > 0 or self._loop.time() - self._made_at > _PROVEN_S)

    def send(self, lines: bytes) -> None:
        self._outgoing.append(lines)
        self._wake.set()

    def abort(self) -> None:
        """Break off, because the service is silent."""
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> NoReturn:
        """Raises `LinkBroken` when the stream has ended, and errors as `ServiceHttp.request` does."""
        self._task = asyncio.create_task(self._run())
        try:
            await asyncio.wait({self._task})
        finally:
            if not self._task.done():
                self._task.cancel()
                await asyncio.wait({self._task})
        if self._task.cancelled():
            raise LinkBroken("the service fell silent")
        self._task.result()
        raise LinkBroken("the service ended the stream")

    async def _run(self) -> None:
        async with self._http.request("POST", "/v1/runs", self._body(), is_stream=True) as response:
            self._is_established = True
            splitter = LineSplitter(max_line_bytes=_MAX_LINE_BYTES)
            while part := await response.content.readany():
                self.heard_at = self._loop.time()
                for line in splitter.feed(part):
                    if isinstance(line, TooLong):
                        raise LinkBroken(f"the service sent a line of more than {_MAX_LINE_BYTES} bytes")
                    if line:
                        self._on_line(line)

    async def _body(self) -> AsyncIterator[bytes]:
        while True:
            await self._wake.wait()
            self._wake.clear()
            part = b"".join(self._outgoing)
            self._outgoing.clear()
            yield part


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    """One run until its answer."""

    line: bytes
    id: str
    is_cell: bool
    clock: StoppedClock  # of the caller's deadline; stopped until a node takes the call
    started_at: float
    future: asyncio.Future[RunResult] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    stream: CallStream | None = None  # where it was sent; None while it waits
    lost_at: float = math.inf  # when the connection was lost
    num_overloads: int = 0


class Calls:
    """Sends a call at once while few are under way, and in batches under load.

    Every call has an id. Sent again after a lost connection, it finds the running call or its answer.
    """

    def __init__(self, http: ServiceHttp) -> None:
        self._http = http
        self._loop = asyncio.get_running_loop()
        self._prefix = uuid.uuid4().hex
        self._last_key = 0
        self._calls: dict[int, _Call] = {}  # without an answer; oldest first
        self._outbox: deque[_Call] = deque()
        self._num_under_way = 0
        self._stream: CallStream | None = None
        self._flush_timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._to_cancel: list[str] = []
        self._tries = Tries(http)
        self._tasks: set[asyncio.Task[None]] = set()
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
            reason = "the request holds a lone surrogate, which has no encoding"
            return RunResult.not_run(RunOutcome.REJECTED, reason, level=IsolationLevel.PROCESS)
        with clock_stopped() as clock:
            started_at = self._loop.time()
            call = _Call(line=line, id=request.id, is_cell=bool(request.session), clock=clock, started_at=started_at)
            self._calls[key] = call
            self._outbox.append(call)
            self._schedule_flush()
            if not self._is_sweeping:
                self._spawn(self._sweep())
            try:
                return await call.future
            finally:
                del self._calls[key]
                if call.stream is not None:  # the caller gave up, and the service does not know it
                    self._end_one()
                    self._cancel_there(call.id)

    async def close(self) -> None:
        """Cancel every call at the service, and fail it here."""
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

    # Calls to the service

    def _schedule_flush(self) -> None:
        is_busy = self._num_under_way >= _NUM_BUSY and len(self._outbox) < _BATCH
        if self._flush_timer is None:
            self._flush_timer = self._loop.call_later(_BATCH_S, self._flush) if is_busy else self._loop.call_soon(self._flush)
        elif isinstance(self._flush_timer, asyncio.TimerHandle) and not is_busy:
            self._flush_timer.cancel()
            self._flush_timer = self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_timer = None
        if self._stream is None:
            if not self._outbox or self._closed is not None:
                return
            self._stream = CallStream(self._http, self._on_line)
            self._spawn(self._serve_stream(self._stream))
        stream = self._stream
        batch: list[bytes] = []
        while self._outbox and self._num_under_way + len(batch) < _MAX_UNDER_WAY:
            call = self._outbox.popleft()
            if call.future.done():
                continue
            if call.is_cell and self._loop.time() - call.lost_at > _CELL_RETURN_S:
                call.future.set_exception(SessionLost("the connection was lost for too long while a cell ran"))
                continue
            call.stream = stream
            batch.append(call.line)
        if batch:
            self._num_under_way += len(batch)
            stream.send(b"".join(batch))

    def _cancel_there(self, call_id: str) -> None:
        self._to_cancel.append(call_id)
        if len(self._to_cancel) == 1:
            self._spawn(self._cancel_soon())

    async def _cancel_soon(self) -> None:
        await asyncio.sleep(0)  # calls that are cancelled together share one request
        ids, self._to_cancel = self._to_cancel, []
        await self._send_cancel(ids)

    async def _send_cancel(self, ids: list[str]) -> None:
        try:
            async with asyncio.timeout(2.0):
                await self._http.ask("POST", "/v1/cancel", _CANCEL.dump_json(CancelRequest(ids=tuple(ids))))
        except (StropError, *CONNECTION_ERRORS) as error:
            _log.debug("%d calls could not be cancelled; they end with their limits: %s", len(ids), error)

    # Answers of the service

    def _on_line(self, line: bytes) -> None:
        answer = _read(line)
        if not isinstance(answer.key, int):
            _log.warning("the service could not read a call: %s", line[:300])
            return
        call = self._calls.get(answer.key)
        if call is None or call.stream is None or call.future.done():
            return  # the caller gave up
        if isinstance(answer, StartLine):
            call.clock.go_on()
            return
        call.stream.num_answers += 1
        self._end_one()
        call.stream = None
        if isinstance(answer, ErrorLine):
            self._on_error(call, answer.error.exception())
        elif answer.result.outcome is RunOutcome.OVERLOADED:
            self._on_error(call, Overloaded(answer.result.reason))
        else:
            if answer.result.node:
                self._http.note_node()
            call.future.set_result(answer.result)

    def _on_error(self, call: _Call, error: StropError) -> None:
        if isinstance(error, Overloaded):
            try:
                self._http.note_error(error)
            except StropError as final:
                error = final
            else:
                call.num_overloads += 1
                self._loop.call_later(backoff_s(call.num_overloads), self._send_again, call)
                return
        call.future.set_exception(error)

    def _send_again(self, call: _Call) -> None:
        if not call.future.done():
            self._outbox.append(call)
            self._schedule_flush()

    def _end_one(self) -> None:
        self._num_under_way -= 1
        if self._outbox and self._flush_timer is None:
            self._schedule_flush()

    # Streams

    async def _serve_stream(self, stream: CallStream) -> None:
        try:
            await stream.run()
        except (UserError, SessionLost) as error:
            self._fail_all(error)
        except (MachineError, *CONNECTION_ERRORS) as error:
            if stream.has_worked:
                self._tries.start_over()
            try:
                await self._tries.after(error)
            except StropError as final:
                self._fail_all(final)
        finally:
            self._stream = None
            self._take_back(stream)
        if self._outbox:
            self._schedule_flush()

    def _take_back(self, stream: CallStream) -> None:
        """Send the calls of this stream that have no answer again, in their old order."""
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

    # Late answers

    async def _sweep(self) -> None:
        self._is_sweeping = True
        try:
            last_at = self._loop.time()
            while self._calls or self._stream is not None:
                await asyncio.sleep(_SWEEP_S)
                now = self._loop.time()
                is_late = now - last_at > 3 * _SWEEP_S  # this process stood still, and has not read what was sent
                last_at = now
                if self._stream is not None and now - self._stream.heard_at > SILENCE_S and not is_late:
                    self._stream.abort()
                self._end_overdue(now)
        finally:
            self._is_sweeping = False

    def _end_overdue(self, now: float) -> None:
        patience_s = self._http.patience.patience_s
        for call in list(self._calls.values()):
            if now - call.started_at < patience_s:
                break
            if not call.future.done():
                late = f"the code service at {self._http.url} did not answer a call within {patience_s:g} s"
                call.future.set_exception(DeadlineExceeded(late))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _read(line: bytes) -> ResultLine | StartLine | ErrorLine:
    """Raises `LinkBroken` for a line of no known shape."""
    fault: ValidationError | None = None
    for shape in _ANSWERS:
        try:
            answer: ResultLine | StartLine | ErrorLine = shape.validate_json(line)
        except ValidationError as error:
            fault = error
        else:
            return answer
    raise LinkBroken(f"the service sent a line of {len(line)} bytes that is no answer") from fault
