"""Both ends of a link in one process, over a real socket pair; what the tests of this folder share."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

from strop.errors import StropError
from strop.sandbox.link import LinkTiming
from strop.sandbox.node_end import serve_node
from strop.sandbox.protocol import CodeNode
from strop.sandbox.remote_node import RemoteNode

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
FAST = LinkTiming(heartbeat_s=0.05, silence_s=0.2, handshake_s=0.5)


async def stream_pair() -> tuple[
    tuple[asyncio.StreamReader, asyncio.StreamWriter], tuple[asyncio.StreamReader, asyncio.StreamWriter]
]:
    left, right = socket.socketpair()
    return await asyncio.open_connection(sock=left), await asyncio.open_connection(sock=right)


async def until(condition: Callable[[], bool], *, limit_s: float = 2.0) -> None:
    """Returns once `condition` holds; raises TimeoutError when it does not within `limit_s`."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - what it waits for has no event, being seen from outside
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def linked(node: CodeNode, *, timing: LinkTiming | None = None) -> AsyncIterator[RemoteNode]:
    """`node`, as the front sees it from the other end of a socket pair."""
    front, back = await stream_pair()
    serving = asyncio.create_task(serve_node(node, *back, timing=timing))
    remote = await RemoteNode.accept(*front, timing=timing)
    try:
        yield remote
    finally:
        await remote.close()
        with contextlib.suppress(StropError, asyncio.CancelledError):
            await asyncio.wait_for(serving, 5)
