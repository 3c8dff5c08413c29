"""A code service whose supervisor answers at once, from a process of its own: what it costs is the cost of the service.

Prints its address, then serves until it is terminated. `sandbox_scale.py` starts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys

from strop.errors import LinkBroken
from strop.sandbox import CodeNode, SandboxConfig
from strop.sandbox.node_process import NodeProcess
from strop.sandbox.scripted import ScriptedNode, scripted_result
from strop.sandbox.server.config import ServeConfig
from strop.sandbox.server.server import CodeServer, serve
from strop.sandbox.supervisor.serve import serve_node

_NUM_SLOTS = 4096


async def _be_supervisor(descriptor: int) -> None:
    node = ScriptedNode(answer=lambda _: scripted_result("1\n"), num_slots=_NUM_SLOTS)
    with contextlib.suppress(LinkBroken):
        await serve_node(node, *await asyncio.open_connection(sock=socket.socket(fileno=descriptor)))


async def _spawn(config: SandboxConfig, name: str) -> CodeNode:
    ours, theirs = socket.socketpair()
    with theirs:
        descriptor = theirs.fileno()
        await asyncio.create_subprocess_exec(
            sys.executable, __file__, str(descriptor), pass_fds=[descriptor]
        )  # ends with its link
    return await NodeProcess.connect(*await asyncio.open_connection(sock=ours), name)


def _announce(server: CodeServer) -> None:
    print(server.url, flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(_be_supervisor(int(sys.argv[1])))
    else:
        asyncio.run(serve(ServeConfig(port=0), _announce, spawn=_spawn))
