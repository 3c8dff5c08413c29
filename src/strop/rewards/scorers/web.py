"""Asks a service that judges for JSON, and says what to do where it gives none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import httpx
from pydantic import Field

from strop.config import Config
from strop.web import Parsed, PatientClient, ServiceRefused, read_key

_MAX_PAUSE_S = 60.0


class WebServiceConfig(Config):
    """A service, and how it may be asked."""

    url: str = Field(pattern=r"^https?://")
    key_env: str | None = None  # the environment variable that holds the key; it is sent as a bearer token
    timeout_s: float = Field(default=60.0, gt=0)  # of one try, from the first byte to the last
    retries: int = Field(default=5, ge=0)
    backoff_s: float = Field(default=1.0, ge=0)  # before the first retry; doubled before each after it
    rate_per_s: float | None = Field(default=None, gt=0)  # requests begun in a second; unset: as they come
    max_running: int = Field(default=16, ge=1)  # requests at once


class JsonService:
    """POSTs JSON to one service and reads JSON back; for many callers of one event loop.

    Args:
        cache: where its caller keeps what the service gave; None where that is not kept. What a failure says hangs on it.

    Raises:
        UserError: the environment variable of the key is not set.
    """

    def __init__(self, config: WebServiceConfig, *, cache: str | None = None) -> None:
        self._config = config
        self._cache = cache
        key = read_key(config, config.url)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = PatientClient(config, max_pause_s=_MAX_PAUSE_S, max_running=config.max_running)

    async def post(self, path: str, body: Mapping[str, Any], parse: Callable[[Any], Parsed]) -> Parsed:
        """What `parse` makes of the answer; it raises `ServiceRefused` for an answer that is none, which is asked for again.

        Raises:
            ServiceRefused: no try gave an answer, or one that another try would not change.
        """
        url = self._config.url.rstrip("/") + path

        async def send(client: httpx.AsyncClient) -> httpx.Response:
            return await client.post(url, json=body, headers=self._headers)

        try:
            return await self._client.ask(send, parse, place=url, hints=_hints(body))
        except ServiceRefused as refused:
            if refused.status is not None:
                raise
            raise ServiceRefused(
                f"{refused} Mend the service, or give it longer (timeout_s, retries, backoff_s). {self._what_is_kept()}"
            ) from refused

    async def close(self) -> None:
        await self._client.close()

    def _what_is_kept(self) -> str:
        if self._cache is None:
            return "A run keeps what was judged in it, and the same command goes on from there."
        return f"Its replies are kept in {self._cache}: the same command asks for the others alone."


def _hints(body: Mapping[str, Any]) -> dict[int, str]:
    """What a refusal may come from, by what was asked."""
    hints: dict[int, str] = {}
    if "model" in body:
        hints[404] = f"Is the address right, and does it serve a model called {body['model']!r}?"
    if "max_tokens" in body:
        hints[400] = f"Is the request too long for it, with a reply of max_tokens = {body['max_tokens']}?"
    if "seed" in body:
        hints[400] = f"{hints.get(400, '')} Is `seed` a key that it refuses? seeded = false leaves that out.".strip()
    return hints
