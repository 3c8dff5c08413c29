"""How many calls of a tool run at once, whatever the tool."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from pydantic import Field

from strop.config import Config
from strop.deadline import clock_stopped
from strop.tools.protocol import Tool, ToolResult, ToolSpec


class CallLimits(Config):
    """What every kind of tool may say. How long a call may take is each kind's own."""

    max_running: int | None = Field(default=None, ge=1)  # calls of all rollouts at once; further ones wait


class CappedTool(Tool):
    """Another tool, of which so many calls run at once; the others wait in the order in which they came.

    The wait counts against no limit of a call: whoever is waited for has a deadline.
    """

    def __init__(self, tool: Tool, gate: asyncio.Semaphore) -> None:
        self._tool = tool
        self._gate = gate

    @property
    def spec(self) -> ToolSpec:
        return self._tool.spec

    @property
    def longest_call_s(self) -> float:
        return self._tool.longest_call_s

    async def call(self, arguments: Mapping[str, object], *, seed: int) -> ToolResult:
        with clock_stopped():
            await self._gate.acquire()
        try:
            return await self._tool.call(arguments, seed=seed)
        finally:
            self._gate.release()

    async def start(self, *, seed: int) -> Tool:
        return CappedTool(await self._tool.start(seed=seed), self._gate)

    async def fork(self) -> Tool:
        return CappedTool(await self._tool.fork(), self._gate)

    async def close(self) -> None:
        await self._tool.close()


def capped(tools: Sequence[Tool], limits: CallLimits) -> list[Tool]:
    """`tools` under one `limits.max_running` that they share."""
    if limits.max_running is None:
        return list(tools)
    gate = asyncio.Semaphore(limits.max_running)
    return [CappedTool(tool, gate) for tool in tools]
