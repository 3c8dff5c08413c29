"""A TCP connection that can be cut or frozen in the middle, between a client and a service."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Relay:
    """Passes bytes on; `cut` resets every connection, `freeze` passes nothing on while all seem open."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._may_pass = asyncio.Event()
        self._may_pass.set()
        self.is_refusing = False
        self.num_connections = 0
        self.port = 0

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def freeze(self) -> None:
        self._may_pass.clear()

    def thaw(self) -> None:
        self._may_pass.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        if self.is_refusing:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        self._writers |= {writer, far_writer}
        await asyncio.gather(self._pass(reader, far_writer), self._pass(far_reader, writer))
        self._writers -= {writer, far_writer}

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(65_536):
                await self._may_pass.wait()
                writer.write(part)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def relayed(host: str, port: int) -> AsyncIterator[Relay]:
    relay = Relay(host, port)
    async with await asyncio.start_server(relay.serve, "127.0.0.1", 0) as server:
        relay.port = server.sockets[0].getsockname()[1]
        yield relay
        relay.thaw()
        relay.cut()
