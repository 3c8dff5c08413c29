"""One stream of weights to many engines at once; whoever cannot prove them is told apart from those who can."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress

from strop.engine.protocol import Capabilities, InferenceEngine, NamedTensor
from strop.errors import EngineLost, MachineError, ModelError

_AHEAD = 2  # tensors by which an engine may be ahead of a slower one


class Everyone:
    """Takes weights as an engine does, for several; each tensor is read once and given to all.

    `failures` holds, after `load_weights`, why engines did not prove what was sent; they must not be sampled from. The others
    did. A tensor may be kept by all of them and so must not be written to by any.
    """

    def __init__(self, engines: Mapping[str, InferenceEngine], *, deadline_s: float) -> None:
        """
        Args:
            engines: by name, at least one.
            deadline_s: how long nothing may move before the engines that keep the others waiting are given up.

        Raises:
            ModelError: the engines' weights are of different types, so that one checksum could not prove them.
        """
        self.failures: dict[str, EngineLost] = {}
        self._engines = dict(engines)
        self._deadline_s = deadline_s
        dtypes = {name: engine.capabilities.dtype for name, engine in engines.items()}
        if len(set(dtypes.values())) > 1:
            raise ModelError(f"the engines hold weights of different types, {dtypes}; give all of them one dtype.")

    @property
    def capabilities(self) -> Capabilities:
        return next(iter(self._engines.values())).capabilities

    async def load_weights(self, tensors: AsyncIterator[NamedTensor], *, version: int, checksum: str) -> None:
        """Returns when every engine has proved the weights or failed to; whoever fails keeps nobody else waiting for long.

        Raises:
            StropError: an engine cannot take weights now, because it was asked to while it samples.
        """
        shared = _SharedStream(tensors, list(self._engines))
        loads = {
            name: asyncio.ensure_future(engine.load_weights(shared.stream(name), version=version, checksum=checksum))
            for name, engine in self._engines.items()
        }
        for name, load in loads.items():
            load.add_done_callback(lambda _, name=name: shared.leave(name))  # type: ignore[misc]
        try:
            while shared.pending:
                if not await shared.has_moved(within_s=self._deadline_s):
                    self._give_up(shared.laggards, loads, version)
        finally:
            for load in loads.values():
                load.cancel()
            await asyncio.wait(loads.values(), timeout=self._deadline_s)
        if shared.error is not None:
            raise shared.error
        for name, load in loads.items():
            self._judge(name, load)

    def _give_up(self, names: Sequence[str], loads: dict[str, asyncio.Task[None]], version: int) -> None:
        for name in names:
            self.failures[name] = EngineLost(
                f"it hangs: the weights of version {version} were not taken within {self._deadline_s:g} s."
            )
            loads[name].cancel()

    def _judge(self, name: str, load: asyncio.Task[None]) -> None:
        if name in self.failures:
            with suppress(asyncio.CancelledError):
                load.exception()  # of one that was given up, whatever it says
            return
        try:
            load.result()
        except EngineLost as error:
            self.failures[name] = error
        except (MachineError, MemoryError, OSError) as error:
            self.failures[name] = EngineLost(f"it could not take weights: {type(error).__name__}: {error}")


class _SharedStream:
    """A stream that several engines read, each from its beginning.

    Whoever began waits for the slower ones among those that began. Nobody waits for an engine that has not: it may be sharing
    what another reads, as those on one machine do, and never begin. What it may still want is kept for it.
    """

    def __init__(self, tensors: AsyncIterator[NamedTensor], names: Sequence[str]) -> None:
        self.error: BaseException | None = None  # of the stream itself
        self.pending: dict[str, int | None] = dict.fromkeys(names)  # tensors taken by each; None: it did not begin
        self._tensors = tensors
        self._held: deque[NamedTensor] = deque()
        self._first = 0  # number of the first that is held
        self._is_over = False
        self._reading = asyncio.Lock()
        self._moved = asyncio.Event()

    @property
    def laggards(self) -> list[str]:
        """Those that keep the others waiting: the last of those that began, or else all."""
        begun = [taken for taken in self.pending.values() if taken is not None]
        return [name for name, taken in self.pending.items() if not begun or taken == min(begun)]

    async def has_moved(self, *, within_s: float) -> bool:
        """Whether somebody took a tensor, or left, in this time."""
        moved = self._moved
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await moved.wait()
        return moved.is_set()

    def leave(self, name: str) -> None:
        """It needs no more of the stream."""
        self.pending.pop(name, None)
        self._let_go()

    async def stream(self, name: str) -> AsyncIterator[NamedTensor]:
        """The stream as the engine of that name reads it."""
        number = 0
        while name in self.pending:
            self.pending[name] = number
            self._let_go()
            while name in self.pending and number > _AHEAD + min(taken for taken in self.pending.values() if taken is not None):
                await self._moved.wait()
            named = await self._at(number)
            if named is None:
                return
            number += 1
            yield named

    async def _at(self, number: int) -> NamedTensor | None:
        """None at the end."""
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

    def _let_go(self) -> None:
        """Drop what everybody has, and tell that something moved."""
        needed = min((taken or 0 for taken in self.pending.values()), default=0)
        while self._held and self._first < needed:
            self._held.popleft()
            self._first += 1
        self._moved.set()
        self._moved = asyncio.Event()  # for whatever moves next
