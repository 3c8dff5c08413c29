"""The tools that a recipe names, opened together and closed together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import Field

from strop import user_code
from strop.registry import OrOwn
from strop.sandbox.protocol import CodeRunner
from strop.tools.function import FunctionToolConfig
from strop.tools.limits import capped
from strop.tools.mcp import McpToolsConfig
from strop.tools.protocol import Tool, ToolSpec
from strop.tools.python import PythonTool, PythonToolConfig
from strop.tools.search.tool import SearchToolConfig

if TYPE_CHECKING:
    ToolConfig: TypeAlias = PythonToolConfig | SearchToolConfig | FunctionToolConfig | McpToolsConfig | Tool
else:
    _BuiltIn = Annotated[PythonToolConfig | SearchToolConfig | FunctionToolConfig | McpToolsConfig, Field(discriminator="kind")]
    ToolConfig = Annotated[_BuiltIn, OrOwn(Tool)]

TOOL_KINDS = ("python", "search", "function", "mcp")
"""A table that is called like a kind is of that kind, unless it says otherwise."""


@asynccontextmanager
async def open_tools(configs: Mapping[str, ToolConfig], runner: CodeRunner) -> AsyncIterator[tuple[Tool, ...]]:
    """The tools of `configs`, in their order, for the time of an `async with`; an MCP server may give several.

    Args:
        configs: by the name of their table under `tools`.
        runner: where the Python tool runs programs; it stays open.

    Raises:
        UserError: one of them cannot be opened: a corpus, a library, a key or a server is missing.
    """
    async with AsyncExitStack() as stack:
        tools: list[Tool] = []
        for name, config in configs.items():
            opened = await _open(config, runner, stack, key=f"tools.{name}")
            tools += opened if isinstance(config, Tool) else capped(opened, config)
        yield tuple(tools)


async def _open(config: ToolConfig, runner: CodeRunner, stack: AsyncExitStack, *, key: str) -> list[Tool]:
    match config:
        case PythonToolConfig():
            return [PythonTool(runner, config)]
        case SearchToolConfig():
            return [await config.open(stack, key=key)]
        case FunctionToolConfig():
            return [config.open(key=key)]
        case McpToolsConfig():
            return await config.open(stack, key=key)
        case Tool():  # a class of the user's
            if not isinstance(config.spec, ToolSpec):
                remedy = "It must be a strop.ToolSpec"
                raise user_code.returned(type(config), config.spec, remedy, what=f"{key}: {type(config).__qualname__}.spec")
            return [config]
