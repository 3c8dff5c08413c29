"""The notebook of a rollout: the calls of a stateful Python tool are cells of one sandbox session."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping

from strop.deadline import clock_stopped
from strop.errors import SessionLost
from strop.sandbox.protocol import CodeService, RunOutcome, RunRequest, RunResult, SessionLimits
from strop.sandbox.sandbox import Session
from strop.tools.protocol import Tool, ToolResult, ToolSpec
from strop.tools.python import PythonTool

_LEASE_S = 3_600.0  # without a call, after which a notebook ends
NEW_NOTEBOOK = "[The notebook ended with the call before; this is a new one, without its variables.]"


class PythonNotebook(Tool):
    """The notebook of one rollout: calls are cells of one session, which opens with the first. Calls of a turn run in order.

    A cell that ends its session (`os._exit`, too much memory, no end after its limit) has its own outcome, and the next cell
    runs in a new session, with a line that says so. A session that the sandbox loses breaks the tool: its state is gone, so the
    rollout is played again.
    """

    def __init__(self, tool: PythonTool, service: CodeService, *, seed: int) -> None:
        self._tool, self._service, self._seed = tool, service, seed
        self._session: Session | None = None
        self._may_have_ended = False  # the last cell may have ended its session
        self._turn = asyncio.Lock()  # calls wait in order

    @property
    def spec(self) -> ToolSpec:
        return self._tool.spec

    @property
    def longest_call_s(self) -> float:
        return self._tool.longest_call_s

    async def call(self, arguments: Mapping[str, object], *, seed: int) -> ToolResult:
        """Run one more cell. Raises `ToolBroken` if the session is lost or cannot be opened."""
        with clock_stopped():
            await self._turn.acquire()
        try:
            return await self._tool.answer(arguments, self._run, seed=seed)
        finally:
            self._turn.release()

    async def fork(self) -> Tool:
        """Return a notebook with the same variables and files. Raises `MachineError` if the sandbox cannot copy the session."""
        branch = PythonNotebook(self._tool, self._service, seed=self._seed)
        async with self._turn:
            if self._session is not None:
                try:
                    branch._session = await self._session.fork()
                except SessionLost:
                    if not self._may_have_ended:
                        raise
                    await self.close()  # both start a new session, and their next calls say so
            branch._may_have_ended = self._may_have_ended
        return branch

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _run(self, request: RunRequest) -> RunResult:
        is_new = self._session is None and self._may_have_ended
        if self._session is None:
            limits = SessionLimits(memory_mib=self._tool.config.memory_mib, seed=self._seed, lease_s=_LEASE_S)
            self._session = await Session.open(self._service, limits)
        try:
            result = await self._session.run(request)
        except SessionLost:
            if is_new or not self._may_have_ended:
                raise
            await self.close()
            return await self._run(request)
        left = result.outcome is RunOutcome.ERROR and result.exit_code is not None  # by an exit
        self._may_have_ended = left or result.outcome in (RunOutcome.TIMEOUT, RunOutcome.KILLED)
        return dataclasses.replace(result, text=f"{NEW_NOTEBOOK}\n{result.text}") if is_new else result
