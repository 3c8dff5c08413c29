"""Tools around other tools: the limits of a recipe, and the control conditions of evaluations."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from strop.config import Config
from strop.deadline import clock_stopped
from strop.errors import ConfigError
from strop.sandbox.protocol import CodeRunner
from strop.tools.protocol import Tool, ToolKind, ToolResult, ToolSpec
from strop.types import ToolOutcome

MaxChars: TypeAlias = Annotated[
    int, Field(ge=64, le=10**9, description="Longest text for the policy; of a longer one head and tail are kept.")
]


class CallLimits(Config):
    """The keys of every kind of tool."""

    description: str = Field(default="", description="What the prompt says of the tool. Default: the tool's own.")
    parameters: Mapping[str, Any] = Field(
        default={}, description="JSON schema of the arguments, as the prompt shows it. Default: the tool's own."
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


class LimitedTool(WrappedTool):
    """Another tool, with the description and the limits that its table in the recipe gives it.

    Of the tools that share `places` only so many calls run at once; the others wait in the order in which they came. The wait
    counts against no limit of a call. A function that runs past its limit in its thread no longer counts.
    """

    def __init__(self, tool: Tool, config: CallLimits, places: asyncio.Semaphore | None = None) -> None:
        super().__init__(tool)
        self._config, self._places = config, places

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(self._tool, "function", type(self._tool))

    @property
    def spec(self) -> ToolSpec:
        own = self._tool.spec
        description, parameters = self._config.description or own.description, self._config.parameters or own.parameters
        return replace(own, description=description, parameters=parameters)

    def around(self, tool: Tool) -> Tool:
        return LimitedTool(tool, self._config, self._places)

    async def call(self, arguments: Mapping[str, object], *, seed: int) -> ToolResult:
        if self._places is None:
            return await super().call(arguments, seed=seed)
        with clock_stopped():
            await self._places.acquire()
        try:
            return await super().call(arguments, seed=seed)
        finally:
            self._places.release()


def limited(tools: Sequence[Tool], config: CallLimits, *, key: str) -> Sequence[Tool]:
    """`tools` with the description and the limits of `config`; together they share its `max_running`.

    Raises:
        ConfigError: it describes one tool, and there are several.
    """
    if not (config.description or config.parameters or config.max_running):
        return tools
    if (config.description or config.parameters) and len(tools) != 1:
        names = ", ".join(tool.spec.name for tool in tools)
        raise ConfigError(f"{key}.description: the table brings several tools ({names}). Give each a table of its own (only).")
    places = None if config.max_running is None else asyncio.Semaphore(config.max_running)
    return [LimitedTool(tool, config, places) for tool in tools]


class NoisyTool(WrappedTool):
    """Replaces every digit in the results of a tool by a random one: the form stays, the content is worthless."""

    async def call(self, arguments: Mapping[str, object], *, seed: int) -> ToolResult:
        result = await super().call(arguments, seed=seed)
        draw = random.Random(seed)
        return replace(result, text=re.sub(r"\d", lambda _: str(draw.randint(0, 9)), result.text))


class AbsentTool(WrappedTool):
    """Answers every call with the error that no tool is available."""

    async def call(self, arguments: Mapping[str, object], *, seed: int) -> ToolResult:
        return ToolResult(outcome=ToolOutcome.ERROR, text="Error: no tool is available.", duration_s=0.0)


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
            tools += limited(opened, kind.config, key=f"tools.{name}") if isinstance(kind.config, CallLimits) else opened
        yield tuple(tools)
