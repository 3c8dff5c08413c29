"""A code service whose supervisor answers at once, from a process of its own: what it costs is the cost of the service.

Prints its address, then serves until it is terminated. `sandbox_scale.py` starts it.
"""

from __future__ import annotations

import asyncio
import socket
import sys

from strop.sandbox import CodeNode, IsolationLevel, RunRequest, RunResult, SandboxConfig, scripted_result
from strop.sandbox.node_process import NodeProcess
from strop.sandbox.server.server import CodeServer, ServeConfig, serve
from strop.sandbox.supervisor.node import Served, serve_node

_NUM_SLOTS = 4096


class _Answering(Served):
    """Answers each program at once."""

    level = IsolationLevel.NAMESPACES
    num_slots = _NUM_SLOTS
    num_sessions = 0

    async def start(self) -> None:
        """It is ready."""

    async def run(self, request: RunRequest) -> RunResult:
        return scripted_result("1\n")

    async def close(self) -> None:
        """It holds nothing."""


async def _be_supervisor(descriptor: int) -> None:
    await serve_node(_Answering(), socket.socket(fileno=descriptor))


async def _spawn(config: SandboxConfig, name: str) -> CodeNode:
    ours, theirs = socket.socketpair()
    with theirs:
        descriptor = theirs.fileno()
        await asyncio.create_subprocess_exec(
            sys.executable, __file__, str(descriptor), pass_fds=[descriptor]
        )  # ends with its link
    return await NodeProcess.connect(ours, name)


def _announce(server: CodeServer) -> None:
    print(server.url, flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(_be_supervisor(int(sys.argv[1])))
    else:
        asyncio.run(serve(ServeConfig(port=0), _announce, spawn=_spawn))
