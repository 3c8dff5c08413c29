"""A node, or a whole service, that runs nothing, as a process of its own that can be stopped and killed.

python scripted_process.py node HOST PORT TOKEN NAME SLOTS LATENCY_S
python scripted_process.py service PORT GRACE_S LATENCY_S
"""

from __future__ import annotations

import asyncio
import sys

from strop.sandbox.node_end import serve_node
from strop.sandbox.protocol import RunRequest
from strop.sandbox.scripted import ScriptedNode
from strop.sandbox.server.config import ServeConfig
from strop.sandbox.server.server import serve


def echo(request: RunRequest) -> str:
    return f"ran {request.code}"


async def node(host: str, port: str, token: str, name: str, slots: str, latency_s: str) -> None:
    reader, writer = await asyncio.open_connection(host, int(port))
    scripted = ScriptedNode(answer=echo, name=name, num_slots=int(slots), max_latency_s=float(latency_s))
    await serve_node(scripted, reader, writer, token=token)


async def service(port: str, nodes_port: str, grace_s: str, latency_s: str) -> None:
    config = ServeConfig(port=int(port), nodes_port=int(nodes_port), num_local_nodes=0, grace_s=float(grace_s))
    joining = asyncio.create_task(join("127.0.0.1", nodes_port, port, latency_s))
    await serve(config)
    joining.cancel()


async def join(host: str, port: str, name: str, latency_s: str) -> None:
    while True:
        try:
            await node(host, port, "", name, "4", latency_s)
        except OSError:
            await asyncio.sleep(0.05)


if __name__ == "__main__":
    asyncio.run({"node": node, "service": service}[sys.argv[1]](*sys.argv[2:]))
