"""The nodes of the front: how much room each has, and which is next."""

from __future__ import annotations

import asyncio

from strop.sandbox.protocol import CodeNode
from strop.sandbox.service.fair_queue import FairQueue
from strop.sandbox.service.jobs import Job


class Seat:
    """One node and what the front has given to it."""

    def __init__(self, node: CodeNode) -> None:
        self.node = node
        self.running: dict[Job, asyncio.Task[None]] = {}
        self.pinned: FairQueue[Job] = FairQueue()  # work that only this node can do: cells of the sessions that live here
        self.is_draining = False

    @property
    def num_free(self) -> int:
        """Of its slots; a node may have more or fewer of them from one moment to the next."""
        return self.node.num_slots - len(self.running)


def best_seat(seats: list[Seat], *, avoid: Seat | None = None) -> Seat | None:
    """The least loaded that takes shared work and has room; the one to `avoid` only when there is no other."""
    best, best_load, spare = None, 1.0, None
    for seat in seats:
        load = len(seat.running) / max(1, seat.node.num_slots)
        if seat.is_draining or load >= 1.0:
            continue
        if seat is avoid:
            spare = seat
        elif load < best_load:
            best, best_load = seat, load
    return best or spare
