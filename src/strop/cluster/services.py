"""A code service on each of several nodes."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from strop.cluster.actor import Actor
from strop.cluster.placement import Node
from strop.errors import MachineError
from strop.sandbox.config import SandboxConfig

_CLOSE_S = 15.0


class _Hosted:
    """What runs in the process."""

    def __init__(self, server: contextlib.AsyncExitStack, url: str) -> None:
        self._server, self._url = server, url

    @classmethod
    async def open(cls, keys: Mapping[str, Any], address: str, token: str) -> Self:
        from strop.sandbox.server.config import ServeConfig
        from strop.sandbox.server.server import CodeServer

        async with contextlib.AsyncExitStack() as opening:
            served = ServeConfig(host=address, port=0, token=token, node=SandboxConfig(**keys), grace_s=0.0)
            server = await opening.enter_async_context(CodeServer(served))
            return cls(opening.pop_all(), server.url)
        raise AssertionError  # an exit stack passes on what is raised

    async def url(self) -> str:
        return self._url

    async def close(self) -> None:
        await self._server.aclose()


@contextlib.asynccontextmanager
async def open_services(config: SandboxConfig, nodes: Sequence[Node], logs: Path) -> AsyncIterator[tuple[SandboxConfig, str]]:
    """Start a service on each of `nodes`, with all processors there. Yields the config of their clients, and the token.

    Raises:
        UserError: a node cannot give the level that `config` asks for.
        ActorsLost: a process did not start.
    """
    token = secrets.token_urlsafe()
    # The numbers of this machine's processors are not those of the nodes: their own defaults hold there.
    keys = {key: getattr(config, key) for key in config.model_fields_set if key != "url"}
    actors: list[Actor] = []

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
        actors.append(actor)
        url: str = await actor.call("url")
        return url

    try:
        urls = await asyncio.gather(*(start(number, node) for number, node in enumerate(nodes)))
        yield config.model_copy(update={"url": tuple(urls)}), token
    finally:
        await asyncio.gather(*map(_close, actors))


async def _close(actor: Actor) -> None:
    with contextlib.suppress(MachineError, TimeoutError):  # what does not close is ended
        async with asyncio.timeout(_CLOSE_S):
            await actor.call("close")
    await actor.close()
