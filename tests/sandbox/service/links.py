"""Both ends of a link in one process, over a real socket pair; what the tests of this folder share."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

from strop.errors import StropError
from strop.sandbox.link import SUPERVISOR_TIMING, LinkTiming
from strop.sandbox.node_process import NodeProcess
from strop.sandbox.protocol import CodeNode
from strop.sandbox.supervisor.serve import serve_node

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
FAST = LinkTiming(heartbeat_s=0.05, silence_s=0.2)


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
async def linked(node: CodeNode, *, timing: LinkTiming = SUPERVISOR_TIMING) -> AsyncIterator[NodeProcess]:
    """`node`, as its parent sees it from the other end of a socket pair."""
    ours, theirs = await stream_pair()
    serving = asyncio.create_task(serve_node(node, *theirs, timing=timing))
    remote = await NodeProcess.connect(*ours, node.name, timing=timing if timing is FAST else None)
    try:
        yield remote
    finally:
        await remote.close()
        with contextlib.suppress(StropError, asyncio.CancelledError):
            await asyncio.wait_for(serving, 5)
