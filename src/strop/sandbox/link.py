"""The link between a sandbox and its supervisor: messages over a socket pair.

    sandbox -> supervisor   (number of the call, method of the node, its argument); (number, "cancel", None)
    supervisor -> sandbox   (number, answer, is_last); an answer is a value, or the exception that the method raised
                            (0, event, False); an event is a `NodeStatus`, a `LogLine`, or why the node does not start

A frame is four bytes of length, then a pickle. Both ends run code of strop for the same user, and no program can reach the
socket, so pickles are safe here.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from strop.sandbox.protocol import IsolationLevel

HEARTBEAT_S = 0.4  # a supervisor sends its status at least this often
_HEADER = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """Sent when the node is ready, when its number of slots changes, and as a sign of life."""

    level: IsolationLevel
    num_slots: int


@dataclass(frozen=True, slots=True)
class LogLine:
    level: int
    text: str


class Link(asyncio.Protocol):
    """One end. Belongs to the running event loop.

    Args:
        on_message: called with each message.
        on_lost: called once with the reason, when the link has ended.
    """

    def __init__(self, on_message: Callable[[Any], None], on_lost: Callable[[str], None]) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._outgoing: list[bytes] = []
        self._flush_timer: asyncio.TimerHandle | None = None
        self.num_heard = 0  # parts of messages

    @classmethod
    async def open(cls, connection: socket.socket, on_message: Callable[[Any], None], on_lost: Callable[[str], None]) -> Self:
        make = lambda: cls(on_message, on_lost)  # noqa: E731
        _, link = await asyncio.get_running_loop().create_connection(make, sock=connection)
        return link

    def send(self, message: object, *, within_s: float = 0.0) -> None:
        """Queue it; the messages of one turn of the event loop, or of `within_s`, leave in one write."""
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._outgoing += (_HEADER.pack(len(body)), body)
        if self._flush_timer is None:
            self._flush_timer = self._loop.call_later(within_s, self._flush)

    def close(self) -> None:
        """Send what is queued, then hang up. Safe to call twice."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Hang up now."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.num_heard += 1
        self._received += data
        start = 0
        while len(self._received) >= start + _HEADER.size:
            (length,) = _HEADER.unpack_from(self._received, start)
            body_at = start + _HEADER.size
            if len(self._received) < body_at + length:
                break
            self._on_message(pickle.loads(self._received[body_at : body_at + length]))
            start = body_at + length
        del self._received[:start]

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._on_lost("the peer hung up" if error is None else f"the connection failed: {error}")

    def _flush(self) -> None:
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        if self._outgoing and self._transport is not None:
            self._transport.write(b"".join(self._outgoing))
        self._outgoing.clear()
