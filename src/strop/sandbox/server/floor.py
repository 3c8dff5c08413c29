"""Assigns jobs to slots of nodes, while nodes join, drain and die, and jobs are late or cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from strop.errors import MachineError, NodeGone, NodeLost, NoNodes, Overloaded
from strop.sandbox.protocol import CodeNode, IsolationLevel
from strop.sandbox.server.config import DispatchConfig
from strop.sandbox.server.jobs import Job
from strop.sandbox.server.metrics import Tally
from strop.sandbox.server.queueing import FairQueue

_log = logging.getLogger(__name__)

_BEAT_S = 0.1  # how often nodes are asked for slots they have gained
_SWEEP_S = 1.0  # how often what is late is looked for
_WARN_S = 3.0  # without a node, while jobs wait; then the log says so


class Seat:
    """One node with its jobs."""

    def __init__(self, node: CodeNode) -> None:
        self.node = node
        self.running: dict[Job, asyncio.Task[None]] = {}
        self.pinned: FairQueue[Job] = FairQueue()  # work for this node only: cells of its sessions
        self.is_draining = False

    @property
    def num_free(self) -> int:
        """Free slots; the number of slots of a node may change at any time."""
        return self.node.num_slots - len(self.running)


def best_seat(seats: list[Seat], *, avoid: Seat | None = None) -> Seat | None:
    """The least loaded node with a free slot that is not draining; the one to `avoid` only if there is no other."""
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


class Floor:
    """Every job that is `put` here ends once: done, given up, or withdrawn. Create it inside a running event loop.

    Args:
        on_seat_gone: called with the seat of a node that is gone, and the reason, before its jobs go to other nodes.
    """

    def __init__(self, config: DispatchConfig, tally: Tally, on_seat_gone: Callable[[Seat, str], None]) -> None:
        self.seats: list[Seat] = []
        self.queue: FairQueue[Job] = FairQueue()
        self._config = config
        self._tally = tally
        self._on_seat_gone = on_seat_gone
        self._loop = asyncio.get_running_loop()
        self._no_node_since = self._loop.time()  # without a node
        self._is_warned = False
        self._num_pinned = 0
        self._is_pinned_next = False
        self.changed = asyncio.Event()  # a job or a session has gone, or a node has come or gone
        self._background: set[asyncio.Task[Any]] = set()
        self.spawn(self._sweep_forever())

    @property
    def level(self) -> IsolationLevel:
        """The lowest level of all nodes; also the level of replies that come from no node."""
        return min((seat.node.level for seat in self.seats), key=lambda level: level.rank, default=IsolationLevel.PROCESS)

    @property
    def num_running(self) -> int:
        return sum(len(seat.running) for seat in self.seats)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run something in the background; it is cancelled when the floor closes."""
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def no_nodes(self) -> NoNodes | None:
        """The error of every job that waits or comes, once there has been no node for too long. Clients try again."""
        no_node_s = self._loop.time() - self._no_node_since
        if self.seats or no_node_s <= self._config.no_node_s:
            return None
        self._warn_of_no_node(no_node_s)
        return NoNodes(f"the service has had no node for {no_node_s:.0f} s")

    # Jobs

    def put(self, job: Job) -> None:
        if job.home is None:
            self.queue.push(job.client, job)
        else:
            job.home.pinned.push(job.client, job)
            self._num_pinned += 1
        self.dispatch()

    def withdraw(self, job: Job) -> None:
        """Cancel a job, also on its node. No effect if it has ended."""
        if self._take_out(job):
            job.end()
        elif job.seat is not None and (task := job.seat.running.get(job)) is not None:
            task.cancel()

    def dispatch(self) -> None:
        """Start what can be started. Pinned and shared work take turns where both want a slot."""
        while True:
            seat = best_seat(self.seats) if self.queue else None
            pinned = self._pinned_seat() if self._num_pinned else None
            if pinned is not None and (seat is None or self._is_pinned_next):
                self._is_pinned_next = False
                self._num_pinned -= 1
                self._start(pinned.pinned.pop(), pinned)
            elif seat is not None:
                self._is_pinned_next = True
                job = self.queue.pop()
                if job.seat is not None:  # the node where it failed before
                    seat = best_seat(self.seats, avoid=job.seat) or seat
                self._start(job, seat)
            else:
                return

    def _start(self, job: Job, seat: Seat) -> None:
        job.seat = seat
        job.started_at = self._loop.time()
        job.due = job.started_at + job.limit_s + self._config.answer_grace_s
        task = self._loop.create_task(job.work(seat.node))
        seat.running[job] = task
        # A callback rather than code after `work`: a task that is cancelled before its first step runs none of its code.
        task.add_done_callback(partial(self._on_worked, job, seat))
        job.begin()

    def _pinned_seat(self) -> Seat | None:
        return next((seat for seat in self.seats if seat.pinned and seat.num_free > 0), None)

    def _take_out(self, job: Job) -> bool:
        """Remove it from its queue; False if it is in none."""
        if job.home is None:
            return self.queue.remove(job.client, job)
        is_out = job.home.pinned.remove(job.client, job)
        self._num_pinned -= is_out
        return is_out

    def _on_worked(self, job: Job, seat: Seat, task: asyncio.Task[None]) -> None:
        del seat.running[job]
        if task.cancelled():
            error: BaseException | None = None
            if job.is_overdue:
                error = MachineError(
                    f"node {seat.node.name!r} did not answer a call {self._config.answer_grace_s:g} s after its limit"
                )
        elif isinstance(error := task.exception(), NodeLost):
            self.lose(seat, str(error))
        elif error is not None and not isinstance(error, MachineError):
            _log.error("unexpected error in a call to node %r", seat.node.name, exc_info=error)
            error = MachineError(f"{type(error).__name__} in the front: {error}")
        if isinstance(error, MachineError):
            self._on_failure(job, error)
        else:
            job.end()
        self.changed.set()
        self.dispatch()

    def _on_failure(self, job: Job, error: MachineError) -> None:
        job.is_overdue = False
        if not isinstance(error, NodeGone):
            job.num_failures += 1
            job.failure = error
        if job.may_run_again:
            self._tally.num_retries += not isinstance(error, NodeGone)
            self.queue.push(job.client, job, is_first=True)
        else:
            job.give_up(error)
            job.end()

    # Nodes

    def add(self, node: CodeNode) -> Seat:
        """Use the node from now on; it is closed when it is lost."""
        seat = Seat(node)
        self.seats.append(seat)
        self._tally.num_nodes_joined += 1
        self._is_warned = False
        self.changed.set()
        _log.info("node %s joined: %d slots, level %s (L%d)", node.name, node.num_slots, node.level, node.level.rank)
        self.spawn(self._watch(seat))
        self.dispatch()
        return seat

    async def drain(self, seat: Seat, *, is_empty: Callable[[Seat], bool], grace_s: float) -> None:
        """Give the node nothing new, and close it once it `is_empty`, or after `grace_s`."""
        seat.is_draining = True
        try:
            async with asyncio.timeout(grace_s):
                while seat.running or seat.pinned or not is_empty(seat):
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            _log.warning("node %s did not finish within %.0f s of draining; closing it", seat.node.name, grace_s)
        self.lose(seat, "it was drained")

    def lose(self, seat: Seat, reason: str) -> None:
        """The node is gone. Jobs that only it can do are given up; running jobs fail by themselves and go to another node."""
        if seat not in self.seats:
            return
        self.seats.remove(seat)
        if not self.seats:
            self._no_node_since = self._loop.time()
        if not seat.is_draining:
            self._tally.num_nodes_lost += 1
        _log.log(logging.INFO if seat.is_draining else logging.WARNING, "node %s left: %s", seat.node.name, reason)
        self._on_seat_gone(seat, reason)
        for job in seat.pinned:
            if self._take_out(job):
                job.give_up(NodeLost(f"node {seat.node.name!r} is gone: {reason}"))
                job.end()
        self.changed.set()
        self.spawn(seat.node.close())

    async def close(self) -> None:
        """Give up every job and close every node."""
        error = MachineError("the code service was closed")
        self.changed.set()
        for job in [*self.queue, *(job for seat in self.seats for job in seat.pinned)]:
            if self._take_out(job):
                job.give_up(error)
                job.end()
        running = {job: task for seat in self.seats for job, task in seat.running.items()}
        for job, task in running.items():
            job.give_up(error)
            task.cancel()
        if running:
            await asyncio.wait(running.values())
        background = set(self._background)
        for helper in background:
            helper.cancel()
        if background:
            await asyncio.wait(background)
        seats, self.seats = self.seats, []
        await asyncio.gather(*(seat.node.close() for seat in seats))

    async def _watch(self, seat: Seat) -> None:
        self.lose(seat, await seat.node.wait_lost())

    async def _sweep_forever(self) -> None:
        next_sweep = self._loop.time() + _SWEEP_S
        while True:
            await asyncio.sleep(_BEAT_S)
            self.dispatch()
            if self._loop.time() >= next_sweep:
                next_sweep = self._loop.time() + _SWEEP_S
                self._end_what_is_late()

    def _end_what_is_late(self) -> None:
        now = self._loop.time()
        for seat in self.seats:
            for job, task in seat.running.items():
                if now > job.due and not job.is_overdue:
                    job.is_overdue = True
                    task.cancel()
        if self.queue and not self.seats and now - self._no_node_since > _WARN_S:
            self._warn_of_no_node(now - self._no_node_since)
        while late := [(job, error) for job in self._waiting_longest() if (error := self._lateness(job, now))]:
            for job, error in late:
                if self._take_out(job):
                    job.give_up(error)
                    job.end()

    def _warn_of_no_node(self, no_node_s: float) -> None:
        """Once, until a node joins."""
        if not self._is_warned:
            self._is_warned = True
            _log.warning(
                "calls come, but the service has had no node for %.0f s; after %g s without one they are refused",
                no_node_s,
                self._config.no_node_s,
            )

    def _waiting_longest(self) -> list[Job]:
        return self.queue.firsts() + [job for seat in self.seats for job in seat.pinned.firsts()]

    def _lateness(self, job: Job, now: float) -> MachineError | None:
        """The error of a job that waited too long. It says if the job may have run, because it must not be sent again then."""
        error: MachineError | None = self.no_nodes()
        if error is None and now - job.arrived_at > self._config.max_wait_s:
            error = Overloaded(f"the call waited {self._config.max_wait_s:g} s for a slot")
        if error is not None and job.failure is not None:
            return MachineError(f"{job.failure}; then {error}")
        return error
