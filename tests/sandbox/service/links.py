"""Both ends of a link in one process, over a real socket pair; what the tests of this folder share."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

from strop.sandbox.node_process import Link, NodeProcess, NodeStatus
from strop.sandbox.protocol import IsolationLevel
from strop.sandbox.supervisor.node import Served, serve_node


async def until(condition: Callable[[], bool], *, limit_s: float = 2.0) -> None:
    """Returns once `condition` holds; raises TimeoutError when it does not within `limit_s`."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - what it waits for has no event, being seen from outside
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def linked(node: Served) -> AsyncIterator[NodeProcess]:
    """`node`, as a sandbox sees it from the other end of a socket pair."""
    ours, theirs = socket.socketpair()
    serving = asyncio.create_task(serve_node(node, theirs))
    remote = await NodeProcess.connect(ours, "n")
    try:
        yield remote
    finally:
        await remote.close()
        await asyncio.wait_for(serving, 5)


@contextlib.asynccontextmanager
async def peer_of_node_process() -> AsyncIterator[tuple[NodeProcess, Link, list[Any]]]:
    """A node that says what the test sends, and the messages that it got."""
    ours, theirs = socket.socketpair()
    received: list[Any] = []
    peer = await Link.open(theirs, received.append, lambda reason: None)
    peer.send((0, NodeStatus(IsolationLevel.NAMESPACES, 9), False))
    remote = await NodeProcess.connect(ours, "n")
    try:
        yield remote, peer, received
    finally:
        await remote.close()
        peer.abort()
