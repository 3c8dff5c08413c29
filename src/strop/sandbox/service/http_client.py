"""Requests to a code service over HTTP, and what each way of failing means."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from pydantic import TypeAdapter, ValidationError

from strop.errors import MachineError, NoNodes, Overloaded, SessionLost, StropError, UserError
from strop.sandbox.service.lines import STARTS_HEADER, ErrorReply, Health, Problem, ProblemKind

try:
    import aiohttp
except ImportError as error:
    raise UserError("a code service is reached with aiohttp, which is not installed: pip install 'strop[serve]'.") from error

_log = logging.getLogger(__name__)

_CONNECT_S = 5.0
_ANSWER_S = 60.0  # for a request that is no stream
_NEWS_S = 5.0  # a service without nodes is asked every two seconds and says so at once; one that took longer had some
_CLIENT_HEADER = "X-Strop-Client"
_ERROR: TypeAdapter[ErrorReply] = TypeAdapter(ErrorReply)
_HEALTH: TypeAdapter[Health] = TypeAdapter(Health)
_KINDS: dict[ProblemKind, type[StropError]] = {
    ProblemKind.INVALID: UserError,
    ProblemKind.NOT_FOUND: UserError,
    ProblemKind.METHOD_NOT_ALLOWED: UserError,
    ProblemKind.TOO_LARGE: UserError,
    ProblemKind.UNAUTHORIZED: UserError,
    ProblemKind.SESSION_LOST: SessionLost,
    ProblemKind.OVERLOADED: Overloaded,
    ProblemKind.NO_NODES: NoNodes,
    ProblemKind.INTERNAL: MachineError,
}
# What happens to a connection, and to one that could not be made.
CONNECTION_ERRORS = (aiohttp.ClientError, OSError, TimeoutError)


class ServiceHttp:
    """One code service: its address, our token, and a pool of connections. Belongs to one event loop."""

    def __init__(self, url: str, *, token: str | None, client: str) -> None:
        self.url = url.rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise UserError(f"{url!r} is no address of a code service; it has to be like http://127.0.0.1:8517.")
        self._headers = {_CLIENT_HEADER: client, STARTS_HEADER: "1"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._session: aiohttp.ClientSession | None = None
        self.was_up = False  # it has answered a request
        self.had_node_at = -math.inf  # when it last did what takes a node
        self._warned_at = -math.inf

    @asynccontextmanager
    async def request(self, method: str, path: str, body: Any = None, *, is_stream: bool = False) -> AsyncIterator[Any]:
        """The response, once its status is known to be 200.

        Raises:
            UserError: the address or the token is wrong, or the request is.
            SessionLost, Overloaded, NoNodes, MachineError: as the service says.
            aiohttp.ClientError, OSError, TimeoutError: there was no answer.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers, connector=aiohttp.TCPConnector(limit=0), auto_decompress=False
            )
        timeout = aiohttp.ClientTimeout(total=None if is_stream else _ANSWER_S, sock_connect=_CONNECT_S)
        try:
            async with self._session.request(method, self.url + path, data=body, timeout=timeout) as response:
                if response.status != 200:
                    self._raise_problem(response.status, await response.read())
                self.was_up = True
                yield response
        except aiohttp.InvalidURL as error:
            raise UserError(f"{self.url!r} is no address of a code service: {error}.") from error

    async def ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """The body of the reply; raises as `request` does."""
        async with self.request(method, path, body) as response:
            reply: bytes = await response.read()
            return reply

    def note_node(self) -> None:
        """It has just done what takes a node."""
        self.had_node_at = asyncio.get_running_loop().time()

    def wait_for_nodes(self, *, since: float, limit_s: float) -> None:
        """Say once in the log what is waited for; raise what is to be said when `limit_s` are over."""
        now = asyncio.get_running_loop().time()
        if now - max(since, self.had_node_at) > limit_s:
            text = (
                f"the code service at {self.url} has no nodes, and none came within {limit_s:g} s. Have one join it with"
                " strop sandbox node --join HOST:PORT, or start the service with --local-nodes 1."
            )
            raise UserError(text) if self.had_node_at == -math.inf else NoNodes(text)
        if now - self._warned_at > limit_s:
            self._warned_at = now
            _log.warning("the code service at %s has no nodes; waiting up to %g s for one", self.url, limit_s)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _raise_problem(self, status: int, body: bytes) -> NoReturn:
        try:
            problem = _ERROR.validate_json(body).error
        except ValidationError:
            problem = None
        if status == 401:
            raise UserError(f"the code service at {self.url} refused the token; give the one that it was started with.")
        if status in (404, 405) or (problem is None and status < 500):
            raise UserError(f"what answers at {self.url} is no code service of this version: it says {status} to us.")
        if problem is None and _says_no_nodes(body):
            raise NoNodes("the service has no node")
        if problem is None:  # something between us and the service, which may be restarting
            raise Overloaded(f"what answers at {self.url} says {status}")
        raise exception_of(problem)


def _says_no_nodes(body: bytes) -> bool:
    """Of an answer to the question for its health, which is no error."""
    try:
        return _HEALTH.validate_json(body).status == "no nodes"
    except ValidationError:
        return False


def exception_of(problem: Problem) -> StropError:
    return _KINDS[problem.kind](problem.message)


def unreachable(http: ServiceHttp, reason: str, *, limit_s: float) -> StropError:
    """A wrong address is the user's to mend; a service that was there is not."""
    if http.was_up:
        return MachineError(f"the code service at {http.url} has been out of reach for {limit_s:g} s: {reason}")
    return UserError(f"no code service answers at {http.url}: {reason}. Is it running, and is this its address?")


def backoff_s(num_failures: int) -> float:
    """Longer with each failure, up to about two seconds, and never in step with other clients."""
    return min(2.0, 0.05 * 2.0 ** min(num_failures, 10)) * random.uniform(0.5, 1.0)


async def back_off(num_failures: int) -> None:
    await asyncio.sleep(backoff_s(num_failures))


class NodeWait:
    """One request's wait for a service without nodes, which says so again and again.

    Args:
        limit_s: how long it may be without them.
    """

    def __init__(self, http: ServiceHttp, *, limit_s: float) -> None:
        self._http = http
        self._limit_s = limit_s
        self._since = self._said_at = -math.inf

    def start_over(self) -> None:
        """It said something else."""
        self._said_at = -math.inf

    def go_on(self) -> None:
        """The service has said so; raise what is to be said when that went on for too long."""
        now = asyncio.get_running_loop().time()
        if now - self._said_at > _NEWS_S:
            self._since = now
        self._said_at = now
        self._http.wait_for_nodes(since=self._since, limit_s=self._limit_s)


class Tries:
    """Of one request that may be sent again.

    Args:
        patience_s: how long an overloaded service is asked again.
        no_node_s: how long one without nodes is.
        limit_s: how long one that does not answer is.
    """

    def __init__(self, http: ServiceHttp, *, patience_s: float, no_node_s: float, limit_s: float) -> None:
        self._http = http
        self._patience_s = patience_s
        self._limit_s = limit_s
        self._node_wait = NodeWait(http, limit_s=no_node_s)
        self._started_at = self._down_since = asyncio.get_running_loop().time()
        self._num_failures = 0

    def note_progress(self) -> None:
        """A part of the answer is there: only the patience of the caller goes on."""
        self._http.note_node()
        self._down_since = self._http.had_node_at
        self._num_failures = 0

    async def after(self, error: Exception) -> None:
        """Wait before the next one, or raise what has become of it all."""
        self._num_failures += 1
        is_overload = isinstance(error, Overloaded)
        now = asyncio.get_running_loop().time()
        if isinstance(error, NoNodes):
            self._node_wait.go_on()
        else:
            self._node_wait.start_over()
        if is_overload:
            self._down_since = now
            if now - self._started_at > self._patience_s:
                raise error
        elif now - self._down_since > self._limit_s:
            reason = str(error) or type(error).__name__
            raise unreachable(self._http, reason, limit_s=self._limit_s) from error
        await back_off(self._num_failures)
