"""The whole service of one machine: HTTP, admission, and the sandbox with its supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from aiohttp import web

from strop.errors import UserError
from strop.sandbox.config import SandboxConfig
from strop.sandbox.local import LocalSandbox
from strop.sandbox.node_process import Spawn, spawn_node
from strop.sandbox.server.dispatcher import DispatchConfig, Dispatcher
from strop.sandbox.server.http import HttpFront

_log = logging.getLogger(__name__)

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_HEADERS_S = 30.0  # for the headers of a request; longer than clients keep an idle connection, which is 15 s for aiohttp
_FLUSH_S = 2.0  # for the last answers, at the end
_MAX_CONNECTIONS = 4096  # further ones are closed at once; lowered to what the descriptor limit allows
_RESERVED_DESCRIPTORS = 128  # for the supervisor and files of this process
_BACKLOG = 1024
_UNACKNOWLEDGED_MS = 10_000  # the kernel ends a connection whose peer acknowledges nothing for this long
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Settings of a service. Raises `UserError` for a token that protects nothing."""

    host: str = "127.0.0.1"  # to listen on
    port: int = 8517  # 0 for a free one
    token: str = ""  # that requests must carry; empty: every process that reaches the port may call
    node: SandboxConfig = field(default_factory=SandboxConfig)
    grace_s: float = 30.0  # after SIGTERM, for running calls

    def __post_init__(self) -> None:
        if self.host not in _LOOPBACK and not self.token:
            raise UserError(
                f"the service is to listen on {self.host!r} without a token, so that other machines could run code here."
                " Set a token, or listen on 127.0.0.1."
            )
        if 0 < len(self.token) < 8:
            raise UserError(
                "the token has fewer than 8 characters, which can be guessed. Make one with:"
                " python -c 'import secrets; print(secrets.token_urlsafe())'."
            )


class CodeServer:
    """Use as `async with`: the service runs inside and is shut down in order at the end.

    Raises at the start:
        UserError: an address is taken, or this machine cannot give the level that the config asks for.
    """

    def __init__(self, config: ServeConfig, dispatch: DispatchConfig | None = None, *, spawn: Spawn = spawn_node) -> None:
        self.config = config
        self._dispatch = dispatch or DispatchConfig()
        self._spawn = spawn
        self._closing = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        config = self.config
        async with self._closing:
            name = f"{os.uname().nodename}-{os.getpid()}"  # differs from those of other services
            box = LocalSandbox(config.node, name=name, no_node_s=self._dispatch.no_node_s, spawn=self._spawn)
            await self._closing.enter_async_context(box)
            self.dispatcher = await self._closing.enter_async_context(Dispatcher(box, self._dispatch))
            self.http = HttpFront(self.dispatcher, config.token)
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
            listening = _listen(config.host, config.port)
            self.port = int(listening.getsockname()[1])
            accepting = await asyncio.get_running_loop().create_server(
                partial(_accept, runner.server), sock=listening, backlog=_BACKLOG
            )
            self._closing.callback(accepting.close)
            self._closing = self._closing.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Refuse new calls, let running ones finish within the grace period, fail the rest, close."""
        async with self._closing:
            self.http.stop()
            await self.dispatcher.finish(grace_s=self.config.grace_s)
            await self.dispatcher.close()

    @property
    def url(self) -> str:
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"http://{host}:{self.port}"


async def serve(
    config: ServeConfig, announce: Callable[[CodeServer], None] = lambda server: None, *, spawn: Spawn = spawn_node
) -> None:
    """Serve until SIGTERM or SIGINT; then let running calls finish within the grace period. For an event loop of its own.

    Args:
        announce: called once, when the service listens.

    Raises:
        UserError: an address is taken, or this machine cannot give the level that the config asks for.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with CodeServer(config, spawn=spawn) as server:
        announce(server)
        await stop.wait()
        _log.info("the code service shuts down; running calls have %g s to finish", config.grace_s)


def _listen(host: str, port: int) -> socket.socket:
    """Raises `UserError` when the address cannot be used. Accepted connections inherit the options."""
    try:
        [family, _, _, _, address], *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        listening = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise UserError(f"the service cannot listen on {host}:{port}: {error.strerror}.") from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
    return listening


def _accept(server: web.Server) -> asyncio.BaseProtocol:
    """The protocol of an accepted connection. `asyncio` itself has no limit, and loops when descriptors run out."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_full = len(server.connections) >= max(1, min(_MAX_CONNECTIONS, descriptors - _RESERVED_DESCRIPTORS))
    return _Full() if is_full else server()


class _Full(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(_FULL)
        transport.close()
