"""An engine whose model runs in a server, and the conversations that the server holds."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from strop.engine.config import ServerConfig
from strop.engine.model_directory import ModelFacts
from strop.engine.protocol import Capabilities, CompletionRequest, check_prefix, check_request, check_vocabulary
from strop.engine.publication import Publication
from strop.engine.published_files import is_adapter, naming_damage
from strop.engine.servers.server import Answer, Likeliest, Server, completion_of, entropy_of
from strop.errors import EngineLost, StropError, UserError, WeightsNotProven
from strop.types import Completion

_log = logging.getLogger(__name__)
_REFRESH_S = 30.0  # for one token after a cached prefix


Ids: TypeAlias = tuple[int, ...]


@dataclass(slots=True)
class _Hold:
    ids: Ids  # of the conversation's newest request, and of its completion
    num_blocks: int  # that it takes; while it runs, that it may take
    is_running: bool = True
    num_released: int = 0  # blocks that had been released when it was used last


class Conversations:
    """The places of one server. A request that goes on where its conversation ended takes its place; any other needs one.

    A server manages its KV memory itself. The count here limits requests to what the server was started for, and shows which
    prefixes the server may evict while a tool runs: a server treats a conversation that waits for a tool like one that has
    ended, and evicts the blocks that were used longest ago.
    """

    def __init__(self, num_places: int, *, num_blocks: int = 0, block_tokens: int | None = None) -> None:
        """Places, and the KV memory below them, of a server that takes first what was used longest ago.

        Args:
            num_blocks: of its KV memory.
            block_tokens: of a block; None where the server does not tell: then nothing is known of its prefixes.
        """
        self._num_places = num_places
        self._num_blocks, self._block_tokens = num_blocks, block_tokens
        self._num_released = 0  # blocks, of conversations that have left
        self._holds: dict[str, _Hold] = {}  # by newest request
        self._waiting: dict[str, tuple[asyncio.Future[None], CompletionRequest]] = {}  # in order of arrival

    @property
    def busy(self) -> list[str]:
        """Requests that run or wait."""
        return [*(request_id for request_id, hold in self._holds.items() if hold.is_running), *self._waiting]

    async def enter(self, request: CompletionRequest) -> None:
        """Take a place; waits for one if it must.

        Raises:
            StropError: the id is in use, or the request does not begin as the conversation that it extends.
        """
        if request.id in self._holds or request.id in self._waiting:
            raise StropError(f"request {request.id}: an earlier request of that id was not released.")
        parent = self._holds.get(request.extends)
        if parent is not None:
            check_prefix(request, parent.ids)
        if self._goes_on_in_place(request):
            del self._holds[request.extends]
            self._holds[request.id] = self._hold_of(request)
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = (place, request)
        self._grant()
        try:
            await place
            if request.id not in self._holds:
                raise asyncio.CancelledError  # it left in the moment of its turn
        except asyncio.CancelledError:
            self.leave(request.id)  # it may have been granted in the same moment
            raise

    def end(self, request: CompletionRequest, ids: Ids) -> None:
        """`request` is complete; its conversation keeps its place. `ids` were sampled."""
        hold = self._holds.get(request.id)
        if hold is not None:  # it was not released meanwhile
            hold.ids, hold.is_running = (*request.ids, *ids), False
            hold.num_blocks, hold.num_released = self._blocks_of(len(hold.ids)), self._num_released

    def leave(self, request_id: str) -> None:
        """Free a conversation's place for the next request. Cancel the request if it waits itself. Ignore unknown ids."""
        if (hold := self._holds.pop(request_id, None)) is not None:
            self._num_released += hold.num_blocks
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            waiting[0].cancel()
        self._grant()

    def endangered(self) -> list[Ids]:
        """Prefixes that the server may evict for those who run, though their conversations go on: use each of them now.

        A conversation's blocks are safe while the memory holds the blocks of all conversations and all blocks that were
        released after its last use. The caller must use the returned prefixes: they count as used from now on.
        """
        if self._block_tokens is None:
            return []
        # A use takes a block for a moment, and everybody may be used at once.
        spare = self._num_blocks - self._num_places - sum(hold.num_blocks for hold in self._holds.values())
        found = []
        for hold in self._holds.values():
            whole = (len(hold.ids) - 1) // self._block_tokens * self._block_tokens  # the last id was never fed
            num_since = self._num_released - hold.num_released
            if whole and not hold.is_running and num_since > max(0, spare):
                hold.num_released = self._num_released
                found.append(hold.ids[: whole + 1])
        return found

    def clear(self) -> None:
        """Forget every conversation: what was cached of them is gone."""
        self._holds.clear()
        self._num_released = 0
        self._grant()

    def _goes_on_in_place(self, request: CompletionRequest) -> bool:
        parent = self._holds.get(request.extends)
        return parent is not None and not parent.is_running and request.at == len(parent.ids)

    def _grant(self) -> None:
        while self._waiting and len(self._holds) < self._num_places:
            request_id = next(iter(self._waiting))
            place, request = self._waiting.pop(request_id)
            if not place.cancelled():
                self._holds[request_id] = self._hold_of(request)
                place.set_result(None)

    def _hold_of(self, request: CompletionRequest) -> _Hold:
        return _Hold(request.ids, self._blocks_of(len(request.ids) + request.max_tokens))

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens) if self._block_tokens is not None else 0


class ServerEngine:
    """An `InferenceEngine` over a server.

    A conversation holds one of `slots` places from its first request to its release. Its prefix is kept in the server's cache
    as far as we see that cache (`Conversations.endangered`); what was evicted all the same is computed again, which
    `cached_tokens` tells.
    """

    def __init__(self, server: Server[Any], model: ModelFacts, config: ServerConfig) -> None:
        """An engine over a server that is ready, and whose weights are not known yet."""
        self._server, self._model, self._config = server, model, config
        self.name, self.capacity, self.policy_version = server.name, server.capacity, -1
        capacity, block_tokens = self.capacity, self.capacity.block_tokens
        self._conversations = Conversations(
            capacity.max_running, num_blocks=capacity.total_tokens // (block_tokens or 1), block_tokens=block_tokens
        )
        self._calls: dict[str, asyncio.Task[Answer]] = {}  # by request
        self._refreshing: set[asyncio.Task[None]] = set()
        self._doubt = "no weights were published to this engine yet"  # empty: the weights are proven
        self._is_keeping = False  # requests, over a publication that goes on
        self._versions: dict[str, int] = {}  # by label, of the weights that a request may have been sampled from
        self._nonce = secrets.token_hex(4)  # another trainer's publications to the same server have another
        self._is_closed = False

    @property
    def capabilities(self) -> Capabilities:
        # A seed decides a request's tokens only as far as the rounding of its batch does not.
        dtype, takes_adapters = self._config.torch_dtype, self._config.adapter_slots > 0
        return Capabilities(
            is_deterministic=False, can_fork=False, entropies="estimated", dtype=dtype, takes_adapters=takes_adapters
        )

    async def complete(self, request: CompletionRequest) -> Completion:
        """See `InferenceEngine.complete`.

        Raises:
            EngineLost: the server died, cannot be reached, answered garbage, or lost the weights.
            UserError: a stop string, but the model directory has no tokenizer; or ids outside the model's vocabulary.
            StropError: `extends` where the ids differ, an id that is in use, a number out of its range.
        """
        self._check(request)
        try:
            await self._conversations.enter(request)
        except asyncio.CancelledError as error:
            if self._is_closed:
                raise self._closed() from error
            raise
        try:
            if request.probe is not None and request.probe.num_tokens == 0:
                request.probe.tell(())
            completion = await self._sample(request)
        except BaseException:
            self._conversations.leave(request.id)
            raise
        self._conversations.end(request, completion.ids)
        return completion

    async def forward(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return what the server's own endpoint answers to a request in OpenAI's form.

        Raises:
            EngineLost: the server died, cannot be reached or answered garbage.
            StropError: it refused the request.
        """
        return await self._server.forward(path, body)

    async def progress(self) -> int:
        if end := self._server.has_ended():
            raise EngineLost(end)
        return await self._server.progress()

    async def abort(self, request_id: str) -> None:
        call = self._calls.pop(request_id, None)
        if call is not None:
            call.cancel()
        self._conversations.leave(request_id)

    async def release(self, request_id: str) -> None:
        self._conversations.leave(request_id)

    async def load_weights(self, publication: Publication) -> None:
        """See `InferenceEngine.load_weights`.

        Requests that are kept, and those that arrive meanwhile, wait in the server. Of a LoRA adapter they do not: those that
        run keep their adapter.

        Raises:
            WeightsNotProven: a weight is missing, unknown or of another shape, or the checksum differs. Requests that were
                kept fail.
            EngineLost: the server could not read them.
            StropError: completions are running or waiting, and the publication does not keep them; nothing was changed.
        """
        version, self._is_keeping = publication.version, publication.keeps_requests
        if not self._is_keeping:
            self._require_idle()
            self._conversations.clear()
            self._versions = {}
        self._doubt = f"the last publication (version {version}) was not completed"
        try:
            directory, checksum = await publication.files(), await publication.checksum()
            label = f"strop {self._nonce} {version} {checksum}"
            self._versions[label] = version
            async with naming_damage(directory):
                if is_adapter(directory):
                    await self._server.read_adapter(directory, checksum=checksum, label=label)
                else:
                    await asyncio.to_thread(self._model.check_weights, directory, version)
                    await self._server.read_weights(directory, checksum=checksum, label=label, keeps_requests=self._is_keeping)
            self.policy_version, self._doubt = version, ""
        finally:
            self._is_keeping = False
            if self._doubt:
                for call in self._calls.values():
                    call.cancel()

    async def sleep(self) -> None:
        """See `SleepingEngine.sleep`."""
        self._require_idle()
        self._conversations.clear()
        self._doubt = "it sleeps until the next publication"
        await self._server.sleep()

    async def warm_up(self) -> None:
        """Have a first completion sampled: it may compile for a while, and shows whether the server can be used at all."""
        request = CompletionRequest(id="warm-up", ids=(0,), max_tokens=2, stop_ids=frozenset(), temperature=1.0, seed=0)
        answer = await self._server.complete(request, timeout_s=self._config.start_timeout_s)
        self._completion_of(answer, request, self.policy_version)

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

    async def _sample(self, request: CompletionRequest) -> Completion:
        self._require_proof()
        oldest = self.policy_version
        call = asyncio.create_task(self._ask(request))
        self._calls[request.id] = call
        try:
            answer = await call
            if self._calls.get(request.id) is not call:
                raise asyncio.CancelledError  # aborted in the moment in which it was answered
        except asyncio.CancelledError as error:
            if self._is_closed:
                raise self._closed() from error
            asking = asyncio.current_task()
            if self._calls.get(request.id) is call and asking is not None and not asking.cancelling():
                self._require_proof()  # a publication that failed has ended it
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
        return self._completion_of(answer, request, oldest)

    async def _ask(self, request: CompletionRequest) -> Answer:
        await self._keep_prefixes()
        if request.probe is None or request.probe.num_tokens == 0:
            return await self._server.complete(request, timeout_s=None)
        tell = request.probe.tell

        def begun(likeliest: Likeliest) -> None:
            tell(tuple(entropy_of(each, request.entropies, vocab_size=self._model.vocab_size) for each in likeliest))

        return await self._server.complete(request, timeout_s=None, begun=begun)

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

    def _completion_of(self, answer: Answer, request: CompletionRequest, oldest: int) -> Completion:
        """Raises `EngineLost` when the answer is garbage, or was sampled from weights that are none of ours from version
        `oldest` on."""
        versions = {label: version for label, version in self._versions.items() if version >= oldest}
        if unknown := [label for label, _ in answer.spans if label not in versions]:
            self._doubt = (
                f"it answered from weights that it calls {unknown[0]!r}, not {[*versions][-1]!r}: it was restarted, or somebody"
                " else publishes to it"
            )
            raise WeightsNotProven(f"{self.name}: {self._doubt}.")
        spans = tuple((versions[label], num_tokens) for label, num_tokens in answer.spans)
        return completion_of(answer, request, server=self.name, vocab_size=self._model.vocab_size, spans=spans)

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
        self._require_proof()

    def _require_proof(self) -> None:
        if self._doubt and not self._is_keeping:
            raise WeightsNotProven(f"{self.name}: {self._doubt}. Publish weights to it again before sampling from it.")

    def _require_idle(self) -> None:
        if busy := self._conversations.busy:
            raise StropError(f"weights cannot be published to {self.name} while requests run or wait: {', '.join(busy[:5])}.")

    def _closed(self) -> EngineLost:
        return EngineLost(f"{self.name} was closed.")
