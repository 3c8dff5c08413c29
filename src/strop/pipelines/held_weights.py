"""A publication that is kept, so that an engine can join while the trainer moves on."""

from __future__ import annotations

from collections.abc import AsyncIterator

from strop.engine.protocol import Capabilities, NamedTensor, TakesWeights
from strop.training.protocol import Trainer


class HeldWeights:
    """Sends the weights that the trainer had when they were first sent, each time again; one copy in the engines' dtype.

    Called as `strop.rollout.fleet.fleet.Publish` is.
    """

    def __init__(self, trainer: Trainer, *, version: int) -> None:
        self._trainer, self._version = trainer, version
        self._held: _Copy | None = None

    async def __call__(self, engines: TakesWeights) -> str:
        """Their checksum, once the engines have proved it. The first call is to be made while the trainer is idle."""
        if self._held is None:
            held = _Copy(engines.capabilities)
            await self._trainer.publish(held, version=self._version)
            self._held = held
        await engines.load_weights(self._held.stream(), version=self._version, checksum=self._held.checksum)
        return self._held.checksum


class _Copy:
    """Takes weights, and keeps them. Implements `TakesWeights`."""

    def __init__(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities  # of the engines that it is for
        self.checksum = ""
        self._tensors: list[NamedTensor] = []

    async def load_weights(self, tensors: AsyncIterator[NamedTensor], *, version: int, checksum: str) -> None:
        """Nothing is proved here: the engines prove what they get against `checksum`."""
        self._tensors, self.checksum = [named async for named in tensors], checksum

    async def stream(self) -> AsyncIterator[NamedTensor]:
        for named in self._tensors:
            yield named
