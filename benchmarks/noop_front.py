"""A front of the code service whose nodes, in a process of their own, answer at once: what it costs is the front's own cost.

Prints its address, then serves until it is terminated. `sandbox_scale.py` starts it.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys

from strop.sandbox.node_end import serve_node
from strop.sandbox.scripted import ScriptedNode, scripted_result
from strop.sandbox.server.config import ServeConfig
from strop.sandbox.server.server import CodeServer, serve

_NUM_NODES = 4
_NUM_SLOTS = 1024


async def _be_nodes(port: int) -> None:
    async def be_one(number: int) -> None:
        node = ScriptedNode(answer=lambda _: scripted_result("1\n"), name=f"noop-{number}", num_slots=_NUM_SLOTS)
        await serve_node(node, *await asyncio.open_connection("127.0.0.1", port))

    await asyncio.gather(*(be_one(number) for number in range(_NUM_NODES)))


def _announce(server: CodeServer) -> None:
    subprocess.Popen([sys.executable, __file__, str(server.nodes_port)])  # it ends with its link
    print(server.url, flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(_be_nodes(int(sys.argv[1])))
    else:
        asyncio.run(serve(ServeConfig(port=0, nodes_port=0, num_local_nodes=0), _announce))
