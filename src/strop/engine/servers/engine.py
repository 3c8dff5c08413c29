"""An engine whose model runs in a server; what every kind of server has in common."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

from strop.engine.config import ServerConfig
from strop.engine.protocol import Capabilities, Capacity, CompletionRequest, NamedTensor
from strop.engine.requests import check_request, check_vocabulary
from strop.engine.servers.answers import Answer, completion_of
from strop.engine.servers.conversations import Conversations
from strop.engine.servers.facts import ModelFacts
from strop.engine.servers.handover import handed_over
from strop.errors import DeadlineExceeded, EngineLost, StropError, UserError, WeightsNotProven
from strop.types import Completion

_log = logging.getLogger(__name__)
_REFRESH_S = 30.0  # for one token after a cached prefix


class Server(Protocol):
    """One server of one kind: how it is spoken to. Every call has a deadline and raises `EngineLost` naming the server."""

    @property
    def name(self) -> str: ...

    @property
    def capacity(self) -> Capacity: ...

    @property
    def can_prove_weights(self) -> bool:
        """Whether `read_weights` tells a checksum that was computed inside the server."""

    async def complete(self, request: CompletionRequest, *, timeout_s: float) -> Answer:
        """Sample; a cancelled call ends the request in the server, too."""

    async def read_weights(self, directory: Path, *, label: str) -> str:
        """Let the server replace its weights by those of `directory` and forget every KV cache; from then on its answers bear
        `label`. Returns the checksum of what it read, "" if it cannot tell."""

    def has_ended(self) -> str:
        """What became of it, with the end of its log, if it was started by us and has ended; else empty."""

    async def close(self) -> None: ...


class ServerEngine:
    """An `InferenceEngine` over a server.

    A conversation holds one of `slots` places from its first request to its release. Its prefix is kept in the server's cache
    as far as we see that cache (`Conversations.endangered`); what was evicted all the same is computed again, which
    `cached_tokens` tells.
    """

    def __init__(self, server: Server, model: ModelFacts, config: ServerConfig) -> None:
        """An engine over a server that is ready, and whose weights are not known yet."""
        self._server, self._model, self._config = server, model, config
        capacity = server.capacity
        block_tokens = capacity.block_tokens
        self._conversations = Conversations(
            capacity.max_running, num_blocks=capacity.total_tokens // (block_tokens or 1), block_tokens=block_tokens
        )
        self._calls: dict[str, asyncio.Task[Answer]] = {}  # by request
        self._refreshing: set[asyncio.Task[None]] = set()
        self._policy_version = -1
        self._doubt = "no weights were published to this engine yet"  # empty: the weights are proven
        self._label = ""
        self._nonce = secrets.token_hex(4)  # another trainer's publications to the same server have another
        self._is_closed = False

    @property
    def name(self) -> str:
        return self._server.name

    @property
    def capabilities(self) -> Capabilities:
        # A seed decides a request's tokens only as far as the rounding of its batch does not.
        return Capabilities(is_deterministic=False, can_fork=False, has_entropies=False, dtype=self._config.torch_dtype)

    @property
    def capacity(self) -> Capacity:
        return self._server.capacity

    @property
    def policy_version(self) -> int:
        return self._policy_version

    async def complete(self, request: CompletionRequest) -> Completion:
        """See `InferenceEngine.complete`.

        Raises:
            EngineLost: the server died, cannot be reached, answered garbage, or lost the weights.
            DeadlineExceeded: no place was free within `deadline_s`, or it was not complete that long after it got one. A
                server that hangs looks the same; whoever asks knows whether it answers others.
            UserError: a stop string, but the model directory has no tokenizer; or ids outside the model's vocabulary.
            StropError: `extends` where the ids differ, an id that is in use, a number out of its range.
        """
        try:
            self._check(request)
        except StropError:
            self._conversations.refuse(request)
            raise
        try:
            async with asyncio.timeout(self._config.deadline_s):
                await self._conversations.enter(request)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"request {request.id} found no free place at {self.name} within {self._config.deadline_s:g} s"
                " (engine.deadline_s). Raise engine.slots or engine.deadline_s."
            ) from error
        except asyncio.CancelledError as error:
            if self._is_closed:
                raise self._closed() from error
            raise
        try:
            completion = await self._sample(request)
        except BaseException:
            self._conversations.leave(request.id)
            raise
        self._conversations.end(request, completion.ids)
        return completion

    async def abort(self, request_id: str) -> None:
        call = self._calls.pop(request_id, None)
        if call is not None:
            call.cancel()
        self._conversations.leave(request_id)

    async def release(self, request_id: str) -> None:
        self._conversations.leave(request_id)

    async def load_weights(self, tensors: AsyncIterator[NamedTensor], *, version: int, checksum: str) -> None:
        """See `InferenceEngine.load_weights`.

        Raises:
            WeightsNotProven: a weight is missing, unknown or of another shape, or the checksum differs.
            EngineLost: the server could not read them.
            StropError: completions are running or waiting; nothing was changed.
        """
        self._require_idle()
        self._doubt = f"the last publication (version {version}) was not completed"
        self._conversations.clear()
        size = self._config.torch_dtype.itemsize
        async with handed_over(tensors, self._model, itemsize=size, version=version, checksum=checksum) as directory:
            await self._read_weights(directory, version=version, checksum=checksum)

    async def read_weights(self, directory: Path, *, version: int, checksum: str) -> None:
        """Like `load_weights`, from the safetensors files of a directory that the server can read, too."""
        self._require_idle()
        self._doubt = f"reading {directory} (version {version}) was not completed"
        self._conversations.clear()
        await self._read_weights(directory, version=version, checksum=checksum)

    async def warm_up(self) -> None:
        """Have a first completion sampled: it may compile for a while, and shows whether the server can be used at all."""
        request = CompletionRequest(id="warm-up", ids=(0,), max_tokens=2, stop_ids=frozenset(), temperature=1.0, seed=0)
        answer = await self._server.complete(request, timeout_s=self._config.start_timeout_s)
        self._completion_of(answer, request)

    async def close(self) -> None:
        """End the server, if it was started by us; whatever is outstanding fails with `EngineLost`. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        for request_id in self._conversations.busy:
            await self.abort(request_id)
        for task in self._refreshing:
            task.cancel()
        await self._server.close()

    async def _read_weights(self, directory: Path, *, version: int, checksum: str) -> None:
        label = f"strop {self._nonce} {version} {checksum}"
        held = await self._server.read_weights(directory, label=label)
        if self._server.can_prove_weights and held != checksum:
            self._doubt = f"the last publication (version {version}) arrived damaged"
            raise WeightsNotProven(f"version {version} was published with checksum {checksum}, but {self.name} holds {held}.")
        self._label, self._policy_version, self._doubt = label, version, ""

    async def _sample(self, request: CompletionRequest) -> Completion:
        call = asyncio.create_task(self._ask(request))
        self._calls[request.id] = call
        try:
            async with asyncio.timeout(self._config.deadline_s):
                answer = await call
            if self._calls.get(request.id) is not call:
                raise asyncio.CancelledError  # aborted in the moment in which it was answered
        except TimeoutError as error:
            if end := self._server.has_ended():
                raise EngineLost(end) from error
            raise DeadlineExceeded(
                f"request {request.id} was not complete after {self._config.deadline_s:g} s at {self.name} (engine.deadline_s)."
            ) from error
        except asyncio.CancelledError as error:
            if self._is_closed:
                raise self._closed() from error
            raise
        except EngineLost as error:
            if self._is_closed:
                raise self._closed() from error
            if end := self._server.has_ended():
                raise EngineLost(end) from error
            raise
        finally:
            call.cancel()
            if self._calls.get(request.id) is call:  # the id may be another's by now
                del self._calls[request.id]
        return self._completion_of(answer, request)

    async def _ask(self, request: CompletionRequest) -> Answer:
        await self._keep_prefixes()
        # The server's own timeout, which would be its loss, comes after ours.
        return await self._server.complete(request, timeout_s=2 * self._config.deadline_s)

    async def _keep_prefixes(self) -> None:
        """Before a request takes memory: use what idle conversations have cached, where the server would take that first."""
        for ids in self._conversations.endangered():
            task = asyncio.create_task(self._refresh(ids))
            self._refreshing.add(task)
            task.add_done_callback(self._refreshing.discard)
        if self._refreshing:
            await asyncio.wait(self._refreshing, timeout=_REFRESH_S)

    async def _refresh(self, ids: tuple[int, ...]) -> None:
        request = CompletionRequest(id="refresh", ids=ids, max_tokens=1, stop_ids=frozenset(), temperature=1.0, seed=0)
        try:
            await self._server.complete(request, timeout_s=_REFRESH_S)
        except StropError as error:  # costs a prefill at most; if the server is lost, the next request says so
            _log.warning("a conversation's cached prefix was not kept: %s", error)

    def _completion_of(self, answer: Answer, request: CompletionRequest) -> Completion:
        """Raises `EngineLost` when the answer is garbage, or was sampled from other weights than those that were published."""
        if answer.label != self._label:
            self._doubt = (
                f"it answered from weights that it calls {answer.label!r}, not {self._label!r}: it was restarted, or somebody"
                " else publishes to it"
            )
            raise WeightsNotProven(f"{self.name}: {self._doubt}.")
        return completion_of(answer, request, server=self.name, vocab_size=self._model.vocab_size, version=self._policy_version)

    def _check(self, request: CompletionRequest) -> None:
        if self._is_closed:
            raise self._closed()
        check_request(request, max_length=self.capacity.max_request_tokens)
        check_vocabulary(request, self._model.vocab_size)
        if request.stop_strings and not self._model.has_tokenizer:
            raise UserError(
                f"request {request.id} has stop strings {request.stop_strings}, but {self._model.directory} has no tokenizer"
                " that the server could decode with. Save one there (tokenizer.save_pretrained), or use stop_ids."
            )
        if self._doubt:
            raise WeightsNotProven(f"{self.name}: {self._doubt}. Publish weights to it again before sampling from it.")

    def _require_idle(self) -> None:
        if busy := self._conversations.busy:
            raise StropError(f"weights cannot be published to {self.name} while requests run or wait: {', '.join(busy[:5])}.")

    def _closed(self) -> EngineLost:
        return EngineLost(f"{self.name} was closed.")
