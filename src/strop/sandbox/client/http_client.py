"""Requests to code services over HTTP: errors by their kind, which service is asked, and how long each failure is retried."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic import TypeAdapter, ValidationError

from strop.errors import MachineError, NoNodes, Overloaded, StropError, UserError
from strop.sandbox.server.ndjson import CLIENT_HEADER, STARTS_HEADER, ErrorReply, Health

try:
    import aiohttp
except ImportError as error:
    raise UserError("a code service is reached with aiohttp, which is not installed: pip install 'strop[serve]'.") from error

Notice: TypeAlias = Callable[[str], None]
"""Is called with a sentence when a service falls silent, is lost, or works again."""

log_notice: Notice = logging.getLogger(__name__).warning

_CONNECT_S = 5.0  # also for the health of a service
_ANSWER_S = 60.0  # for a request that is no stream
SILENCE_S = 5.0  # without a line of a stream, after which a service is given up; it sends an empty one twice a second
_REPLY: TypeAdapter[ErrorReply | Health] = TypeAdapter(ErrorReply | Health)
_HEALTH: TypeAdapter[Health] = TypeAdapter(Health)
CONNECTION_ERRORS = (aiohttp.ClientError, OSError, TimeoutError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long what is tried again, in seconds. `SandboxClient` describes each."""

    patience_s: float
    no_node_s: float
    reconnect_s: float
    connect_s: float


class ServiceHttp:
    """One code service: its address, a pool of connections, and what is known of its state. Belongs to one event loop."""

    def __init__(self, url: str, *, token: str | None, client: str, patience: Patience, notice: Notice) -> None:
        self.notice = notice
        self.url = url.rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise UserError(f"{url!r} is no address of a code service; it has to be like http://127.0.0.1:8517.")
        self.patience = patience
        self.num_slots = 1
        self.num_calls = 0  # of this client, under way
        self.num_sessions = 0  # of this client
        self.is_silent = False  # suspected to be lost
        self.lost_at: float | None = None  # since when it does not answer, or cannot run anything
        self.retry_at = 0.0  # other services are preferred until then
        self.num_failures = 0  # since it last worked
        self._error: Exception | None = None  # the last one
        self._headers = {CLIENT_HEADER: client, STARTS_HEADER: "1"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._session: aiohttp.ClientSession | None = None
        self._was_up = False  # it has answered a request

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
            reply: bytes = await response.read()
            return reply

    async def health(self) -> Health:
        """Ask whether it works, and how many slots it has; raises as `request` does."""
        try:
            health = _HEALTH.validate_json(await self.ask("GET", "/v1/health", limit_s=_CONNECT_S))
        except ValidationError as error:
            raise UserError(f"no code service of this version answers at {self.url}: its health is something else.") from error
        self.num_slots = max(1, sum(node.num_slots for node in health.nodes))
        return health

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
        if isinstance(self._error, NoNodes):
            return self.patience.no_node_s
        return self.patience.reconnect_s if self._was_up else self.patience.connect_s

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

    async def close(self) -> None:
        """Close its connections; requests under way fail, later ones connect again."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

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
        if isinstance(reply, ErrorReply):
            return reply.error.exception()
        if isinstance(reply, Health) and reply.status == "no nodes":
            return NoNodes("it has no node to run anything on")
        return Overloaded(f"the status of {self.url} is {status}")  # a proxy, or a service that is restarting


class Services:
    """The code services of one client, at least one."""

    def __init__(self, urls: Sequence[str], *, token: str | None, client: str, patience: Patience, notice: Notice) -> None:
        self.patience = patience
        self.all = [ServiceHttp(url, token=token, client=client, patience=patience, notice=notice) for url in urls]

    @property
    def are_several(self) -> bool:
        return len(self.all) > 1

    def best(self, *, for_session: bool = False) -> ServiceHttp:
        """The least loaded one that works, as far as is known."""
        now = asyncio.get_running_loop().time()
        return min(
            self.all,
            key=lambda service: (
                service.is_silent or service.lost_at is not None,
                service.retry_at > now,
                (service.num_sessions if for_session else service.num_calls) / service.num_slots,
            ),
        )

    def raise_if_all_lost(self) -> None:
        """Raise the error of the service that was lost last, once the patience with it is over."""
        last = min(self.all, key=lambda service: service.lost_s)
        if last.lost_s > last.limit_s:
            raise last.loss()

    async def after(self, service: ServiceHttp, error: Exception, *, started_at: float, has_home: bool = False) -> None:
        """Return when a request that failed may be tried again; raise the final error if it may not.

        Args:
            has_home: only the same service can do it.
        """
        service.note_error(error)
        self.raise_if_all_lost()
        now = asyncio.get_running_loop().time()
        if isinstance(error, Overloaded) and now - started_at > self.patience.patience_s:
            raise error
        await asyncio.sleep((service.retry_at if has_home else min(one.retry_at for one in self.all)) - now)


def backoff_s(num_failures: int) -> float:
    """Longer with each failure, up to about two seconds, and random so that clients do not retry at the same time."""
    return min(2.0, 0.05 * 2.0 ** min(num_failures, 10)) * random.uniform(0.5, 1.0)
