"""The embedded start: the code service of this machine for a program that has an event loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from strop.errors import MachineError
from strop.sandbox.config import SandboxConfig
from strop.sandbox.protocol import (
    CodeService,
    IsolationLevel,
    PairVerdict,
    RunRequest,
    RunResult,
    SessionLimits,
    VerifyRequest,
    demand,
)
from strop.sandbox.service.config import DispatchConfig, RequestLimits
from strop.sandbox.service.dispatcher import Dispatcher
from strop.sandbox.service.local_nodes import LocalNodes


class LocalSandbox(CodeService):
    """A `CodeService` on this machine; use as `async with`, or call `start` and `close`. Belongs to one event loop.

    The supervisor is a process of its own, so that deadlines hold however busy this one is, and it is started again when it
    dies. It ends with this process, whatever ends that.

    Args:
        config: the limits, how many programs run at once, and the least isolation that is accepted.
    """

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self.config = config or SandboxConfig()
        self._dispatcher: Dispatcher | None = None
        self._nodes: LocalNodes | None = None
        self._starting = asyncio.Lock()
        self._is_closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def level(self) -> IsolationLevel:
        """What holds here. Raises `MachineError` before the start."""
        if self._dispatcher is None:
            raise MachineError("the sandbox has not been started")
        return self._dispatcher.level

    async def start(self) -> None:
        """Start the supervisor, which proves its level of isolation first. Safe to call twice.

        Raises:
            UserError: this machine cannot give `config.min_level`; the message says what did not hold.
        """
        await self._service()

    async def run(self, request: RunRequest) -> RunResult:
        demand("the argument of run()", request, RunRequest, hint=', as in run(RunRequest(code="print(1)"))')
        return await (await self._service()).run(request)

    async def verify(self, request: VerifyRequest) -> AsyncIterator[tuple[int, PairVerdict]]:
        hint = ', as in verify(VerifyRequest(pairs=(AnswerPair(gold="1/2", answer="0.5"),)))'
        demand("the argument of verify()", request, VerifyRequest, hint=hint)
        async for verdict in (await self._service()).verify(request):
            yield verdict

    async def open_session(self, limits: SessionLimits) -> str:
        demand("the argument of open_session()", limits, SessionLimits)
        return await (await self._service()).open_session(limits)

    async def fork_session(self, session: str) -> str:
        return await (await self._service()).fork_session(session)

    async def close_session(self, session: str) -> None:
        await (await self._service()).close_session(session)

    async def close(self) -> None:
        self._is_closed = True
        async with self._starting:
            if self._nodes is not None:
                await self._nodes.close()
            if self._dispatcher is not None:
                await self._dispatcher.close()

    async def _service(self) -> Dispatcher:
        async with self._starting:
            if self._is_closed:
                raise MachineError("the sandbox was closed; a call came after that")
            if self._dispatcher is None:
                limits = RequestLimits(max_code_bytes=self.config.max_code_bytes, max_stdin_bytes=self.config.max_stdin_bytes)
                dispatcher = Dispatcher(DispatchConfig(limits=limits))
                nodes = LocalNodes(dispatcher, self.config, ["local"])
                try:
                    await nodes.start()
                except BaseException:
                    await dispatcher.close()
                    raise
                self._dispatcher, self._nodes = dispatcher, nodes
            return self._dispatcher
