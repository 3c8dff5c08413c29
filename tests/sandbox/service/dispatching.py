"""Scripted nodes, and answers to compare, for a dispatcher without its network."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from services import Supply, echo

from scripted_node import ScriptedNode
from strop.sandbox import LocalSandbox
from strop.sandbox.protocol import AnswerPair, PairVerdict, VerifyRequest
from strop.sandbox.server.dispatcher import DispatchConfig, Dispatcher


def node(name: str = "n", *, slots: int = 4, latency_s: float = 0.0, fault_rate: float = 0.0) -> ScriptedNode:
    return ScriptedNode(answer=echo, name=name, num_slots=slots, max_latency_s=latency_s, fault_rate=fault_rate)


@contextlib.asynccontextmanager
async def dispatching(*nodes: ScriptedNode, config: DispatchConfig | None = None) -> AsyncIterator[Dispatcher]:
    """The first node, and each other one after the death of the one before."""
    async with LocalSandbox(spawn=Supply(*nodes)) as box, Dispatcher(box, config) as front:
        yield front


def pairs(num: int) -> tuple[AnswerPair, ...]:
    return tuple(AnswerPair(gold=str(number), answer=str(number if number % 2 else -1)) for number in range(num))


async def judged(front: Dispatcher, request: VerifyRequest, client: str = "") -> dict[int, PairVerdict]:
    verdicts = [verdict async for verdict in front.verify(request, client=client)]
    assert len({index for index, _ in verdicts}) == len(verdicts)
    return dict(verdicts)
