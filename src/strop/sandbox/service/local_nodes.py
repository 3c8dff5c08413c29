"""Nodes of this machine for a dispatcher: each a process of its own, which is started again whenever it dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from strop.errors import MachineError, UserError
from strop.sandbox.config import SandboxConfig
from strop.sandbox.service.dispatcher import Dispatcher
from strop.sandbox.service.front_end import RemoteNode
from strop.sandbox.service.spawn import spawn_node

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0  # before a node that died is started again
_PROVEN_S = 60.0  # a node that lived for so long did not die of its start


class LocalNodes:
    """Keeps one node alive for each name, until `close`. The dispatcher closes the nodes themselves.

    Args:
        dispatcher: which they work for.
        config: of each of them.
        names: in every reply.
        drain_s: for what runs on a node that asks to leave.
    """

    def __init__(self, dispatcher: Dispatcher, config: SandboxConfig, names: list[str], *, drain_s: float = 30.0) -> None:
        self._dispatcher = dispatcher
        self._config = config
        self._names = names
        self._drain_s = drain_s
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Returns when all of them work.

        Raises:
            UserError: this machine cannot give the level that is asked for.
            MachineError: one did not start for another reason.
        """
        starts = [spawn_node(self._config, name=name) for name in self._names]
        started = await asyncio.gather(*starts, return_exceptions=True)
        for name, node in zip(self._names, started, strict=True):
            if not isinstance(node, BaseException):
                self._tend(node, name)
        for failure in started:
            if isinstance(failure, BaseException):
                raise failure

    async def close(self) -> None:
        """Start nothing again from now on. Safe to call twice."""
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def let_drain(self, node: RemoteNode) -> None:
        """Returns when `node` is gone; when it asked to leave, it was given the time to finish."""
        if await node.wait_draining():
            await self._dispatcher.drain_node(node, grace_s=self._drain_s)

    def _tend(self, node: RemoteNode, name: str) -> None:
        self._dispatcher.add_node(node)
        self._spawn(self._replace_forever(node, name))

    async def _replace_forever(self, node: RemoteNode, name: str) -> None:
        loop = asyncio.get_running_loop()
        pause_s = _FIRST_PAUSE_S
        while True:
            joined_at = loop.time()
            self._spawn(self.let_drain(node))
            await node.wait_lost()
            pause_s = _FIRST_PAUSE_S if loop.time() - joined_at > _PROVEN_S else pause_s
            while True:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                try:
                    node = await spawn_node(self._config, name=name)
                    break
                except (MachineError, UserError, OSError) as error:
                    _log.error("node %s could not be started again, next try in %.1f s: %s", name, pause_s, error)
            self._dispatcher.add_node(node)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
