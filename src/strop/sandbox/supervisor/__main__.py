"""The process of one node, which runs programs for the other end of its link.

`sandbox.spawn` starts it with an inherited socket; `strop sandbox node --join` serves a front on another machine.
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
from strop.sandbox.node_end import serve_node
from strop.sandbox.supervisor.node import Node

_PR_SET_PDEATHSIG = 1
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0  # before the next try to connect
_log = logging.getLogger(__name__)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m strop.sandbox.supervisor", description=(__doc__ or "").splitlines()[0])
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
    except LinkBroken:  # the process that started it is gone
        return 0
    except StropError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve_parent(descriptor: int, config: SandboxConfig, name: str) -> None:
    async with Node(config, name=name) as node:
        reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
        for number in (signal.SIGTERM, signal.SIGINT):  # it ends with its link: the process that started it decides
            asyncio.get_running_loop().add_signal_handler(number, lambda: None)
        await serve_node(node, reader, writer)


async def join_front(place: str, config: SandboxConfig, *, name: str | None, token: str) -> None:
    """Serve the front that listens at `place`, HOST:PORT, until SIGTERM; connect again when the link breaks.

    Raises:
        UserError: no front listens there at first, it refuses this node, or this machine cannot give the requested level.
    """
    host, _, port = place.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise UserError(f"--join is {place!r}; it must be HOST:PORT, as in 10.0.0.1:8518.")
    try:  # before the self-test, which takes seconds; the front checks the token with the first message
        _, writer = await asyncio.open_connection(host, int(port))
    except (OSError, UnicodeError) as error:  # the latter for an invalid host name
        remedy = "Start one with `strop sandbox serve --nodes-port`."
        raise UserError(f"no front answers at {place}: {getattr(error, 'strerror', None) or error}. {remedy}") from error
    writer.close()
    draining, pause_s = _draining_on_signals(), _FIRST_PAUSE_S
    async with Node(config, name=name or f"{socket.gethostname()}-{os.getpid()}") as node:
        while not draining.is_set():
            try:
                link = await asyncio.open_connection(host, int(port))
                pause_s = _FIRST_PAUSE_S
                await serve_node(node, *link, token=token, draining=draining)
                return
            except (LinkBroken, OSError) as error:
                _log.warning("no link to the front at %s: %s; next try in %.1f s", place, error, pause_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(draining.wait(), pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _draining_on_signals() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set."""
    draining = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, draining.set)
    return draining


if __name__ == "__main__":
    sys.exit(main())
