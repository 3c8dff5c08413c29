"""The tools of MCP servers: a program that is started here and speaks over its stdin and stdout, or a server at an address.

One connection serves all rollouts. A task of its own holds it, because the library must close it in the task that opened it. A
lost connection is opened again, with a new process if the server is a program.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Self, TextIO, cast

import httpx2
from pydantic import Field, ValidationError, model_validator
from pydantic_core import to_json

from strop.errors import MachineError, ToolBroken, UserError
from strop.sandbox.protocol import CodeRunner
from strop.tools.function import parameters_schema
from strop.tools.limits import CallLimits, MaxChars
from strop.tools.protocol import TimedTool, Tool, ToolKind, ToolSpec
from strop.tools.python import shorten
from strop.types import ToolOutcome

if TYPE_CHECKING:
    from mcp import Client, MCPError
    from mcp.types import CallToolResult
    from mcp.types import Tool as ListedTool

logger = logging.getLogger(__name__)

_ALIVE_S = 5.0  # a server that does not list its tools in this time is lost
_FAILED_STATUS = "Server returned an error response"  # the library's message for most error statuses
_START_S = 30.0  # for a connection, and for a list of the tools
_PAUSES_S = (0.0, 0.0, 1.0, 2.0)  # before each try of a call whose server was lost; a server takes a while to restart
_CLOSE_S = 10.0  # for closing a connection; before that the library kills a program that does not end by itself


class Mcp(ToolKind):
    """The tools of an MCP server, under the names that the server gives them; needs `strop[mcp]`."""

    class Config(CallLimits):
        """The server, and limits of calls."""

        command: tuple[str, ...] = Field(
            default=(), description="A program that speaks MCP on stdin and stdout, and its arguments."
        )
        env: Mapping[str, str] = Field(default={}, description="Environment of the program, beyond PATH, HOME and the like.")
        url: str | None = Field(default=None, description="Address of a server, as in http://127.0.0.1:8000/mcp.")
        headers: Mapping[str, str] = Field(default={}, description="Headers of every request; `{key}` is filled in.")
        key_env: str | None = Field(default=None, description="Environment variable with the key.")
        only: tuple[str, ...] = Field(default=(), description="Names of the tools to use; by default all of the server.")
        prefix: str = Field(default="", description="Put before each name, if two servers use the same one.")
        wall_s: float = Field(default=30.0, gt=0, le=86_400, description="Time limit of one call.")
        max_chars: MaxChars = 4_096

        @model_validator(mode="after")
        def _is_one_server(self) -> Self:
            if bool(self.command) == (self.url is not None):
                raise ValueError('give either the command of an MCP server, as in command = ["python", "server.py"], or a url.')
            return self

        @property
        def server(self) -> str:
            """The server, for messages."""
            return self.url if self.url is not None else " ".join(self.command)

    config: Config

    async def open(self, stack: AsyncExitStack, runner: CodeRunner, *, key: str) -> list[Tool]:
        """Connect and list the tools. A server that cannot be reached, or lacks a tool of `only`, is a `UserError`."""
        server = McpServer(self.config, key=key)
        stack.push_async_callback(server.close)
        return list(await server.tools())


class McpServer:
    """A server, connected again when it is lost. Use from one event loop; `close` ends its program."""

    def __init__(self, config: Mcp.Config, *, key: str) -> None:
        if find_spec("mcp") is None:
            raise UserError("MCP servers need the library mcp: pip install 'strop[mcp]'.")
        self.config = config
        self._secret = "" if config.key_env is None else os.environ.get(config.key_env, "")
        if config.key_env is not None and not self._secret:
            raise UserError(f"{key}: the environment variable {config.key_env} is not set. Set it, or change key_env.")
        self._key = key
        self._connection: _Connection | None = None
        self._connecting = asyncio.Lock()

    async def tools(self) -> list[McpTool]:
        """The tools of the server, in its order. Raises `UserError` as `Mcp.open` does."""
        try:
            listed = await self._listed(await self._connected())
        except MachineError as error:
            raise UserError(f"{self._key}: {error}") from error
        names = [each.name for each in listed]
        missing = [name for name in self.config.only if name not in names]
        if missing or not listed:
            asked = f"no tool {missing[0]!r}" if missing else "no tool at all"
            raise UserError(f"{self._key}: the MCP server has {asked}; it offers {', '.join(names) or 'none'}.")
        return [
            McpTool(self, each.name, _spec(each, self.config.prefix))
            for each in listed
            if not self.config.only or each.name in self.config.only
        ]

    async def call(self, name: str, arguments: Mapping[str, object]) -> tuple[ToolOutcome, str]:
        """Call a tool; if the server is lost during the call, call it again on a new connection.

        Raises:
            ToolBroken: the server was lost in every try.
        """
        fault: Exception | None = None
        for pause_s in _PAUSES_S:
            await asyncio.sleep(pause_s)
            try:
                return await self._call_on(await self._connected(), name, arguments)
            except MachineError as error:
                fault = error
                logger.warning("%s: %s", self._key, fault)
        raise ToolBroken(f"{self._key}: failed {len(_PAUSES_S)} times in a row, last: {fault}") from fault

    async def close(self) -> None:
        """Safe to call twice."""
        if self._connection is not None:
            await self._drop(self._connection)

    async def _listed(self, connection: _Connection) -> list[ListedTool]:
        """Every page of the server's list. Raises `MachineError` if it does not come in time."""
        listed: list[ListedTool] = []
        limit = asyncio.timeout(_START_S)
        try:
            async with limit:
                page = await connection.client.list_tools()
                while True:
                    listed += page.tools
                    if page.next_cursor is None:
                        return listed
                    page = await connection.client.list_tools(cursor=page.next_cursor)
        except Exception as error:
            late = limit.expired() and isinstance(error, TimeoutError)
            fault = f"no list within {_START_S:g} s" if late else _innermost(error)
            words = connection.last_words()
            raise MachineError(f"the MCP server {self.config.server} does not list its tools: {fault}{words}") from error

    async def _call_on(self, connection: _Connection, name: str, arguments: Mapping[str, object]) -> tuple[ToolOutcome, str]:
        """Raises `MachineError` if there was no answer; then the connection is closed, unless it is alive."""
        from mcp import MCPError
        from mcp.types import INVALID_PARAMS

        limit = asyncio.timeout(self.config.wall_s)
        try:
            async with limit:
                return _read(await connection.client.call_tool(name, dict(arguments)))
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                return ToolOutcome.WRONG_ARGUMENTS, error.message
            fault = f"{type(error).__name__}: {error.message}"
            if await connection.is_alive():
                if not self._is_cut_off(error):
                    return ToolOutcome.ERROR, error.message or f"Error {error.code}."
                raise MachineError(f"{self._lost(name)}: {fault}") from error  # other calls still use the connection
        except TimeoutError:
            if limit.expired() and await connection.is_alive():  # only the call is slow
                return ToolOutcome.TIMEOUT, f"{name} gave no answer within {self.config.wall_s:g} s."
            fault = f"it lists no tools within {_ALIVE_S:g} s, after a call of {self.config.wall_s:g} s"
        except (ValidationError, RuntimeError) as error:  # the answer is no result, or differs from its schema
            if await connection.is_alive():
                return ToolOutcome.ERROR, f"The answer of {name} is invalid: {_innermost(error).splitlines()[0]}"
            fault = _innermost(error)
        except Exception as error:  # noqa: BLE001 - the errors of the transport are not documented
            fault = f"{type(error).__name__}: {error}"
        words = connection.last_words()
        await self._drop(connection)
        raise MachineError(f"{self._lost(name)}: {fault}{words}")

    def _lost(self, name: str) -> str:
        return f"the MCP server {self.config.server} was lost during a call of {name}"

    def _is_cut_off(self, error: MCPError) -> bool:
        """Whether HTTP lost the answer, with the server alive or not: the stream ended early, or a proxy answered 5xx."""
        from mcp.types import CONNECTION_CLOSED

        return self.config.url is not None and (error.code == CONNECTION_CLOSED or error.message == _FAILED_STATUS)

    async def _connected(self) -> _Connection:
        async with self._connecting:
            if self._connection is not None and self._connection.is_lost:
                await self._drop(self._connection)
            if self._connection is None:
                self._connection = await _Connection.open(self.config, secret=self._secret)
            return self._connection

    async def _drop(self, connection: _Connection) -> None:
        if self._connection is connection:
            self._connection = None
        await connection.close()


class _Connection:
    """A task that holds the library's client open until `close`, or until the server is lost."""

    def __init__(self, config: Mcp.Config, *, secret: str) -> None:
        self._config, self._secret = config, secret
        self._stop = asyncio.Event()
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._log: TextIO = cast("TextIO", tempfile.TemporaryFile("w+", errors="replace"))  # noqa: SIM115
        self._holder = asyncio.create_task(self._hold())

    @classmethod
    async def open(cls, config: Mcp.Config, *, secret: str) -> Self:
        """Raises `MachineError` when the server does not answer in time."""
        connection = cls(config, secret=secret)
        try:
            async with asyncio.timeout(_START_S):
                await asyncio.shield(connection._ready)
        except BaseException as error:
            words = connection.last_words()
            await connection.close()
            if not isinstance(error, Exception):
                raise
            fault = f"no answer within {_START_S:g} s" if isinstance(error, TimeoutError) else _innermost(error)
            raise MachineError(f"the MCP server {config.server} cannot be reached: {fault}{words}") from error
        return connection

    @property
    def client(self) -> Client:
        return self._ready.result()

    @property
    def is_lost(self) -> bool:
        return self._holder.done()

    async def is_alive(self) -> bool:
        """Whether the server still lists its tools."""
        try:
            async with asyncio.timeout(_ALIVE_S):
                await self.client.list_tools(cache_mode="bypass")
        except Exception:  # noqa: BLE001 - any error means no
            return False
        return True

    def last_words(self) -> str:
        """The end of the program's stderr, for a message; empty for a server at an address."""
        if self._log.closed:
            return ""
        self._log.seek(0)
        lines = " ".join(self._log.read()[-300:].split())
        return f". It printed: {lines}" if lines else ""

    async def close(self) -> None:
        """Safe to call twice. A program has ended when this returns."""
        self._stop.set()
        if not self._ready.done():
            self._holder.cancel()
        _, running = await asyncio.wait([self._holder], timeout=_CLOSE_S)
        for each in running:
            each.cancel()
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # or asyncio logs that it was never retrieved
        self._log.close()

    async def _hold(self) -> None:
        from mcp import Client

        try:
            async with _transport(self._config, self._secret, self._log) as transport, Client(transport) as client:
                self._ready.set_result(client)
                await self._stop.wait()
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error if isinstance(error, Exception) else MachineError("the attempt was cancelled"))
            if not isinstance(error, Exception):
                raise
            logger.info("the MCP server %s: %s", self._config.server, error)


@asynccontextmanager
async def _transport(config: Mcp.Config, secret: str, log: TextIO) -> AsyncIterator[Any]:
    """The transport of the library's client, not yet opened."""
    from mcp import StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client

    if config.url is None:
        program, *arguments = config.command
        server = StdioServerParameters(command=program, args=arguments, env=dict(config.env))
        yield stdio_client(server, errlog=log)
        return
    headers = {name: value.replace("{key}", secret) for name, value in config.headers.items()}
    limits = httpx2.Timeout(_START_S, read=None)  # each call has its own limit for the answer
    async with httpx2.AsyncClient(headers=headers, timeout=limits) as http:
        yield streamable_http_client(config.url, http_client=http)


class McpTool(TimedTool):
    """One tool of a server. All rollouts share the state of the server."""

    def __init__(self, server: McpServer, name: str, spec: ToolSpec) -> None:
        super().__init__(spec)
        self._server, self._name = server, name

    @property
    def longest_call_s(self) -> float:
        """Every try connects, gets no answer, checks whether the server is alive and closes the connection."""
        return sum(_PAUSES_S) + len(_PAUSES_S) * (_START_S + self._server.config.wall_s + _ALIVE_S + _CLOSE_S)

    async def answer(self, arguments: Mapping[str, object], *, seed: int) -> tuple[ToolOutcome, str]:
        """Call it; again only if the server was lost during the call. Raises `ToolBroken`."""
        outcome, text = await self._server.call(self._name, arguments)
        return outcome, shorten(text, self._server.config.max_chars)


def _spec(listed: ListedTool, prefix: str) -> ToolSpec:
    name = f"{prefix}{listed.name}"
    parameters = parameters_schema(listed.input_schema, tool=name)
    return ToolSpec(name=name, description=listed.description or name, parameters=parameters)


def _read(result: CallToolResult) -> tuple[ToolOutcome, str]:
    """The texts of the result; other content (pictures, sound) is replaced by its type."""
    parts = [each.text if each.type == "text" else f"[{each.type}]" for each in result.content]
    if not parts and result.structured_content is not None:
        parts = [to_json(result.structured_content).decode()]
    text = "\n".join(parts)
    if result.is_error:
        return ToolOutcome.ERROR, text or "Error."
    return (ToolOutcome.STDOUT if text else ToolOutcome.EMPTY), text


def _innermost(error: Exception) -> str:
    """The innermost error of a group."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
