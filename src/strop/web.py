"""Asks a service over HTTP: so many at once, no faster than it may be asked, and again where it fails in passing.

No connection, no answer in time, 408, 425, 429, 5xx and an answer of another form are asked again after a pause that doubles;
the service's own Retry-After is kept to, up to a limit. All else (401: the key; 404: the address) is told at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import httpx

from strop.deadline import clock_stopped
from strop.errors import UserError

logger = logging.getLogger(__name__)

Parsed = TypeVar("Parsed")
_AGAIN = frozenset({408, 425, 429})  # and every 5xx
_OF_THE_KEY = frozenset({401, 402, 403})
_OF_THE_ADDRESS = frozenset({404, 405, 410})  # and every 3xx: redirections are not followed
_OF_WHAT_WAS_ASKED = frozenset({400, 413, 422})


class ServiceRefused(UserError):  # noqa: N818 - named for what happened
    """A service that was asked as often as was allowed, and gave no answer that can be used."""

    def __init__(self, message: str, *, status: int | None = None, said: str = "") -> None:
        super().__init__(message)
        self.status = status
        """Of an answer that another try would not change; None where no try gave one."""
        self.said = said
        """What such an answer says, in short."""

    @property
    def is_of_what_was_asked(self) -> bool:
        """Whether another request may fare better: this one is too long for the service, or has something it will not take."""
        return self.status in _OF_WHAT_WAS_ASKED


class ServiceLimits(Protocol):
    """How a service may be asked; configs have these as keys of their own."""

    @property
    def key_env(self) -> str | None: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def retries(self) -> int: ...
    @property
    def backoff_s(self) -> float: ...
    @property
    def rate_per_s(self) -> float | None: ...


def read_key(limits: ServiceLimits, url: str) -> str:
    """What the environment variable of the key holds; empty for a service that wants none.

    Raises:
        UserError: the variable is not set.
    """
    key = "" if limits.key_env is None else os.environ.get(limits.key_env, "")
    if limits.key_env is not None and not key:
        raise UserError(
            f"the service at {url} needs a key, and the environment variable {limits.key_env} is not set. Set it, or name"
            " another one with key_env."
        )
    return key


class PatientClient:
    """One service, for many callers of one event loop. Opens when it is first asked.

    Args:
        max_pause_s: between two tries, whatever the service asks for.
        max_running: requests at once; any number where it is None.
    """

    def __init__(self, limits: ServiceLimits, *, max_pause_s: float, max_running: int | None = None) -> None:
        self._limits, self._max_pause_s, self._max_running = limits, max_pause_s, max_running
        self._client: httpx.AsyncClient | None = None
        self._running: AbstractAsyncContextManager[None] = (
            nullcontext() if max_running is None else asyncio.Semaphore(max_running)
        )
        self._next_start = 0.0  # on the loop's clock
        self._draw = random.Random(0)  # of pauses; decides nothing that is seen

    async def ask(
        self,
        send: Callable[[httpx.AsyncClient], Awaitable[httpx.Response]],
        parse: Callable[[Any], Parsed],
        *,
        place: str,
        hints: Mapping[int, str] | None = None,
    ) -> Parsed:
        """What `parse` makes of the JSON that comes back.

        Args:
            parse: raises `ServiceRefused` for an answer that is none, which is asked for again; anything else goes through.
            place: what messages call the service.
            hints: by status, what to look at where that is the answer; there are some for keys and addresses.

        Raises:
            ServiceRefused: no try gave an answer, or one that another try would not change.
        """
        fault, num_tries = "", 1 + self._limits.retries
        async with self._running:
            for number in range(1, num_tries + 1):
                await self._pace()
                asked_pause_s = 0.0
                try:
                    async with asyncio.timeout(self._limits.timeout_s):  # httpx's own limit is of each wait, not of all
                        response = await send(self._opened())
                    if response.status_code < 300:
                        return parse(_json(response, place))
                    fault = self._fault(response, place, hints or {})
                    asked_pause_s = _seconds(response.headers.get("Retry-After", ""))
                except TimeoutError:
                    fault = f"{place} gave no answer within timeout_s = {self._limits.timeout_s:g}"
                except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
                    raise ServiceRefused(f"{place} is no address: {error} Write it as in http://127.0.0.1:8000.") from error
                except httpx.RequestError as error:
                    fault = f"{place} cannot be reached ({type(error).__name__}: {error})"
                except ServiceRefused as refused:
                    if refused.status is not None:
                        raise
                    fault = str(refused)
                logger.warning("try %d of %d failed: %s", number, num_tries, fault)
                if number < num_tries:
                    pause_s = self._limits.backoff_s * 2 ** (number - 1) * self._draw.uniform(0.75, 1.25)
                    await asyncio.sleep(min(max(pause_s, asked_pause_s), self._max_pause_s))
        raise ServiceRefused(f"{fault.rstrip('.')}; so ended the last of {num_tries} tries.")

    async def close(self) -> None:
        """Safe to call twice."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _opened(self) -> httpx.AsyncClient:
        if self._client is None:
            keys: dict[str, Any] = {"timeout": self._limits.timeout_s}
            if self._max_running is not None:
                keys["limits"] = httpx.Limits(max_connections=self._max_running, max_keepalive_connections=self._max_running)
            self._client = httpx.AsyncClient(**keys)
        return self._client

    async def _pace(self) -> None:
        if self._limits.rate_per_s is None:
            return
        now = asyncio.get_running_loop().time()
        start = max(now, self._next_start)
        self._next_start = start + 1 / self._limits.rate_per_s
        with clock_stopped():  # the turn is fixed already, whatever becomes of those before it
            await asyncio.sleep(start - now)

    def _fault(self, response: httpx.Response, place: str, hints: Mapping[int, str]) -> str:
        """What is wrong, of an answer that is worth another try. Raises `ServiceRefused` of any other."""
        status, said = response.status_code, _in_short(response.text)
        fault = f"{place} answered {status}: {said}"
        if status in _AGAIN or status >= 500:
            return fault
        raise ServiceRefused(f"{fault.rstrip('.')}. {hints.get(status) or self._hint(status)}", status=status, said=said)

    def _hint(self, status: int) -> str:
        if status in _OF_THE_KEY:
            key = self._limits.key_env
            return f"Is the key in {key} right, and paid for?" if key else "It wants a key: name its variable with key_env."
        if status in _OF_THE_ADDRESS or status < 400:
            return "Is the address right?"
        return "Another try would not change that."


def _json(response: httpx.Response, place: str) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise ServiceRefused(f"{place} answered what is no JSON: {_in_short(response.text)}") from error


def _in_short(text: str) -> str:
    return " ".join(text.split())[:200] or "nothing"


def _seconds(retry_after: str) -> float:
    return float(retry_after) if retry_after.strip().isdecimal() else 0.0
