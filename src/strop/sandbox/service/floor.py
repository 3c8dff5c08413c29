"""Brings jobs and slots of nodes together, whatever becomes of either: nodes join, drain and die, jobs are late or unwanted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from strop.errors import MachineError, NodeGone, NodeLost, NoNodes, Overloaded
from strop.sandbox.protocol import CodeNode, IsolationLevel
from strop.sandbox.service.config import DispatchConfig
from strop.sandbox.service.fair_queue import FairQueue
from strop.sandbox.service.jobs import Job, JudgeJob
from strop.sandbox.service.seats import Seat, best_seat
from strop.sandbox.service.tally import Tally

_log = logging.getLogger(__name__)

_BEAT_S = 0.1  # how often nodes are asked for slots they have gained
_SWEEP_S = 1.0  # how often what is late is looked for
_LONELY_S = 3.0  # without a node under a queue; then the log says so
_MAX_PAIRS = 64  # in one call of a node, when slots are short


class Floor:
    """Every job that is `put` here ends once: done, given up, or withdrawn. Make it inside a running event loop.

    Args:
        refuses_at_once: what comes when there has been no node for long is not to wait: who asks here asks again by itself.
        on_seat_gone: called with the seat of a node that is gone, and why, before its jobs are placed anew.
    """

    def __init__(
        self, config: DispatchConfig, tally: Tally, on_seat_gone: Callable[[Seat, str], None], *, refuses_at_once: bool
    ) -> None:
        self.seats: list[Seat] = []
        self.queue: FairQueue[Job] = FairQueue()
        self._config = config
        self._tally = tally
        self._on_seat_gone = on_seat_gone
        self._refuses_at_once = refuses_at_once
        self._closed: MachineError | None = None
        self._loop = asyncio.get_running_loop()
        self._alone_since = self._loop.time()  # without a node
        self._is_loneliness_told = False
        self._num_pinned = 0
        self._is_pinned_next = False
        self.changed = asyncio.Event()  # a job or a session has gone, or a node has come or gone
        self._background: set[asyncio.Task[Any]] = set()
        self.spawn(self._sweep_forever())

    @property
    def level(self) -> IsolationLevel:
        """What every node here gives at least; what a reply carries that no node gave."""
        return min((seat.node.level for seat in self.seats), key=lambda level: level.rank, default=IsolationLevel.PROCESS)

    @property
    def num_running(self) -> int:
        return sum(len(seat.running) for seat in self.seats)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Have something done that nobody awaits; it ends with the floor at the latest."""
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def no_nodes(self, *, since: float) -> NoNodes | None:
        """What a job that came at `since` is told once it should wait no longer for a first node."""
        now = self._loop.time()
        waits_since = self._alone_since if self._refuses_at_once else max(self._alone_since, since)
        if self.seats or now - waits_since <= self._config.no_node_s:
            return None
        alone_s = now - self._alone_since
        self._tell_of_loneliness(alone_s)
        return NoNodes(f"the service has had no node for {alone_s:.0f} s")

    async def wait_for_node(self) -> None:
        """Return once there is one. Raises `NoNodes` as a job that comes now would be told."""
        since = self._loop.time()
        while not self.seats:
            if (error := self._closed or self.no_nodes(since=since)) is not None:
                raise error
            self.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SWEEP_S):
                    await self.changed.wait()

    # Jobs

    def put(self, job: Job) -> None:
        if job.home is None:
            self.queue.push(job.client, job)
        else:
            job.home.pinned.push(job.client, job)
            self._num_pinned += 1
        self.dispatch()

    def withdraw(self, job: Job) -> None:
        """Nobody waits for it any more: it ends without being done, and its node is told. No effect on one that has ended."""
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
                if job.seat is not None:  # where it failed before
                    seat = best_seat(self.seats, avoid=job.seat) or seat
                self._start(job, seat)
                if isinstance(job, JudgeJob) and self.queue and best_seat(self.seats) is None:
                    self._fill(job)
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

    def _fill(self, job: JudgeJob) -> None:
        """Let it take along what the same client has next, before its first step."""
        while isinstance(other := self.queue.first_of(job.client), JudgeJob):
            if other.pair_wall_s != job.pair_wall_s or len(job.open) + len(other.open) > _MAX_PAIRS:
                break
            self.queue.remove(job.client, other)
            job.absorb(other)
            other.end()
        job.due = job.started_at + job.limit_s + self._config.answer_grace_s

    def _pinned_seat(self) -> Seat | None:
        return next((seat for seat in self.seats if seat.pinned and seat.num_free > 0), None)

    def _take_out(self, job: Job) -> bool:
        """Of the queue it waits in; False when it waits in none."""
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
            _log.error("a call to node %r failed in a way it should not", seat.node.name, exc_info=error)
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
        """Let the node work; it is watched from here on, and closed when it is lost."""
        seat = Seat(node)
        self.seats.append(seat)
        self._tally.num_nodes_joined += 1
        self._is_loneliness_told = False
        self.changed.set()
        _log.info("node %s joined: %d slots, level %s (L%d)", node.name, node.num_slots, node.level, node.level.rank)
        self.spawn(self._watch(seat))
        self.dispatch()
        return seat

    async def drain(self, seat: Seat, *, is_empty: Callable[[Seat], bool], grace_s: float) -> None:
        """Give it nothing new and let it go once it `is_empty`, or `grace_s` later."""
        seat.is_draining = True
        try:
            async with asyncio.timeout(grace_s):
                while seat.running or seat.pinned or not is_empty(seat):
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            _log.warning("node %s was not done %.0f s after it began to drain; letting it go", seat.node.name, grace_s)
        self.lose(seat, "it was drained")

    def lose(self, seat: Seat, reason: str) -> None:
        """The node is gone. What waited for it alone is given up; what ran on it fails by itself and is placed anew."""
        if seat not in self.seats:
            return
        self.seats.remove(seat)
        if not self.seats:
            self._alone_since = self._loop.time()
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
        """Give up every job and let every node go."""
        error = self._closed = MachineError("the code service was closed")
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
        if self.queue and not self.seats and now - self._alone_since > _LONELY_S:
            self._tell_of_loneliness(now - self._alone_since)
        while late := [(job, error) for job in self._waiting_longest() if (error := self._lateness(job, now))]:
            for job, error in late:
                if self._take_out(job):
                    job.give_up(error)
                    job.end()

    def _tell_of_loneliness(self, alone_s: float) -> None:
        """Once, until a node joins."""
        if not self._is_loneliness_told:
            self._is_loneliness_told = True
            _log.warning(
                "calls come, but the service has had no node for %.0f s; after %g s without one they are refused",
                alone_s,
                self._config.no_node_s,
            )

    def _waiting_longest(self) -> list[Job]:
        return self.queue.firsts() + [job for seat in self.seats for job in seat.pinned.firsts()]

    def _lateness(self, job: Job, now: float) -> MachineError | None:
        """The last word of a job that waited too long; one that may have run is told so, since it must not be sent again."""
        error: MachineError | None = self.no_nodes(since=job.arrived_at)
        if error is None and now - job.arrived_at > self._config.max_wait_s:
            error = Overloaded(f"the call waited {self._config.max_wait_s:g} s for a slot")
        if error is not None and job.failure is not None:
            return MachineError(f"{job.failure}; then {error}")
        return error
