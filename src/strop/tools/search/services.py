"""Search services over HTTP as data: how each is asked, and where its results stand in the answer."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from pydantic import Field

from strop.config import Config

_PLACEHOLDER = re.compile(r"\{(query|query_in_url|top_k|key)\}")


class ServiceConfig(Config):
    """What all services over HTTP have in common."""

    key_env: str | None = None  # the environment variable that holds the API key; not set: the service wants none
    cache: str | None = None  # a .json or .jsonl; what is found is kept there, and not asked for again
    timeout_s: float = Field(default=10.0, gt=0)  # of one try
    retries: int = Field(default=3, ge=0)
    backoff_s: float = Field(default=0.5, gt=0)  # before the second try; doubled before each further one
    rate_per_s: float | None = Field(default=None, gt=0)  # requests begun, those of retries included


class SerperConfig(ServiceConfig):
    """Google's results through serper.dev."""

    kind: Literal["serper"]
    url: str = "https://google.serper.dev/search"
    key_env: str | None = "SERPER_API_KEY"


class BingConfig(ServiceConfig):
    """Bing's web search, or a service that speaks as it does."""

    kind: Literal["bing"]
    url: str = "https://api.bing.microsoft.com/v7.0/search"
    key_env: str | None = "BING_API_KEY"


class RetrieverConfig(ServiceConfig):
    """A retriever server as in Search-R1 (arXiv 2503.09516): `{"queries": [...], "topk": k}` -> lists of documents."""

    kind: Literal["retriever"]
    url: str  # as in http://127.0.0.1:8000/retrieve


class AnyServiceConfig(ServiceConfig):
    """Any other service that answers in JSON.

    `{query}`, `{query_in_url}`, `{top_k}` and `{key}` are filled in wherever they stand.
    """

    kind: Literal["http"]
    url: str
    method: Literal["GET", "POST"] = "GET"
    params: Mapping[str, str] = Field(default={})  # of the address
    headers: Mapping[str, str] = Field(default={})  # as in { Authorization = "Bearer {key}" }
    body: dict[str, Any] | None = None  # sent as JSON
    results: str = "results"  # where the list of results stands in the answer, as in web.results or result.0
    title: str = "title"  # where in a result; it may be missing
    text: str = "text"


HttpConfig: TypeAlias = SerperConfig | BingConfig | RetrieverConfig | AnyServiceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a service is asked, and where its results stand."""

    method: str
    params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    results: str
    title: str
    text: str


def shape_of(config: HttpConfig) -> Shape:
    match config:
        case SerperConfig():
            headers, wanted = {"X-API-KEY": "{key}"}, {"q": "{query}", "num": "{top_k}"}
            return Shape(method="POST", headers=headers, body=wanted, results="organic", title="title", text="snippet")
        case BingConfig():
            headers, params = {"Ocp-Apim-Subscription-Key": "{key}"}, {"q": "{query}", "count": "{top_k}"}
            return Shape(method="GET", headers=headers, params=params, results="webPages.value", title="name", text="snippet")
        case RetrieverConfig():
            body: dict[str, Any] = {"queries": ["{query}"], "topk": "{top_k}", "return_scores": True}
            return Shape(method="POST", body=body, results="result.0", title="document.title", text="document.contents")
        case AnyServiceConfig():
            return Shape(**{name: getattr(config, name) for name in Shape.__slots__})


def name_of(config: HttpConfig) -> str:
    """The service as its results are kept under: its address, and a digest of how it is asked and read. Keys are not in it."""
    shape = shape_of(config)
    asked = [config.url, shape.method, shape.params, shape.body, shape.results, shape.title, shape.text]
    digest = hashlib.blake2b(json.dumps(asked, sort_keys=True).encode(), digest_size=4).hexdigest()
    return f"{config.url.partition('?')[0].rpartition('@')[2]} {digest}"


def filled(template: Any, values: Mapping[str, str | int]) -> Any:
    """`template` with every placeholder replaced; a text that is nothing but `{top_k}` becomes a number."""
    if isinstance(template, str):
        if template == "{top_k}":
            return values["top_k"]
        return _PLACEHOLDER.sub(lambda found: str(values[found[1]]), template)
    if isinstance(template, Mapping):
        return {key: filled(value, values) for key, value in template.items()}
    return [filled(value, values) for value in template] if isinstance(template, list) else template


def at(value: Any, path: str) -> Any:
    """What stands at `path`, as in web.results or result.0; None where there is nothing."""
    for step in path.split(".") if path else ():
        if isinstance(value, Mapping):
            value = value.get(step)
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            return None
    return value
