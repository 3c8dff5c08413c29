"""The engines that a run samples from: they join, drain, are lost and replaced, and hold the same published weights."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from strop.engine.protocol import InferenceEngine, TakesWeights
from strop.errors import EngineLost, MachineError, StropError, WeightsNotProven
from strop.rollout.fleet.dispatch import GO_ON, Dispatch
from strop.rollout.fleet.figures import BatchReport
from strop.rollout.fleet.member import Member
from strop.rollout.fleet.publication import Everyone
from strop.rollout.scheduling import SchedulerConfig

logger = logging.getLogger(__name__)

DEADLINE_S = 660.0  # of a completion; a tenth above an embedded engine's own, so that one which keeps its own is heard first
OPEN_DEADLINE_S = 900.0
_CLOSE_S = 60.0

Publish = Callable[[TakesWeights], Awaitable[str]]
"""Sends the current weights to whoever takes them, and returns their checksum once they are proved."""

OpenEngine = Callable[[int], Awaitable[InferenceEngine]]
"""Opens another engine in place of the n-th of those that the fleet began with; where the fleet publishes, with any weights."""


class FleetObserver(Protocol):
    """Is told what becomes of the engines."""

    def engine_joined(self, name: str) -> None: ...

    def engine_lost(self, name: str, *, reason: str) -> None: ...

    def engine_drained(self, name: str) -> None: ...

    def engine_not_replaced(self, name: str, *, reason: str) -> None:
        """The engine that was to come in place of `name` did not."""


class Unobserved:
    """Nobody needs to know; losses are logged all the same."""

    def engine_joined(self, name: str) -> None:
        pass

    def engine_lost(self, name: str, *, reason: str) -> None:
        pass

    def engine_drained(self, name: str) -> None:
        pass

    def engine_not_replaced(self, name: str, *, reason: str) -> None:
        pass


class Fleet:
    """Any number of engines of any sizes, behind the scheduler that `config` asks for.

    A batch of rollouts is played on it at a time (`play`). An engine that dies, hangs, answers what cannot be true, or holds
    other weights than were published is given up: named to `observer`, closed, and replaced if there is `open_another`, up
    to `config.max_replacements` times a batch. The rollouts that it held go on elsewhere from their last finished turn.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        config: SchedulerConfig | None = None,
        *,
        open_another: OpenEngine | None = None,
        deadline_s: float = DEADLINE_S,
        observer: FleetObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
        closes_engines: bool = True,
        block_tokens: int | None = None,
    ) -> None:
        """
        Args:
            deadline_s: of one completion, and of an engine's taking of weights; a little more than the engine's own.
            clock: never goes back.
            block_tokens: of engines whose KV memory comes in blocks; None: nobody knows, so it is guessed.
            closes_engines: whether the engines are the fleet's own, to be closed when they are lost, drained, or with it.
        """
        self.config = SchedulerConfig() if config is None else config
        self._open_another = open_another
        self._deadline_s = deadline_s
        self._observer: FleetObserver = Unobserved() if observer is None else observer
        self._clock = clock
        self._closes_engines = closes_engines
        self._block_tokens = block_tokens
        self._members: dict[str, Member] = {}
        self._num_named = 0
        self._dispatch: Dispatch | None = None
        self._report: BatchReport | None = None
        self._version = engines[0].policy_version if engines else -1
        self._checksum = ""  # of what was published last
        self._first_loss: EngineLost | None = None  # since the last publication
        self._publish: Publish | None = None  # what sent the weights that are sampled from; None: engines come with them
        self._may_join = asyncio.Event()  # whether the current weights may be sent to a newcomer
        self._may_join.set()
        self._joining = asyncio.Lock()
        self._num_replaced = 0  # in this batch
        self._coming: set[asyncio.Task[None]] = set()  # replacements
        self._leaving: set[asyncio.Task[None]] = set()  # engines that are being closed
        self._is_closed = False
        for engine in engines:
            self._add(engine, place=self._num_named)

    @property
    def engines(self) -> dict[str, InferenceEngine]:
        """By name; those that take rollouts."""
        return {name: member.engine for name, member in self._members.items() if not member.is_draining}

    @property
    def policy_version(self) -> int:
        """Of the weights that the next request samples from; -1 before any were published."""
        return self._version

    @property
    def max_request_tokens(self) -> int:
        """The longest conversation that any engine holds, prompt included."""
        return max((member.spec.longest for member in self._members.values()), default=0)

    @property
    def last_batch(self) -> BatchReport:
        """What the last batch came to. Raises `StropError` before the first."""
        if self._report is None:
            raise StropError("no batch was played on this fleet yet.")
        return self._report

    async def publish(self, publish: Publish, *, version: int) -> str:
        """Let `publish` send the weights of `version` to every engine, and return their checksum; engines that cannot prove
        them are given up and replaced (law 6).

        Raises:
            WeightsNotProven, EngineLost: no engine holds them, nor does one that was opened in its place.
        """
        self._may_join.clear()
        async with self._joining:
            self._publish, self._version, self._first_loss = publish, version, None
            everyone = Everyone(list(self._members.values()), deadline_s=self._deadline_s)
            if self._members:
                self._checksum = await publish(everyone)
        self._may_join.set()
        for name, error in everyone.failures.items():
            self.give_up(self._members[name], error)
        while not self._members and self.is_mending:
            await self.changed()
        self._check_somebody_is_left()
        return self._checksum

    async def join(self, engine: InferenceEngine, *, place: int | None = None) -> str:
        """Another engine, which holds the current weights, takes rollouts from now on; returns the name that it got.

        Args:
            place: of the engine that it replaces; one that replaces none is not replaced either, when it is lost.

        Raises:
            WeightsNotProven: it holds other weights.
        """
        if engine.policy_version != self._version:
            raise WeightsNotProven(
                f"an engine with policy version {engine.policy_version} was to join, but version {self._version} is sampled"
                " from. Publish the current weights to it first."
            )
        member = self._add(engine, place=place)
        self._observer.engine_joined(member.name)
        if self._dispatch is not None:
            self._dispatch.join(member)
        return member.name

    def drain(self, name: str) -> None:
        """It takes no new conversation, and leaves the fleet when those that it holds have ended."""
        member = self._members[name]
        member.is_draining = True
        if self._dispatch is None:
            self.drained(member)
        else:
            self._dispatch.drain(member)

    @asynccontextmanager
    async def batch(self) -> AsyncIterator[Dispatch]:
        """A batch of rollouts; `last_batch` says afterwards what it came to.

        Raises:
            EngineLost: there is no engine.
            StropError: another batch is being played.
        """
        if self._dispatch is not None:
            raise StropError("a batch is being played on this fleet already; batches come one at a time.")
        self._check_somebody_is_left()
        self._num_replaced = 0
        dispatch = self._dispatch = Dispatch(
            self.config,
            self,
            {name: member for name, member in self._members.items() if not member.is_draining},
            version=self._version,
            deadline_s=self._deadline_s,
            clock=self._clock,
        )
        try:
            yield dispatch
        finally:
            if self._publish is not None:
                self._may_join.clear()  # whoever published may now change the weights
                async with self._joining:
                    pass
            self._report = await dispatch.close()
            self._dispatch = None

    async def close(self) -> None:
        """Close every engine, those that are still on their way included."""
        self._is_closed = True
        self._may_join.set()
        for member in list(self._members.values()):
            self._dismiss(member)
        await asyncio.gather(*self._coming, *self._leaving)
        await asyncio.gather(*self._leaving)

    # What a batch tells.

    def give_up(self, member: Member, error: EngineLost) -> None:
        """`member` is lost. Safe to call twice."""
        if member.loss:
            return
        reason = str(error)
        member.give_up(reason)
        self._first_loss = self._first_loss or error
        logger.warning("engine %s is given up: %s", member.name, reason)
        self._observer.engine_lost(member.name, reason=reason)
        self._dismiss(member)
        self._replace(member.name, member.place)
        if self._dispatch is not None:
            self._dispatch.died(member)
            self._dispatch.check_hope()

    def drained(self, member: Member) -> None:
        """`member` holds nothing any more."""
        self._observer.engine_drained(member.name)
        self._dismiss(member)
        if self._dispatch is not None:
            self._dispatch.check_hope()

    @property
    def is_mending(self) -> bool:
        return bool(self._coming)

    async def changed(self) -> None:
        if self._coming:
            await asyncio.wait(self._coming, return_when=asyncio.FIRST_COMPLETED)

    def _add(self, engine: InferenceEngine, *, place: int | None) -> Member:
        member = Member(f"engine-{self._num_named}", engine, place=place, block_tokens=self._block_tokens, clock=self._clock)
        self._num_named += 1
        self._members[member.name] = member
        return member

    def _dismiss(self, member: Member) -> None:
        del self._members[member.name]
        if self._closes_engines:
            self._start(self._leaving, self._close_engine(member.name, member.engine))

    async def _close_engine(self, name: str, engine: InferenceEngine) -> None:
        try:
            async with asyncio.timeout(_CLOSE_S):
                await engine.close()
        except (MachineError, OSError) as error:
            logger.warning("engine %s could not be closed: %s", name, error or f"{_CLOSE_S:g} s have passed")

    def _replace(self, name: str, place: int | None) -> None:
        """Open another engine in place of `name`, if that was not done too often in this batch."""
        if self._open_another is None or place is None or self._is_closed:
            return
        if self._num_replaced >= self.config.max_replacements:
            reason = f"{self._num_replaced} were replaced in this step already (scheduler.max_replacements)."
            self._observer.engine_not_replaced(name, reason=reason)
            return
        self._num_replaced += 1
        self._start(self._coming, self._bring(name, place, self._open_another))

    async def _bring(self, lost: str, place: int, open_another: OpenEngine) -> None:
        opening = asyncio.ensure_future(open_another(place))
        await asyncio.wait({opening}, timeout=OPEN_DEADLINE_S)
        if not opening.done():
            opening.add_done_callback(self._close_latecomer)
            self._not_brought(lost, place, f"another engine was not open after {OPEN_DEADLINE_S:g} s.")
            return
        if (error := opening.exception()) is not None:
            self._not_brought(lost, place, f"{type(error).__name__}: {error}")
            return
        engine = opening.result()
        try:
            await self._bring_in(engine, place)
        except (MachineError, OSError) as error:
            await self._close_engine("that was to come", engine)
            self._not_brought(lost, place, f"{type(error).__name__}: {error}")

    async def _bring_in(self, engine: InferenceEngine, place: int) -> None:
        """Give the newcomer the current weights as soon as they may be sent, and let it join."""
        while True:
            await self._may_join.wait()
            async with self._joining:
                if not self._may_join.is_set():
                    continue
                if self._is_closed:
                    await engine.close()
                    return
                if self._publish is not None:
                    async with asyncio.timeout(self._deadline_s):
                        self._checksum = await self._publish(engine)
                await self.join(engine, place=place)
                return

    def _not_brought(self, lost: str, place: int, reason: str) -> None:
        """Try again, or tell that `lost` stays without a replacement."""
        logger.warning("engine %s could not be replaced: %s", lost, reason)
        self._observer.engine_not_replaced(lost, reason=reason)
        self._first_loss = self._first_loss or EngineLost(reason)
        self._replace(lost, place)

    def _close_latecomer(self, opening: asyncio.Future[InferenceEngine]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            self._start(self._leaving, self._close_engine("a latecomer", opening.result()))

    def _start(self, kind: set[asyncio.Task[None]], work: Any) -> None:
        task = asyncio.ensure_future(work)
        kind.add(task)
        task.add_done_callback(lambda done: self._ended(kind, done))

    def _ended(self, kind: set[asyncio.Task[None]], done: asyncio.Task[None]) -> None:
        kind.discard(done)
        if self._dispatch is None:
            return
        if not done.cancelled() and isinstance(error := done.exception(), Exception):
            self._dispatch.fail(error)  # a fault of this code, or of whoever opens engines: not to be waited out
        self._dispatch.check_hope()

    def _check_somebody_is_left(self) -> None:
        if self._members or self.is_mending:
            return
        kind = WeightsNotProven if isinstance(self._first_loss, WeightsNotProven) else EngineLost
        raise kind(f"no engine is left to sample from. {self._first_loss or 'All were drained.'} {GO_ON}") from self._first_loss
