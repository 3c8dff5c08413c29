"""The process of the supervisor, which `sandbox.spawn` starts with an inherited socket."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys

from strop.errors import LinkBroken, StropError, UserError
from strop.sandbox.config import SandboxConfig
from strop.sandbox.supervisor.node import Node
from strop.sandbox.supervisor.serve import serve_node

_PR_SET_PDEATHSIG = 1


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


if __name__ == "__main__":
    sys.exit(main())
