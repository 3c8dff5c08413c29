"""Requests to a code service over HTTP: errors by their kind, and how long each kind is retried."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from strop.errors import MachineError, NoNodes, Overloaded, StropError, UserError
from strop.sandbox.server.ndjson import CLIENT_HEADER, STARTS_HEADER, ErrorReply, Health

try:
    import aiohttp
except ImportError as error:
    raise UserError("a code service is reached with aiohttp, which is not installed: pip install 'strop[serve]'.") from error

_log = logging.getLogger(__name__)

_CONNECT_S = 5.0
_ANSWER_S = 60.0  # for a request that is no stream
_NEWS_S = 5.0  # a service without nodes is asked every two seconds; when it did not say so for longer, it had a node
_REPLY: TypeAdapter[ErrorReply | Health] = TypeAdapter(ErrorReply | Health)
CONNECTION_ERRORS = (aiohttp.ClientError, OSError, TimeoutError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long what is tried again, in seconds. `SandboxClient` describes each."""

    patience_s: float
    no_node_s: float
    reconnect_s: float
    connect_s: float


class ServiceHttp:
    """One code service: its address, the token, and a pool of connections. Belongs to one event loop."""

    def __init__(self, url: str, *, token: str | None, client: str, patience: Patience) -> None:
        self.url = url.rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise UserError(f"{url!r} is no address of a code service; it has to be like http://127.0.0.1:8517.")
        self.patience = patience
        self._headers = {CLIENT_HEADER: client, STARTS_HEADER: "1"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._session: aiohttp.ClientSession | None = None
        self._was_up = False  # it has answered a request
        self._had_node = False  # it has done something that takes a node
        self._no_nodes_since = self._no_nodes_at = -math.inf  # first and last report of it, without interruption

    @asynccontextmanager
    async def request(self, method: str, path: str, body: Any = None, *, is_stream: bool = False) -> AsyncIterator[Any]:
        """The response, if its status is 200.

        Raises:
            UserError: the address, the token or the request is wrong.
            SessionLost, Overloaded, NoNodes, MachineError: as the service says.
            aiohttp.ClientError, OSError, TimeoutError: there was no answer.
        """
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(headers=self._headers, connector=connector, auto_decompress=False)
        timeout = aiohttp.ClientTimeout(total=None if is_stream else _ANSWER_S, sock_connect=_CONNECT_S)
        try:
            async with self._session.request(method, self.url + path, data=body, timeout=timeout) as response:
                if response.status != 200:
                    raise self._error_of(response.status, await response.read())
                self._was_up = True
                yield response
        except aiohttp.InvalidURL as error:
            raise UserError(f"{self.url!r} is no address of a code service: {error}.") from error

    async def ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """The body of the reply; raises as `request` does."""
        async with self.request(method, path, body) as response:
            reply: bytes = await response.read()
            return reply

    def note_node(self) -> None:
        """The service has just done something that takes a node."""
        self._had_node = True
        self._no_nodes_at = -math.inf

    def note_error(self, error: Exception) -> None:
        """Log once that the service has no nodes; raise when that lasts longer than `no_node_s`."""
        if not isinstance(error, NoNodes):
            self._no_nodes_at = -math.inf
            return
        now = asyncio.get_running_loop().time()
        limit_s = self.patience.no_node_s
        if now - self._no_nodes_at > _NEWS_S:
            self._no_nodes_since = now
            _log.warning("the code service at %s has no nodes; waiting up to %g s for one", self.url, limit_s)
        self._no_nodes_at = now
        if now - self._no_nodes_since > limit_s:
            text = (
                f"the code service at {self.url} has no nodes, and none came within {limit_s:g} s. Let one join it with"
                " strop sandbox node --join HOST:PORT, or start the service with --local-nodes 1."
            )
            raise NoNodes(text) if self._had_node else UserError(text)

    @property
    def reach_limit_s(self) -> float:
        """How long the service may be out of reach."""
        return self.patience.reconnect_s if self._was_up else self.patience.connect_s

    def unreachable(self, error: Exception) -> StropError:
        """A wrong address is a mistake of the user; a service that did answer before is not."""
        reason = str(error) or type(error).__name__
        if self._was_up:
            return MachineError(f"the code service at {self.url} has been out of reach for {self.reach_limit_s:g} s: {reason}")
        return UserError(f"no code service answers at {self.url}: {reason}. Is it running, and is this its address?")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

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
            return NoNodes("the service has no node")
        return Overloaded(f"the status of {self.url} is {status}")  # a proxy, or a service that is restarting


def backoff_s(num_failures: int) -> float:
    """Longer with each failure, up to about two seconds, and random so that clients do not retry at the same time."""
    return min(2.0, 0.05 * 2.0 ** min(num_failures, 10)) * random.uniform(0.5, 1.0)


class Tries:
    """The failures of one request, or of one series of streams, that are retried."""

    def __init__(self, http: ServiceHttp) -> None:
        self._http = http
        self._started_at = asyncio.get_running_loop().time()
        self.start_over()

    def start_over(self) -> None:
        """The service was in reach."""
        self._down_since = asyncio.get_running_loop().time()
        self._num_failures = 0

    async def after(self, error: Exception) -> None:
        """Wait before the next try, or raise the final error."""
        self._num_failures += 1
        now = asyncio.get_running_loop().time()
        self._http.note_error(error)
        if isinstance(error, Overloaded):
            self._down_since = now
            if now - self._started_at > self._http.patience.patience_s:
                raise error
        elif now - self._down_since > self._http.reach_limit_s:
            raise self._http.unreachable(error) from error
        await asyncio.sleep(backoff_s(self._num_failures))
