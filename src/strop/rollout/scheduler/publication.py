"""Sends one stream of weights to several engines at once, and separates the engines that fail from the others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from strop.engine.protocol import Capabilities, NamedTensor
from strop.errors import EngineLost, ModelError

if TYPE_CHECKING:
    from strop.rollout.scheduler.engine_pool import PooledEngine

_MAX_AHEAD = 2  # tensors by which an engine may be ahead of a slower one


class Broadcast:
    """Takes weights as one engine does, and gives each tensor to several engines. Each tensor is read once.

    Afterwards `weights_error` says of each engine why it did not prove the weights. All engines may keep the same tensor, so
    none of them may write to it.
    """

    def __init__(self, engines: Sequence[PooledEngine], *, deadline_s: float) -> None:
        """
        Args:
            deadline_s: after this time without progress, the engines that delay the others fail.

        Raises:
            ModelError: the engines' weights have different types, so one checksum cannot prove them.
        """
        self._engines = {engine.name: engine for engine in engines}
        self._deadline_s = deadline_s
        dtypes = {name: engine.capabilities.dtype for name, engine in self._engines.items()}
        if len(set(dtypes.values())) > 1:
            raise ModelError(f"the engines hold weights of different types: {dtypes}. Give all of them the same dtype.")

    @property
    def capabilities(self) -> Capabilities:
        return next(iter(self._engines.values())).capabilities

    async def load_weights(self, tensors: AsyncIterator[NamedTensor], *, version: int, checksum: str) -> None:
        """Return when every engine has proved the weights or failed. A failed engine does not delay the others for long.

        Raises:
            StropError: an engine cannot take weights now, because it is sampling.
        """
        shared = _SharedStream(tensors, list(self._engines))
        loads = {
            name: asyncio.ensure_future(
                engine.load_weights(shared.stream(name), version=version, checksum=checksum, is_only=False)
            )
            for name, engine in self._engines.items()
        }
        for name, load in loads.items():
            load.add_done_callback(lambda _, name=name: shared.leave(name))  # type: ignore[misc]
        try:
            while shared.pending:
                if await shared.has_moved(within_s=self._deadline_s):
                    continue
                for name in shared.laggards:
                    self._engines[name].weights_error = EngineLost(
                        f"it hangs: the weights of version {version} were not taken within {self._deadline_s:g} s."
                    )
                    loads[name].cancel()
        finally:
            for load in loads.values():
                load.cancel()
            await asyncio.wait(loads.values(), timeout=self._deadline_s)
        if shared.error is not None:
            raise shared.error
        for name, load in loads.items():
            if self._engines[name].weights_error is None:
                load.result()


class _SharedStream:
    """A stream that several engines read, each from its beginning.

    An engine that has begun to read waits for slower ones that have begun. It does not wait for an engine that has not begun:
    engines on one machine may share what one of them reads, and never begin. What such an engine may still read is kept.
    """

    def __init__(self, tensors: AsyncIterator[NamedTensor], names: Sequence[str]) -> None:
        self.error: BaseException | None = None  # of the stream itself
        self.pending: dict[str, int | None] = dict.fromkeys(names)  # tensors that each has taken; None: it has not begun
        self._tensors = tensors
        self._held: deque[NamedTensor] = deque()
        self._first = 0  # number of the first tensor that is held
        self._is_over = False
        self._reading = asyncio.Lock()
        self._moved = asyncio.Event()

    @property
    def laggards(self) -> list[str]:
        """The engines that delay the others: the slowest of those that have begun, or all if none has."""
        begun = self._taken
        return [name for name, taken in self.pending.items() if not begun or taken == min(begun)]

    @property
    def _taken(self) -> list[int]:
        """How many tensors each engine has taken that has begun."""
        return [taken for taken in self.pending.values() if taken is not None]

    async def has_moved(self, *, within_s: float) -> bool:
        """Whether an engine takes a tensor or leaves in this time."""
        moved = self._moved
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await moved.wait()
        return moved.is_set()

    def leave(self, name: str) -> None:
        """The engine needs no more tensors."""
        self.pending.pop(name, None)
        self._drop_taken()

    async def stream(self, name: str) -> AsyncIterator[NamedTensor]:
        """The stream for one engine."""
        number = 0
        while name in self.pending:
            self.pending[name] = number
            self._drop_taken()
            while name in self.pending and number > _MAX_AHEAD + min(self._taken):
                await self._moved.wait()
            named = await self._at(number)
            if named is None:
                return
            number += 1
            yield named

    async def _at(self, number: int) -> NamedTensor | None:
        """Tensor `number`; None at the end of the stream."""
        async with self._reading:
            while not self._is_over and number >= self._first + len(self._held):
                try:
                    self._held.append(await anext(self._tensors))
                except StopAsyncIteration:
                    self._is_over = True
                except BaseException as error:
                    self.error = error
                    raise
        return self._held[number - self._first] if number < self._first + len(self._held) else None

    def _drop_taken(self) -> None:
        """Drop the tensors that every engine has taken, and wake those that wait."""
        needed = min((taken or 0 for taken in self.pending.values()), default=0)
        while self._held and self._first < needed:
            self._held.popleft()
            self._first += 1
        self._moved.set()
        self._moved = asyncio.Event()  # for the next change
