"""The embedded engine: continuous batching over a fixed number of slots, in one thread that owns the model.

Requests join and leave at every decode step. A conversation keeps its slot, and so its KV cache, while a tool runs. The event
loop only passes requests on and waits.

Deterministic mode (`EngineConfig.deterministic`) makes each token and log-prob independent, bit for bit, of what else is in
the batch: prefill is one conversation at a time in chunks that depend only on that conversation; decode runs with row counts
and KV lengths that were measured, on this machine and model, to give the bits of the largest ones. What a request finds in
the cache is its own history, as long as the conversation that it extends is still held; afterwards its prefix is computed
again, which is as correct but rounds differently.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from strop.engine.config import EngineConfig
from strop.engine.model_directory import config_of
from strop.engine.protocol import (
    COPIED_AT_ONCE,
    Capabilities,
    Capacity,
    CompletionRequest,
    NamedTensor,
    Probe,
    check_request,
    check_vocabulary,
)
from strop.engine.publication import Publication
from strop.engine.torch.batch import Batch, Detokenizer, Job, ResultT, fail, resolve
from strop.engine.torch.cpu.resources import end_team, give_back_freed_memory, use_threads
from strop.engine.torch.decoder import Decoder, invariant_sizes
from strop.engine.torch.sampling import uniforms
from strop.engine.torch.weights import PublishedWeights
from strop.errors import DeadlineExceeded, EngineLost, ModelError, StropError, UserError, WeightsNotProven
from strop.types import Completion

_FEW_WEIGHTS = 2**17  # of a matrix; with fewer, one thread computes and leaves the other cores to tools and the trainer


class TorchEngine:
    """An `InferenceEngine` in this process.

    Requests wait for a slot in order of arrival. A request that continues exactly where its conversation's newest request
    ended keeps the slot and never waits. Any other request that extends an earlier one is a fork and gets its own slot.
    `release` and `abort` take the id of a conversation's newest request that was not refused.
    """

    def __init__(self, model_config: Any, config: EngineConfig, *, detokenize: Detokenizer | None = None) -> None:
        """Create an engine without weights, for the architecture of `model_config`, a `transformers` model config.

        Args:
            detokenize: ids -> text; needed only for requests with stop strings. It is called in the worker's thread.

        Raises:
            ModelError: the architecture or one of its features is not implemented.
        """
        self._config = config
        self._dtype = config.torch_dtype
        self._detokenize = detokenize
        self._is_loading = False
        self._decoder = Decoder(
            model_config,
            dtype=self._dtype,
            device=config.torch_device,
            num_slots=config.slots,
            max_length=config.max_length,
        )
        self._weights = PublishedWeights(self._decoder.weights)
        self._worker = Worker(config, self._decoder, self._weights, detokenize)
        end_team()  # of this thread; from here on the worker's thread computes

    @classmethod
    def from_directory(
        cls, path: Path, config: EngineConfig, *, version: int = 0, detokenize: Detokenizer | None = None
    ) -> TorchEngine:
        """Return an engine with the weights of a `transformers` model directory, as policy `version`. Blocks meanwhile.

        Raises:
            ModelError: no model, weights that are not safetensors or do not fit the config, or an unknown architecture.
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
            entropies="full",
            dtype=self._dtype,
        )

    @property
    def capacity(self) -> Capacity:
        slots, length = self._config.slots, self._config.max_length
        return Capacity(total_tokens=slots * length, max_request_tokens=length, max_running=slots)

    @property
    def policy_version(self) -> int:
        return self._weights.version

    def named_parameters(self) -> Iterator[NamedTensor]:
        """Yield the weights under the names of `transformers`. Do not write to them: the engine then refuses to sample."""
        return self._decoder.weights.named_parameters()

    async def complete(self, request: CompletionRequest) -> Completion:
        """See `InferenceEngine.complete`.

        Raises:
            UserError: a stop string, but the engine has no detokenizer; or ids outside the model's vocabulary.
            StropError: `extends` where the ids differ, an id that is in use, a number out of its range.
        """
        self._check(request)
        caller = None
        if request.probe is not None:
            caller = _Caller(request.probe)
            request = replace(request, probe=caller.probe)
        future = self._worker.submit(request)
        try:
            return await asyncio.wrap_future(future)
        finally:
            if caller is not None:
                caller.has_left = True
            # Nothing to do, unless the caller was cancelled.
            self._worker.tell(partial(self._worker.batch.abandon, future))

    @property
    def num_steps(self) -> int:
        """Steps of the model so far."""
        return self._worker.num_steps

    async def progress(self) -> int:
        return self.num_steps

    async def release(self, request_id: str) -> None:
        self._worker.tell(partial(self._worker.batch.discard, request_id))

    abort = release

    async def load_weights(self, publication: Publication) -> None:
        """See `InferenceEngine.load_weights`. Requests that arrive meanwhile wait for the end.

        Conversations lose their slots, unless the publication keeps requests: then they pause between two steps, compute
        their context again with the new weights, and go on where they were. vLLM does the same (`/pause?mode=keep`).

        Raises:
            WeightsNotProven: a weight is missing, unknown or of another shape, or the checksum differs. The engine refuses
                to sample until a load succeeds, and requests that it kept fail.
            StropError: completions are running or waiting, and the publication does not keep them; nothing was changed.
        """
        if self._is_loading:
            raise StropError("weights are already being loaded into this engine; loads come one at a time.")
        self._is_loading = True
        try:
            begin = partial(self._worker.batch.begin_load, keeps_requests=publication.keeps_requests)
            await asyncio.wrap_future(self._worker.call(begin))
            some: list[NamedTensor] = []
            num_bytes = 0
            async for named in publication.tensors():
                some.append(named)
                num_bytes += named[1].nbytes
                if num_bytes >= COPIED_AT_ONCE:
                    await self._copy(some)
                    some, num_bytes = [], 0
            await self._copy(some)
            prove = partial(self._weights.prove, publication.version, await publication.checksum())
            await asyncio.wrap_future(self._worker.prove(prove))
        finally:
            self._is_loading = False
            self._worker.tell(self._worker.batch.end_load)
            end_team()  # of the event loop's thread, which may have computed since the last publication

    async def _copy(self, tensors: list[NamedTensor]) -> None:
        def copy() -> None:
            for name, tensor in tensors:
                self._weights.copy(name, tensor)

        await asyncio.wrap_future(self._worker.call(copy))

    async def sleep(self) -> None:
        """See `SleepingEngine.sleep`."""
        await asyncio.wrap_future(self._worker.call(self._worker.batch.sleep))

    async def close(self) -> None:
        """End the worker; whatever is outstanding fails with `EngineLost`. Safe to call twice."""
        await asyncio.to_thread(self._worker.stop)

    def _check(self, request: CompletionRequest) -> None:
        check_request(request, max_length=self._config.max_length)
        check_vocabulary(request, self._decoder.architecture.vocab_size)
        if request.stop_strings and self._detokenize is None:
            raise UserError(
                f"request {request.id} has stop strings {request.stop_strings}, but this engine has no detokenizer."
                " Give it a detokenizer (TorchEngine(..., detokenize=tokenizer.decode)), or use stop_ids."
            )


class _Caller:
    """Passes entropies from the worker's thread to the caller's event loop, until `complete` has returned or raised."""

    def __init__(self, probe: Probe) -> None:
        self.has_left = False
        self.probe = Probe(num_tokens=probe.num_tokens, tell=self._send)
        self._loop, self._tell = asyncio.get_running_loop(), probe.tell

    def _send(self, entropies: tuple[float, ...]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and its requests with it
            self._loop.call_soon_threadsafe(self._receive, entropies)

    def _receive(self, entropies: tuple[float, ...]) -> None:
        if not self.has_left:
            self._tell(entropies)


_STOP_S = 60.0  # longest time of the last step after `stop`
_REST_S = 1.0  # without a request until the KV cache is given back: longer than a rollout waits for its next branch


class Worker:
    """Public methods may be called from any thread. Private methods and those of `batch` run in the worker's thread."""

    def __init__(
        self, config: EngineConfig, decoder: Decoder, weights: PublishedWeights, detokenize: Detokenizer | None
    ) -> None:
        self._config, self._decoder, self._weights = config, decoder, weights
        self.batch = Batch(config, decoder, weights, detokenize)
        self.num_steps = 0
        self._is_calibrated = not config.deterministic
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None: stop
        self._lock = threading.Lock()  # over the next two
        self._outstanding: set[Future[Any]] = set()
        self._end: EngineLost | None = None  # why the worker has ended
        self._thread = threading.Thread(target=self._run, name="strop-engine", daemon=True)
        self._thread.start()

    @property
    def is_deterministic(self) -> bool:
        """Whether the recipe asks for it and the measurement with the first weights confirmed it."""
        return self._config.deterministic and (self.batch.sizes.is_invariant or not self._is_calibrated)

    def submit(self, request: CompletionRequest) -> Future[Completion]:
        """Queue a request. Cancel it by `Batch.abandon`, with the future that this returned."""
        first = request.num_before
        drawn = uniforms(request.seed, first + request.max_tokens)[first:]
        job = Job(request=request, future=Future(), uniforms=drawn)
        self._track(job.future)
        self.tell(partial(self.batch.arrive, job))
        return job.future

    def call(self, function: Callable[[], ResultT]) -> Future[ResultT]:
        """Run `function` in the worker's thread between two steps. Only the caller gets its `StropError`."""
        future: Future[ResultT] = Future()
        self._track(future)

        def answer() -> None:
            if not future.set_running_or_notify_cancel():
                return  # the caller was cancelled
            try:
                resolve(future, function())
            except StropError as error:
                fail(future, error)

        self._inbox.put(answer)
        return future

    def tell(self, command: Callable[[], None]) -> None:
        """Run `command`, which does not fail, in the worker's thread between two steps."""
        self._inbox.put(command)

    def prove(self, prove: Callable[[], None]) -> Future[None]:
        """Run `prove`, which proves the weights; after the first weights, measure the sizes for deterministic mode."""

        def prove_and_calibrate() -> None:
            prove()
            if not self._is_calibrated:
                self.batch.sizes = invariant_sizes(self._decoder)
                give_back_freed_memory()
                self._is_calibrated = True

        return self.call(prove_and_calibrate)

    def stop(self) -> None:
        """End the thread. Open requests fail with `EngineLost`. Raises `DeadlineExceeded` if a step hangs."""
        self._inbox.put(None)
        self._thread.join(_STOP_S)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"the engine's worker thread did not end within {_STOP_S} s: a model step hangs.")

    def _track(self, future: Future[Any]) -> None:
        with self._lock:
            if self._end is not None:
                raise EngineLost(str(self._end)) from self._end.__cause__
            self._outstanding.add(future)
        future.add_done_callback(self._outstanding.discard)

    def _run(self) -> None:
        end = EngineLost("the engine was closed.")
        try:
            shape = self._decoder.architecture
            if self._config.threads is not None:
                use_threads(self._config.threads)
            elif shape.hidden_size * max(shape.intermediate_size, shape.vocab_size) < _FEW_WEIGHTS:
                use_threads(1)
            self._serve()
        except BaseException as error:  # noqa: BLE001 - whatever ended this thread is handed to everybody who waits for it
            end = EngineLost(f"the engine's worker died of {type(error).__name__}: {error}")
            end.__cause__ = error
        with self._lock:
            self._end = end
            outstanding = list(self._outstanding)
        for future in outstanding:
            lost = EngineLost(str(end))
            lost.__cause__ = end.__cause__
            fail(future, lost)

    def _serve(self) -> None:
        while True:
            for command in self._commands():
                if command is None:
                    return
                command()
            with torch.inference_mode():
                self.batch.admit()
                if self.batch.is_running:
                    self.num_steps += 1
                    self.batch.step()

    def _commands(self) -> Iterator[Callable[[], None] | None]:
        """Yield the queued commands; wait for one while no request runs."""
        if not self.batch.is_running:
            if self._inbox.empty():
                end_team()  # so that a trainer or another engine can use the cores
            try:
                command = self._inbox.get(timeout=_REST_S)
            except queue.Empty:
                self.batch.rest()
                command = self._inbox.get()
            yield command
        while not self._inbox.empty():
            yield self._inbox.get()
