"""What a trainer owes the controller, whether it is local, torchrun workers or actors: the same few calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

from torch import Tensor

from strop.algorithms.protocol import Column, LossInputs, ValueInputs
from strop.engine.protocol import TakesWeights
from strop.errors import UserError
from strop.training.batch import TokenBatch
from strop.training.compute import UpdateCost

TokenLoss: TypeAlias = Callable[[Tensor, LossInputs], Tensor]
TokenStatistics: TypeAlias = Callable[[Tensor, LossInputs], dict[str, Tensor]]
ValueLoss: TypeAlias = Callable[[Tensor, ValueInputs], Tensor]
ValueStatistics: TypeAlias = Callable[[Tensor, ValueInputs], dict[str, Tensor]]

WriteCheckpoint: TypeAlias = Callable[[Path], None]
"""Writes a checkpoint into a directory that is empty, in whatever thread it is called, and waits for the disk.

Raises `RunError` where there is no room, `TrainerLost` when a process of the trainer is gone.
"""


class WeightsLost(UserError):  # noqa: N818 - named for what happened
    """An update made weights that are not finite, so the trainer has none: what the last checkpoint holds is what is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """One optimizer step, or why there was none: then nothing of the trainer has changed."""

    update: int  # how many updates this trainer has done, this one included
    loss: float  # not finite where that is why the update was skipped; so is grad_norm
    grad_norm: float  # before clipping
    learning_rate: float
    statistics: Mapping[str, float]  # of unmasked tokens: entropy_nats and the method's own; empty when skipped
    cost: UpdateCost | None = field(default=None, compare=False)  # of updates that were made, but a critic's; hangs on a clock
    skip_reason: str = ""  # nothing to learn from, or a loss or gradient that is not finite

    @property
    def is_skipped(self) -> bool:
        return bool(self.skip_reason)


class Checkpointed(Protocol):
    """What a checkpoint is made of: any trainer, of a policy or of a reward model."""

    async def save(self, directory: Path) -> None:
        """Write a checkpoint into `directory`, which is empty."""

    async def snapshot(self) -> WriteCheckpoint:
        """Copy in memory what `save` would write; what comes of it writes that, whatever is called meanwhile."""

    async def load(self, directory: Path) -> None:
        """Go on from what `save` wrote."""


class Trainer(Protocol):
    """Owns the weights and the optimizer. Calls are made one at a time.

    After an update that made weights which are not finite every call raises `WeightsLost`, but `load`, which brings others.
    """

    @property
    def num_updates(self) -> int: ...

    async def score(self, batch: TokenBatch, column: Column) -> TokenBatch:
        """`batch` with `column` filled in by the policy, the reference or the critic, without gradient.

        Log-probs are at the batch's temperature. Raises `ValueError` where there is no such model.
        """

    async def update(self, batch: TokenBatch, loss: TokenLoss, statistics: TokenStatistics) -> UpdateReport:
        """One optimizer step on the whole batch: loss = sum(loss_weights * token loss), split as memory asks (law 4).

        A batch without old log-probs is on policy: what this update computes before its step stands for them, exactly, and
        nothing is paid for it.

        Raises:
            CannotLearnError: too many updates in a row were skipped.
            WeightsLost: the step made weights that are not finite.
        """

    async def update_critic(self, batch: TokenBatch, loss: ValueLoss, statistics: ValueStatistics) -> UpdateReport:
        """One step of the critic's optimizer on the whole batch, which has values and returns; as `update`, and apart from it.

        Raises:
            CannotLearnError: too many of them in a row were skipped.
            ValueError: there is no critic, or one of the columns is missing.
        """

    async def publish(self, engine: TakesWeights, *, version: int) -> str:
        """Send the weights to the engine in its dtype; returns their checksum once the engine has proved it (law 6)."""

    async def save(self, directory: Path) -> None:
        """Write a checkpoint into `directory`, which is empty: model (a directory that transformers loads) or adapter, state
        of the optimizer, the critic with its own, counters."""

    async def snapshot(self) -> WriteCheckpoint:
        """Copy in memory what `save` would write; what comes of it writes that, whatever is called meanwhile.

        Take the next one when the one before is written.
        """

    async def save_model(self, directory: Path) -> None:
        """Write the model and its tokenizer into `directory`, which `transformers` then loads; an adapter is merged."""

    async def load(self, directory: Path) -> None:
        """Continue from what `save` wrote: the next update is the one that would have followed, bit for bit.

        On another number of processes it is the same up to rounding.

        Raises:
            RunError: something that `save` wrote is missing.
            ModelError: it is of another model.
        """

    async def reset_optimizer(self) -> None:
        """Forget the policy's moments and start its learning-rate schedule again; the weights and `num_updates` stay."""

    async def refresh_reference(self) -> None:
        """Measure KL against the policy as it is now (DeepSeek-R1, arXiv 2501.12948: every 400 steps).

        Raises:
            ValueError: there is no reference.
        """

    async def close(self) -> None:
        """Wait for a call that still runs, then give the threads and devices back."""
