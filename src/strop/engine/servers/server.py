"""One server: started or given by address, and spoken to in JSON over HTTP. Its answers are validated."""

from __future__ import annotations

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Self, TypeVar

import httpx2
from pydantic import BaseModel, ConfigDict, ValidationError

from strop.engine.config import ServerConfig
from strop.engine.model_directory import ModelFacts
from strop.engine.protocol import NUM_LIKELIEST, Capacity, CompletionRequest, Entropies, check_completion
from strop.engine.servers.process import ServerProcess
from strop.errors import EngineLost, StropError, UserError
from strop.run_directory import parse_json
from strop.types import Completion, FinishReason

ASK_S = 60.0  # by default: for a call that needs no model step
_CONNECT_S = 10.0
_SHOWN = 500  # characters of a server's answer in an error
_OUR_VARIABLES = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")  # name our interpreter and its modules


class ServerClient:
    """Calls one server. `name` is how errors call it.

    Args:
        socket: of a server on this machine that listens on no port; `url` is then only a prefix of paths.
    """

    def __init__(self, name: str, url: str, *, socket: Path | None = None) -> None:
        self.name = name
        self._http = httpx2.AsyncClient(
            base_url=url,
            transport=httpx2.AsyncHTTPTransport(
                uds=str(socket) if socket else None,
                # A connection for each call. One that is used again may be hung up while the call is on its way, since a server
                # that was too busy to read takes it for idle. Not every call may be repeated.
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
            ),
            trust_env=False,
        )

    async def get(self, path: str, *, timeout_s: float = ASK_S, query: Mapping[str, str] = MappingProxyType({})) -> Any:
        """See `post`."""
        return _parse(self.name, path, (await self._send("GET", path, None, query, timeout_s)).content)

    async def get_text(self, path: str, *, timeout_s: float = ASK_S) -> str:
        return (await self._send("GET", path, None, {}, timeout_s)).text

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = ASK_S,
        query: Mapping[str, str] = MappingProxyType({}),
        parsed: bool = True,
    ) -> Any:
        """The parsed answer; None where it is empty, or not wanted. A call that is cancelled hangs up, which ends it in the
        server, too. Without `timeout_s` it waits as long as the server needs.

        Raises:
            EngineLost: no connection, no answer in time, an answer of 5xx, or one that is not JSON.
            StropError: an answer of 4xx: the request was wrong.
        """
        response = await self._send("POST", path, body, query, timeout_s)
        return _parse(self.name, path, response.content) if parsed else None

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """The parsed events of an answer that comes in parts, without a deadline. Raises as `post`."""
        try:
            timeout = httpx2.Timeout(None, connect=_CONNECT_S)
            async with self._http.stream("POST", path, json=body, timeout=timeout) as response:
                if response.status_code >= 400:
                    await response.aread()
                    self._refuse(path, response)
                async for line in response.aiter_lines():
                    event = line.removeprefix("data: ")
                    if event and event != "[DONE]":
                        yield _parse(self.name, path, event)
        except httpx2.HTTPError as error:
            raise EngineLost(f"{self.name}: {path}: {error or type(error).__name__}") from error

    async def is_up(self, path: str, *, timeout_s: float = ASK_S) -> bool:
        """Whether `path` is answered with 200. Never raises."""
        try:
            return (await self._http.get(path, timeout=timeout_s)).status_code == 200
        except httpx2.HTTPError:
            return False

    async def close(self) -> None:
        await self._http.aclose()

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, query: Mapping[str, str], timeout_s: float | None
    ) -> httpx2.Response:
        timeout = httpx2.Timeout(timeout_s, connect=min(timeout_s or _CONNECT_S, _CONNECT_S))
        try:
            response = await self._http.request(method, path, json=body, params=query, timeout=timeout)
        except httpx2.TimeoutException as error:
            raise EngineLost(f"{self.name} did not answer {path} within {timeout_s or _CONNECT_S:g} s.") from error
        except httpx2.HTTPError as error:
            raise EngineLost(f"{self.name}: {path}: {error or type(error).__name__}") from error
        self._refuse(path, response)
        return response

    def _refuse(self, path: str, response: httpx2.Response) -> None:
        """Raise if the answer is of 4xx or 5xx."""
        if response.status_code >= 500:
            raise EngineLost(f"{self.name} failed at {path} ({response.status_code}): {response.text[:_SHOWN]}")
        if response.status_code >= 400:
            raise StropError(f"{self.name} refused {path} ({response.status_code}): {response.text[:_SHOWN]}")


def _parse(name: str, path: str, text: str | bytes) -> Any:
    if not text:
        return None
    try:
        return parse_json(text)
    except ValueError as error:
        raise EngineLost(f"{name} answered {path} with no JSON ({error}): {text[:_SHOWN]!r}") from error


Likeliest = Sequence[Sequence[float]]
"""At each position log-probs of the likeliest tokens."""
Begun = Callable[[Likeliest], None]
"""Is called with the first tokens of a request with a probe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One completion as a server gave it, in our words. `label` names the weights that sampled it."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    is_stopped: bool  # by a stop id or string; False: by its length
    cached_tokens: int
    spans: Sequence[tuple[str, int]]  # labels of weights, each with the number of tokens that they sampled
    likeliest: Likeliest = ()  # if they were asked for


def completion_of(
    answer: Answer, request: CompletionRequest, *, server: str, vocab_size: int, spans: tuple[tuple[int, int], ...]
) -> Completion:
    """Raises `EngineLost`, naming the server, when the answer cannot be one to this request. `spans` have policy versions."""
    ids = tuple(answer.ids)
    is_stopped = answer.is_stopped or (bool(ids) and ids[-1] in request.stop_ids)
    needed = answer.likeliest if request.entropies is not Entropies.ANY else ()  # vLLM always sends the sampled token's
    completion = Completion(
        ids=ids,
        logprobs=tuple(answer.logprobs),
        entropies=tuple(entropy_of(each, request.entropies, vocab_size=vocab_size) for each in needed),
        is_forced=(False,) * len(ids),
        spans=spans,
        finish_reason=FinishReason.STOP if is_stopped else FinishReason.LENGTH,
        cached_tokens=answer.cached_tokens,
    )
    try:
        check_completion(request, completion, vocab_size=vocab_size, policy_version=None)
    except EngineLost as error:
        raise EngineLost(f"{server}: {error}") from error
    return replace(completion, logprobs=tuple(min(each, 0.0) for each in completion.logprobs))


_NUM_LIKELIEST = {Entropies.ANY: 0, Entropies.TOP10: NUM_LIKELIEST, Entropies.FULL: 20}


def num_logprobs(kind: Entropies) -> int:
    """Log-probs to ask for at each token: one more than are used, as vLLM sends the sampled token's in place of the last."""
    return _NUM_LIKELIEST[kind] and 1 + _NUM_LIKELIEST[kind]


def entropy_of(logprobs: Sequence[float], kind: Entropies, *, vocab_size: int) -> float:
    """The entropy of one token, in nats.

    `FULL` spreads the probability that is left evenly over the rest of the vocabulary. That is the largest entropy that the
    likeliest tokens allow, so the estimate is never too small but for rounding.

    Args:
        logprobs: `num_logprobs` of them, in any order, or all if the vocabulary is smaller.
    """
    likeliest = sorted(logprobs, reverse=True)[: _NUM_LIKELIEST[kind]]
    total = -math.fsum(math.exp(each) * each for each in likeliest if each > -math.inf)
    if kind is Entropies.TOP10:
        return max(0.0, total)
    rest, num_rest = 1 - math.fsum(math.exp(each) for each in likeliest), vocab_size - len(likeliest)
    return max(0.0, total - (rest * math.log(rest / num_rest) if rest > 0 and num_rest > 0 else 0.0))


class Said(BaseModel):
    """Part of an answer, as far as it concerns us; a server may say more."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    @classmethod
    def read(cls, body: Any, *, server: str) -> Self:
        """Return `body`, which is parsed JSON, as this class. Raises `EngineLost`, which names the place, if it is not that."""
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "the top"
            shown = json.dumps(body)[:_SHOWN]
            raise EngineLost(f"{server} answered with garbage: {first['msg']}, at {place} of {shown}") from error


ConfigT = TypeVar("ConfigT", bound=ServerConfig)


class Server(ABC, Generic[ConfigT]):
    """One server of one kind, and its process if strop started it.

    Every call but `complete` has a deadline, and all raise `EngineLost` naming the server.
    """

    title: ClassVar[str]  # of servers that are given by address
    health: ClassVar[str]  # the path that is answered once the server is up

    def __init__(self, client: ServerClient, config: ConfigT) -> None:
        self._client, self._config = client, config
        self._process: ServerProcess | None = None
        self.capacity = Capacity(total_tokens=0, max_request_tokens=0, max_running=config.slots)

    @classmethod
    @abstractmethod
    async def start(cls, name: str, model: ModelFacts, config: ConfigT, *, log: Path) -> Self:
        """A server of our own, without weights, that only this machine can reach.

        Raises `EngineLost`, which names the log, when it does not start within `start_timeout_s`.
        """

    @classmethod
    async def connect(cls, address: str, config: ConfigT) -> Self:
        """A server that runs already; it stays when this is closed.

        Raises:
            EngineLost: no server answers at the address.
            UserError: it was not started as it must be.
        """
        return await cls(ServerClient(f"{cls.title} at {address}", address), config)._ready()

    @abstractmethod
    async def complete(self, request: CompletionRequest, *, timeout_s: float | None, begun: Begun | None = None) -> Answer:
        """Sample; a cancelled call ends the request in the server, too.

        Args:
            begun: of a request with a probe: called with the first tokens as soon as there are as many as it asks for, by
                servers that can.
        """

    @abstractmethod
    async def progress(self) -> int:
        """See `InferenceEngine.progress`."""

    @abstractmethod
    async def read_weights(self, directory: Path, *, checksum: str, label: str, keeps_requests: bool) -> None:
        """Let the server replace its weights by those of `directory` and forget every KV cache; from then on its answers bear
        `label`. Raises `WeightsNotProven` if it holds others then; it samples no more until it has read what it can prove."""

    async def read_adapter(self, directory: Path, *, checksum: str, label: str) -> None:
        """Let requests that begin now be sampled with the LoRA adapter in `directory`, and their answers bear `label`; those
        that run keep theirs. Only servers with `engine.adapter_slots` can. Raises `WeightsNotProven` as `read_weights`."""
        raise NotImplementedError

    async def sleep(self) -> None:
        """Free the memory of weights and KV caches until `read_weights`. Only servers with `engine.sleep` can."""
        raise NotImplementedError

    async def forward(self, path: str, body: Mapping[str, Any] | None) -> Any:
        """Send a request in OpenAI's form: a GET without `body`, else a POST."""
        if body is None:
            return await self._client.get(path)
        return await self._client.post(path, body, timeout_s=None)

    @property
    def name(self) -> str:
        return self._client.name

    def has_ended(self) -> str:
        """Return how the process ended, with the end of its log; empty while it runs or if it is not ours."""
        if self._process is None or self._process.is_alive:
            return ""
        return f"{self.name}: {self._process.describe(self._process.end)}"

    async def close(self) -> None:
        await self._client.close()
        if self._process is not None:
            await self._process.stop()

    @abstractmethod
    async def _learn_capacity(self) -> Capacity:
        """Ask the server what it holds. Raises `UserError` when it was not started as it must be."""

    async def _run(self, command: Sequence[str], *, environment: Mapping[str, str], log: Path) -> Self:
        """Start the program of this server, and wait until it is up."""
        try:
            is_up, limit_s = partial(self._client.is_up, self.health, timeout_s=_CONNECT_S), self._config.start_timeout_s
            self._process = await ServerProcess.start(command, env=environment, log=log, is_ready=is_up, deadline_s=limit_s)
        except BaseException:
            await self.close()
            raise
        return await self._ready()

    async def _ready(self) -> Self:
        try:
            self.capacity = await self._learn_capacity()
        except BaseException:
            await self.close()
            raise
        return self

    def _refuse(self, wrong: Mapping[str, bool], *, length: int | None) -> None:
        """Raises `UserError` for the first fault that is so, or when the longest conversation of the server is too short."""
        config = self._config
        short = f"it holds conversations of {length} tokens, fewer than engine.max_length {config.max_length}"
        for fault, is_so in {**wrong, short: length is not None and length < config.max_length}.items():
            if is_so:
                raise UserError(f"{self.name} cannot be used: {fault}. Start it as docs/engines.md says.")


def command_of(
    module: str, options: Mapping[str, object], flags: Sequence[str], model: ModelFacts, config: ServerConfig
) -> list[str]:
    """What starts a server of `model`."""
    words = [str(config.python), "-m", module, *(str(word) for option in options.items() for word in option), *flags]
    words += [] if model.has_tokenizer else ["--skip-tokenizer-init"]
    return [*words, *config.arguments]


def environment_of(config: ServerConfig, variables: Mapping[str, str], *, without: Sequence[str] = ()) -> dict[str, str]:
    """Our environment for a server that we start, with the devices of its replica, but none of our modules."""
    unwanted = (*_OUR_VARIABLES, *without)
    inherited = {name: value for name, value in os.environ.items() if name not in unwanted}
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, config.devices))} if config.devices else {}
    return {**inherited, "HF_HUB_OFFLINE": "1", **variables, **devices, **config.environment}
