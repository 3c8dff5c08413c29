"""Tools around other tools: a limit of calls at once, and the control conditions of evaluations."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from pydantic import Field

from strop.config import Config
from strop.deadline import clock_stopped
from strop.errors import ConfigError
from strop.sandbox.protocol import CodeRunner
from strop.tools.protocol import Tool, ToolKind, ToolResult, ToolSpec
from strop.types import ToolOutcome


class CallLimits(Config):
    """The keys of every kind of tool."""

    description: str = Field(default="", description="What the prompt says of the tool. Default: the tool's own.")
    parameters: Mapping[str, Any] = Field(
        default={}, description="JSON schema of the arguments, as the prompt shows it. Default: the tool's own."
    )
    max_calls: int | None = Field(
        default=None, ge=0, le=10**9, description="Most calls of one rollout; further ones are refused, and it goes on."
    )
    max_running: int | None = Field(
        default=None, ge=1, le=10**9, description="Most calls of all rollouts that run at once; further ones wait."
    )


class WrappedTool(Tool):
    """Another tool, forwarded to; a subclass changes what it needs to."""

    def __init__(self, tool: Tool) -> None:
        self._tool = tool

    @property
    def spec(self) -> ToolSpec:
        return self._tool.spec

    @property
    def longest_call_s(self) -> float:
        return self._tool.longest_call_s

    @property
    def max_calls(self) -> int | None:
        return self._tool.max_calls

    def around(self, tool: Tool) -> Tool:
        """Return this wrapper around another start or fork of its tool."""
        return type(self)(tool)

    async def call(self, arguments: Mapping[str, object], *, seed: int) -> ToolResult:
        return await self._tool.call(arguments, seed=seed)

    async def start(self, *, seed: int) -> Tool:
        return self.around(await self._tool.start(seed=seed))

    async def fork(self) -> Tool:
        return self.around(await self._tool.fork())

    async def close(self) -> None:
        await self._tool.close()


class CappedTool(WrappedTool):
    """Another tool, of which only so many calls run at once; the others wait in the order in which they came.

    The wait counts against no limit of a call. A function that runs past its limit in its thread no longer counts.
    """

    def __init__(self, tool: Tool, places: asyncio.Semaphore) -> None:
        super().__init__(tool)
        self._places = places

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(self._tool, "function", type(self._tool))

    def around(self, tool: Tool) -> Tool:
        return CappedTool(tool, self._places)

    async def call(self, arguments: Mapping[str, object], *, seed: int) -> ToolResult:
        with clock_stopped():
            await self._places.acquire()
        try:
            return await super().call(arguments, seed=seed)
        finally:
            self._places.release()


class LimitedTool(WrappedTool):
    """Another tool, of which a rollout may make only so many calls."""

    def __init__(self, tool: Tool, max_calls: int) -> None:
        super().__init__(tool)
        self._max_calls = max_calls

    @property
    def max_calls(self) -> int | None:
        return self._max_calls

    def around(self, tool: Tool) -> Tool:
        return LimitedTool(tool, self._max_calls)


class DescribedTool(WrappedTool):
    """Another tool that the prompt describes in other words."""

    def __init__(self, tool: Tool, spec: ToolSpec) -> None:
        super().__init__(tool)
        self._spec = spec

    @property
    def spec(self) -> ToolSpec:
        return self._spec

    def around(self, tool: Tool) -> Tool:
        return DescribedTool(tool, self._spec)


def described(tools: Sequence[Tool], config: CallLimits, *, key: str) -> Sequence[Tool]:
    """`tools` with the description and the parameters of `config`. Raises `ConfigError` if there are several for one."""
    if not config.description and not config.parameters:
        return tools
    if len(tools) != 1:
        names = ", ".join(tool.spec.name for tool in tools)
        raise ConfigError(f"{key}.description: the table brings several tools ({names}). Give each a table of its own (only).")
    own = tools[0].spec
    spec = replace(own, description=config.description or own.description, parameters=config.parameters or own.parameters)
    return tools if spec == own else [DescribedTool(tools[0], spec)]


class NoisyTool(WrappedTool):
    """Replaces every digit in the results of a tool by a random one: the form stays, the content is worthless."""

    async def call(self, arguments: Mapping[str, object], *, seed: int) -> ToolResult:
        result = await super().call(arguments, seed=seed)
        draw = random.Random(seed)
        return replace(result, text=re.sub(r"\d", lambda _: str(draw.randint(0, 9)), result.text))


class AbsentTool(Tool):
    """Answers every call with the error that no tool is available."""

    def __init__(self, tool: Tool) -> None:
        self._spec, self._max_calls = tool.spec, tool.max_calls

    @property
    def max_calls(self) -> int | None:
        return self._max_calls

    @property
    def spec(self) -> ToolSpec:
        return self._spec

    async def call(self, arguments: Mapping[str, object], *, seed: int) -> ToolResult:
        return ToolResult(outcome=ToolOutcome.ERROR, text="Error: no tool is available.", duration_s=0.0)


def capped(tools: Sequence[Tool], max_running: int | None) -> Sequence[Tool]:
    """`tools`, of which together at most `max_running` calls run at once."""
    if max_running is None:
        return tools
    places = asyncio.Semaphore(max_running)
    return [CappedTool(tool, places) for tool in tools]


@asynccontextmanager
async def open_tools(kinds: Mapping[str, ToolKind], runner: CodeRunner) -> AsyncIterator[tuple[Tool, ...]]:
    """The tools of `kinds`, in their order, for the time of an `async with`; those of one kind share its `max_running`.

    Args:
        kinds: by the name of their table under `tools`.
        runner: where the Python tool runs programs; it stays open.

    Raises:
        UserError: one of them cannot be opened: a corpus, a library, a key or a server is missing.
    """
    async with AsyncExitStack() as stack:
        tools: list[Tool] = []
        for name, kind in kinds.items():
            opened = await kind.open(stack, runner, key=f"tools.{name}")
            if isinstance(config := kind.config, CallLimits):
                opened = capped(described(opened, config, key=f"tools.{name}"), config.max_running)
                if config.max_calls is not None:
                    opened = [LimitedTool(tool, config.max_calls) for tool in opened]
            tools += opened
        yield tuple(tools)
