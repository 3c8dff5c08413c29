"""The trainer of a policy: one model in this process, or divided over several processes. The event loop never computes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from strop.algorithms.method import Column
from strop.cluster.placement import Node
from strop.engine.protocol import COPIED_AT_ONCE, Capabilities, InferenceEngine, NamedTensor, in_parts
from strop.engine.publication import Publication
from strop.engine.torch.cpu.resources import end_team
from strop.training.assembly import LearnerOptions, open_learner
from strop.training.batch import TokenBatch
from strop.training.config import TrainerConfig
from strop.training.learner import Learner
from strop.training.optimizer import TokenLoss, TokenStatistics, UpdateReport, ValueLoss, ValueStatistics
from strop.training.weights import WriteCheckpoint
from strop.training.workers import LearnerGroup

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")


class ComputeThread:
    """One thread for everything that touches a model, so that calls never overlap and the event loop stays free."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="strop-trainer")

    async def run(self, work: Callable[[], Result]) -> Result:
        def compute() -> Result:
            try:
                return work()
            finally:
                end_team()  # else the engine's threads sleep between operations

        return await asyncio.get_running_loop().run_in_executor(self._executor, compute)

    async def close(self) -> None:
        """Wait for the running call, then end the thread."""
        await asyncio.to_thread(self._executor.shutdown)


class _Source:
    """The weights of a learner, as `strop.engine.publication.WeightSource`."""

    def __init__(
        self, learner: Learner | LearnerGroup, thread: ComputeThread, dtype: torch.dtype, num_bytes: int, *, is_adapter: bool
    ) -> None:
        self._learner, self._thread, self._dtype = learner, thread, dtype
        self.num_bytes, self._is_adapter = num_bytes, is_adapter

    async def tensors(self) -> AsyncIterator[NamedTensor]:
        names = await self._thread.run(self._learner.names)
        parts = in_parts(((name, self._learner.published(name, self._dtype)) for name in names), COPIED_AT_ONCE)
        while part := await self._thread.run(lambda: next(parts, [])):
            for named in part:
                yield named

    async def checksum(self) -> str:
        return await self._thread.run(lambda: self._learner.checksum(self._dtype))

    @property
    def nodes(self) -> Sequence[Node | None]:
        return self._learner.nodes if isinstance(self._learner, LearnerGroup) else (None,)

    async def write(self, directories: Sequence[Path]) -> str:
        write = self._learner.write_published_adapter if self._is_adapter else self._learner.write_published
        return await self._thread.run(lambda: write(directories, self._dtype))


class Trainer:
    """Owns the weights and the optimizer. Make one call at a time. Tensors of a batch come and go on the CPU.

    Weights, gradients and moments are float32; with precision "bfloat16" the model computes with rounded copies of the
    weights, and gradients are rounded before they are added up.

    After an update that made weights that are not finite, every call except `load` raises `WeightsLost`. When a process of
    the trainer is lost, every call raises `TrainerLost`; the last checkpoint is what is left.
    """

    def __init__(self, learner: Learner | LearnerGroup, *, has_adapter: bool = False) -> None:
        self.learner, self._has_adapter = learner, has_adapter
        self._thread = ComputeThread()

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
        """Return a trainer of the model in `directory`: in this process, or over `config.workers` processes.

        Args:
            directory: which `transformers` loads.
            config: of the trainer.
            reference: a directory with the frozen model of the KL penalty.
            critic: a directory with the model whose decoder the critic starts from; the critic also takes a reward model's
                head.
            total_updates: the updates of the policy's cosine schedule.
            total_critic_updates: the updates of the critic's cosine schedule.

        Raises:
            ModelError: there is no model, or not one that can be trained here.
            ValueError: a schedule and the number of updates do not fit.
            TrainerLost: a process did not start.
        """
        options = LearnerOptions(
            directory=directory,
            config=config,
            reference=reference,
            critic=critic,
            total_updates=total_updates,
            total_critic_updates=total_critic_updates,
        )
        learner = LearnerGroup(options) if config.workers else open_learner(options)
        end_team()  # of the calling thread
        return cls(learner, has_adapter=config.lora is not None)

    @property
    def num_updates(self) -> int:
        return self.learner.num_updates

    async def score(self, batch: TokenBatch, column: Column) -> TokenBatch:
        """Return `batch` with `column` from the policy, the reference or the critic, without gradient.

        Log-probs are at the batch's temperature. Raises `ValueError` if the trainer has no such model.
        """
        scores = await self._thread.run(lambda: self.learner.score(batch, column))
        return replace(batch, columns={**batch.columns, column: scores})

    async def update(self, batch: TokenBatch, loss: TokenLoss, statistics: TokenStatistics) -> UpdateReport:
        """Make one optimizer step on the batch: loss = sum(loss_weights * token loss), in micro-batches.

        A batch without old log-probs is on policy: the update uses its own log-probs as old ones, without extra cost.

        Raises:
            CannotLearnError: too many updates in a row were skipped.
            WeightsLost: the step made weights that are not finite.
        """
        return await self._thread.run(lambda: self.learner.update(batch, loss, statistics))

    async def update_critic(self, batch: TokenBatch, loss: ValueLoss, statistics: ValueStatistics) -> UpdateReport:
        """Make one step of the critic's optimizer on the batch, which has values and returns. Raises as `update`."""
        return await self._thread.run(lambda: self.learner.update_critic(batch, loss, statistics))

    async def publish(self, engine: InferenceEngine, *, version: int) -> str:
        """Give the engine the weights in its dtype. Return their checksum when the engine has confirmed it."""
        async with await self.publication(engine.capabilities, version=version) as publication:
            await engine.load_weights(publication)
            return await publication.checksum()

    async def publication(self, engine: Capabilities, *, version: int) -> Publication:
        """Return the weights as such engines take them: in their dtype, and the adapter by itself if they take adapters.

        Engines may read them until the trainer computes again, and their files until `close`. Of a model over several
        processes, and of an adapter, there are only files.
        """
        is_adapter = self._has_adapter and engine.takes_adapters
        num_elements = self.learner.num_adapter_elements if is_adapter else self.learner.num_elements
        num_bytes = engine.dtype.itemsize * await self._thread.run(num_elements)
        source = _Source(self.learner, self._thread, engine.dtype, num_bytes, is_adapter=is_adapter)
        publication = Publication(source, version=version)
        if isinstance(self.learner, LearnerGroup) or is_adapter:
            await publication.write()
        return publication

    async def save(self, directory: Path) -> None:
        """Write a checkpoint into the empty `directory`: the model or adapter, the state of optimizer and critic, counters.

        All of it is copied in memory first.
        """
        write = await self.snapshot()
        await asyncio.to_thread(write, directory.absolute())

    async def snapshot(self) -> WriteCheckpoint:
        """Copy in memory what `save` writes. Return a function that writes the copy, also while training continues.

        With several processes the next call waits until it is written. Take the next snapshot only when this one is written.
        """
        return await self._thread.run(self.learner.snapshot_writer)

    async def save_model(self, directory: Path) -> None:
        """Write the model and its tokenizer into `directory` in the format of `transformers`; an adapter is merged."""
        await self._thread.run(lambda: self.learner.save_model(directory.absolute()))

    async def save_adapter(self, directory: Path) -> None:
        """Write the adapter into `directory` in the format of `peft`. Raises `ValueError` if there is none."""
        await self._thread.run(lambda: self.learner.save_adapter(directory.absolute()))

    async def load(self, directory: Path) -> None:
        """Continue from a checkpoint. The next update is bit for bit the one that followed in the saved run.

        With another number of processes it is equal up to rounding.

        Raises:
            RunError: a file of the checkpoint is missing or damaged.
            ModelError: the checkpoint is of another model.
        """
        await self._thread.run(lambda: self.learner.load(directory.absolute()))

    async def reset_optimizer(self) -> None:
        """Reset the policy's moments and its learning-rate schedule. The weights and `num_updates` stay."""
        await self._thread.run(lambda: self.learner.reset_optimizer())

    async def refresh_reference(self) -> None:
        """Set the reference of the KL penalty to the current policy (DeepSeek-R1, arXiv 2501.12948: every 400 steps).

        Raises:
            ValueError: the trainer has no reference.
        """
        await self._thread.run(lambda: self.learner.refresh_reference())

    async def close(self) -> None:
        """Wait for the running call, then release threads and processes."""
        if isinstance(self.learner, LearnerGroup):
            await self._thread.run(self.learner.close)
        await self._thread.close()
