"""A trainer in this process: one model, one optimizer, one worker thread in which all of their compute runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeVar

from strop.algorithms.protocol import Column
from strop.engine.protocol import COPIED_AT_ONCE, NamedTensor, TakesWeights
from strop.engine.teams import end_team
from strop.errors import ConfigError
from strop.training.assembly import open_learner
from strop.training.batch import TokenBatch
from strop.training.config import TrainerConfig
from strop.training.learner import Learner
from strop.training.protocol import (
    TokenLoss,
    TokenStatistics,
    UpdateReport,
    ValueLoss,
    ValueStatistics,
    WriteCheckpoint,
)

Result = TypeVar("Result")


class LocalTrainer:
    """Implements `Trainer` for a model that fits on one device. Tensors of a batch come and go on the CPU.

    Weights, gradients and moments are float32; with precision "bfloat16" the model computes with rounded copies of the
    weights, and gradients are rounded before they are added up.
    """

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="strop-trainer")

    @classmethod
    def from_directory(
        cls,
        directory: Path,
        config: TrainerConfig,
        *,
        reference: Path | None = None,
        critic: Path | None = None,
        total_updates: int | None = None,
        total_critic_updates: int | None = None,
    ) -> Self:
        """A trainer of the model in `directory`; the arguments are those of `open_trainer`.

        Raises:
            ModelError: there is no model, or not one that can be trained here.
            ConfigError: `config` asks for processes, which `open_trainer` starts.
            ValueError: a schedule and the number of updates do not fit.
        """
        if config.workers:
            raise ConfigError(f"trainer.workers is {config.workers}, but this trainer is one process: use open_trainer.")
        learner = open_learner(
            directory,
            config,
            reference=reference,
            critic=critic,
            total_updates=total_updates,
            total_critic_updates=total_critic_updates,
        )
        return cls(learner)

    @property
    def num_updates(self) -> int:
        return self.learner.num_updates

    async def score(self, batch: TokenBatch, column: Column) -> TokenBatch:
        scores = await self._run(lambda: self.learner.score(batch, column))
        return replace(batch, columns={**batch.columns, column: scores})

    async def update(self, batch: TokenBatch, loss: TokenLoss, statistics: TokenStatistics) -> UpdateReport:
        return await self._run(lambda: self.learner.update(batch, loss, statistics))

    async def update_critic(self, batch: TokenBatch, loss: ValueLoss, statistics: ValueStatistics) -> UpdateReport:
        return await self._run(lambda: self.learner.update_critic(batch, loss, statistics))

    async def publish(self, engine: TakesWeights, *, version: int) -> str:
        """Each tensor is a copy, cast to the engine's dtype when its turn comes: the engine may keep it."""
        dtype = engine.capabilities.dtype
        checksum = await self._run(lambda: self.learner.checksum(dtype))

        names = iter(self.learner.names())

        def copy_some() -> list[NamedTensor]:
            copies: list[NamedTensor] = []
            num_bytes = 0
            for name in names:
                copies.append((name, self.learner.tensor(name).to(dtype, copy=True)))
                num_bytes += copies[-1][1].nbytes
                if num_bytes >= COPIED_AT_ONCE:
                    break
            return copies

        async def stream() -> AsyncIterator[NamedTensor]:
            while copies := await self._run(copy_some):
                for copy in copies:
                    yield copy

        await engine.load_weights(stream(), version=version, checksum=checksum)
        return checksum

    async def save(self, directory: Path) -> None:
        """Writes `directory`/model (or adapter), state and trainer.json."""
        await self._run(lambda: self.learner.save(directory))

    async def snapshot(self) -> WriteCheckpoint:
        snapshot = await self._run(self.learner.snapshot)
        return snapshot.write

    async def save_model(self, directory: Path) -> None:
        await self._run(lambda: self.learner.save_model(directory))

    async def load(self, directory: Path) -> None:
        await self._run(lambda: self.learner.load(directory))

    async def reset_optimizer(self) -> None:
        await self._run(self.learner.reset_optimizer)

    async def refresh_reference(self) -> None:
        await self._run(self.learner.refresh_reference)

    async def close(self) -> None:
        await asyncio.to_thread(self._worker.shutdown)

    async def _run(self, work: Callable[[], Result]) -> Result:
        """Everything that touches the weights runs in the one worker thread, so calls never overlap (law 7)."""

        def compute() -> Result:
            try:
                return work()
            finally:
                end_team()  # or the engine's operations would sleep between each other

        return await asyncio.get_running_loop().run_in_executor(self._worker, compute)
