"""A session as an object: a notebook whose cells run one after the other, copied where a conversation branches."""

from __future__ import annotations

import dataclasses
from types import TracebackType
from typing import Self

from strop.sandbox.protocol import CodeService, RunRequest, RunResult, SessionLimits, demand


class Session:
    """State that lasts from cell to cell, errors included; use as `async with`, or call `close`.

    async with await Session.open(service) as session:
        await session.run(RunRequest(code="x = 1"))
        branch = await session.fork()  # x is 1 in both, and from here on each has its own
    """

    def __init__(self, service: CodeService, name: str) -> None:
        self._service = service
        self.name = name

    @classmethod
    async def open(cls, service: CodeService, limits: SessionLimits | None = None) -> Self:
        return cls(service, await service.open_session(limits or SessionLimits()))

    async def run(self, cell: RunRequest) -> RunResult:
        """Run one more cell. Raises `SessionLost` when the session ended before it: no cell is ever run twice."""
        demand("the argument of run()", cell, RunRequest, hint=', as in run(RunRequest(code="x = 1"))')
        return await self._service.run(dataclasses.replace(cell, session=self.name))

    async def fork(self) -> Self:
        """A copy of its state as it is now. Raises `SessionLost`."""
        return type(self)(self._service, await self._service.fork_session(self.name))

    async def close(self) -> None:
        """Safe to call twice."""
        await self._service.close_session(self.name)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
