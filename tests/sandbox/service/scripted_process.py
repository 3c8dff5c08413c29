"""A whole service that runs nothing, as a process of its own that can be stopped and killed.

python scripted_process.py PORT GRACE_S LATENCY_S SLOTS
"""

from __future__ import annotations

import asyncio
import sys

from services import Supply, scripted

from strop.sandbox.server.server import ServeConfig, serve


async def main(port: str, grace_s: str, latency_s: str, slots: str) -> None:
    node = scripted(port, slots=int(slots), latency_s=float(latency_s))
    await serve(ServeConfig(port=int(port), grace_s=float(grace_s)), spawn=Supply(node))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
