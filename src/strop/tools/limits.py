"""How many calls of a tool run at once, whatever the tool."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

from pydantic import Field

from strop.config import Config
from strop.deadline import clock_stopped
from strop.tools.protocol import Tool, ToolResult, ToolSpec

logger = logging.getLogger(__name__)


class CallLimits(Config):
    """What every kind of tool may say. How long a call may take is each kind's own."""

    max_running: int | None = Field(default=None, ge=1)  # calls of all rollouts at once; further ones wait


class Gate:
    """So many places; whoever waits for one gets it in the order of coming. Of one event loop."""

    def __init__(self, num_places: int) -> None:
        self._free = asyncio.Semaphore(num_places)
        self._num_places = num_places
        self._num_left_behind = 0  # places of calls that were answered, or given up, before what they did had ended
        self._stuck_changes: asyncio.Future[None] | None = None

    async def enter(self, *, name: str) -> Place:
        """Waits with the clock of the call stopped, for what holds a place ends by itself: but not while everything that does
        is past its limit, since nobody knows when that ends. `name` is the tool's."""
        entering = asyncio.ensure_future(self._free.acquire())
        try:
            while not entering.done():
                either: list[asyncio.Future[Any]] = [entering, self._change()]
                with nullcontext() if self._is_stuck else clock_stopped():
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            if not entering.cancel():  # it had got its place just then
                self._free.release()
            raise
        return Place(self, name)

    @property
    def _is_stuck(self) -> bool:
        return self._num_left_behind == self._num_places

    def _change(self) -> asyncio.Future[None]:
        if self._stuck_changes is None or self._stuck_changes.done():
            self._stuck_changes = asyncio.get_running_loop().create_future()
        return self._stuck_changes

    def left_behind(self, change: int, *, name: str) -> None:
        was_stuck = self._is_stuck
        self._num_left_behind += change
        if self._is_stuck == was_stuck:
            return
        if self._is_stuck:
            logger.warning(
                "%s: all %d of max_running are calls that were past their limit and have not ended; others wait, and count it",
                name,
                self._num_places,
            )
        if self._stuck_changes is not None and not self._stuck_changes.done():
            self._stuck_changes.set_result(None)

    def leave(self) -> None:
        self._free.release()


class Place:
    """One call's place behind a gate. It is free when the call was answered and nothing that it does holds it any more."""

    def __init__(self, gate: Gate, name: str) -> None:
        self._gate = gate
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._num_holding = 0
        self._is_answered = False

    @property
    def is_here(self) -> bool:
        """Whether it is taken, and of the running loop: a call's context goes along into whatever the call leaves behind."""
        is_taken = self._num_holding > 0 or not self._is_answered
        return is_taken and asyncio.get_running_loop() is self._loop

    def hold(self) -> None:
        """Until `let_go`: something runs for the call that cannot be ended, as a thread."""
        self._num_holding += 1

    def let_go(self) -> None:
        self._num_holding -= 1
        if self._is_answered and not self._num_holding:
            self._gate.left_behind(-1, name=self._name)
            self._gate.leave()

    def answered(self) -> None:
        """The call has its result, or was given up."""
        self._is_answered = True
        if self._num_holding:
            self._gate.left_behind(1, name=self._name)
        else:
            self._gate.leave()


_of_this_call: ContextVar[Place | None] = ContextVar("_of_this_call", default=None)


def place_of_this_call() -> Place | None:
    """Of the call within which this is asked; None where its tool has no `max_running`."""
    place = _of_this_call.get()
    return place if place is not None and place.is_here else None


class CappedTool(Tool):
    """Another tool, of which so many calls run at once; the others wait in the order in which they came.

    The wait counts against no limit of a call: whoever is waited for has a deadline. A call that was answered while a thread
    still runs for it (`place_of_this_call`) keeps its place; the wait counts where all places are kept so.
    """

    def __init__(self, tool: Tool, gate: Gate) -> None:
        self._tool = tool
        self._gate = gate

    @property
    def spec(self) -> ToolSpec:
        return self._tool.spec

    @property
    def longest_call_s(self) -> float:
        return self._tool.longest_call_s

    async def call(self, arguments: Mapping[str, object], *, seed: int) -> ToolResult:
        place = await self._gate.enter(name=self.spec.name)
        token = _of_this_call.set(place)
        try:
            return await self._tool.call(arguments, seed=seed)
        finally:
            _of_this_call.reset(token)
            place.answered()

    async def start(self, *, seed: int) -> Tool:
        return CappedTool(await self._tool.start(seed=seed), self._gate)

    async def fork(self) -> Tool:
        return CappedTool(await self._tool.fork(), self._gate)

    async def close(self) -> None:
        await self._tool.close()


def capped(tools: Sequence[Tool], limits: CallLimits) -> list[Tool]:
    """`tools` under one `limits.max_running` that they share."""
    if limits.max_running is None:
        return list(tools)
    gate = Gate(limits.max_running)
    return [CappedTool(tool, gate) for tool in tools]
