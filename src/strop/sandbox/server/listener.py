"""Accepts TCP connections up to a limit, also while the process has no free file descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Callable

from strop.errors import UserError

_log = logging.getLogger(__name__)

_BACKLOG = 1024
_RESERVED_DESCRIPTORS = 128  # for the supervisor and files of this process
_PEER_SHARE = 0.75  # of the connections, for one address: one machine cannot lock out all others
_RETRY_S = 0.2  # before the next try when a connection cannot be accepted
_LOG_EVERY_S = 60.0
_UNACKNOWLEDGED_MS = 10_000  # the kernel ends a connection whose peer acknowledges nothing for this long
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Listener:
    """A listening socket. `asyncio.start_server` has no limit, and without descriptors it logs 1000 errors a second.

    Args:
        make_protocol: called for each accepted connection.
        max_connections: further connections are closed at once. It is lowered to what the descriptor limit allows.

    Raises:
        UserError: the address cannot be used.
    """

    def __init__(
        self, host: str, port: int, make_protocol: Callable[[], asyncio.BaseProtocol], *, max_connections: int
    ) -> None:
        try:
            [family, _, _, _, address], *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            self._socket = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        except OSError as error:
            raise UserError(f"the service cannot listen on {host}:{port}: {error.strerror}.") from error
        self._socket.setblocking(False)
        self._make_protocol = make_protocol
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_connections = max(1, min(max_connections, descriptors - _RESERVED_DESCRIPTORS))
        self._peers: dict[socket.socket, str] = {}
        self._logged_at = -_LOG_EVERY_S
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._accept_forever())

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    async def close(self) -> None:
        """Accept no more connections. Open ones stay open."""
        self._task.cancel()
        await asyncio.wait({self._task})
        self._socket.close()

    async def _accept_forever(self) -> None:
        while True:
            try:
                connection, (peer, *_) = await self._loop.sock_accept(self._socket)
            except OSError as error:  # above all: no free descriptors
                self._warn(f"a connection could not be accepted: {error.strerror}")
                await asyncio.sleep(_RETRY_S)
                continue
            with contextlib.suppress(OSError):  # the peer may be gone
                await self._admit(connection, peer)

    async def _admit(self, connection: socket.socket, peer: str) -> None:
        if refusal := self._refusal(peer):
            self._warn(refusal)
            with connection:
                connection.send(_FULL)
        else:
            self._peers[connection] = peer
            _limit_silence(connection)
            await self._loop.connect_accepted_socket(self._make_protocol, connection)

    def _refusal(self, peer: str) -> str:
        self._peers = {connection: peer for connection, peer in self._peers.items() if connection.fileno() != -1}
        if len(self._peers) >= self._max_connections:
            return f"{len(self._peers)} connections are open, which is the limit; further ones are closed"
        num_of_peer = sum(each == peer for each in self._peers.values())
        if num_of_peer >= max(1, _PEER_SHARE * self._max_connections):
            return f"{peer} has {num_of_peer} connections, which is the limit for one address; further ones are closed"
        return ""

    def _warn(self, message: str) -> None:
        """Log at most one line a minute."""
        if (now := self._loop.time()) - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = now
            _log.warning("port %d: %s", self.port, message)


def _limit_silence(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
