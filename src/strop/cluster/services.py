"""A code service on each of several nodes."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from strop.cluster.actors import Actor
from strop.cluster.connection import Connection
from strop.cluster.placement import Node, Roles
from strop.sandbox.config import SandboxConfig
from strop.sandbox.protocol import CodeService

if TYPE_CHECKING:
    from strop.sandbox.server.server import CodeServer

_PAUSE_S = 5.0  # before a service that did not start is started again


class _Hosted:
    """What runs in the process."""

    def __init__(self, server: CodeServer) -> None:
        self._server = server

    @classmethod
    async def open(cls, keys: Mapping[str, Any], address: str, token: str) -> Self:
        from strop.sandbox.server.server import CodeServer, ServeConfig

        served = ServeConfig(host=address, port=0, token=token, node=SandboxConfig(**keys), grace_s=0.0)
        return cls(await CodeServer(served).__aenter__())

    async def url(self) -> str:
        return self._server.url

    async def close(self) -> None:
        await self._server.__aexit__(None, None, None)


@contextlib.asynccontextmanager
async def open_services(
    config: SandboxConfig, connection: Connection, num: int, logs: Path, notice: Callable[[str], None]
) -> AsyncIterator[CodeService]:
    """Start a service on each of `num` nodes, with all processors there, and another one in place of one that is lost.

    Args:
        notice: is called with a sentence when a service falls silent, is lost, or works again.

    Raises:
        UserError: there are too few nodes, or one cannot give the level that `config` asks for.
        ActorsLost: a process did not start.
    """
    from strop.sandbox.client import open_services as open_client  # needs aiohttp, which the extra `cluster` has

    token = secrets.token_urlsafe()
    # The numbers of this machine's processors are not those of the nodes: their own defaults hold there.
    keys = {key: getattr(config, key) for key in config.model_fields_set if key != "url"}
    actors: dict[int, tuple[Actor, Node]] = {}

    async def start(number: int, node: Node) -> str:
        actor = await Actor.start(
            _Hosted.open,
            keys,
            node.address,
            token,
            what=f"code service {number}",
            key="cluster.sandbox_nodes",
            log=logs / f"code-service-{number}.log",
            environment={},
            node=node,
        )
        actors[number] = actor, node
        return str(await actor.call("url"))

    async def keep(number: int, url: str) -> None:
        while True:
            await actors[number][0].wait_lost()
            taken = [node.id for other, (_, node) in actors.items() if other != number]
            try:
                nodes = await asyncio.to_thread(connection.nodes)
                node = min(reversed(nodes), key=lambda node: taken.count(node.id))
                moved = await start(number, node)
                await client.move(url, moved)
            except Exception as error:  # noqa: BLE001 - of strop, Ray or the network: the next try may succeed
                notice(f"code service {number} was not started again: {error}")
                await asyncio.sleep(_PAUSE_S)
            else:
                notice(f"code service {number} was started again on {node}.")
                url = moved

    nodes = connection.place(Roles(sandboxes=num)).sandboxes
    keeping: list[asyncio.Task[None]] = []
    try:
        urls = await asyncio.gather(*(start(number, node) for number, node in enumerate(nodes)))
        async with open_client(config.model_copy(update={"url": tuple(urls)}), token, notice=notice) as client:
            keeping += [asyncio.create_task(keep(number, url)) for number, url in enumerate(urls)]
            yield client
    finally:
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
        await asyncio.gather(*(actor.shut_down() for actor, _ in actors.values()))
