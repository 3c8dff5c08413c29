"""The embedded engine: continuous batching over a fixed number of slots, in one thread that owns the model.

Requests join and leave at every decode step; a conversation keeps its slot, and so its KV cache, while its tool runs. The
event loop only hands requests over and waits (design law 7).

Deterministic mode (`EngineConfig.deterministic`) makes each token and log-prob independent, bit for bit, of what else is in
the batch: prefill is one conversation at a time in chunks that depend on that conversation alone; decode runs with row counts
and KV lengths that were measured, on this machine and model, to give the bits of the largest ones. What a request finds in
the cache is its own history, as long as the conversation that it extends is still held; afterwards its prefix is computed
again, which is as correct but rounds differently.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from strop.engine.batch import Detokenizer
from strop.engine.config import EngineConfig
from strop.engine.decoder import Decoder
from strop.engine.model_directory import config_of
from strop.engine.protocol import COPIED_AT_ONCE, Capabilities, Capacity, CompletionRequest, NamedTensor
from strop.engine.publication import PublishedWeights
from strop.engine.requests import check_request, check_vocabulary
from strop.engine.teams import end_team
from strop.engine.worker import Worker
from strop.errors import DeadlineExceeded, ModelError, StropError, UserError, WeightsNotProven
from strop.types import Completion


class TorchEngine:
    """An `InferenceEngine` in this process.

    Requests wait for a slot in order of arrival; one that goes on exactly where its conversation's newest request ended keeps
    that slot and never waits; any other that extends an earlier one is a fork and gets a slot of its own. `release` and
    `abort` take the id of a conversation's newest request, whether that was completed, refused or lost.
    """

    def __init__(self, model_config: Any, config: EngineConfig, *, detokenize: Detokenizer | None = None) -> None:
        """An engine without weights, for the architecture of `model_config`, a `transformers` model config.

        Args:
            detokenize: ids -> text; needed for requests with stop strings only. It is called in the worker's thread.

        Raises:
            ModelError: the architecture, or a feature of it, is not implemented here.
        """
        self._config = config
        self._detokenize = detokenize
        self._decoder = Decoder(
            model_config,
            dtype=config.torch_dtype,
            device=config.torch_device,
            num_slots=config.slots,
            max_length=config.max_length,
        )
        self._weights = PublishedWeights(self._decoder.weights)
        self._worker = Worker(config, self._decoder, self._weights, detokenize)
        end_team()  # of the thread that made the decoder; the worker's is the one that counts from here on

    @classmethod
    def from_directory(
        cls, path: Path, config: EngineConfig, *, version: int = 0, detokenize: Detokenizer | None = None
    ) -> TorchEngine:
        """An engine with the weights of a `transformers` model directory, as policy `version`. Blocks while it reads them.

        Raises:
            ModelError: no such model, its weights are not safetensors or not those of its config, or it is not implemented.
        """
        engine = cls(config_of(path), config, detokenize=detokenize)
        try:
            engine._worker.prove(partial(engine._weights.read, path, version)).result()
        except StropError as error:
            engine._worker.stop()
            if isinstance(error, WeightsNotProven):
                raise ModelError(f"{path}: its weights do not fit its config: {error}") from error
            raise
        return engine

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            is_deterministic=self._worker.is_deterministic,
            can_fork=True,
            has_entropies=True,
            dtype=self._config.torch_dtype,
        )

    @property
    def capacity(self) -> Capacity:
        slots, length = self._config.slots, self._config.max_length
        return Capacity(total_tokens=slots * length, max_request_tokens=length, max_running=slots)

    @property
    def policy_version(self) -> int:
        return self._weights.version

    def named_parameters(self) -> Iterator[NamedTensor]:
        """What the engine samples from, under the names that `transformers` uses. Not to be written to: it is noticed."""
        return self._decoder.weights.named_parameters()

    async def complete(self, request: CompletionRequest) -> Completion:
        """See `InferenceEngine.complete`.

        Raises:
            DeadlineExceeded: not done within `EngineConfig.deadline_s`, the wait for a slot included; it is aborted.
            UserError: a stop string, but the engine has no detokenizer; or ids outside the model's vocabulary.
            StropError: `extends` where the ids differ, an id that is in use, a number out of its range.
        """
        try:
            self._check(request)
        except StropError:
            self._worker.refuse(request)
            raise
        future = self._worker.submit(request)
        try:
            async with asyncio.timeout(self._config.deadline_s):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"request {request.id} was not complete after {self._config.deadline_s} s (engine.deadline_s)."
            ) from error
        finally:
            self._worker.abandon(future)  # nothing to do, unless the caller was cancelled or ran out of time

    async def abort(self, request_id: str) -> None:
        self._worker.discard(request_id)

    async def release(self, request_id: str) -> None:
        self._worker.discard(request_id)

    async def load_weights(self, tensors: AsyncIterator[NamedTensor], *, version: int, checksum: str) -> None:
        """See `InferenceEngine.load_weights`. Conversations lose their slots; requests that arrive meanwhile wait for the end.

        Raises:
            WeightsNotProven: a weight is missing, unknown or of another shape, or the checksum differs. The engine refuses
                to sample until a load succeeds.
            StropError: completions are running or waiting; nothing was changed.
        """
        loader = object()
        try:
            await asyncio.wrap_future(self._worker.begin_load(loader))
            some: list[NamedTensor] = []
            num_bytes = 0
            async for named in tensors:
                some.append(named)
                num_bytes += named[1].nbytes
                if num_bytes >= COPIED_AT_ONCE:
                    await self._copy(some)
                    some, num_bytes = [], 0
            await self._copy(some)
            await asyncio.wrap_future(self._worker.prove(partial(self._weights.prove, version, checksum)))
        finally:
            self._worker.end_load(loader)
            end_team()  # of the event loop's thread, which may have computed since the last publication

    async def _copy(self, tensors: list[NamedTensor]) -> None:
        def copy() -> None:
            for name, tensor in tensors:
                self._weights.copy(name, tensor)

        await asyncio.wrap_future(self._worker.call(copy))

    async def close(self) -> None:
        """End the worker; whatever is outstanding fails with `EngineLost`. Safe to call twice."""
        await asyncio.to_thread(self._worker.stop)

    def _check(self, request: CompletionRequest) -> None:
        check_request(request, max_length=self._config.max_length)
        check_vocabulary(request, self._decoder.architecture.vocab_size)
        if request.stop_strings and self._detokenize is None:
            raise UserError(
                f"request {request.id} has stop strings {request.stop_strings}, but this engine knows ids alone."
                " Give it a detokenizer (TorchEngine(..., detokenize=tokenizer.decode)), or use stop_ids."
            )
