"""The process of one node: runs programs for whoever holds the other end of its link.

python -m strop.sandbox.node --fd 5 --config '{...}'                           for the process that started it
python -m strop.sandbox.node --join HOST:PORT --token-file FILE --name NAME    for a front on another machine
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from strop.errors import LinkBroken, StropError, UserError
from strop.sandbox.config import SandboxConfig
from strop.sandbox.node.node import Node
from strop.sandbox.service.link import serve_node

_PR_SET_PDEATHSIG = 1
_log = logging.getLogger(__name__)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m strop.sandbox.node", description=(__doc__ or "").splitlines()[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--fd", type=int, help="an inherited, connected socket")
    where.add_argument("--join", metavar="HOST:PORT", help="where a front listens for nodes")
    parser.add_argument("--config", default="{}", help="a SandboxConfig as JSON")
    parser.add_argument("--name", default=f"{socket.gethostname()}-{os.getpid()}")
    parser.add_argument("--token-file", type=Path, help="what the front asks for")
    chosen = parser.parse_args()
    logging.basicConfig(level=os.environ.get("STROP_LOG", "WARNING").upper(), format="%(levelname)s %(name)s: %(message)s")
    token = chosen.token_file.read_text(encoding="utf-8").strip() if chosen.token_file else ""
    try:
        return asyncio.run(_serve(chosen.fd, chosen.join, SandboxConfig.model_validate_json(chosen.config), chosen.name, token))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except LinkBroken as error:
        _log.warning("the front is gone: %s", error)
        return 0
    except StropError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


async def _serve(descriptor: int | None, join: str | None, config: SandboxConfig, name: str, token: str) -> int:
    draining = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, draining.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, draining.set)
    async with Node(config, name=name) as node:
        if descriptor is not None:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
        else:
            assert join is not None
            host, _, port = join.rpartition(":")
            if not host or not port.isdecimal():
                raise UserError(f"--join is {join!r}; it must be HOST:PORT, as in 10.0.0.1:8518.")
            try:
                reader, writer = await asyncio.open_connection(host, int(port))
            except OSError as error:
                raise UserError(
                    f"no front answers at {join}: {error}. Start one with `strop sandbox serve --nodes-port`."
                ) from error
        _log.info("node %s serves at level %s", name, node.level)
        await serve_node(node, reader, writer, token=token, draining=draining)
    return 0


if __name__ == "__main__":
    sys.exit(main())
