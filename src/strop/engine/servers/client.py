"""JSON over HTTP to one server, with every failure named after it and put down to whoever is at fault."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from strop.errors import EngineLost, StropError

_CONNECT_S = 10.0
_SHOWN = 500  # characters of a server's answer in an error


class ServerClient:
    """Calls one server. `name` is how errors call it.

    Args:
        socket: of a server on this machine that listens on no port; `url` is then only a prefix of paths.
    """

    def __init__(self, name: str, url: str, *, socket: Path | None = None) -> None:
        self.name = name
        self._http = httpx.AsyncClient(
            base_url=url,
            transport=httpx.AsyncHTTPTransport(
                uds=str(socket) if socket else None,
                # A connection for each call. One that is used again may be hung up while the call is on its way, since a server
                # that was too busy to read takes it for idle. Not every call may be repeated.
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            ),
            trust_env=False,
        )

    async def get(self, path: str, *, timeout_s: float, query: Mapping[str, str] = MappingProxyType({})) -> Any:
        """See `post`."""
        return _parse(self.name, path, await self._send("GET", path, None, query, timeout_s))

    async def get_text(self, path: str, *, timeout_s: float) -> str:
        return (await self._send("GET", path, None, {}, timeout_s)).text

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float,
        query: Mapping[str, str] = MappingProxyType({}),
        parsed: bool = True,
    ) -> Any:
        """The parsed answer; None where it is empty, or not wanted. A call that is cancelled hangs up, which ends it in the
        server, too.

        Raises:
            EngineLost: no connection, no answer in time, an answer of 5xx, or one that is not JSON.
            StropError: an answer of 4xx: the request was wrong.
        """
        response = await self._send("POST", path, body, query, timeout_s)
        return _parse(self.name, path, response) if parsed else None

    async def is_up(self, path: str) -> bool:
        """Whether `path` is answered with 200. Never raises."""
        try:
            return (await self._http.get(path, timeout=_CONNECT_S)).status_code == 200
        except httpx.HTTPError:
            return False

    async def close(self) -> None:
        await self._http.aclose()

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, query: Mapping[str, str], timeout_s: float
    ) -> httpx.Response:
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_S))
        try:
            response = await self._http.request(method, path, json=body, params=query, timeout=timeout)
        except httpx.TimeoutException as error:
            raise EngineLost(f"{self.name} did not answer {path} within {timeout_s:g} s.") from error
        except httpx.HTTPError as error:
            raise EngineLost(f"{self.name}: {path}: {error or type(error).__name__}") from error
        if response.status_code >= 500:
            raise EngineLost(f"{self.name} failed at {path} ({response.status_code}): {response.text[:_SHOWN]}")
        if response.status_code >= 400:
            raise StropError(f"{self.name} refused {path} ({response.status_code}): {response.text[:_SHOWN]}")
        return response


def _parse(name: str, path: str, response: httpx.Response) -> Any:
    if not response.content:
        return None
    try:
        return response.json()
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise EngineLost(f"{name} answered {path} with something that is not JSON: {response.text[:_SHOWN]!r}") from error
