"""The process of one node: runs programs for whoever holds the other end of its link.

`service.spawn` starts it, with a socket that it inherits; `strop sandbox node --join` serves a front on another machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys

from strop.errors import LinkBroken, StropError, UserError
from strop.sandbox.config import SandboxConfig
from strop.sandbox.node.node import Node
from strop.sandbox.service.link import serve_node

_PR_SET_PDEATHSIG = 1
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0  # before a front is asked again
_log = logging.getLogger(__name__)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m strop.sandbox.node", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fd", type=int, required=True, help="an inherited, connected socket")
    parser.add_argument("--config", default="{}", help="a SandboxConfig as JSON")
    parser.add_argument("--name", required=True)
    chosen = parser.parse_args()
    level = logging.getLevelNamesMapping().get(os.environ.get("STROP_LOG", "").upper(), logging.WARNING)
    logging.basicConfig(level=level, format="%(levelname)s %(message)s")
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        asyncio.run(_serve_parent(chosen.fd, SandboxConfig.model_validate_json(chosen.config), chosen.name))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except LinkBroken:  # whoever started it is gone
        return 0
    except StropError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve_parent(descriptor: int, config: SandboxConfig, name: str) -> None:
    async with Node(config, name=name) as node:
        reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
        await serve_node(node, reader, writer, draining=_draining_on_signals())


async def join_front(place: str, config: SandboxConfig, *, name: str | None, token: str) -> None:
    """Serve the front that listens at `place`, HOST:PORT, until this process gets SIGTERM; join again when the link breaks.

    Raises:
        UserError: nobody listens there at first, it refuses this node, or this machine cannot give the level that is asked for.
    """
    host, _, port = place.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise UserError(f"--join is {place!r}; it must be HOST:PORT, as in 10.0.0.1:8518.")
    await _knock(host, int(port))  # before the self-test, which takes seconds
    draining = _draining_on_signals()
    async with Node(config, name=name or f"{socket.gethostname()}-{os.getpid()}") as node:
        link = await _connect(host, int(port))
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await serve_node(node, *link, token=token, draining=draining)
                return
            except LinkBroken as error:
                _log.warning("the link to the front at %s broke: %s; joining it again", place, error)
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(draining.wait(), pause_s)
                    return
                try:
                    link = await asyncio.open_connection(host, int(port))
                    pause_s = _FIRST_PAUSE_S
                    break
                except OSError as error:
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                    _log.warning("no front answers at %s (%s), next try in %.1f s", place, error.strerror, pause_s)


async def _connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Raises `UserError` when nobody listens there."""
    try:
        return await asyncio.open_connection(host, port)
    except (OSError, UnicodeError) as error:  # the latter of a host name that cannot be one
        remedy = "Start one with `strop sandbox serve --nodes-port`."
        raise UserError(f"no front answers at {host}:{port}: {getattr(error, 'strerror', None) or error}. {remedy}") from error


async def _knock(host: str, port: int) -> None:
    """Raises `UserError` when nobody listens there. Whether the token is right is learned with the node's first message."""
    _, writer = await _connect(host, port)
    writer.close()


def _draining_on_signals() -> asyncio.Event:
    """Set when this process is asked to end."""
    draining = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, draining.set)
    return draining


if __name__ == "__main__":
    sys.exit(main())
