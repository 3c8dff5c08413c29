"""One code service as a client sees it: requests over HTTP, a stream of runs, and whether it works.

A stream is one request whose lines are calls, with a reply whose lines are their answers.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from strop.deadline import StoppedClock
from strop.errors import LinkBroken, MachineError, NoNodes, Overloaded, StropError, UserError
from strop.sandbox.protocol import RunOutcome, RunResult
from strop.sandbox.server import ndjson

try:
    import aiohttp
except ImportError as error:
    raise UserError("a code service is reached with aiohttp, which is not installed: pip install 'strop[serve]'.") from error

_log = logging.getLogger(__name__)

Notice: TypeAlias = Callable[[str], None]
"""Is called with a sentence when a service falls silent, is lost, or works again."""

log_notice: Notice = _log.warning

_CONNECT_S = 5.0  # also for the health of a service
_ANSWER_S = 60.0  # for a request that is no stream
_CANCEL_S = 2.0
_LOOK_S = 0.5  # how often a stream without lines is looked at: the time that this process is stopped counts as one look
_SUSPECT_S = 1.5  # of silence, after which a service gets no new calls
SILENCE_S = 5.0  # without a line of a stream, after which a service is given up; it sends an empty one twice a second
_PROVEN_S = 2.0  # after which a stream without an answer shows that the service works
_MAX_UNDER_WAY = 16_384  # calls; further ones wait here
_BATCH = 64
BATCH_S = 0.003  # to fill a batch
_NUM_BUSY = 16  # calls under way from which on further ones wait to leave in a batch
_MAX_LINE_BYTES = 256 << 20  # of an answer
CONNECTION_ERRORS = (aiohttp.ClientError, OSError, TimeoutError)

_REPLY: TypeAdapter[ndjson.ErrorReply | ndjson.Health] = TypeAdapter(ndjson.ErrorReply | ndjson.Health)
_ANSWER: TypeAdapter[ndjson.ResultLine | ndjson.StartLine | ndjson.ErrorLine] = TypeAdapter(
    Annotated[ndjson.ResultLine | ndjson.StartLine | ndjson.ErrorLine, Field(union_mode="left_to_right")]  # most are results
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One run.

    Args:
        key: differs from those of all other calls of the client.
        line: the request.
        clock: of the caller's deadline; goes on when a node takes the call.
    """

    key: int
    id: str
    line: bytes
    clock: StoppedClock


class Service:
    """Belongs to one event loop.

    Args:
        name: of the client in the queue of the service.
        reconnect_s, connect_s, notice: as for `SandboxClient`.
    """

    def __init__(self, url: str, *, token: str | None, name: str, reconnect_s: float, connect_s: float, notice: Notice) -> None:
        self.notice = notice
        self.url = url.rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise UserError(f"{url!r} is no address of a code service; it has to be like http://127.0.0.1:8517.")
        self._reconnect_s, self._connect_s = reconnect_s, connect_s
        self.num_slots = 1
        self.num_calls = 0  # of this client, under way
        self.num_sessions = 0  # of this client
        self.has_stream = False
        self.is_silent = False  # suspected to be lost
        self.lost_at: float | None = None  # since when it does not answer, or cannot run anything
        self.retry_at = 0.0  # other services are preferred until then
        self.num_failures = 0  # since it last worked
        self._error: Exception | None = None  # the last one
        self._headers = {ndjson.CLIENT_HEADER: name, ndjson.STARTS_HEADER: "1"}
        self._headers |= {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None
        self._was_up = False  # it has answered a request
        self._calls: dict[int, tuple[Call, asyncio.Future[RunResult]]] = {}  # of the stream
        self._room = asyncio.Semaphore(_MAX_UNDER_WAY)
        self._outgoing: list[bytes] = []
        self._wake = asyncio.Event()  # sends what is outgoing
        self._to_cancel: list[str] = []
        self._cancelling: asyncio.Task[None] | None = None

    # Requests

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: Any = None, *, is_stream: bool = False, limit_s: float = _ANSWER_S
    ) -> AsyncIterator[Any]:
        """The response, if its status is 200.

        Raises:
            UserError: the address, the token or the request is wrong.
            SessionLost, Overloaded, NoNodes, MachineError: as the service says.
            aiohttp.ClientError, OSError, TimeoutError: there was no answer.
        """
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(headers=self._headers, connector=connector, auto_decompress=False)
        timeout = aiohttp.ClientTimeout(total=None if is_stream else limit_s, sock_connect=_CONNECT_S)
        try:
            async with self._session.request(method, self.url + path, data=body, timeout=timeout) as response:
                if response.status != 200:
                    raise self._error_of(response.status, await response.read())
                self._was_up = True
                yield response
        except aiohttp.InvalidURL as error:
            raise UserError(f"{self.url!r} is no address of a code service: {error}.") from error

    async def ask(self, method: str, path: str, body: bytes | None = None, *, limit_s: float = _ANSWER_S) -> bytes:
        """The body of the reply; raises as `request` does."""
        async with self.request(method, path, body, limit_s=limit_s) as response:
            return bytes(await response.read())

    async def health(self) -> ndjson.Health:
        """Ask whether it works, and how many slots it has; raises as `request` does."""
        try:
            health = ndjson.Health.model_validate_json(await self.ask("GET", "/v1/health", limit_s=_CONNECT_S))
        except ValidationError as error:
            raise UserError(f"no code service of this version answers at {self.url}: its health is something else.") from error
        self.num_slots = max(1, sum(node.num_slots for node in health.nodes))
        return health

    async def close(self) -> None:
        """Close its connections; requests under way fail, later ones connect again."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    # The stream of runs

    async def stream(self, on_open: Callable[[], None]) -> None:
        """Take calls, from `on_open` until the service ends the stream. Raises `LinkBroken`, or as `request`, if it is lost."""
        await self.health()
        self._outgoing, self._wake = [b"\n"], asyncio.Event()  # the line sends the headers
        self._wake.set()
        lines = self._lines(self._outgoing, self._wake)
        try:
            async with self.request("POST", "/v1/runs", lines, is_stream=True) as response:
                self.has_stream, self.retry_at = True, 0.0
                on_open()
                try:
                    await self._read(response.content)
                finally:
                    response.close()
        finally:
            self.has_stream = self.is_silent = False
            self._fail(LinkBroken(f"the connection to the code service at {self.url} was lost"))

    async def call(self, call: Call) -> RunResult:
        """Run it over the stream, which has to be open.

        Raises:
            LinkBroken: the stream was lost.
            Overloaded, SessionLost, MachineError: as the service says.
        """
        answer: asyncio.Future[RunResult] = asyncio.get_running_loop().create_future()
        self.num_calls += 1
        try:
            async with self._room:
                if not self.has_stream:
                    raise LinkBroken(f"the connection to the code service at {self.url} was lost")
                self._calls[call.key] = call, answer
                self._send(call.line)
                return await answer
        finally:
            self._calls.pop(call.key, None)
            self.num_calls -= 1
            if answer.cancelled():  # the caller gave up, and the service does not know it
                self._to_cancel.append(call.id)
                if self._cancelling is None or self._cancelling.done():
                    self._cancelling = asyncio.create_task(self._cancel())

    async def end(self, error: MachineError) -> None:
        """Fail every call with `error`, cancel it at the service, and close."""
        self._to_cancel += [call.id for call, _ in self._calls.values()]
        self._fail(error)
        await self._cancel()
        await self.close()

    def _send(self, line: bytes) -> None:
        """Lines leave together: those of one turn of the event loop or, under load, of `BATCH_S`."""
        self._outgoing.append(line)
        if self.num_calls < _NUM_BUSY or len(self._outgoing) >= _BATCH:
            self._wake.set()
        elif len(self._outgoing) == 1:
            asyncio.get_running_loop().call_later(BATCH_S, self._wake.set)

    async def _lines(self, outgoing: list[bytes], wake: asyncio.Event) -> AsyncIterator[bytes]:
        while True:
            await wake.wait()
            wake.clear()
            if part := b"".join(outgoing):
                outgoing.clear()
                yield part

    async def _read(self, content: Any) -> None:
        splitter = ndjson.LineSplitter(max_line_bytes=_MAX_LINE_BYTES)
        proven_at = asyncio.get_running_loop().time() + _PROVEN_S
        silent_s = 0.0
        while True:
            try:
                async with asyncio.timeout(_LOOK_S):
                    part = await content.readany()
            except TimeoutError:
                silent_s += _LOOK_S
                if silent_s >= SILENCE_S:
                    await self.close()  # ends other requests that wait for it
                    raise LinkBroken(f"it was silent for {silent_s:.1f} s") from None
                if silent_s >= _SUSPECT_S and not self.is_silent:
                    self.is_silent = True
                    self.notice(f"the code service at {self.url} has been silent for {silent_s:.1f} s")
                continue
            if not part:
                return
            silent_s, self.is_silent = 0.0, False
            for line in splitter.feed(part):
                if isinstance(line, ndjson.TooLong):
                    raise LinkBroken(f"the service sent a line of more than {_MAX_LINE_BYTES} bytes")
                if line:
                    self._take(line)
            if asyncio.get_running_loop().time() > proven_at:
                self.note_works()

    def _take(self, line: bytes) -> None:
        """Raises `NoNodes` when nothing runs there: the stream is opened again when the service can run something."""
        try:
            read = _ANSWER.validate_json(line)
        except ValidationError as error:
            raise LinkBroken(f"the service sent a line of {len(line)} bytes that is no answer") from error
        if not isinstance(read.key, int):
            _log.warning("the service could not read a call: %s", line[:300])
            return
        call, answer = self._calls.get(read.key, (None, None))
        if call is None or answer is None or answer.done():
            return  # the caller gave up
        if isinstance(read, ndjson.StartLine):
            call.clock.go_on()
        elif isinstance(read, ndjson.ErrorLine):
            failure = read.error.exception()
            if isinstance(failure, NoNodes):
                raise failure
            answer.set_exception(failure)
        elif read.result.outcome is RunOutcome.OVERLOADED:
            overloaded = Overloaded(read.result.reason)
            self.note_error(overloaded)
            answer.set_exception(overloaded)
        else:
            self.note_works()
            answer.set_result(read.result)

    def _fail(self, error: MachineError) -> None:
        for _, answer in self._calls.values():
            if not answer.done():
                answer.set_exception(type(error)(*error.args))

    async def _cancel(self) -> None:
        await asyncio.sleep(0)  # calls that are cancelled together share one request
        ids, self._to_cancel = self._to_cancel, []
        if not ids:
            return
        try:
            async with asyncio.timeout(_CANCEL_S):
                await self.ask("POST", "/v1/cancel", ndjson.CancelRequest(ids=tuple(ids)).line())
        except (StropError, *CONNECTION_ERRORS) as error:
            _log.debug("%d calls could not be cancelled; they end with their limits: %s", len(ids), error)

    # Its state

    def note_works(self) -> None:
        """It has just done something."""
        self.num_failures, self.retry_at = 0, 0.0
        if self.lost_at is not None:
            self.lost_at = None
            self.notice(f"the code service at {self.url} works again")

    def note_error(self, error: Exception) -> None:
        """A request failed and will be tried again. The first failure of a service that worked is logged."""
        now = asyncio.get_running_loop().time()
        self.num_failures += 1
        self.retry_at = now + backoff_s(self.num_failures)
        if isinstance(error, Overloaded) and not isinstance(error, NoNodes):
            self.lost_at = None
            return
        self._error = error
        if self.lost_at is None:
            self.lost_at = now
            self.notice(f"the code service at {self.url} is lost: {self._reason}")

    @property
    def lost_s(self) -> float:
        """For how long it has been lost; 0 if it is not."""
        return 0.0 if self.lost_at is None else asyncio.get_running_loop().time() - self.lost_at

    @property
    def limit_s(self) -> float:
        """How long it may be lost."""
        return self._reconnect_s if self._was_up or isinstance(self._error, NoNodes) else self._connect_s

    def loss(self) -> StropError:
        """The final error. A wrong address is a mistake of the user; a service that did answer before is not."""
        if isinstance(self._error, NoNodes):
            return NoNodes(
                f"the code service at {self.url} has had no node for {self.limit_s:g} s; its log says why its supervisor"
                " does not start."
            )
        if self._was_up:
            return MachineError(f"the code service at {self.url} has been out of reach for {self.limit_s:g} s: {self._reason}")
        return UserError(f"no code service answers at {self.url}: {self._reason}. Is it running, and is this its address?")

    @property
    def _reason(self) -> str:
        return str(self._error) or type(self._error).__name__

    def _error_of(self, status: int, body: bytes) -> StropError:
        try:
            reply = _REPLY.validate_json(body)
        except ValidationError:
            reply = None
        if status == 401:
            return UserError(f"the code service at {self.url} refused the token; use the one that it was started with.")
        if status in (404, 405) or (reply is None and status < 500):
            return UserError(f"no code service of this version answers at {self.url}: the status is {status}.")
        if isinstance(reply, ndjson.ErrorReply):
            return reply.error.exception()
        if isinstance(reply, ndjson.Health) and reply.status == "no nodes":
            return NoNodes("it has no node to run anything on")
        return Overloaded(f"the status of {self.url} is {status}")  # a proxy, or a service that is restarting


def backoff_s(num_failures: int) -> float:
    """Longer with each failure, up to about two seconds, and random so that clients do not retry at the same time."""
    return min(2.0, 0.05 * 2.0 ** min(num_failures, 10)) * random.uniform(0.5, 1.0)
