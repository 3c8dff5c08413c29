"""Control conditions for an evaluation: does the policy really use what its tools say?"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import replace

from strop.tools.protocol import Tool, ToolResult, ToolSpec
from strop.types import ToolOutcome

_DIGIT = re.compile(r"\d")


class NoisyTool(Tool):
    """Another tool whose results have every digit drawn anew: right in form, worthless in content."""

    def __init__(self, tool: Tool) -> None:
        self._tool = tool

    @property
    def spec(self) -> ToolSpec:
        return self._tool.spec

    @property
    def longest_call_s(self) -> float:
        return self._tool.longest_call_s

    async def call(self, arguments: Mapping[str, object], *, seed: int) -> ToolResult:
        result = await self._tool.call(arguments, seed=seed)
        draw = random.Random(seed)
        return replace(result, text=_DIGIT.sub(lambda _: str(draw.randint(0, 9)), result.text))

    async def start(self, *, seed: int) -> Tool:
        return NoisyTool(await self._tool.start(seed=seed))

    async def fork(self) -> Tool:
        return NoisyTool(await self._tool.fork())

    async def close(self) -> None:
        await self._tool.close()


class AbsentTool(Tool):
    """Another tool that answers every call by saying that it is not there."""

    def __init__(self, tool: Tool) -> None:
        self._spec = tool.spec

    @property
    def spec(self) -> ToolSpec:
        return self._spec

    async def call(self, arguments: Mapping[str, object], *, seed: int) -> ToolResult:
        return ToolResult(outcome=ToolOutcome.ERROR, text="Error: no tool is available.", duration_s=0.0)
