"""The runs of a client: sent in batches over one stream to each service, sent again when one is lost, answered once each.

    run -> outbox -> stream of the least loaded service that works -> answer
             ^----- calls of a stream that is lost -----'

A cell of a session goes only to the service of its session.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from strop.deadline import StoppedClock, clock_stopped
from strop.errors import DeadlineExceeded, LinkBroken, MachineError, NoNodes, Overloaded, SessionLost, StropError
from strop.sandbox.client.http_client import CONNECTION_ERRORS, SILENCE_S, ServiceHttp, Services, backoff_s
from strop.sandbox.protocol import IsolationLevel, RunOutcome, RunRequest, RunResult
from strop.sandbox.server.ndjson import CancelRequest, ErrorLine, LineSplitter, ResultLine, RunLine, StartLine, TooLong

_log = logging.getLogger(__name__)

_BATCH = 64
_BATCH_S = 0.003  # to fill a batch
_NUM_BUSY = 16  # calls under way from which on further ones wait to leave in a batch
_MAX_UNDER_WAY = 16_384  # at one service; further ones wait here
_SUSPECT_S = 1.5  # of silence, after which a service gets no new calls
_SWEEP_S = 0.2
_CELL_RETURN_S = 60.0  # the service caches an answer for twice as long; later a cell might run twice

_MAX_LINE_BYTES = 256 << 20  # of an answer
_PROVEN_S = 2.0

_RUN_LINE: TypeAdapter[RunLine] = TypeAdapter(RunLine)
_ANSWERS: tuple[TypeAdapter[Any], ...] = (TypeAdapter(ResultLine), TypeAdapter(StartLine), TypeAdapter(ErrorLine))
_CANCEL: TypeAdapter[CancelRequest] = TypeAdapter(CancelRequest)


class CallStream:
    """Open until the service ends it or the connection is lost. `run` drives it.

    Args:
        on_line: called with this stream and each line of an answer.
    """

    def __init__(self, service: ServiceHttp, on_line: Callable[[CallStream, bytes], None]) -> None:
        self.service = service
        self._on_line = on_line
        self._outgoing: list[bytes] = [b"\n"]  # sends the headers
        self._wake = asyncio.Event()
        self._wake.set()
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._abort_error: MachineError | None = None
        self.made_at = self.heard_at = self._loop.time()

    def send(self, lines: bytes) -> None:
        self._outgoing.append(lines)
        self._wake.set()

    def abort(self, error: MachineError) -> None:
        """Break off; `run` raises this error."""
        self._abort_error = error
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        """Return when the service has ended the stream; `LinkBroken` and errors of `ServiceHttp.request` say why it broke."""
        self.made_at = self.heard_at = self._loop.time()
        self._task = asyncio.create_task(self._run())
        try:
            await asyncio.wait({self._task})
        finally:
            if not self._task.done():
                self._task.cancel()
                await asyncio.wait({self._task})
        if self._abort_error is not None:
            raise self._abort_error
        self._task.result()

    async def _run(self) -> None:
        async with self.service.request("POST", "/v1/runs", self._body(), is_stream=True) as response:
            splitter = LineSplitter(max_line_bytes=_MAX_LINE_BYTES)
            while part := await response.content.readany():
                self.heard_at = self._loop.time()
                for line in splitter.feed(part):
                    if isinstance(line, TooLong):
                        raise LinkBroken(f"the service sent a line of more than {_MAX_LINE_BYTES} bytes")
                    if line:
                        self._on_line(self, line)

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
    home: ServiceHttp | None  # of the session of a cell
    clock: StoppedClock  # of the caller's deadline; stopped until a node takes the call
    started_at: float
    future: asyncio.Future[RunResult] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    stream: CallStream | None = None  # where it was sent; None while it waits
    lost_at: float = math.inf  # when the connection was lost
    num_overloads: int = 0


class Calls:
    """Sends a call at once while few are under way, and in batches under load.

    Every call has an id. Sent again to the same service after a lost connection, it finds the running call or its answer.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._loop = asyncio.get_running_loop()
        self._prefix = uuid.uuid4().hex
        self._last_key = 0
        self._calls: dict[int, _Call] = {}  # without an answer; oldest first
        self._outbox: deque[_Call] = deque()
        self._waiting_cells: list[_Call] = []  # for their service to come back
        self._num_under_way = 0
        self._streams: dict[ServiceHttp, CallStream] = {}
        self._serving: set[ServiceHttp] = set()  # that have a stream, or are tried until they have one
        self._untried = set(services.all)
        self._flush_timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._to_cancel: defaultdict[ServiceHttp, list[str]] = defaultdict(list)
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_sweeping = False
        self._closed: MachineError | None = None

    async def run(self, request: RunRequest, *, home: ServiceHttp | None = None) -> RunResult:
        """Run a program, or a cell of a session at `home`."""
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
            call = _Call(line=line, id=request.id, home=home, clock=clock, started_at=started_at)
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
                    self._cancel_there(call.stream.service, call.id)
                    self._end_one(call)

    async def close(self) -> None:
        """Cancel every call at the service, and fail it here."""
        self._closed = MachineError("the client of the code service was closed")
        sent: defaultdict[ServiceHttp, list[str]] = defaultdict(list)
        for call in self._calls.values():
            if call.stream is not None:
                sent[call.stream.service].append(call.id)
        self._fail_all(self._closed)
        await asyncio.gather(*(self._send_cancel(service, ids) for service, ids in sent.items()))
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
        if not self._outbox or self._closed is not None:
            return
        for service in self._services.all:
            if service not in self._serving:
                self._serving.add(service)
                self._spawn(self._serve(service))
        if self._untried:
            return  # else the first calls would all go to the first service that answers
        batches: defaultdict[CallStream, list[bytes]] = defaultdict(list)
        while self._outbox:
            call = self._outbox[0]
            stream = self._best() if call.home is None else self._streams.get(call.home)
            if stream is not None and stream.service.num_calls >= _MAX_UNDER_WAY:
                break
            if stream is None and call.home is None:
                break  # no service works
            self._outbox.popleft()
            if call.future.done():
                continue
            if call.home is not None and self._loop.time() - call.lost_at > _CELL_RETURN_S:
                call.future.set_exception(SessionLost("the connection was lost for too long while a cell ran"))
            elif stream is None:
                self._waiting_cells.append(call)
            else:
                call.stream = stream
                self._num_under_way += 1
                stream.service.num_calls += 1
                batches[stream].append(call.line)
        for stream, batch in batches.items():
            stream.send(b"".join(batch))

    def _best(self) -> CallStream | None:
        """The stream of the least loaded service."""
        now = self._loop.time()
        return min(
            self._streams.values(),
            key=lambda stream: (
                stream.service.is_silent,
                stream.service.retry_at > now,
                stream.service.num_calls / stream.service.num_slots,
            ),
            default=None,
        )

    def _cancel_there(self, service: ServiceHttp, call_id: str) -> None:
        if not self._to_cancel:
            self._spawn(self._cancel_soon())
        self._to_cancel[service].append(call_id)

    async def _cancel_soon(self) -> None:
        await asyncio.sleep(0)  # calls that are cancelled together share one request
        to_cancel, self._to_cancel = self._to_cancel, defaultdict(list)
        await asyncio.gather(*(self._send_cancel(service, ids) for service, ids in to_cancel.items()))

    async def _send_cancel(self, service: ServiceHttp, ids: list[str]) -> None:
        try:
            async with asyncio.timeout(2.0):
                await service.ask("POST", "/v1/cancel", _CANCEL.dump_json(CancelRequest(ids=tuple(ids))))
        except (StropError, *CONNECTION_ERRORS) as error:
            _log.debug("%d calls could not be cancelled; they end with their limits: %s", len(ids), error)

    # Answers of the service

    def _on_line(self, stream: CallStream, line: bytes) -> None:
        answer = _read(line)
        if not isinstance(answer.key, int):
            _log.warning("the service could not read a call: %s", line[:300])
            return
        call = self._calls.get(answer.key)
        if call is None or call.stream is not stream or call.future.done():
            return  # the caller gave up
        if isinstance(answer, StartLine):
            call.clock.go_on()
            return
        self._end_one(call)
        if isinstance(answer, ErrorLine):
            self._on_error(call, stream, answer.error.exception())
        elif answer.result.outcome is RunOutcome.OVERLOADED:
            self._on_error(call, stream, Overloaded(answer.result.reason))
        else:
            stream.service.note_works()
            call.future.set_result(answer.result)

    def _on_error(self, call: _Call, stream: CallStream, error: StropError) -> None:
        if not isinstance(error, Overloaded):
            call.future.set_exception(error)
            return
        if isinstance(error, NoNodes):
            stream.abort(error)  # the stream is opened again when the service can run something
        else:
            stream.service.note_error(error)
        call.num_overloads += 1
        self._loop.call_later(backoff_s(call.num_overloads), self._send_again, call)

    def _send_again(self, call: _Call) -> None:
        if not call.future.done():
            self._outbox.append(call)
            self._schedule_flush()

    def _end_one(self, call: _Call) -> None:
        """The call is no longer under way."""
        assert call.stream is not None
        call.stream.service.num_calls -= 1
        call.stream = None
        self._num_under_way -= 1
        if self._outbox and self._flush_timer is None:
            self._schedule_flush()

    # Streams

    async def _serve(self, service: ServiceHttp) -> None:
        """Keep a stream to the service open while there are calls."""
        try:
            while self._calls:
                stream = CallStream(service, self._on_line)
                try:
                    await service.health()
                    self._open(stream)
                    await stream.run()
                except (MachineError, *CONNECTION_ERRORS) as error:
                    service.note_error(error)
                    self._services.raise_if_all_lost()
                finally:
                    self._take_back(stream)
                await asyncio.sleep(backoff_s(service.num_failures))
        except StropError as error:
            self._fail_all(error)
        finally:
            self._serving.discard(service)

    def _open(self, stream: CallStream) -> None:
        self._streams[stream.service] = stream
        self._untried.discard(stream.service)
        stream.service.retry_at = 0.0
        waiting, self._waiting_cells = self._waiting_cells, []
        self._outbox.extendleft(reversed(waiting))
        self._schedule_flush()

    def _take_back(self, stream: CallStream) -> None:
        """Send the calls of this stream that have no answer again, in their old order."""
        self._streams.pop(stream.service, None)
        self._untried.discard(stream.service)
        stream.service.is_silent = False
        for call in reversed([call for call in self._calls.values() if call.stream is stream]):
            self._end_one(call)
            call.lost_at = min(call.lost_at, self._loop.time())
            if not call.future.done():
                self._outbox.appendleft(call)
        if self._outbox:
            self._schedule_flush()

    def _fail_all(self, error: StropError) -> None:
        for call in self._calls.values():
            if not call.future.done():
                call.future.set_exception(type(error)(*error.args))
        self._outbox.clear()
        self._waiting_cells.clear()

    # Late answers

    async def _sweep(self) -> None:
        self._is_sweeping = True
        try:
            last_at = self._loop.time()
            while self._calls or self._streams:
                await asyncio.sleep(_SWEEP_S)
                now = self._loop.time()
                is_late = now - last_at > 3 * _SWEEP_S  # this process stood still, and has not read what was sent
                last_at = now
                for stream in self._streams.values():
                    if not is_late:
                        self._check_silence(stream, now)
                self._end_cells_of_lost_services()
                self._end_overdue(now)
        finally:
            self._is_sweeping = False

    def _check_silence(self, stream: CallStream, now: float) -> None:
        service, silent_s = stream.service, now - stream.heard_at
        if silent_s > SILENCE_S:
            stream.abort(LinkBroken(f"it was silent for {silent_s:.1f} s"))
            self._spawn(service.close())  # ends other requests that wait for it
        elif silent_s > _SUSPECT_S and not service.is_silent:
            service.is_silent = True
            service.notice(f"the code service at {service.url} has been silent for {silent_s:.1f} s")
        elif silent_s < _SUSPECT_S:
            service.is_silent = False
            if now - stream.made_at > _PROVEN_S:
                service.note_works()

    def _end_cells_of_lost_services(self) -> None:
        """With one service there is nothing to lose by waiting for it; with several, a session is given up."""
        waiting, self._waiting_cells = self._waiting_cells, []
        for call in waiting:
            assert call.home is not None
            if self._services.are_several and call.home.lost_s > SILENCE_S and not call.future.done():
                call.future.set_exception(SessionLost(f"the session is lost with the code service at {call.home.url}"))
            elif not call.future.done():
                self._waiting_cells.append(call)

    def _end_overdue(self, now: float) -> None:
        patience_s = self._services.patience.patience_s
        for call in list(self._calls.values()):
            if now - call.started_at < patience_s:
                break
            if not call.future.done():
                late = f"no code service answered a call within {patience_s:g} s"
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
