"""A fork_server whose children are real, and whose answers are not: something sits on their links and changes what they say."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strop.engine.processes.fork_server import EngineForkServer, ForkedProcess

_LENGTH = struct.Struct(">I")
Tamper = Callable[[dict[str, Any]], bytes]


def frame(message: object) -> bytes:
    return raw_frame(json.dumps(message).encode())


def raw_frame(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


class TamperingForkServer:
    """`tamper` gets each message of a child, and returns the bytes that its client gets instead.

    After what is not a whole frame the link is closed.
    """

    def __init__(self, fork_server: EngineForkServer, tamper: Tamper) -> None:
        self._fork_server, self._tamper = fork_server, tamper
        self._tasks: list[asyncio.Task[None]] = []

    async def fork(self, order: dict[str, Any], link: socket.socket, log: Path) -> ForkedProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await self._fork_server.fork(order, theirs, log)
        from_client, to_client = await asyncio.open_connection(sock=link.dup())
        from_child, to_child = await asyncio.open_connection(sock=ours)
        self._tasks.append(asyncio.create_task(self._pass_orders(from_client, to_child)))
        self._tasks.append(asyncio.create_task(self._pass_answers(from_child, to_client)))
        return process

    def enter(self) -> None:
        pass

    async def leave(self) -> None:
        """By its only child."""
        await asyncio.gather(*self._tasks)

    async def _pass_orders(self, from_client: asyncio.StreamReader, to_child: asyncio.StreamWriter) -> None:
        while part := await from_client.read(65_536):
            to_child.write(part)
        to_child.close()

    async def _pass_answers(self, from_child: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        try:
            while True:
                (length,) = _LENGTH.unpack(await from_child.readexactly(_LENGTH.size))
                said = self._tamper(json.loads(await from_child.readexactly(length)))
                to_client.write(said)
                if len(said) < _LENGTH.size or len(said) != _LENGTH.size + _LENGTH.unpack_from(said)[0]:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):  # killed
            pass
        to_client.close()
