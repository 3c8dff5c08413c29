"""Asks a search service over HTTP, as often as it takes and no faster than it may be asked.

What fails by the network's or the service's fault is asked for again (strop.web). A refusal of the query (400, 413, 414,
422) is told to the policy. Anything else (401: the key is wrong; 404: the address is) is ours at once.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from strop.deadline import clock_stopped
from strop.errors import ToolBroken
from strop.tools.search.protocol import Backend, Passage, QueryRefused, as_pages
from strop.tools.search.results import Origin, ResultFile
from strop.tools.search.services import HttpConfig, at, filled, name_of, shape_of
from strop.tools.text import encodable
from strop.web import PatientClient, ServiceRefused, read_key

_REFUSED = frozenset({400, 413, 414, 422})
_MAX_PAUSE_S = 15.0


@dataclass(slots=True)
class _Asking:
    """What is being asked for those who want it."""

    task: asyncio.Task[str]
    num_waiting: int = 0


class HttpSearch(Backend):
    """Use as `async with`. A query that comes again while it is being asked waits for that answer.

    Raises:
        UserError: the variable of the key is not set.
    """

    def __init__(self, config: HttpConfig) -> None:
        self._config = config
        self._shape = shape_of(config)
        self._key = read_key(config, config.url)
        self._kept = None if config.cache is None else ResultFile(Path(config.cache))
        self._name = name_of(config)
        self._asking: dict[tuple[str, int], _Asking] = {}
        self._client = PatientClient(config, max_pause_s=_MAX_PAUSE_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    @property
    def longest_call_s(self) -> float:
        """Every try takes its time, and every pause is as long as a service may ask for."""
        return (1 + self._config.retries) * self._config.timeout_s + self._config.retries * _MAX_PAUSE_S

    async def results(self, query: str, *, top_k: int) -> str:
        """From the cache where it is there, else from the service, which is asked again where it fails.

        Raises:
            QueryRefused: the service does not take this query.
            ToolBroken: it gave no answer in any try, or one that another try would not change.
        """
        kept = None if self._kept is None else self._kept.get_from(query, self._origin(top_k))
        return await self._shared(query, top_k) if kept is None else kept

    async def _shared(self, query: str, top_k: int) -> str:
        """One request for all who ask the same at once. Whoever is cancelled leaves it to the others, the last one ends it."""
        asking = self._asking.get((query, top_k))
        is_first = asking is None
        if asking is None:
            asking = self._asking[query, top_k] = _Asking(asyncio.create_task(self._asked(query, top_k)))
        asking.num_waiting += 1
        try:
            # The first one's clock is the request's own; the others wait for what ends by itself.
            with nullcontext() if is_first else clock_stopped():
                return await asyncio.shield(asking.task)
        finally:
            asking.num_waiting -= 1
            if not asking.num_waiting:
                if self._asking.get((query, top_k)) is asking:
                    del self._asking[query, top_k]
                asking.task.cancel()
                await asyncio.wait([asking.task])

    async def _asked(self, query: str, top_k: int) -> str:
        text = encodable(as_pages(await self._found(query, top_k)))  # JSON may hold halves of surrogate pairs
        if self._kept is not None:
            await self._kept.add(query, text, self._origin(top_k))
        return text

    def _origin(self, top_k: int) -> Origin:
        return Origin(service=self._name, top_k=top_k)

    async def _found(self, query: str, top_k: int) -> list[Passage]:
        values: dict[str, str | int] = {"query": query, "query_in_url": quote(query, safe=""), "top_k": top_k, "key": self._key}

        async def send(client: httpx.AsyncClient) -> httpx.Response:
            return await client.request(
                self._shape.method,
                filled(self._config.url, values),
                params=filled(self._shape.params, values) or None,
                headers=filled(self._shape.headers, values),
                json=filled(self._shape.body, values),
            )

        try:
            return await self._client.ask(send, lambda answer: self._passages(answer, top_k), place=self._config.url)
        except ServiceRefused as refused:
            if refused.status in _REFUSED:
                raise QueryRefused(f"status {refused.status}: {refused.said}") from refused
            raise ToolBroken(f"search: {refused}") from refused

    def _passages(self, answer: Any, top_k: int) -> list[Passage]:
        found = at(answer, self._shape.results)
        if found is None:
            found = []  # services leave the list out where nothing was found
        if not isinstance(found, list):
            raise ToolBroken(
                f"search: {self._config.url} answered without a list at {self._shape.results!r}: {str(answer)[:200]}"
            )
        passages = []
        for number, each in enumerate(found[:top_k]):
            title, text = at(each, self._shape.title), at(each, self._shape.text)
            if isinstance(text, str):
                passages.append(Passage(id=str(number), title=title if isinstance(title, str) else "", text=text))
        return passages
