"""A client of code services: a `CodeService` in this process, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from dataclasses import replace

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from strop.deadline import clock_stopped
from strop.errors import DeadlineExceeded, LinkBroken, MachineError, Overloaded, SessionLost, StropError, UserError
from strop.sandbox.client_service import CONNECTION_ERRORS, SILENCE_S, Call, Notice, Service, backoff_s, log_notice
from strop.sandbox.config import TOKEN_VARIABLE, SandboxConfig
from strop.sandbox.protocol import (
    NUM_PAIRS,
    AsyncContext,
    CodeService,
    IsolationLevel,
    PairVerdict,
    RunOutcome,
    RunRequest,
    RunResult,
    SessionLimits,
    VerifyRequest,
)
from strop.sandbox.server.ndjson import ErrorLine, Health, RunLine, SessionReply, VerdictLine

_CELL_RETURN_S = 60.0  # the service caches an answer for twice as long; later a cell might run twice

_VERIFY: TypeAdapter[VerifyRequest] = TypeAdapter(VerifyRequest)
_VERDICT: TypeAdapter[VerdictLine | ErrorLine] = TypeAdapter(VerdictLine | ErrorLine)
_LIMITS: TypeAdapter[SessionLimits] = TypeAdapter(SessionLimits)


class SandboxClient(AsyncContext, CodeService):
    """Runs many calls at once. Belongs to the event loop that it is first used in.

    async with SandboxClient("http://127.0.0.1:8517", token=token) as service:
        result = await service.run(RunRequest(code="print(1)"))

    It retries `overloaded` answers and lost connections; every call has one answer. With several services a call goes to the
    least loaded one, and to another one when that is lost: it may run twice then. A session stays at its service, no cell runs
    twice, and a session that is lost with its service raises `SessionLost`.

    Args:
        url: the address of the service, or the addresses of several.
        token: the token of every service.
        client: the name in the queue of a service, in which clients take turns; by default each object has its own.
        patience_s: the longest time of one call, with queue and retries; then it raises `DeadlineExceeded`.
        reconnect_s: how long every service may be out of reach before calls raise `MachineError`, or unable to run anything
            before they raise `NoNodes`.
        connect_s: the same before the first answer; then calls raise `UserError`, as for a wrong address.
        notice: is called with a sentence when a service falls silent, is lost, or works again. Default: a warning in the log.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        token: str | None = None,
        client: str = "",
        patience_s: float = 3600.0,
        reconnect_s: float = 60.0,
        connect_s: float = 5.0,
        notice: Notice = log_notice,
    ) -> None:
        self._patience_s = patience_s
        self._client = client or uuid.uuid4().hex
        self._services = [
            Service(one, token=token, name=self._client, reconnect_s=reconnect_s, connect_s=connect_s, notice=notice)
            for one in ([url] if isinstance(url, str) else url)
        ]
        self._homes: dict[str, Service] = {}  # of sessions
        self._last_key = 0
        self._num_calls = 0  # without an answer
        self._streams: dict[Service, asyncio.Task[None]] = {}  # keep one open to each service while there are calls
        self._untried = set(self._services)
        self._turn: asyncio.Future[StropError | None] | None = None  # for which calls wait that need a stream
        self._closed: MachineError | None = None

    async def run(self, request: RunRequest) -> RunResult:
        """See `CodeService`. Raises `UserError` for a wrong address or token, `SessionLost` for a cell without its session."""
        if not isinstance(request, RunRequest):
            raise TypeError(f"a program is run as RunRequest(code=...); this is of type {type(request).__name__}")
        if self._closed is not None:
            raise self._closed
        home = self._home(request.session) if request.session else None
        self._last_key = key = self._last_key + 1
        if not request.id:
            request = replace(request, id=f"{self._client}-{key}")
        try:
            line = RunLine(key=key, request=request).line()
        except PydanticSerializationError:
            reason = "the request holds a lone surrogate, which has no encoding"
            return RunResult.not_run(RunOutcome.REJECTED, reason, level=IsolationLevel.PROCESS)
        self._num_calls += 1
        try:
            with clock_stopped() as clock:
                async with asyncio.timeout(self._patience_s):
                    return await self._run(Call(key=key, id=request.id, line=line, clock=clock), home)
        except TimeoutError as error:
            raise DeadlineExceeded(f"no code service answered a call within {self._patience_s:g} s") from error
        except SessionLost:
            self._forget(request.session)
            raise
        finally:
            self._num_calls -= 1

    async def verify(self, request: VerifyRequest) -> AsyncGenerator[tuple[int, PairVerdict]]:
        """See `CodeService`. Pairs whose verdicts were lost with a connection are sent again, which changes no verdict."""
        verdicts: dict[int, PairVerdict] = {}
        started_at = asyncio.get_running_loop().time()
        while rest := [index for index in range(len(request.pairs)) if index not in verdicts]:
            asked = VerifyRequest(pairs=tuple(request.pairs[index] for index in rest), pair_wall_s=request.pair_wall_s)
            service, num_slots = self._best(self._services), -(-len(rest) // NUM_PAIRS)
            service.num_calls += num_slots
            try:
                async for line in self._verdicts(service, asked):
                    if (index := rest[line.index]) not in verdicts:
                        verdicts[index] = line.verdict
                        service.note_works()
                        yield index, line.verdict
                if len(verdicts) < len(request.pairs):
                    raise ConnectionResetError("the reply ended too early")
            except (Overloaded, *CONNECTION_ERRORS) as error:
                await self._after(service, error, started_at=started_at)
            finally:
                service.num_calls -= num_slots

    async def open_session(self, limits: SessionLimits) -> str:
        """Open it at the service with the fewest sessions of this client for its size."""
        service, reply = await self._ask("POST", "/v1/sessions", _LIMITS.dump_json(limits))
        return self._add_session(service, reply)

    async def fork_session(self, session: str) -> str:
        try:
            service, reply = await self._ask("POST", f"/v1/sessions/{session}/fork", home=self._home(session))
        except SessionLost:
            self._forget(session)
            raise
        return self._add_session(service, reply)

    async def close_session(self, session: str) -> None:
        with contextlib.suppress(SessionLost):
            home = self._home(session)
            self._forget(session)
            await self._ask("DELETE", f"/v1/sessions/{session}", home=home)

    async def health(self) -> dict[str, Health]:
        """The state of each service that works, by address. Those that do not answer within the patience are in the log.

        Raises:
            UserError: an address or the token is wrong.
            MachineError: no service works.
        """
        found = await asyncio.gather(*map(self._health, self._services))
        health = {service.url: one for service, one in zip(self._services, found, strict=True) if one is not None}
        if not health:
            raise self._services[0].loss()
        return health

    async def move(self, url: str, other: str) -> None:
        """Call a service at the address `other` in place of the one at `url`, which is lost with its sessions."""
        service = next(service for service in self._services if service.url == url)
        service.url, service.retry_at = other, 0.0
        await service.close()

    async def close(self) -> None:
        """Cancel every run at its service, and fail it here."""
        self._closed = MachineError("the client of the code service was closed")
        for stream in self._streams.values():
            stream.cancel()
        self._wake(self._closed)
        await asyncio.gather(*(service.end(self._closed) for service in self._services))
        await asyncio.gather(*self._streams.values(), return_exceptions=True)

    # Runs

    async def _run(self, call: Call, home: Service | None) -> RunResult:
        """Send it until it has an answer. With its id, a service finds the running call or its answer."""
        lost_at, num_overloads = math.inf, 0
        while True:
            service = await self._service_for(home)
            if home is not None and asyncio.get_running_loop().time() - lost_at > _CELL_RETURN_S:
                raise SessionLost("the connection was lost for too long while a cell ran")
            try:
                return await service.call(call)
            except LinkBroken:
                lost_at = min(lost_at, asyncio.get_running_loop().time())
            except Overloaded:
                num_overloads += 1
                await asyncio.sleep(backoff_s(num_overloads))

    async def _service_for(self, home: Service | None) -> Service:
        """Wait for a stream: to `home`, or to any service once each was tried, so that the first one does not get all calls."""
        while True:
            if self._closed is not None:
                raise self._closed
            for service in self._services:
                if service not in self._streams or self._streams[service].done():
                    self._streams[service] = asyncio.create_task(self._keep_stream(service))
            if home is not None and home.has_stream:
                return home
            if home is None and not self._untried and (open_ones := [each for each in self._services if each.has_stream]):
                return self._best(open_ones)
            self._require_home(home)
            self._turn = self._turn or asyncio.get_running_loop().create_future()
            if (error := await asyncio.shield(self._turn)) is not None:
                raise type(error)(*error.args)

    async def _keep_stream(self, service: Service) -> None:
        """Keep a stream to the service open while there are calls."""

        def note_tried() -> None:
            self._untried.discard(service)
            self._wake()

        try:
            while self._num_calls:
                try:
                    await service.stream(note_tried)
                except (MachineError, *CONNECTION_ERRORS) as error:
                    service.note_error(error)
                    self._raise_if_all_lost()
                note_tried()
                await asyncio.sleep(backoff_s(service.num_failures))
        except StropError as error:
            self._untried.discard(service)
            self._wake(error)

    def _wake(self, error: StropError | None = None) -> None:
        """Let the calls that wait look again for a stream, or raise `error`."""
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.set_result(error)

    # Which service, and for how long

    @staticmethod
    def _best(services: Iterable[Service], *, for_session: bool = False) -> Service:
        """The least loaded one that works, as far as is known."""
        now = asyncio.get_running_loop().time()
        return min(
            services,
            key=lambda service: (
                service.is_silent or service.lost_at is not None,
                service.retry_at > now,
                (service.num_sessions if for_session else service.num_calls) / service.num_slots,
            ),
        )

    def _raise_if_all_lost(self) -> None:
        """Raise the error of the service that was lost last, once the patience with it is over."""
        last = min(self._services, key=lambda service: service.lost_s)
        if last.lost_s > last.limit_s:
            raise last.loss()

    async def _after(self, service: Service, error: Exception, *, started_at: float, has_home: bool = False) -> None:
        """Return when a request that failed may be tried again; raise the final error if it may not.

        Args:
            has_home: only the same service can do it.
        """
        service.note_error(error)
        self._raise_if_all_lost()
        now = asyncio.get_running_loop().time()
        if isinstance(error, Overloaded) and now - started_at > self._patience_s:
            raise error
        await asyncio.sleep((service.retry_at if has_home else min(one.retry_at for one in self._services)) - now)

    async def _health(self, service: Service) -> Health | None:
        """None if it is lost for longer than it may be."""
        while True:
            try:
                health = await service.health()
            except (Overloaded, *CONNECTION_ERRORS) as error:
                service.note_error(error)
                if service.lost_s > service.limit_s:
                    return None
                await asyncio.sleep(backoff_s(service.num_failures))
            else:
                service.note_works()
                return health

    async def _ask(
        self, method: str, path: str, body: bytes | None = None, *, home: Service | None = None
    ) -> tuple[Service, bytes]:
        """The reply, and the service that gave it: `home`, or the best for a new session."""
        started_at = asyncio.get_running_loop().time()
        while True:
            service = home or self._best(self._services, for_session=True)
            try:
                reply = await service.ask(method, path, body)
            except (Overloaded, *CONNECTION_ERRORS) as error:
                await self._after(service, error, started_at=started_at, has_home=home is not None)
                self._require_home(home)
            else:
                service.note_works()
                return service, reply

    # Sessions

    def _add_session(self, service: Service, reply: bytes) -> str:
        session = SessionReply.model_validate_json(reply).session
        self._homes[session] = service
        service.num_sessions += 1
        return session

    def _home(self, session: str) -> Service:
        if (home := self._homes.get(session)) is not None:
            return home
        if len(self._services) > 1:
            raise SessionLost(f"session {session!r} is lost, was closed, or was not opened by this client")
        return self._services[0]  # of another client, perhaps

    def _require_home(self, home: Service | None) -> None:
        """Raise `SessionLost` for the service of a session that is lost, if there are others. The only one may come back."""
        if home is not None and len(self._services) > 1 and home.lost_s > SILENCE_S:
            raise SessionLost(f"the session is lost with the code service at {home.url}")

    def _forget(self, session: str) -> None:
        if (home := self._homes.pop(session, None)) is not None:
            home.num_sessions -= 1

    @staticmethod
    async def _verdicts(service: Service, request: VerifyRequest) -> AsyncGenerator[VerdictLine]:
        try:
            body = _VERIFY.dump_json(request)
        except PydanticSerializationError as error:
            raise UserError(f"the answers hold a lone surrogate, which has no encoding: {error}.") from error
        async with service.request("POST", "/v1/verify", body, is_stream=True) as response:
            # A line without its end is lost with the rest of the reply.
            while (line := await asyncio.wait_for(response.content.readline(), SILENCE_S)).endswith(b"\n"):
                if line.strip():
                    try:
                        read = _VERDICT.validate_json(line)
                    except ValidationError as error:
                        raise MachineError(f"the code service sent a line that is no verdict: {line!r:.100}") from error
                    if isinstance(read, ErrorLine):
                        raise read.error.exception()
                    yield read


@contextlib.asynccontextmanager
async def open_services(config: SandboxConfig, token: str | None, notice: Notice = log_notice) -> AsyncIterator[SandboxClient]:
    """Open the services of `config.url`. Raises `UserError` if one has another token, or a level below `config.min_level`."""
    async with SandboxClient(config.url, token=token, notice=notice) as client:
        for url, health in (await client.health()).items():
            if not health.nodes:  # a healthy service has one, and shows it only for its token
                raise UserError(
                    f"the code service at {url} wants another token. Put its token into the"
                    f" environment variable {TOKEN_VARIABLE}; `strop sandbox run` also takes it from --token-file."
                )
            for node in health.nodes:
                if node.level.rank < config.min_level.rank:
                    raise UserError(
                        f"sandbox.min_level is {config.min_level.value!r}, but the service at {url} gives"
                        f" {node.level.value!r}. Start it with --min-level {config.min_level.value},"
                        " or lower sandbox.min_level."
                    )
        yield client
