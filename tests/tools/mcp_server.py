"""A real MCP server for tests: `python mcp_server.py stdio`, or `python mcp_server.py http PORT`."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Literal

from mcp import MCPError
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel

server = MCPServer("for tests")


class Point(BaseModel):
    x: float
    y: float = 0.0


@server.tool()
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


@server.tool()
def move(point: Point, direction: Literal["up", "down"] = "up") -> str:
    """Moves a point."""
    return f"{point.x:g},{point.y + (1 if direction == 'up' else -1):g}"


@server.tool()
def fail(reason: str) -> str:
    """Fails."""
    raise ToolError(reason)


@server.tool()
def refuse(code: int) -> str:
    """Refuses by an error of the protocol."""
    raise MCPError(code, f"refused with {code}")


@server.tool()
def say(text: str) -> str:
    """Says it."""
    return text


@server.tool()
async def wait(seconds: float) -> str:
    """Waits."""
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def die(marks: str, times: int) -> str:
    """Ends the server, so many times; `marks` is a file that counts them."""
    counter = Path(marks)
    num_before = len(counter.read_text()) if counter.exists() else 0
    counter.write_text("x" * (num_before + 1))
    if num_before < times:
        sys.stderr.write("dying as told\n")
        sys.stderr.flush()
        os._exit(9)
    return f"pid {os.getpid()}"


@server.tool()
def secret() -> str:
    """Tells what the environment holds."""
    return os.environ.get("FOR_THE_SERVER", "nothing")


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
