"""The whole service in one process: HTTP, the queue, nodes of this machine, and a port that nodes of other machines join."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from strop.errors import LinkBroken
from strop.sandbox.remote_node import RemoteNode
from strop.sandbox.server.config import DispatchConfig, ServeConfig
from strop.sandbox.server.dispatcher import Dispatcher
from strop.sandbox.server.http import HttpFront
from strop.sandbox.server.listener import Listener
from strop.sandbox.spawn import keep_alive, spawn_node

_log = logging.getLogger(__name__)

_HEADERS_S = 30.0  # for the headers of a request; longer than clients keep an idle connection, which is 15 s for aiohttp
_FLUSH_S = 2.0  # for the last answers, at the end
_MAX_CONNECTIONS = 4096  # and no more than descriptors allow


class CodeServer:
    """Use as `async with`: the service runs inside and is shut down in order at the end.

    Raises at the start:
        UserError: an address is taken, or this machine cannot give the level that the config asks for.
    """

    def __init__(self, config: ServeConfig, dispatch: DispatchConfig | None = None) -> None:
        self.config = config
        self._dispatch = dispatch
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        config = self.config
        async with self._closing:
            self.dispatcher = await self._closing.enter_async_context(Dispatcher(self._dispatch))
            self._closing.push_async_callback(self._end_tasks)
            self.http = HttpFront(self.dispatcher, config)
            await self._start_local_nodes()
            self.nodes_port = None
            if config.nodes_port is not None:
                self.nodes_port = self._listen(config.nodes_host, config.nodes_port, self._node_protocol, "the port of nodes")
            runner = web.AppRunner(
                self.http.app,
                access_log=None,
                handler_cancellation=True,
                shutdown_timeout=_FLUSH_S,
                keepalive_timeout=_HEADERS_S,  # without a complete request, counted from the connection or the last response
                auto_decompress=False,  # `HttpFront` refuses compressed bodies
            )
            await runner.setup()
            self._closing.push_async_callback(runner.cleanup)
            assert runner.server is not None
            self.port = self._listen(config.host, config.port, runner.server, "the service")
            self._closing = self._closing.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Refuse new calls, let running ones finish within the grace period, fail the rest, close."""
        async with self._closing:
            self.http.stop()
            await self.dispatcher.finish(grace_s=self.config.grace_s)
            await self._end_tasks()
            await self.dispatcher.close()

    @property
    def url(self) -> str:
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"http://{host}:{self.port}"

    def _listen(self, host: str, port: int, make_protocol: Callable[[], asyncio.BaseProtocol], purpose: str) -> int:
        listener = Listener(host, port, make_protocol, max_connections=_MAX_CONNECTIONS, purpose=purpose)
        self._closing.push_async_callback(listener.close)
        return listener.port

    # Nodes

    async def _start_local_nodes(self) -> None:
        """Return when all of them work; each is started again when it dies. Raises as the start does."""
        prefix = f"{os.uname().nodename}-{os.getpid()}"  # differs from those of other services
        starts = [spawn_node(self.config.node, name=f"{prefix}-{number}") for number in range(self.config.num_local_nodes)]
        started = await asyncio.gather(*starts, return_exceptions=True)
        for node in started:
            if isinstance(node, RemoteNode):
                self.dispatcher.add_node(node)
                use = self.dispatcher.add_node
                self._spawn(keep_alive(node, self.config.node, use=use, lose=lambda node, reason: None))
        for failure in started:
            if isinstance(failure, BaseException):
                raise failure

    def _node_protocol(self) -> asyncio.BaseProtocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(), self._welcome)

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            node = await RemoteNode.accept(reader, writer, token=self.config.nodes_token)
        except LinkBroken as error:
            level = logging.DEBUG if reader.at_eof() else logging.WARNING  # a peer that hung up may be a port check
            _log.log(level, "a node could not join from %s: %s", writer.get_extra_info("peername"), error)
            return
        self.dispatcher.add_node(node)
        self._spawn(self._let_drain(node))

    async def _let_drain(self, node: RemoteNode) -> None:
        """Return when `node` is gone. If it asks to leave, it gets the time to finish."""
        if await node.wait_draining():
            await self.dispatcher.drain_node(node, grace_s=self.config.grace_s)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end_tasks(self) -> None:
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def serve(config: ServeConfig, announce: Callable[[CodeServer], None] = lambda server: None) -> None:
    """Serve until SIGTERM or SIGINT; then let running calls finish within the grace period, and return.

    Args:
        announce: called once, when the service listens.

    Raises:
        UserError: an address is taken, or this machine cannot give the level that the config asks for.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        async with CodeServer(config) as server:
            announce(server)
            await stop.wait()
            _log.info("the code service shuts down; running calls have %g s to finish", config.grace_s)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
