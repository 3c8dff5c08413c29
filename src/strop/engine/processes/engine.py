"""The embedded engine in a separate process: several share a machine, and the failure of one does not end the others.

The client only sends and waits. What the process says is checked before anybody sees it, and whatever shows that it cannot be
trusted any more (it died, fell silent, sent garbage, ran out of memory) ends it, and with it every request, by `EngineLost`.
A slow request is another matter: the process answers pings from a thread that computes nothing.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import torch

from strop.engine.config import EngineConfig
from strop.engine.processes.fork_server import EngineForkServer, ForkedProcess, enter_shared_fork_server
from strop.engine.processes.link import (
    Abandon,
    Abort,
    Complete,
    Completed,
    FromChild,
    Hello,
    Link,
    Load,
    Loaded,
    Order,
    Release,
)
from strop.engine.protocol import Capabilities, Capacity, CompletionRequest, Probe, check_completion
from strop.engine.publication import Publication
from strop.errors import EngineLost, WeightsNotProven
from strop.types import Completion

_OPEN_S = 600.0  # to read a model's weights from a slow disk, and measure what determinism needs
_SILENT_PINGS = 20


class ProcessEngine:
    """An `InferenceEngine` whose `TorchEngine` lives in a child process; its semantics are those of `TorchEngine`.

    Anything that the process does wrong is its end: it is killed, and every request, outstanding or later, raises `EngineLost`
    with the engine's name, its process id and the reason.
    """

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        fork_server: EngineForkServer,
        process: ForkedProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        silent_pings: int,
    ) -> None:
        """Of a process that was just forked; `start` is what others call."""
        self.name = name
        self._config, self._fork_server, self._process = config, fork_server, process
        self._link = Link(name, process, reader, writer, check=self._check, silent_pings=silent_pings)
        self._has_left = False  # the fork_server
        self._hello: Hello | None = None
        self._policy_version, self._is_deterministic = -1, False
        self._doubt = ""  # empty: what the process itself says of its weights counts

    @classmethod
    async def start(
        cls,
        model_directory: Path,
        config: EngineConfig,
        *,
        name: str,
        log: Path,
        version: int | None = 0,
        fork_server: EngineForkServer | None = None,
        environment: Mapping[str, str] | None = None,
        silent_pings: int = _SILENT_PINGS,
    ) -> Self:
        """An engine with the weights of a `transformers` model directory, whose tokenizer it uses for stop strings.

        Args:
            name: for messages.
            log: what the process prints is appended here.
            version: of the directory's weights; None: they are not read, and the engine waits for `load_weights`.
            fork_server: forks the process in milliseconds. By default all engines
                of this event loop share one; the first of them waits until it has imported torch.
            environment: variables added to the process's environment, such as CUDA_VISIBLE_DEVICES.
            silent_pings: how many pings, one a second, may stay without an answer before the engine counts as lost.

        Raises:
            ModelError: no such model, its weights are not safetensors or not those of its config, or it is not implemented.
            EngineLost: the process did not start.
        """
        if fork_server is not None:
            fork_server.enter()
        place = fork_server or await enter_shared_fork_server(log)
        order = {
            "model": str(model_directory.absolute()),
            "config": config.model_dump(mode="json"),
            "version": version,
            "environment": dict(environment or {}),
        }
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await place.fork(order, theirs, log)
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            await place.leave()
            raise
        engine = cls(name, config, place, process, reader, writer, silent_pings=silent_pings)
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
        return self._link.is_alive

    @property
    def capabilities(self) -> Capabilities:
        hello = self._said
        return Capabilities(
            is_deterministic=self._is_deterministic,
            can_fork=hello.can_fork,
            entropies=hello.entropies,
            dtype=torch.float32 if hello.dtype == "float32" else torch.bfloat16,
            can_probe=True,
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

    async def complete(self, request: CompletionRequest, *, probe: Probe | None = None) -> Completion:
        """See `TorchEngine.complete`, which this equals in all that it returns and raises."""
        if self._doubt:
            raise WeightsNotProven(f"{self._doubt}. Publish weights to the engine again before sampling from it.")
        number = self._link.next_number()
        try:
            order = Complete(number=number, request=request, probe_tokens=probe.num_tokens if probe is not None else 0)
            completed = await self._link.ask(order, Completed, probe)
        finally:
            if self._link.is_open_question(number):  # the caller was cancelled
                self._link.tell(Abandon(number=number))
        return completed.completion

    async def progress(self) -> int:
        return self._link.progress

    async def abort(self, request_id: str) -> None:
        self._link.tell(Abort(request_id=request_id))

    async def release(self, request_id: str) -> None:
        self._link.tell(Release(request_id=request_id))

    async def load_weights(self, publication: Publication) -> None:
        """See `TorchEngine.load_weights`. The process reads files, and proves what it holds.

        A load that does not end within `EngineConfig.stall_timeout_s` is the end of the engine.
        """
        self._doubt = f"the last publication (version {publication.version}) was not completed"
        directory, checksum = await publication.files(), await publication.checksum()
        self._doubt = ""
        order = Load(number=self._link.next_number(), directory=str(directory), version=publication.version, checksum=checksum)
        try:
            async with asyncio.timeout(self._config.stall_timeout_s):
                await self._link.ask(order, Loaded)
        except TimeoutError as error:
            raise self._link.lose(
                f"{self._link.title} hangs: it did not load weights within {self._config.stall_timeout_s} s"
                " (engine.stall_timeout_s)."
            ) from error

    async def close(self) -> None:
        """End the process; whatever is outstanding fails with `EngineLost`. Safe to call twice."""
        await self._link.close("the engine was closed.")
        if not self._has_left:
            self._has_left = True
            await self._fork_server.leave()

    async def _open(self) -> None:
        """Raises what kept the process from opening its engine."""
        try:
            async with asyncio.timeout(_OPEN_S):
                self._hello = await self._link.open()
        except TimeoutError as error:
            raise EngineLost(f"{self._link.title} was not open after {_OPEN_S:g} s.") from error
        self._policy_version, self._is_deterministic = self._hello.policy_version, self._hello.is_deterministic

    @property
    def _said(self) -> Hello:
        assert self._hello is not None  # `start` waits for it
        return self._hello

    def _check(self, order: Order, answer: FromChild) -> None:
        """Looks at an answer as it arrives, because the next one may belong to other weights. Raises `EngineLost`."""
        if isinstance(order, Complete) and isinstance(answer, Completed):
            vocab_size, version = self._said.vocab_size, self._policy_version
            check_completion(order.request, answer.completion, vocab_size=vocab_size, policy_version=version)
        if isinstance(order, Load) and isinstance(answer, Loaded):
            if answer.policy_version != order.version:
                raise EngineLost(f"it says that it holds version {answer.policy_version} after {order.version} was published.")
            self._policy_version, self._is_deterministic = answer.policy_version, answer.is_deterministic
