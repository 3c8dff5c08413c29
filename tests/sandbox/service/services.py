"""A whole service over real sockets, with a scripted supervisor; what the tests of HTTP, client and server share."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from scripted_node import ScriptedNode
from strop.errors import MachineError
from strop.sandbox import SandboxConfig
from strop.sandbox.protocol import CodeNode, RunRequest
from strop.sandbox.server.dispatcher import DispatchConfig
from strop.sandbox.server.server import CodeServer, ServeConfig


def echo(request: RunRequest) -> str:
    return f"ran {request.code}"


def scripted(name: str = "n", *, slots: int = 8, latency_s: float = 0.0, fault_rate: float = 0.0) -> ScriptedNode:
    return ScriptedNode(answer=echo, name=name, num_slots=slots, max_latency_s=latency_s, fault_rate=fault_rate)


class Supply:
    """Spawns these nodes, one after another; more may be added later."""

    def __init__(self, *nodes: CodeNode) -> None:
        self.nodes = list(nodes)

    async def __call__(self, config: SandboxConfig, name: str) -> CodeNode:
        if not self.nodes:
            raise MachineError("there is no other supervisor")
        return self.nodes.pop(0)


def dead() -> ScriptedNode:
    """A node that dies as soon as it has started."""
    node = scripted()
    node.die()
    return node


@contextlib.asynccontextmanager
async def serving(
    node: CodeNode | Supply, *, dispatch: DispatchConfig | None = None, **settings: Any
) -> AsyncIterator[CodeServer]:
    spawn = node if isinstance(node, Supply) else Supply(node)
    async with CodeServer(ServeConfig(**{"port": 0, "grace_s": 0.2} | settings), dispatch, spawn=spawn) as server:
        yield server


@contextlib.asynccontextmanager
async def asking(server: CodeServer, **headers: str) -> AsyncIterator[aiohttp.ClientSession]:
    """A client that knows nothing of strop."""
    async with aiohttp.ClientSession(server.url, headers=headers) as session:
        yield session


def run_lines(*calls: tuple[object, dict[str, Any]]) -> bytes:
    return b"".join(json.dumps({"key": key, "request": request}).encode() + b"\n" for key, request in calls)


def answers_by_key(body: bytes) -> dict[Any, dict[str, Any]]:
    """Every answer of a stream; a key that comes twice fails."""
    answers: dict[Any, dict[str, Any]] = {}
    for line in body.splitlines():
        if line:
            answer = json.loads(line)
            assert answer["key"] not in answers, f"key {answer['key']!r} was answered twice"
            answers[answer["key"]] = answer
    return answers
