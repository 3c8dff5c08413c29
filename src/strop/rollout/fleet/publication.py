"""One stream of weights to many engines at once; whoever cannot prove them is told apart from those who can."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress

from strop.engine.protocol import Capabilities, NamedTensor
from strop.errors import EngineLost, MachineError, ModelError
from strop.rollout.fleet.member import Member

_AHEAD = 2  # tensors that a fast engine may be given before a slow one has taken them


class Everyone:
    """Takes weights as an engine does, for several; each tensor is read once and given to all.

    `failures` holds, after `load_weights`, why engines did not prove what was sent; they must not be sampled from. The others
    did. A tensor may be kept by all of them and so must not be written to by any.
    """

    def __init__(self, members: Sequence[Member], *, deadline_s: float) -> None:
        """Raises `ModelError` when the engines' weights are of different types: one checksum could not prove them."""
        self.failures: dict[str, EngineLost] = {}
        self.version = -1
        self._members = list(members)
        self._deadline_s = deadline_s
        dtypes = {member.name: member.engine.capabilities.dtype for member in members}
        if len(set(dtypes.values())) > 1:
            raise ModelError(f"the engines hold weights of different types, {dtypes}; give all of them one dtype.")

    @property
    def capabilities(self) -> Capabilities:
        return self._members[0].engine.capabilities

    async def load_weights(self, tensors: AsyncIterator[NamedTensor], *, version: int, checksum: str) -> None:
        """Returns when every engine has proved the weights or failed to; whoever fails keeps nobody else waiting.

        Raises:
            StropError: an engine cannot take weights now, because it was asked to while it samples.
        """
        self.version = version
        queues: dict[str, asyncio.Queue[NamedTensor | None]] = {each.name: asyncio.Queue(_AHEAD) for each in self._members}
        loads = {
            each.name: asyncio.ensure_future(
                each.engine.load_weights(_taken_from(queues[each.name]), version=version, checksum=checksum)
            )
            for each in self._members
        }
        try:
            async for named in tensors:
                for name, queue in queues.items():
                    await self._give(name, loads[name], queue, named)
            for name, queue in queues.items():
                await self._give(name, loads[name], queue, None)
            await self._finish(loads)
        finally:
            for load in loads.values():
                load.cancel()
            await asyncio.wait(loads.values(), timeout=self._deadline_s)

    async def _give(
        self, name: str, load: asyncio.Future[None], queue: asyncio.Queue[NamedTensor | None], named: NamedTensor | None
    ) -> None:
        """Put a tensor into the queue of an engine that still takes some."""
        while not load.done() and name not in self.failures:
            with suppress(asyncio.QueueFull):
                queue.put_nowait(named)
                return
            put = asyncio.ensure_future(queue.put(named))
            await asyncio.wait({put, load}, timeout=self._deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if put.done():
                return
            put.cancel()
            if not load.done():
                self._give_up(name, load)

    async def _finish(self, loads: Mapping[str, asyncio.Future[None]]) -> None:
        await asyncio.wait(loads.values(), timeout=self._deadline_s)
        for name, load in loads.items():
            if not load.done():
                self._give_up(name, load)
            if name in self.failures:
                continue
            try:
                load.result()
            except EngineLost as error:
                self.failures[name] = error
            except (MachineError, MemoryError, OSError) as error:
                self.failures[name] = EngineLost(f"it could not take weights: {type(error).__name__}: {error}")

    def _give_up(self, name: str, load: asyncio.Future[None]) -> None:
        load.cancel()
        self.failures[name] = EngineLost(
            f"it hangs: the weights of version {self.version} were not taken within {self._deadline_s:g} s."
        )


async def _taken_from(queue: asyncio.Queue[NamedTensor | None]) -> AsyncIterator[NamedTensor]:
    while (named := await queue.get()) is not None:
        yield named
