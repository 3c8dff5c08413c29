"""The tools of MCP servers: a program that we start and speak to over its stdin and stdout, or a server at an address.

One connection serves all rollouts. It is held by a task of its own, because the library wants it closed where it was opened,
and is opened anew when it is lost, with a fresh process where the server is a program of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal, Self, TextIO, cast

from pydantic import Field, ValidationError, model_validator
from pydantic_core import to_json

from strop.errors import MachineError, ToolBroken, UserError
from strop.tools.limits import CallLimits
from strop.tools.protocol import Tool, ToolResult, ToolSpec
from strop.tools.python import shorten
from strop.tools.schema import parameters_schema
from strop.types import ToolOutcome

if TYPE_CHECKING:
    from mcp import Client, MCPError
    from mcp.types import CallToolResult
    from mcp.types import Tool as ListedTool

logger = logging.getLogger(__name__)

_SIGN_OF_LIFE_S = 5.0  # within which a server lists its tools, or is taken to be lost
_FAILED_STATUS = "Server returned an error response"  # the library's words for a status that it has no other error for
_MAX_PAUSE_S = 15.0
_FAREWELL_S = 10.0  # for closing a connection; the library kills a program that does not end by itself well before


class McpToolsConfig(CallLimits):
    """The tools of an MCP server, each under the name that the server gives it; needs `strop[mcp]`."""

    kind: Literal["mcp"]
    command: tuple[str, ...] = ()  # a program that speaks MCP over its stdin and stdout, with its arguments
    env: Mapping[str, str] = Field(default={})  # what the program finds in its environment besides PATH, HOME and the like
    url: str | None = None  # or a server's address, as in http://127.0.0.1:8000/mcp
    headers: Mapping[str, str] = Field(default={})  # of every request; `{key}` is filled in
    key_env: str | None = None  # the environment variable that holds the key
    only: tuple[str, ...] = ()  # of the server's tools, these; all when empty
    prefix: str = ""  # put before each name, where two servers use one
    wall_s: float = Field(default=30.0, gt=0)  # of one call
    start_s: float = Field(default=30.0, gt=0)  # for a connection
    retries: int = Field(default=3, ge=0)  # of a call whose server was lost, each on a new connection
    backoff_s: float = Field(default=1.0, gt=0)  # before the second retry: the first is made at once; doubled for each further
    max_chars: int = Field(default=4_096, ge=64)  # of what the policy is shown; head and tail are kept beyond it

    @model_validator(mode="after")
    def _is_one_server(self) -> Self:
        if bool(self.command) == (self.url is not None):
            raise ValueError('give either the command of an MCP server, as in command = ["python", "server.py"], or its url.')
        return self

    @property
    def longest_call_s(self) -> float:
        """Every try connects anew, gets no answer, finds no sign of life and takes its leave."""
        of_a_try_s = self.start_s + self.wall_s + _SIGN_OF_LIFE_S + _FAREWELL_S
        pauses_s = sum(self.pause_s(num_tries) for num_tries in range(1 + self.retries))
        return (1 + self.retries) * of_a_try_s + pauses_s

    def pause_s(self, num_tries: int) -> float:
        """Before another try of a call that was tried so often: the first new connection is made at once."""
        return 0.0 if num_tries < 2 else min(self.backoff_s * 2 ** (num_tries - 2), _MAX_PAUSE_S)

    @property
    def server(self) -> str:
        """The server in words."""
        return self.url if self.url is not None else " ".join(self.command)

    async def open(self, stack: AsyncExitStack, *, key: str) -> list[Tool]:
        """Connect, and ask for the tools; `stack` closes the connection.

        Raises:
            UserError: the server cannot be reached or started, or lacks a tool of `only`.
        """
        server = McpServer(self, key=key)
        stack.push_async_callback(server.close)
        return list(await server.tools())


class McpServer:
    """A server, reached anew when it is lost. Use from one event loop; `close` ends what was started."""

    def __init__(self, config: McpToolsConfig, *, key: str) -> None:
        _require_library()
        self.config = config
        self._secret = "" if config.key_env is None else os.environ.get(config.key_env, "")
        if config.key_env is not None and not self._secret:
            raise UserError(f"{key}: the environment variable {config.key_env} is not set. Set it, or name another one.")
        self._key = key
        self._connection: _Connection | None = None
        self._connecting = asyncio.Lock()

    async def tools(self) -> list[McpTool]:
        """Those that the server offers, in its order. Raises `UserError` as `McpToolsConfig.open` does."""
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
            McpTool(self, each.name, _spec(f"{self.config.prefix}{each.name}", each.description, each.input_schema))
            for each in listed
            if not self.config.only or each.name in self.config.only
        ]

    async def call(self, name: str, arguments: Mapping[str, object]) -> tuple[ToolOutcome, str]:
        """Call a tool; where the server is lost under the call, again on a new connection.

        Raises:
            ToolBroken: it was lost every time, or does not come back.
        """
        fault: Exception | None = None
        for num_tries in range(1 + self.config.retries):
            await asyncio.sleep(self.config.pause_s(num_tries))  # a server that comes back takes a while
            try:
                connection = await self._connected()
                return await self._call_on(connection, name, arguments)
            except MachineError as error:
                fault = error
                logger.warning("%s: %s", self._key, fault)
        raise ToolBroken(f"{self._key}: failed {1 + self.config.retries} times in a row, last: {fault}") from fault

    async def close(self) -> None:
        """Safe to call twice."""
        if self._connection is not None:
            await self._drop(self._connection)

    async def _listed(self, connection: _Connection) -> list[ListedTool]:
        """Every page of the server's list. Raises `MachineError` where it does not come, or not in time."""
        listed: list[ListedTool] = []
        limit = asyncio.timeout(self.config.start_s)
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
            fault = f"no list within start_s = {self.config.start_s:g} s" if late else _told(error)
            words = connection.last_words()
            raise MachineError(f"the MCP server {self.config.server} does not list its tools: {fault}{words}") from error

    async def _call_on(self, connection: _Connection, name: str, arguments: Mapping[str, object]) -> tuple[ToolOutcome, str]:
        """Raises `MachineError` when no answer came back; the connection is dropped then, unless it lives."""
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
            if not self._may_be_lost(error) or await connection.is_alive():
                if not self._is_cut_off(error):
                    return ToolOutcome.ERROR, error.message or f"Error {error.code}."
                raise MachineError(f"{self._lost(name)}: {fault}") from error  # the connection has others' calls
        except TimeoutError:
            if limit.expired() and await connection.is_alive():  # the call is slow, not the server
                return ToolOutcome.TIMEOUT, f"{name} gave no answer within {self.config.wall_s:g} s."
            fault = f"no sign of life for {_SIGN_OF_LIFE_S:g} s after a call of {self.config.wall_s:g} s"
        except (ValidationError, RuntimeError) as error:  # what came back is no result, or not what its schema promises
            if await connection.is_alive():
                return ToolOutcome.ERROR, f"The answer of {name} is not what it should be: {_told(error).splitlines()[0]}"
            fault = _told(error)
        except Exception as error:  # noqa: BLE001 - of the transport: what it raises when a server goes is not promised
            fault = f"{type(error).__name__}: {error}"
        words = connection.last_words()
        await self._drop(connection)
        raise MachineError(f"{self._lost(name)}: {fault}{words}")

    def _lost(self, name: str) -> str:
        return f"the MCP server {self.config.server} was lost under a call of {name}"

    def _may_be_lost(self, error: MCPError) -> bool:
        """Whether the library makes such errors itself where no answer came; any other is the answer of a server that lives."""
        from mcp.types import CONNECTION_CLOSED, INVALID_REQUEST, METHOD_NOT_FOUND, PARSE_ERROR

        if self.config.url is None:
            return error.code == CONNECTION_CLOSED
        of_status = (INVALID_REQUEST, METHOD_NOT_FOUND, PARSE_ERROR)  # 404: its session is over; a redirection; no message
        return error.code in of_status or self._is_cut_off(error)

    def _is_cut_off(self, error: MCPError) -> bool:
        """Whether HTTP lost the answer, be the server alive or not: the stream broke off, or a proxy answered 5xx."""
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
    """A task that holds the library's client open until it is told to stop, or the server goes."""

    def __init__(self, config: McpToolsConfig, *, secret: str) -> None:
        self._config = config
        self._secret = secret
        self._stop = asyncio.Event()
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._log: TextIO = cast("TextIO", tempfile.TemporaryFile("w+", errors="replace"))  # noqa: SIM115
        self._holder = asyncio.create_task(self._hold())

    @classmethod
    async def open(cls, config: McpToolsConfig, *, secret: str) -> Self:
        """Raises `MachineError` when the server does not answer in time."""
        connection = cls(config, secret=secret)
        try:
            async with asyncio.timeout(config.start_s):
                await asyncio.shield(connection._ready)
        except BaseException as error:
            words = connection.last_words()
            await connection.close()
            if not isinstance(error, Exception):
                raise
            fault = f"no answer within {config.start_s:g} s" if isinstance(error, TimeoutError) else _told(error)
            raise MachineError(f"the MCP server {config.server} cannot be reached: {fault}{words}") from error
        return connection

    @property
    def client(self) -> Client:
        return self._ready.result()

    @property
    def is_lost(self) -> bool:
        return self._holder.done()

    async def is_alive(self) -> bool:
        """Whether it still lists its tools."""
        try:
            async with asyncio.timeout(_SIGN_OF_LIFE_S):
                await self.client.list_tools(cache_mode="bypass")
        except Exception:  # noqa: BLE001 - whatever it is, it is no sign of life
            return False
        return True

    def last_words(self) -> str:
        """The end of what the program wrote to stderr, for a message; empty for a server at an address."""
        if self._log.closed:
            return ""
        self._log.seek(0)
        lines = " ".join(self._log.read()[-300:].split())
        return f". Its last words: {lines}" if lines else ""

    async def close(self) -> None:
        """Safe to call twice; the program, if there is one, has ended when this returns."""
        self._stop.set()
        if not self._ready.done():
            self._holder.cancel()
        _, running = await asyncio.wait([self._holder], timeout=_FAREWELL_S)
        for each in running:
            each.cancel()
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # seen
        self._log.close()

    async def _hold(self) -> None:
        from mcp import Client

        try:
            async with _transport(self._config, self._secret, self._log) as transport, Client(transport) as client:
                self._ready.set_result(client)
                await self._stop.wait()
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error if isinstance(error, Exception) else MachineError("it was given up"))
            if not isinstance(error, Exception):
                raise
            logger.info("the MCP server %s: %s", self._config.server, error)


@asynccontextmanager
async def _transport(config: McpToolsConfig, secret: str, log: TextIO) -> AsyncIterator[Any]:
    """What the library's client speaks through, not yet opened."""
    import httpx2  # the library's own
    from mcp import StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client

    if config.url is None:
        program, *arguments = config.command
        server = StdioServerParameters(command=program, args=arguments, env=dict(config.env))
        yield stdio_client(server, errlog=log)
        return
    headers = {name: value.replace("{key}", secret) for name, value in config.headers.items()}
    limits = httpx2.Timeout(config.start_s, read=None)  # how long an answer may take is each call's to say
    async with httpx2.AsyncClient(headers=headers, timeout=limits) as http:
        yield streamable_http_client(config.url, http_client=http)


class McpTool(Tool):
    """One tool of a server. What the server keeps from call to call, all rollouts share."""

    def __init__(self, server: McpServer, name: str, spec: ToolSpec) -> None:
        self._server = server
        self._name = name
        self._spec = spec

    @property
    def spec(self) -> ToolSpec:
        return self._spec

    @property
    def longest_call_s(self) -> float:
        return self._server.config.longest_call_s

    async def call(self, arguments: Mapping[str, object], *, seed: int) -> ToolResult:
        """Call it once; again only where the server was lost under the call. Raises `ToolBroken`."""
        started_at = time.perf_counter()
        outcome, text = await self._server.call(self._name, arguments)
        shown = shorten(text, self._server.config.max_chars)
        return ToolResult(outcome=outcome, text=shown, duration_s=time.perf_counter() - started_at)


def _spec(name: str, description: str | None, schema: Mapping[str, Any]) -> ToolSpec:
    return ToolSpec(name=name, description=description or name, parameters=parameters_schema(schema, tool=name))


def _read(result: CallToolResult) -> tuple[ToolOutcome, str]:
    """Its texts; what a policy cannot read (pictures, sound) is named by its kind."""
    parts = [each.text if each.type == "text" else f"[{each.type}]" for each in result.content]
    if not parts and result.structured_content is not None:
        parts = [to_json(result.structured_content).decode()]
    text = "\n".join(parts)
    if result.is_error:
        return ToolOutcome.ERROR, text or "Error."
    return (ToolOutcome.STDOUT if text else ToolOutcome.EMPTY), text


def _told(error: Exception) -> str:
    """The innermost error of a group: what went wrong, not where."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _require_library() -> None:
    with contextlib.suppress(ImportError):
        import mcp  # noqa: F401

        return
    raise UserError("MCP servers need the library mcp: pip install 'strop[mcp]'.")
