"""Where programs run, as a config says: a sandbox on this machine, or a service at an address."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from strop.errors import UserError
from strop.sandbox.config import SandboxConfig
from strop.sandbox.local import LocalSandbox
from strop.sandbox.protocol import CodeService


@asynccontextmanager
async def open_service(config: SandboxConfig, *, token: str | None = None) -> AsyncIterator[CodeService]:
    """The service that `config` names, for the time of an `async with`.

    Args:
        token: of a service at an address; what the environment variable `config.token_env` holds when it is None.

    Raises:
        UserError: `config.min_level` is not given here or there, or the address or the token is wrong.
    """
    if not config.url:
        async with LocalSandbox(config) as box:
            yield box
        return
    from strop.sandbox.service.client import SandboxClient  # needs the extra `serve`, which a sandbox on this machine does not

    async with SandboxClient(config.url, token=token or os.environ.get(config.token_env)) as client:
        nodes = (await client.health()).nodes
        if not nodes:  # it has some, or it would not be well, and tells only who has the token
            raise UserError(
                f"the code service at {config.url} refuses us without its token, or with a wrong one. Put its token into the"
                f" environment variable {config.token_env}; `strop sandbox run` also takes it from --token-file."
            )
        for node in nodes:
            if node.level.rank < config.min_level.rank:
                raise UserError(
                    f"sandbox.min_level is {config.min_level.value!r}, but node {node.name!r} of the service at {config.url}"
                    f" gives {node.level.value!r}. Start its nodes with --min-level {config.min_level.value}, or accept less."
                )
        yield client
