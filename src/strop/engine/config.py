"""What a recipe may say about the engines that sample."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias
from urllib.parse import urlsplit

import torch
from pydantic import Discriminator, Field, NonNegativeInt, PositiveFloat, PositiveInt, Tag, field_validator, model_validator

from strop.config import Config
from strop.errors import ConfigError


class AnyEngine(Config):
    """What every kind of engine is told."""

    replicas: PositiveInt = 1  # engines to open; rollouts are spread over them
    slots: PositiveInt = 64  # conversations that one engine holds at once; all of them decode together
    max_length: PositiveInt = 1024  # tokens of one conversation, completions included
    dtype: Literal["float32", "bfloat16"] = "float32"
    deadline_s: PositiveFloat = 600.0  # of one completion, waiting for a slot included
    devices: tuple[NonNegativeInt, ...] = ()  # CUDA devices, as many for each replica in turn; empty: what it finds

    @model_validator(mode="after")
    def _shares_devices_out(self) -> Self:
        if len(self.devices) % self.num_engines:
            raise ValueError(
                f"engine.devices names {len(self.devices)} devices, which {self.num_engines} engines cannot share out evenly."
                f" Name {self.num_engines}, one for each engine, or as many more for each; or change engine.replicas."
            )
        return self

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == "float32" else torch.bfloat16

    @property
    def num_engines(self) -> int:
        return self.replicas

    @property
    def is_apart(self) -> bool:
        """Whether it computes in another process than whoever opens it."""
        return True

    def only(self, place: int) -> Self:
        """Of the engine at `place` alone, counted from 0, as it is among the others."""
        width = len(self.devices) // self.num_engines
        return self.model_copy(update={"replicas": 1, "devices": self.devices[place * width : (place + 1) * width]})


class EngineConfig(AnyEngine):
    """The embedded engine: `transformers` weights, our own forward, in a thread of this process or in a process of its own."""

    kind: Literal["torch"] = "torch"
    device: Literal["cpu", "cuda", "auto"] = "auto"  # auto: cuda where there is one
    threads: PositiveInt | None = None  # torch's own choice when unset; torch keeps one number for the whole process
    deterministic: bool = True  # a request's tokens and log-probs do not depend on what else is in the batch
    decode: Literal["auto", "eager", "static"] = "auto"  # static: in few sizes, as CUDA graphs on a GPU; auto: static on CUDA
    cached_prompts: NonNegativeInt = 2  # opening prompts whose KV is kept, so that a group's prompt is computed once
    own_process: bool = False  # so that its end is not ours; always so with several replicas, which also share out the cores

    @property
    def is_apart(self) -> bool:
        first = self.only(0)
        return first.own_process or bool(first.devices)

    def only(self, place: int) -> Self:
        one = super().only(place)
        if self.replicas == 1:
            return one
        threads = self.threads or max(1, (os.cpu_count() or 1) // self.replicas)
        return one.model_copy(update={"own_process": True, "threads": threads})

    @property
    def torch_device(self) -> torch.device:
        """Raises `ConfigError` for "cuda" where torch sees no such device."""
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError('engine.device is "cuda", but torch sees no CUDA device here. Use "auto" or "cpu".')
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)


class ServerConfig(AnyEngine):
    """A server engine: a program with an environment of its own, which strop starts, or which runs already."""

    python: Path | None = None  # the interpreter of the environment that has the server; strop starts it
    addresses: tuple[str, ...] = ()  # http://host:port of servers that run already, instead; on this machine (docs/engines.md)
    tensor_parallel: PositiveInt = 1  # devices that share one replica
    arguments: tuple[str, ...] = ()  # more words for the server's command line
    environment: dict[str, str] = Field(default={})  # more variables for the server's environment
    start_timeout_s: PositiveFloat = 600.0  # until a server is up; and for its first completion
    publish_timeout_s: PositiveFloat = 600.0  # for a server to read published weights

    @model_validator(mode="after")
    def _is_started_or_given(self) -> Self:
        if self.python is None and not self.addresses:
            raise ValueError(
                "engine needs either python, the interpreter of the server's environment, or addresses of servers that run."
            )
        if self.python is not None and self.addresses:
            raise ValueError(
                "engine.python and engine.addresses are both set. Keep python for servers that strop starts, or addresses for"
                " servers that run already."
            )
        if self.addresses and self.replicas not in (1, len(self.addresses)):
            raise ValueError(
                f"engine.replicas is {self.replicas}, but there are {len(self.addresses)} addresses. Leave replicas out:"
                " each address is one engine."
            )
        if self.devices and len(self.devices) != self.num_engines * self.tensor_parallel:
            raise ValueError(
                f"engine.devices names {len(self.devices)} devices, but {self.num_engines} replicas of {self.tensor_parallel}"
                f" need {self.num_engines * self.tensor_parallel}."
            )
        return self

    @field_validator("addresses")
    @classmethod
    def _are_different_servers(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        seen: dict[tuple[str, str, int], str] = {}
        for address in addresses:
            server = _server_at(address)
            if (before := seen.get(server)) is not None:
                same = f"{address!r} twice" if before == address else f"{before!r} and {address!r}, which are the same server"
                raise ValueError(f"has {same}. Each address is one engine: name each server once.")
            seen[server] = address
        return addresses

    @property
    def num_engines(self) -> int:
        return len(self.addresses) or self.replicas

    def only(self, place: int) -> Self:
        return super().only(place).model_copy(update={"addresses": self.addresses[place : place + 1]})


class VllmConfig(ServerConfig):
    """vLLM, over HTTP with token ids in and out."""

    kind: Literal["vllm"] = "vllm"
    kv_mib: PositiveInt | None = None  # KV memory of one replica; unset: for `slots` conversations of `max_length`
    block_tokens: PositiveInt = 32  # of a KV block; a prefix is found in the cache in whole blocks only
    eager: bool = False  # no compiler: starts in a third of the time, decodes more slowly


class SglangConfig(ServerConfig):
    """SGLang, over its native token endpoints. Written to its published schema, and not proven against it."""

    kind: Literal["sglang"] = "sglang"
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None  # of the device; unset: its own choice


def _server_at(address: str) -> tuple[str, str, int]:
    """Scheme, host and port. Raises `ValueError` when `address` is no URL of a server."""
    remedy = "Write http://host:port, as in http://127.0.0.1:8000."
    try:
        url = urlsplit(address)
        port = url.port
    except ValueError as error:
        raise ValueError(f"{address!r} is no URL: {error}. {remedy}") from error
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(f"{address!r} is no http or https URL with a host. {remedy}")
    return url.scheme, url.hostname, port or (443 if url.scheme == "https" else 80)


def kind(tree: Any) -> str | None:
    """The kind of engine that a table of a recipe means: the embedded one, unless it says otherwise."""
    said = tree.get("kind", "torch") if isinstance(tree, Mapping) else getattr(tree, "kind", None)
    return said if isinstance(said, str) else None


EngineChoice: TypeAlias = Annotated[
    Annotated[EngineConfig, Tag("torch")] | Annotated[VllmConfig, Tag("vllm")] | Annotated[SglangConfig, Tag("sglang")],
    Discriminator(kind),
]
