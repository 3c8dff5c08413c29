"""Search services over HTTP: how each is asked, and where the results are in its answer.

A failure of the network or the service is retried (see strop.http). A refusal of the query (400, 413, 414, 422) is shown to the
policy. Any other error status, such as 401, 404 or 410, and a server whose name has no address end the run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import quote

import httpx2
from pydantic import Field, model_validator

from strop.errors import ToolBroken, UserError
from strop.http import PatientClient, ServiceLimits, ServiceRefused, SharedRequests, read_key
from strop.tools.protocol import encodable
from strop.tools.search import Backend, Origin, Passage, QueryRefused, ResultFile, as_pages

_MAX_PAUSE_S = 15.0
_PLACEHOLDER = re.compile(r"\{(query|query_in_url|top_k|key|language|market|zone|country)\}")
_MARKETS = {"zh": "zh-CN", "ja": "ja-JP", "ko": "ko-KR", "ru": "ru-RU", "en": "en-US"}
_SCRIPTS = (("ja", r"[\u3040-\u30ff]"), ("ko", r"[\uac00-\ud7af]"), ("zh", r"[\u4e00-\u9fff]"), ("ru", r"[\u0400-\u04ff]"))
_BING = "https://www.bing.com/search?q={query_in_url}&mkt={market}&setLang={language}&brd_json=1&cc={country}"
_KNOWN: Mapping[str, Mapping[str, Any]] = {
    "serper": {
        "url": "https://google.serper.dev/search",
        "key_env": "SERPER_API_KEY",
        "method": "POST",
        "headers": {"X-API-KEY": "{key}"},
        "body": {"q": "{query}", "num": "{top_k}", "hl": "{language}"},
        "results": "organic",
        "text": "snippet",
    },
    "brightdata": {
        "url": "https://api.brightdata.com/request",
        "key_env": "BRIGHTDATA_API_KEY",
        "method": "POST",
        "headers": {"Authorization": "Bearer {key}"},
        "body": {"zone": "{zone}", "url": _BING, "format": "raw"},
        "results": "organic",
        "text": "description",
    },
    "retriever": {
        "method": "POST",
        "body": {"queries": ["{query}"], "topk": "{top_k}", "return_scores": True},
        "results": "result.0",
        "title": "document.title",
        "text": "document.contents",
    },
}
"""The keys of known services: Google's results from serper.dev; Bing's result page through Bright Data, as ARPO's released code
asks it (Bing's own API ended in August 2025); a retriever server as in Search-R1 (arXiv 2503.09516)."""
_OWNERS = dict.fromkeys(("method", "params", "headers", "body", "results", "title", "text"), "http")
_OWNERS |= dict.fromkeys(("zone", "country"), "brightdata")


class HttpConfig(ServiceLimits):
    """A service that answers in JSON: any one (`http`), or one whose request and answer are known.

    `{query}`, `{query_in_url}`, `{top_k}` and `{key}` are filled in everywhere. So are `{language}` and `{market}`, as in zh
    and zh-CN: those of the query's script, or else en and en-US.
    """

    kind: Literal["http", "serper", "brightdata", "retriever"] = Field(description="Backend kind.")
    url: str = Field(default="", description="Address of the service; serper and brightdata have one.")
    timeout_s: float = Field(default=10.0, gt=0, le=86_400, description="Time limit of one try.")
    retries: int = Field(default=3, ge=0, le=1000, description="Further tries after a failure.")
    cache: str | None = Field(default=None, description="A .jsonl of results; a query in it is not asked again.")
    zone: str = Field(default="serp_api1", description="Of brightdata: the name of your zone for search pages.")
    country: str = Field(default="us", pattern="^[a-z]{2}$", description="Of brightdata: country whose results are asked for.")
    method: Literal["GET", "POST"] = Field(default="GET", description="HTTP method.")
    params: Mapping[str, str] = Field(default={}, description="Parameters in the address.")
    headers: Mapping[str, str] = Field(default={}, description='As in { Authorization = "Bearer {key}" }.')
    body: dict[str, Any] | None = Field(default=None, description="Body, sent as JSON.")
    results: str = Field(default="results", description="Path of the list of results, as in web.results or result.0.")
    title: str = Field(default="title", description="Path of the title in a result; it may be missing.")
    text: str = Field(default="text", description="Path of the text in a result.")

    @model_validator(mode="before")
    @classmethod
    def _as_known(cls, keys: Any) -> Any:
        return {**_KNOWN.get(str(keys.get("kind")), {}), **keys} if isinstance(keys, Mapping) else keys

    @model_validator(mode="after")
    def _holds_no_key_of_another_kind(self) -> Self:
        known = _KNOWN.get(self.kind, {})
        for key, owner in _OWNERS.items():
            if self.kind != owner and getattr(self, key) != known.get(key, type(self).model_fields[key].default):
                raise ValueError(f"{key} is a key of kind = {owner!r}, not of kind = {self.kind!r}. Remove it.")
        return self

    @model_validator(mode="after")
    def _has_an_address(self) -> Self:
        if not self.url:
            raise ValueError(f"url is not set, which kind = {self.kind!r} needs. Set it to the address of the service.")
        return self


class HttpSearch(Backend):
    """The caller closes it. Equal queries at the same time share one request.

    Raises:
        UserError: the environment variable of the key is not set.
    """

    def __init__(self, config: HttpConfig) -> None:
        self._config = config
        self._key = read_key(config, config.url)
        self._cache = None if config.cache is None else ResultFile(Path(config.cache))
        self._name = _name(self._config)
        self._requests = SharedRequests[str]()
        self._client = PatientClient(config, max_pause_s=_MAX_PAUSE_S)

    async def close(self) -> None:
        """Cancel running requests."""
        await self._requests.close()
        await self._client.close()

    @property
    def longest_call_s(self) -> float:
        """Every try takes its whole time, and every pause is the longest that a service may ask for."""
        return (1 + self._config.retries) * self._config.timeout_s + self._config.retries * _MAX_PAUSE_S

    async def results(self, query: str, *, top_k: int) -> str:
        """From the cache, or else from the service.

        Raises:
            QueryRefused: the service does not accept this query.
            ToolBroken: no try gave an answer.
            UserError: no other query would get one either.
        """
        if self._cache is not None and (cached := self._cache.get(query, Origin(self._name, top_k))) is not None:
            return cached
        return await self._requests.ask((query, top_k), lambda: self._request(query, top_k))

    async def _request(self, query: str, top_k: int) -> str:
        text = encodable(as_pages(await self._find(query, top_k)))
        if self._cache is not None:
            await self._cache.add(query, text, Origin(self._name, top_k))
        return text

    async def _find(self, query: str, top_k: int) -> list[Passage]:
        config = self._config
        language = next((language for language, script in _SCRIPTS if re.search(script, query)), "en")
        values: dict[str, str | int] = {"query": query, "query_in_url": quote(query, safe=""), "top_k": top_k, "key": self._key}
        values |= {"language": language, "market": _MARKETS[language], "zone": config.zone, "country": config.country}
        url, params, headers, body = (_fill(each, values) for each in (config.url, config.params, config.headers, config.body))

        async def send(client: httpx2.AsyncClient) -> httpx2.Response:
            return await client.request(config.method, url, params=params or None, headers=headers, json=body)

        try:
            return await self._client.ask(send, lambda answer: self._passages(answer, top_k), place=config.url)
        except ServiceRefused as refused:
            if refused.is_of_what_was_asked:
                raise QueryRefused(f"status {refused.status}: {refused.said}") from refused
            if refused.is_of_the_service:
                raise UserError(f"the search service is not usable: {refused}") from refused
            raise ToolBroken(f"search: {refused}") from refused

    def _passages(self, answer: Any, top_k: int) -> list[Passage]:
        config = self._config
        found = _at(answer, config.results)
        if found is None:
            return []  # services leave the list out if nothing was found
        if not isinstance(found, list):
            raise ToolBroken(f"search: {config.url} answered without a list at {config.results!r}: {str(answer)[:200]}")
        passages = []
        for number, each in enumerate(found[:top_k]):
            title, text = _at(each, config.title), _at(each, config.text)
            if isinstance(text, str):
                passages.append(Passage(id=str(number), title=title if isinstance(title, str) else "", text=text))
        return passages


def _name(config: HttpConfig) -> str:
    """The name of the service in a cache: its address, and a digest of how it is asked and read. It holds no key."""
    asked = config.model_dump(include={"url", "method", "params", "body", "results", "title", "text", "zone", "country"})
    digest = hashlib.blake2b(json.dumps(asked, sort_keys=True).encode(), digest_size=4).hexdigest()
    return f"{config.url.partition('?')[0].rpartition('@')[2]} {digest}"


def _fill(template: Any, values: Mapping[str, str | int]) -> Any:
    """`template` with its placeholders replaced. A text that is only `{top_k}` becomes a number."""
    if isinstance(template, str):
        if template == "{top_k}":
            return values["top_k"]
        return _PLACEHOLDER.sub(lambda found: str(values[found[1]]), template)
    if isinstance(template, Mapping):
        return {key: _fill(value, values) for key, value in template.items()}
    return [_fill(value, values) for value in template] if isinstance(template, list) else template


def _at(value: Any, path: str) -> Any:
    """The value at `path`, as in web.results or result.0; None if there is none."""
    for step in path.split(".") if path else ():
        if isinstance(value, Mapping):
            value = value.get(step)
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            return None
    return value
