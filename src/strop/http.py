"""Asks services over HTTP: retries, and JSON in both directions."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Generic, TypeVar

import httpx2
from pydantic import Field

from strop.config import Config
from strop.deadline import clock_stopped
from strop.errors import MachineError, UserError, in_short

logger = logging.getLogger(__name__)

Parsed = TypeVar("Parsed")
_RETRY_STATUS = frozenset({408, 425, 429})  # and every 5xx
_KEY_STATUS = frozenset({401, 402, 403})
_ADDRESS_STATUS = frozenset({404, 405, 410})  # and every 3xx: redirections are not followed
_REQUEST_STATUS = frozenset({400, 413, 414, 422})
BACKOFF_S = 1.0  # before the first retry; doubled for each further one
_MAX_PAUSE_S = 60.0
_CLOSED = "what judges answers was closed, or did not judge every pair"


class ServiceRefused(UserError):  # noqa: N818 - named for what happened
    """A service gave no usable answer in any try, or one that another try would not change."""

    def __init__(self, message: str, *, status: int | None = None, said: str = "", is_unknown_host: bool = False) -> None:
        super().__init__(message)
        self.is_unknown_host = is_unknown_host
        """The name of the server had no address in any try."""
        self.status = status
        """Of an answer that another try would not change; None if there was none."""
        self.said = said
        """The beginning of such an answer."""

    @property
    def is_of_what_was_asked(self) -> bool:
        """Whether the fault is in this request, for example its length, so that another request may succeed."""
        return self.status in _REQUEST_STATUS

    @property
    def is_of_the_service(self) -> bool:
        """Whether every other request would fail as well: a wrong key or address, or a service that is gone."""
        return self.is_unknown_host or (self.status is not None and self.status not in _REQUEST_STATUS)


class ServiceLimits(Config):
    """Limits of the requests to a service."""

    key_env: str | None = Field(default=None, description="Environment variable with the key, which is sent as a bearer token.")
    timeout_s: float = Field(default=60.0, gt=0, le=86_400, description="Time limit of one try.")
    retries: int = Field(default=5, ge=0, le=1000, description="Tries after the first one.")


class WebServiceConfig(ServiceLimits):
    """A service and the limits for requests to it."""

    url: str = Field(pattern=r"^https?://", description="Address of the service.")
    max_running: int = Field(default=16, ge=1, le=100_000, description="Concurrent requests.")


def read_key(limits: ServiceLimits, url: str) -> str:
    """The key from its environment variable; empty for a service without a key.

    Raises:
        UserError: the variable is not set.
    """
    key = "" if limits.key_env is None else os.environ.get(limits.key_env, "")
    if limits.key_env is not None and not key:
        raise UserError(
            f"the service at {url} needs a key, and the environment variable {limits.key_env} is not set. Set it, or"
            " change key_env."
        )
    return key


class PatientClient:
    """A client of one service for many callers of one event loop. It opens with the first request.

    Args:
        max_pause_s: the longest pause between two tries, also if the service asks for more.
        max_running: the most requests at once; None for no limit.
    """

    def __init__(self, limits: ServiceLimits, *, max_pause_s: float, max_running: int | None = None) -> None:
        self._limits, self._max_pause_s, self._max_running = limits, max_pause_s, max_running
        self._client: httpx2.AsyncClient | None = None
        self._running: AbstractAsyncContextManager[None] = (
            nullcontext() if max_running is None else asyncio.Semaphore(max_running)
        )
        self._draw = random.Random(0)  # for pauses only

    async def ask(
        self,
        send: Callable[[httpx2.AsyncClient], Awaitable[httpx2.Response]],
        parse: Callable[[Any], Parsed],
        *,
        place: str,
        hints: Mapping[int, str] | None = None,
    ) -> Parsed:
        """The result of `parse` on the JSON of the answer.

        Args:
            parse: raises `ServiceRefused` for an invalid answer, which is retried; other errors are passed on.
            place: the name of the service in messages.
            hints: by status, a remedy for the message; statuses of keys and addresses have one.

        Raises:
            ServiceRefused: no try gave an answer, or another try would not change it.
        """
        fault, is_unknown, num_tries = "", False, 1 + self._limits.retries
        async with self._running:
            for number in range(1, num_tries + 1):
                asked_pause_s, is_unknown = 0.0, False
                try:
                    async with asyncio.timeout(self._limits.timeout_s):  # httpx2 limits each wait, not the request
                        response = await send(self._opened())
                    if response.status_code < 300:
                        return parse(_json(response, place))
                    fault = self._fault(response, place, hints or {})
                    asked_pause_s = _seconds(response.headers.get("Retry-After", ""))
                except TimeoutError:
                    fault = f"{place} gave no answer within timeout_s = {self._limits.timeout_s:g}"
                except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
                    raise ServiceRefused(f"{place} is no address: {error} Write it as in http://127.0.0.1:8000.") from error
                except httpx2.RequestError as error:
                    fault = f"{place} cannot be reached ({type(error).__name__}: {error})"
                    is_unknown = is_unknown_host(error)
                except ServiceRefused as refused:
                    if refused.status is not None:
                        raise
                    fault = str(refused)
                logger.warning("try %d of %d failed: %s", number, num_tries, fault)
                if number < num_tries:
                    pause_s = BACKOFF_S * 2 ** (number - 1) * self._draw.uniform(0.75, 1.25)
                    await asyncio.sleep(min(max(pause_s, asked_pause_s), self._max_pause_s))
        hint = " Is the address right, and is there a network?" if is_unknown else ""
        message = f"{fault.rstrip('.')}; that was the last of {num_tries} tries.{hint}"
        raise ServiceRefused(message, is_unknown_host=is_unknown)

    async def close(self) -> None:
        """Safe to call twice."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _opened(self) -> httpx2.AsyncClient:
        if self._client is None:
            keys: dict[str, Any] = {"timeout": self._limits.timeout_s}
            if self._max_running is not None:
                keys["limits"] = httpx2.Limits(max_connections=self._max_running, max_keepalive_connections=self._max_running)
            self._client = httpx2.AsyncClient(**keys)
        return self._client

    def _fault(self, response: httpx2.Response, place: str, hints: Mapping[int, str]) -> str:
        """The fault of an answer that is worth another try. Raises `ServiceRefused` for any other answer."""
        status, said = response.status_code, _said(response)
        fault = f"{place} answered {status}: {said}"
        if status in _RETRY_STATUS or status >= 500:
            return fault
        raise ServiceRefused(f"{fault.rstrip('.')}. {hints.get(status) or self._hint(status)}", status=status, said=said)

    def _hint(self, status: int) -> str:
        if status in _KEY_STATUS:
            if key := self._limits.key_env:
                return f"Is the key in {key} right, and paid for?"
            return "It needs a key: set key_env to its environment variable."
        if status in _ADDRESS_STATUS or status < 400:
            return "Is the address right?"
        return "Another try would not change it."


def _said(response: httpx2.Response) -> str:
    return in_short(response.text) or "nothing"


def _json(response: httpx2.Response, place: str) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise ServiceRefused(f"{place} answered without JSON: {_said(response)}") from error


def is_unknown_host(error: BaseException | None) -> bool:
    """Whether there is no such name; not where the resolver could not tell, as in an outage of the network."""
    while error is not None and not isinstance(error, socket.gaierror):
        error = error.__cause__ or error.__context__
    return error is not None and error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


def _seconds(retry_after: str) -> float:
    return float(retry_after) if retry_after.strip().isdecimal() else 0.0


class JsonService(PatientClient):
    """POSTs JSON to one service and reads JSON back; for many callers of one event loop.

    Args:
        cache: where the caller stores replies, for error messages; None if it does not.

    Raises:
        UserError: the environment variable of the key is not set.
    """

    def __init__(self, config: WebServiceConfig, *, cache: str | None = None) -> None:
        super().__init__(config, max_pause_s=_MAX_PAUSE_S, max_running=config.max_running)
        self._url, self._cache = config.url.rstrip("/"), cache
        key = read_key(config, config.url)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def post(self, path: str, body: Mapping[str, Any], parse: Callable[[Any], Parsed]) -> Parsed:
        """What `parse` returns for the answer. It raises `ServiceRefused` for a malformed answer, which is retried.

        Raises:
            ServiceRefused: no try gave an answer, or the service refused the request itself.
        """
        url = self._url + path
        try:
            return await self.ask(
                lambda client: client.post(url, json=body, headers=self._headers), parse, place=url, hints=_hints(body)
            )
        except ServiceRefused as refused:
            if refused.status is not None:
                raise
            raise ServiceRefused(
                f"{refused} Repair the service, or give it more time (timeout_s, retries). {self._what_is_kept()}"
            ) from refused

    def _what_is_kept(self) -> str:
        if self._cache is None:
            return "The run keeps its judgements, and the same command continues from there."
        return f"Its replies are stored in {self._cache}: the same command requests only the others."


def _hints(body: Mapping[str, Any]) -> dict[int, str]:
    """Possible causes of a refusal, by status and the keys of the request."""
    hints: dict[int, str] = {}
    if "model" in body:
        hints[404] = f"Is the address right, and does it serve a model called {body['model']!r}?"
    if "max_tokens" in body:
        hints[400] = f"Is the request too long for it, with a reply of max_tokens = {body['max_tokens']}?"
    if "seed" in body:
        hints[400] = f"{hints.get(400, '')} Does it refuse the key `seed`? seeded = false omits it.".strip()
    return hints


MAX_FROM_THE_START = 8
"""Failures before the first judgement."""
MAX_IN_A_ROW = 128
"""Failures in a row after it: twice the largest group in use (64), since one bad request can fail with all its responses."""


class Failures:
    """Counts the responses in a row for which a service gave no judgement. Warns of the 1st, 2nd, 4th, 8th, ...

    Args:
        what: what happens to such a response, for messages.
    """

    def __init__(self, what: str = "not judged, and excluded from their groups") -> None:
        self._what = what
        self._has_succeeded = False
        self._num_in_a_row = self._num = 0

    def success(self) -> None:
        """A judgement was given."""
        self._has_succeeded, self._num_in_a_row = True, 0

    def refused(self, error: ServiceRefused) -> None:
        """The service refused one response.

        Raises:
            ServiceRefused: another response would be refused as well (`error` itself), or there were too many in a row.
        """
        if not error.is_of_what_was_asked:
            raise error
        self.add(str(error))

    def add(self, reason: str) -> None:
        """One response has no judgement. Raises `ServiceRefused` when there were too many in a row."""
        self._num += 1
        self._num_in_a_row += 1
        if self._num_in_a_row >= (MAX_IN_A_ROW if self._has_succeeded else MAX_FROM_THE_START):
            raise ServiceRefused(
                f"{self._num_in_a_row} responses in a row were {self._what}. Check the server's log, its model and the length"
                f" limits, and run the same command again. The last failure: {reason}"
            )
        if self._num.bit_count() == 1:  # 1, 2, 4, ...
            logger.warning("%s: %d so far; the last: %s", self._what, self._num, reason)


AskedT = TypeVar("AskedT")
AnswerT = TypeVar("AnswerT")


class SharedRequests(Generic[AnswerT]):
    """Makes equal requests of the callers of one event loop once. A request continues when a caller is cancelled."""

    def __init__(self) -> None:
        self._running: dict[Hashable, asyncio.Task[AnswerT]] = {}

    async def ask(self, key: Hashable, request: Callable[[], Coroutine[Any, Any, AnswerT]]) -> AnswerT:
        """The answer of the request that runs for `key`, or else of a new one."""
        running = self._running.get(key)
        is_first = running is None
        if running is None:
            running = self._running[key] = asyncio.create_task(request())
            running.add_done_callback(lambda _: self._running.pop(key, None))
        # The deadline of the first caller runs during the request; the deadlines of the others stand still.
        with nullcontext() if is_first else clock_stopped():
            return await asyncio.shield(running)

    async def close(self) -> None:
        """Cancel running requests. Safe to call twice."""
        running = list(self._running.values())
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class Gatherer(Generic[AskedT, AnswerT]):
    """Gathers what the callers of one event loop ask within a short time into one request.

    Args:
        request: yields (index, answer) for each question of a request. Its error reaches all who still wait for that request.
        wait_s: how long the first question of a request waits for others.
        most: questions of one request.
    """

    def __init__(
        self, request: Callable[[list[AskedT]], AsyncIterator[tuple[int, AnswerT]]], *, wait_s: float, most: int
    ) -> None:
        self._request, self._wait_s, self._most = request, wait_s, most
        self._waiting: list[tuple[AskedT, asyncio.Future[AnswerT]]] = []
        self._running: set[asyncio.Task[None]] = set()

    async def ask(self, question: AskedT) -> AnswerT:
        """The answer. Raises `MachineError` if it does not come, as after `close`."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_later(self._wait_s, self._begin)
        answer: asyncio.Future[AnswerT] = loop.create_future()
        self._waiting.append((question, answer))
        if len(self._waiting) == self._most:
            self._begin()
        return await answer

    async def close(self) -> None:
        """Cancel requests that run. Safe to call twice."""
        for each in self._running:
            each.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for _, answer in self._waiting:
            if not answer.done():
                answer.set_exception(MachineError(_CLOSED))

    def _begin(self) -> None:
        asked = [each for each in self._waiting if not each[1].done()]  # done: its caller was cancelled
        self._waiting = []
        if asked:
            running = asyncio.get_running_loop().create_task(self._answer(asked))
            self._running.add(running)
            running.add_done_callback(self._running.discard)

    async def _answer(self, asked: list[tuple[AskedT, asyncio.Future[AnswerT]]]) -> None:
        fault: Exception = MachineError(_CLOSED)
        try:
            async for index, found in self._request([question for question, _ in asked]):
                if not asked[index][1].done():
                    asked[index][1].set_result(found)
        except Exception as error:  # noqa: BLE001 - raised again in the callers
            fault = error
        finally:
            for _, answer in asked:
                if not answer.done():
                    answer.set_exception(fault)
