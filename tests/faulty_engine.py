"""A scripted engine with KV memory that can be full, which fails at given points."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

import torch

from strop.engine.protocol import (
    Capacity,
    CompletionRequest,
    check_prefix,
    check_request,
    weights_checksum,
)
from strop.engine.publication import Publication
from strop.engine.scripted import Policy, ScriptedEngine
from strop.errors import EngineLost, StropError, WeightsNotProven
from strop.types import Completion


class Fault(StrEnum):
    """What a scripted engine can do wrong."""

    HANG = "hang"  # answers nothing, loads nothing, until `recover`
    LOSE = "lose"  # the request is lost, and no other
    DIE = "die"  # every request is lost, these and all later ones, until `restart`
    OUT_OF_MEMORY = "out_of_memory"  # the same, and it says why
    MISSING_LOGPROB = "missing_logprob"
    NAN_LOGPROB = "nan_logprob"
    FOREIGN_ID = "foreign_id"  # an id that is in no vocabulary
    OLD_WEIGHTS = "old_weights"  # it sampled from the version before the published one


_LAST_WORDS = {
    Fault.DIE: "the engine was scripted to die.",
    Fault.OUT_OF_MEMORY: "the engine was scripted to run out of memory.",
}


@dataclass(slots=True, kw_only=True)
class _Hold:
    """KV memory of one conversation."""

    ids: tuple[int, ...]  # of its newest request and completion
    reserved_tokens: int
    running: asyncio.Task[Completion] | None
    versions: list[int]  # of the weights since its newest request began


class FaultyEngine(ScriptedEngine):
    """Fails on demand: at chosen requests (`faults`), or from one moment to the next (`fail`, `kill`, `restart`).

    Args:
        latency_s: how long each completion takes.
        kv_tokens: KV memory. A conversation holds len(ids) + max_tokens of it until it is released; others wait.
        max_running: how many conversations may hold KV memory at once.
        faults: what goes wrong at which requests, counted from 0 in order of arrival.
        has_wrong_weights: whether every load ends up holding other values than were sent.
    """

    def __init__(
        self,
        policy: Policy | Sequence[Sequence[int]],
        *,
        latency_s: float = 0.0,
        kv_tokens: int = 1 << 20,
        max_request_tokens: int = 1 << 14,
        max_running: int = 1 << 10,
        faults: Mapping[int, Fault] | None = None,
        has_wrong_weights: bool = False,
        policy_version: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(policy, policy_version=policy_version, dtype=dtype)
        self._latency_s = latency_s
        self.capacity = Capacity(
            total_tokens=kv_tokens, max_request_tokens=min(max_request_tokens, kv_tokens), max_running=max_running
        )
        self._faults = dict(faults or {})
        self._fault: Fault | None = None
        self._may_answer = asyncio.Event()
        self._may_answer.set()
        self._has_wrong_weights = has_wrong_weights
        self._is_proven = True
        self._is_lost = False
        self._last_words = ""  # of its newest end
        self._num_ends = 0
        self._progress = 0
        self._dying: asyncio.Task[None] | None = None
        self._holds: dict[str, _Hold] = {}  # by newest request
        self._loading = asyncio.Lock()
        self._room = asyncio.Condition()
        self._queue: list[str] = []  # requests that wait for room, in order of arrival

    def fail(self, fault: Fault) -> None:
        """From here on `fault` is wrong with every request that it answers, until `recover`."""
        self._fault = fault
        if fault is Fault.HANG:
            self._may_answer.clear()
        else:
            self._may_answer.set()

    def recover(self) -> None:
        """Nothing is wrong with it any more; the dead need `restart`."""
        self._fault = None
        self._may_answer.set()

    async def kill(self, reason: str = _LAST_WORDS[Fault.DIE]) -> None:
        """What is outstanding fails at once with `EngineLost`, and so does what comes later, until `restart`."""
        self._is_lost, self._last_words, self._num_ends = True, reason, self._num_ends + 1
        self._queue.clear()
        for hold in self._holds.values():
            if hold.running is not None:
                hold.running.cancel()
        async with self._room:
            self._room.notify_all()

    def restart(self, *, policy_version: int) -> None:
        """It comes back healthy and empty, with the weights of that version, as a server does that restarts by itself."""
        self.recover()
        self._is_lost = False
        self._holds.clear()
        self.policy_version, self._is_proven = policy_version, True

    async def complete(self, request: CompletionRequest) -> Completion:
        async with self._loading:  # what comes meanwhile waits, as for real engines
            pass
        number, num_ends = len(self.requests), self._num_ends
        self._accept(request)
        cached_tokens = await self._take_room(request)
        hold = self._holds[request.id]
        hold.running = asyncio.create_task(self._answer(request, number, cached_tokens))
        try:
            completion = await hold.running
        except asyncio.CancelledError as error:
            if self._num_ends != num_ends:
                raise EngineLost(self._last_words) from error
            raise
        finally:
            has_failed = hold.running.cancelled() or hold.running.exception() is not None
            if has_failed and self._holds.get(request.id) is hold:
                await self._give_back(request.id)
        hold.running = None
        hold.ids = (*request.ids, *completion.ids)
        return completion

    async def progress(self) -> int:
        if self._is_lost:
            raise EngineLost(self._last_words)
        if self._may_answer.is_set() and any(hold.running is not None for hold in self._holds.values()):
            self._progress += 1
        return self._progress

    async def abort(self, request_id: str) -> None:
        await self._give_back(request_id)

    async def release(self, request_id: str) -> None:
        self.released.append(request_id)
        await self._give_back(request_id)

    async def load_weights(self, publication: Publication) -> None:
        running = [request_id for request_id, hold in self._holds.items() if hold.running is not None]
        if (running or self._queue) and not publication.keeps_requests:
            raise StropError(f"weights cannot be loaded while completions run or wait: {[*running, *self._queue]}.")
        await self._may_answer.wait()
        if self._is_lost:
            raise EngineLost(self._last_words)
        async with self._loading:
            await self._load(publication)

    async def _load(self, publication: Publication) -> None:
        self._is_proven = False
        if not publication.keeps_requests:
            self._holds.clear()
        self.weights = {name: tensor.detach().to(self._dtype, copy=True) async for name, tensor in publication.tensors()}
        if self._has_wrong_weights:
            self.weights = {name: tensor + 1 for name, tensor in self.weights.items()}
        version, checksum, held = publication.version, await publication.checksum(), weights_checksum(self.weights.items())
        if held != checksum:
            raise WeightsNotProven(f"version {version} was published with checksum {checksum}, but the engine holds {held}.")
        self._is_proven, self.policy_version = True, version
        for hold in self._holds.values():
            hold.versions.append(version)

    async def close(self) -> None:
        await self.kill("the engine was closed.")

    def _accept(self, request: CompletionRequest) -> None:
        check_request(request, max_length=self.capacity.max_request_tokens)
        if request.id in self._holds or request.id in self._queue:
            raise StropError(f"request {request.id}: an earlier request of that id was not released.")
        number = len(self.requests)
        self.requests.append(request)
        if self._is_lost:
            raise EngineLost(self._last_words)
        if Fault.LOSE in (self._faults.get(number), self._fault):
            raise EngineLost(f"request {request.id}, number {number}, was scripted to lose the engine.")
        if not self._is_proven:
            raise WeightsNotProven("the last publication was not proven. Publish weights to the engine again.")
        parent = self._holds.get(request.extends)
        if parent is not None:
            check_prefix(request, parent.ids)

    def _goes_on_in_place(self, request: CompletionRequest) -> bool:
        parent = self._holds.get(request.extends)
        return parent is not None and parent.running is None and request.at == len(parent.ids)

    async def _take_room(self, request: CompletionRequest) -> int:
        """Wait for KV memory, first come first served; returns how many ids were there already."""
        cached_tokens = min(request.at, len(request.ids) - 1) if request.extends in self._holds else 0
        tokens = len(request.ids) + request.max_tokens
        if self._goes_on_in_place(request):
            del self._holds[request.extends]  # it goes on in place; its memory is its own
        else:
            await self._wait_for(request.id, tokens)
        self._holds[request.id] = _Hold(ids=request.ids, reserved_tokens=tokens, running=None, versions=[self.policy_version])
        return cached_tokens

    async def _wait_for(self, request_id: str, tokens: int) -> None:
        num_ends = self._num_ends
        self._queue.append(request_id)
        try:
            async with self._room:
                await self._room.wait_for(
                    lambda: (
                        self._num_ends != num_ends
                        or request_id not in self._queue
                        or (self._queue[0] == request_id and self._has_room_for(tokens))
                    )
                )
            if self._num_ends != num_ends:
                raise EngineLost(self._last_words)
            if request_id not in self._queue:
                raise asyncio.CancelledError(f"request {request_id} was aborted")
        finally:
            if request_id in self._queue:
                self._queue.remove(request_id)
            async with self._room:
                self._room.notify_all()

    def _has_room_for(self, tokens: int) -> bool:
        held = sum(hold.reserved_tokens for hold in self._holds.values())
        return held + tokens <= self.capacity.total_tokens and len(self._holds) < self.capacity.max_running

    async def _give_back(self, request_id: str) -> None:
        hold = self._holds.pop(request_id, None)
        if hold is not None and hold.running is not None:
            hold.running.cancel()
        if request_id in self._queue:
            self._queue.remove(request_id)
        async with self._room:
            self._room.notify_all()

    async def _answer(self, request: CompletionRequest, number: int, cached_tokens: int) -> Completion:
        await asyncio.sleep(self._latency_s)
        fault = self._faults.get(number)
        if fault is Fault.HANG:
            await asyncio.Event().wait()
        await self._may_answer.wait()
        fault = fault or self._fault
        if fault in _LAST_WORDS:
            self._dying = asyncio.create_task(self.kill(_LAST_WORDS[fault]))
            await asyncio.Event().wait()  # for that end
        completion = self.completion(request, number, cached_tokens=cached_tokens)
        completion = replace(completion, spans=_even_spans(self._holds[request.id].versions, len(completion.ids)))
        return completion if fault is None else _damaged(completion, fault)


def _even_spans(versions: Sequence[int], length: int) -> tuple[tuple[int, int], ...]:
    """As if every version had sampled equally many of the tokens."""
    ends = [length * number // len(versions) for number in range(len(versions) + 1)]
    spans = zip(versions, (end - start for start, end in pairwise(ends)), strict=True)
    return tuple((version, num) for version, num in spans if num)


def _damaged(completion: Completion, fault: Fault) -> Completion:
    match fault:
        case Fault.MISSING_LOGPROB:
            return replace(completion, logprobs=completion.logprobs[:-1])
        case Fault.NAN_LOGPROB:
            return replace(completion, logprobs=(*completion.logprobs[:-1], float("nan")))
        case Fault.FOREIGN_ID:
            return replace(completion, ids=(-1, *completion.ids[1:]))
        case Fault.OLD_WEIGHTS:
            return replace(completion, spans=((completion.policy_version - 1, len(completion.ids)),))
    return completion
