"""The whole service in one process: HTTP, the queue, nodes of this machine, and a door for nodes of others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from strop.errors import LinkBroken, UserError
from strop.sandbox.service.config import ServeConfig, default_name
from strop.sandbox.service.dispatcher import Dispatcher
from strop.sandbox.service.front_end import RemoteNode
from strop.sandbox.service.http import HttpFront
from strop.sandbox.service.local_nodes import LocalNodes

_log = logging.getLogger(__name__)

_FLUSH_S = 2.0  # for answers on their way, at the very end


class CodeServer:
    """Use as `async with`; it works inside, and has ended in order after it.

    Raises, as it starts:
        UserError: an address is taken, or this machine cannot give the level that is asked for.
    """

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with self._closing:
            self.dispatcher = await self._closing.enter_async_context(Dispatcher(self.config.dispatch, refuses_at_once=True))
            self._closing.push_async_callback(self._end_tasks)
            self.http = HttpFront(self.dispatcher, self.config)
            names = [f"{default_name()}-{number}" for number in range(self.config.num_local_nodes)]
            self._local = LocalNodes(self.dispatcher, self.config.node, names, drain_s=self.config.grace_s)
            self._closing.push_async_callback(self._local.close)
            await self._local.start()
            self.nodes_port = await self._open_door()
            self.port = await self._listen()
            self._closing = self._closing.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take nothing new, finish what runs within the grace, answer the rest, end."""
        async with self._closing:
            self.http.stop()
            await self.dispatcher.finish(grace_s=self.config.grace_s)
            await self._end_tasks()
            await self._local.close()
            await self.dispatcher.close()

    @property
    def url(self) -> str:
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"http://{host}:{self.port}"

    async def _listen(self) -> int:
        runner = web.AppRunner(
            self.http.app, access_log=None, handler_cancellation=True, handle_signals=False, shutdown_timeout=_FLUSH_S
        )
        await runner.setup()
        self._closing.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, self.config.host, self.config.port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            raise UserError(f"the service cannot listen on {self.config.host}:{self.config.port}: {error.strerror}.") from error
        return int(runner.addresses[0][1])

    # Nodes of other machines

    async def _open_door(self) -> int | None:
        if (port := self.config.nodes_port) is None:
            return None
        try:
            door = await asyncio.start_server(self._welcome, self.config.nodes_host, port)
        except OSError as error:
            raise UserError(f"nodes cannot join on {self.config.nodes_host}:{port}: {error.strerror}.") from error
        self._closing.callback(door.close)
        return int(door.sockets[0].getsockname()[1])

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            node = await RemoteNode.accept(reader, writer, token=self.config.nodes_token)
        except LinkBroken as error:
            level = logging.DEBUG if reader.at_eof() else logging.WARNING  # one that hung up may only have asked who listens
            _log.log(level, "a node could not join from %s: %s", writer.get_extra_info("peername"), error)
            return
        self.dispatcher.add_node(node)
        self._spawn(self._local.let_drain(node))

    def _spawn(self, work: Any) -> None:
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
    """Serve until SIGTERM or SIGINT; then finish what runs, within the grace, and return.

    Args:
        announce: called once when it listens.

    Raises:
        UserError: an address is taken, or this machine cannot give the level that is asked for.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        async with CodeServer(config) as server:
            announce(server)
            await stop.wait()
            _log.info("the code service is asked to end; it finishes what runs, for at most %g s", config.grace_s)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
