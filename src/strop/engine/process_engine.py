"""The embedded engine in a process of its own: several of them share a machine, and one that dies takes nobody along.

The client only sends and waits. What the process says is checked before anybody sees it, and whatever shows that it cannot be
trusted any more (it died, fell silent, sent garbage, ran out of memory) ends it, and with it every request, by `EngineLost`.
A slow request is another matter: the process answers pings from a thread that computes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from strop.engine.config import EngineConfig
from strop.engine.processes.messages import (
    FROM_CHILD,
    TO_CHILD,
    Abandon,
    Abort,
    BeginLoad,
    BreakOff,
    Cancelled,
    Complete,
    Completed,
    Failed,
    FromChild,
    Garbled,
    Hello,
    Load,
    Loaded,
    Ping,
    Pong,
    Ready,
    Release,
    ToChild,
    read_message,
    to_frame,
)
from strop.engine.processes.nursery import EngineNursery, ForkedProcess
from strop.engine.protocol import Capabilities, Capacity, CompletionRequest, NamedTensor
from strop.engine.requests import check_completion
from strop.errors import DeadlineExceeded, EngineLost, StropError
from strop.types import Completion

AnswerT = TypeVar("AnswerT", Hello, Completed, Ready, Loaded)

_OPEN_S = 600.0  # to read a model's weights from a slow disk, and measure what determinism needs
_PING_S = 1.0
_SILENT_PINGS = 20  # unanswered, before the process counts as hanging
_END_S = 2.0  # from the end of the link to the news of the process's end


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """What was asked under one number. It stays until its answer comes, also when nobody waits for that any more."""

    kind: type[FromChild]  # of the answer
    answer: asyncio.Future[Any]
    request: CompletionRequest | None = None
    version: int | None = None  # that is to be loaded


class ProcessEngine:
    """An `InferenceEngine` whose `TorchEngine` lives in a child process; its semantics are those of `TorchEngine`.

    Anything that the process does wrong is its end: it is killed, and every request, outstanding or later, raises `EngineLost`
    with the engine's name, its process id and the reason.
    """

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        nursery: EngineNursery,
        process: ForkedProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        owns_nursery: bool,
        silent_pings: int,
    ) -> None:
        self.name = name
        self._config, self._nursery, self._process = config, nursery, process
        self._reader, self._writer = reader, writer
        self._owns_nursery, self._silent_pings = owns_nursery, silent_pings
        self._hello: Hello | None = None
        self._policy_version, self._is_deterministic = -1, False
        self._num_asked = 0
        self._questions: dict[int, _Question] = {}  # by number
        self._has_spoken = True  # since the last ping
        self._end: EngineLost | None = None
        self._watching: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(
        cls,
        model_directory: Path,
        config: EngineConfig,
        *,
        name: str,
        log: Path,
        version: int | None = 0,
        nursery: EngineNursery | None = None,
        environment: Mapping[str, str] | None = None,
        silent_pings: int = _SILENT_PINGS,
    ) -> Self:
        """An engine with the weights of a `transformers` model directory.

        Args:
            name: for messages.
            log: what the process prints is appended here.
            version: of the directory's weights; None: they are not read, and the engine waits for `load_weights`.
            nursery: forks the process, in milliseconds, and shares publications among its engines. Without one the engine
                starts its own, which imports torch first.
            environment: of the process, beside this one's: CUDA_VISIBLE_DEVICES to give each engine a device.
            silent_pings: how many pings, one a second, may stay without an answer before the engine counts as lost.

        Raises:
            ModelError: no such model, its weights are not safetensors or not those of its config, or it is not implemented.
            EngineLost: the process did not start.
        """
        own = None if nursery is not None else await EngineNursery.start(log=log)
        try:
            place = nursery or own
            assert place is not None
            order = {
                "model": str(model_directory.absolute()),
                "config": config.model_dump(mode="json"),
                "version": version,
                "environment": dict(environment or {}),
            }
            ours, theirs = socket.socketpair()
            with theirs:
                process = await place.fork(order, theirs, log)
            reader, writer = await asyncio.open_connection(sock=ours)
            engine = cls(name, config, place, process, reader, writer, owns_nursery=own is not None, silent_pings=silent_pings)
        except BaseException:
            if own is not None:
                await own.close()
            raise
        try:
            await engine._open()
        except BaseException:
            await engine.close()
            raise
        return engine

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it was neither lost nor closed."""
        return self._end is None

    @property
    def capabilities(self) -> Capabilities:
        hello = self._said
        return Capabilities(
            is_deterministic=self._is_deterministic,
            can_fork=hello.can_fork,
            has_entropies=hello.has_entropies,
            dtype=torch.float32 if hello.dtype == "float32" else torch.bfloat16,
        )

    @property
    def capacity(self) -> Capacity:
        hello = self._said
        return Capacity(
            total_tokens=hello.total_tokens, max_request_tokens=hello.max_request_tokens, max_running=hello.max_running
        )

    @property
    def vocab_size(self) -> int:
        return self._said.vocab_size

    @property
    def policy_version(self) -> int:
        return self._policy_version

    async def complete(self, request: CompletionRequest) -> Completion:
        """See `TorchEngine.complete`, which this equals in all that it returns and raises."""
        number = self._next_number()
        try:
            async with asyncio.timeout(self._config.deadline_s):
                completed = await self._ask(Complete(number=number, request=request), Completed, request=request)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"request {request.id} was not complete after {self._config.deadline_s} s (engine.deadline_s)."
            ) from error
        finally:
            if number in self._questions:  # the caller was cancelled or ran out of time
                self._send(Abandon(number=number))
        return completed.completion

    async def abort(self, request_id: str) -> None:
        self._send(Abort(request_id=request_id))

    async def release(self, request_id: str) -> None:
        self._send(Release(request_id=request_id))

    async def load_weights(self, tensors: AsyncIterator[NamedTensor], *, version: int, checksum: str) -> None:
        """See `TorchEngine.load_weights`. The process proves what it holds against `checksum`."""
        begun = self._next_number()
        is_given_up = True
        try:
            await self._ask(BeginLoad(number=begun, version=version, checksum=checksum), Ready)
            weights = await self._nursery.weights.take(tensors, checksum=checksum)
            is_given_up = False
        finally:
            if is_given_up:
                self._send(BreakOff(begun=begun))
        # The process reads shared memory now; to leave that under it would kill it, whoever is cancelled here.
        order = Load(number=self._next_number(), begun=begun, weights=weights)
        await asyncio.shield(self._start_task(self._load(order, version)))

    async def close(self) -> None:
        """End the process; whatever is outstanding fails with `EngineLost`. Safe to call twice."""
        self._lose("the engine was closed.")
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._writer.close()
        if self._owns_nursery:
            await self._nursery.close()

    async def _open(self) -> None:
        """Raises what kept the process from opening its engine."""
        hello = self._expect(0, Hello)
        self._start_task(self._listen())
        try:
            async with asyncio.timeout(_OPEN_S):
                self._hello = await hello
        except TimeoutError as error:
            raise EngineLost(f"{self._title} was not open after {_OPEN_S:g} s.") from error
        self._policy_version, self._is_deterministic = self._hello.policy_version, self._hello.is_deterministic
        self._watching = self._start_task(self._watch())

    @property
    def _said(self) -> Hello:
        assert self._hello is not None  # `start` waits for it
        return self._hello

    @property
    def _title(self) -> str:
        return f"engine {self.name} (pid {self.pid})"

    async def _load(self, order: Load, version: int) -> None:
        try:
            async with asyncio.timeout(self._config.deadline_s):
                await self._ask(order, Loaded, version=version)
        except TimeoutError as error:
            self._lose(f"{self._title} hangs: it did not load weights within {self._config.deadline_s} s (engine.deadline_s).")
            raise self._lost() from error
        finally:
            self._nursery.weights.leave()

    def _next_number(self) -> int:
        self._num_asked += 1
        return self._num_asked

    async def _ask(
        self,
        order: Complete | BeginLoad | Load,
        kind: type[AnswerT],
        *,
        request: CompletionRequest | None = None,
        version: int | None = None,
    ) -> AnswerT:
        """Send what has an answer, and wait for that. Raises what the process raised, or `EngineLost`."""
        if self._end is not None:
            raise self._lost()
        answer = self._expect(order.number, kind, request=request, version=version)
        self._send(order)
        return await answer

    def _expect(
        self, number: int, kind: type[AnswerT], *, request: CompletionRequest | None = None, version: int | None = None
    ) -> asyncio.Future[AnswerT]:
        answer: asyncio.Future[AnswerT] = asyncio.get_running_loop().create_future()
        self._questions[number] = _Question(kind=kind, answer=answer, request=request, version=version)
        return answer

    def _send(self, message: ToChild) -> None:
        if self._end is None:
            self._writer.write(to_frame(TO_CHILD, message))

    async def _listen(self) -> None:
        try:
            while True:
                message = await read_message(FROM_CHILD, self._reader)
                self._has_spoken = True
                self._hear(message)
        except Garbled as error:
            self._lose(f"{self._title} answered garbage: {error}. {self._process.last_words}")
        except EngineLost as error:
            self._lose(f"{self._title} is lost: {error}")
        except EOFError:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.ended.wait(), _END_S)
            self._lose(f"{self._title} {self._process.end or 'hung up'}. {self._process.last_words}")

    def _hear(self, message: FromChild) -> None:
        """Raises `Garbled` or `EngineLost` when the process cannot be trusted any more."""
        if isinstance(message, Pong):
            return
        number = 0 if isinstance(message, Hello) else message.number
        question = self._questions.get(number)
        if question is None:
            raise Garbled(f"an answer ({message.kind}) to number {number}, which was not asked")
        try:
            self._settle(question, message)
        except StropError as error:
            if type(error) is EngineLost:  # `WeightsNotProven` is one that the engine survives
                raise
            _end_with(question.answer, error)
        del self._questions[number]

    def _settle(self, question: _Question, message: FromChild) -> None:
        """Raises what the answer says, or what is wrong with it."""
        if isinstance(message, Failed):
            raise message.as_error()
        if isinstance(message, Cancelled) and question.kind is Completed:
            question.answer.cancel()
            return
        if not isinstance(message, question.kind):
            raise Garbled(f"{message.kind} where it was asked for {question.kind.__name__}")
        if isinstance(message, Completed) and question.request is not None:
            vocab_size, version = self._said.vocab_size, self._policy_version
            check_completion(question.request, message.completion, vocab_size=vocab_size, policy_version=version)
        if isinstance(message, Loaded):
            if message.policy_version != question.version:
                raise EngineLost(
                    f"it says that it holds version {message.policy_version} after {question.version} was published."
                )
            self._policy_version, self._is_deterministic = message.policy_version, message.is_deterministic
        if not question.answer.done():
            question.answer.set_result(message)

    async def _watch(self) -> None:
        """Pings are counted, not timed: when this process itself was held up, its engines are not to blame."""
        num_silent = 0
        while num_silent < self._silent_pings:
            self._has_spoken = False
            self._send(Ping())
            await asyncio.sleep(_PING_S)
            num_silent = 0 if self._has_spoken else num_silent + 1
        state = f" ({state})" if (state := self._process.state) else ""
        self._lose(f"{self._title} hangs: it answered none of {num_silent} pings, one every {_PING_S:g} s{state}.")

    def _lose(self, why: str) -> None:
        """The first reason counts."""
        if self._end is not None:
            return
        self._end = EngineLost(why.strip())
        if self._watching is not None:
            self._watching.cancel()
        for question in self._questions.values():
            _end_with(question.answer, self._lost())
        self._questions.clear()
        self._start_task(self._process.kill())

    def _lost(self) -> EngineLost:
        return EngineLost(str(self._end))

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # of a load whose caller has gone: nobody else would look at it


def _end_with(answer: asyncio.Future[Any], error: StropError) -> None:
    if not answer.done():
        answer.set_exception(error)
