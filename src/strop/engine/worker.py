"""The thread that owns the model, and the mailbox through which others reach it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from strop.engine.batch import Batch, Detokenizer, Job, ResultT, fail, resolve
from strop.engine.config import EngineConfig
from strop.engine.decoder import Decoder
from strop.engine.invariance import invariant_sizes
from strop.engine.memory import give_back_freed_memory
from strop.engine.protocol import CompletionRequest
from strop.engine.publication import PublishedWeights
from strop.engine.sampling import uniforms
from strop.engine.teams import end_team
from strop.errors import DeadlineExceeded, EngineLost, StropError
from strop.types import Completion

_STOP_S = 60.0  # how long a step, or a prefill, may still take when the worker is told to stop


class Worker:
    """Every method without an underscore may be called from any thread; all others run in the worker's own."""

    def __init__(
        self, config: EngineConfig, decoder: Decoder, weights: PublishedWeights, detokenize: Detokenizer | None
    ) -> None:
        self._config, self._decoder, self._weights = config, decoder, weights
        self._batch = Batch(config, decoder, weights, detokenize)
        self._is_calibrated = not config.deterministic
        self._loader: object = None  # whose load of weights is under way

        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None: stop
        self._lock = threading.Lock()  # over the next two
        self._outstanding: set[Future[Any]] = set()
        self._end: EngineLost | None = None  # why there is no worker any more
        self._thread = threading.Thread(target=self._run, name="strop-engine", daemon=True)
        self._thread.start()

    @property
    def is_deterministic(self) -> bool:
        """Asked for, and not found false by measurement when the first weights arrived."""
        return self._config.deterministic and (self._batch.sizes.is_invariant or not self._is_calibrated)

    def submit(self, request: CompletionRequest) -> Future[Completion]:
        """Queue a request. Cancel it by `abandon`, with the future that this returned."""
        drawn = uniforms(request.seed, request.max_tokens)
        job = Job(request=request, future=Future(), uniforms=drawn)
        self._track(job.future)
        self._inbox.put(lambda: self._batch.arrive(job))
        return job.future

    def call(self, function: Callable[[], ResultT]) -> Future[ResultT]:
        """Run `function` in the worker's thread, between two steps; a `StropError` of it reaches the caller alone."""
        future: Future[ResultT] = Future()
        self._track(future)

        def answer() -> None:
            if not future.set_running_or_notify_cancel():
                return  # whoever asked has gone
            try:
                resolve(future, function())
            except StropError as error:
                fail(future, error)

        self._inbox.put(answer)
        return future

    def refuse(self, request: CompletionRequest) -> None:
        """Note that a request was refused before it came here."""
        self._inbox.put(lambda: self._batch.note_refusal(request))

    def discard(self, request_id: str) -> None:
        """Give back what the newest request of a conversation holds: its slot, its place in the queue; cancel it if it runs."""
        self._inbox.put(lambda: self._batch.discard(request_id))

    def abandon(self, future: Future[Completion]) -> None:
        """Discard the request whose future this is, unless it has ended."""
        self._inbox.put(lambda: self._batch.abandon(future))

    def begin_load(self, loader: object) -> Future[None]:
        """Drop all KV and refuse to sample until weights are proven. Fails with `StropError` while completions run or wait."""
        return self.call(partial(self._begin_load, loader))

    def end_load(self, loader: object) -> None:
        """If `loader` began one, let the requests that arrived during a load go on, or be refused if it failed."""
        self._inbox.put(partial(self._end_load, loader))

    def prove(self, prove: Callable[[], None]) -> Future[None]:
        """Run `prove`, which proves the weights, then measure what deterministic mode needs to know of them."""

        def prove_and_calibrate() -> None:
            prove()
            if not self._is_calibrated:
                self._batch.sizes = invariant_sizes(self._decoder)
                give_back_freed_memory()
                self._is_calibrated = True

        return self.call(prove_and_calibrate)

    def stop(self) -> None:
        """End the thread; what is outstanding fails with `EngineLost`. Raises `DeadlineExceeded` when it hangs."""
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
            if self._config.threads is not None:
                torch.set_num_threads(self._config.threads)
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
                self._batch.admit()
                if self._batch.is_running:
                    self._batch.step()

    def _commands(self) -> Iterator[Callable[[], None] | None]:
        """What was asked meanwhile; waits for something while no request runs."""
        if not self._batch.is_running:
            if self._inbox.empty():
                end_team()  # somebody else may want to compute meanwhile: a trainer, another engine
            yield self._inbox.get()
        while not self._inbox.empty():
            yield self._inbox.get()

    def _begin_load(self, loader: object) -> None:
        if self._batch.is_loading:
            raise StropError("weights are already being loaded into this engine; loads come one at a time.")
        if names := self._batch.unfinished:
            raise StropError(
                f"weights cannot be loaded while {len(names)} completions are running or waiting ({', '.join(names[:3])}, ...)."
                " Await or abort them first."
            )
        self._batch.is_loading, self._loader = True, loader
        self._batch.clear()
        self._weights.retract("the last publication did not reach its end")

    def _end_load(self, loader: object) -> None:
        if self._loader is loader:
            self._batch.is_loading, self._loader = False, None
