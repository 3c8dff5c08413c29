"""The trainer that a recipe asks for."""

from __future__ import annotations

from pathlib import Path

from strop.training.config import TrainerConfig
from strop.training.protocol import Trainer
from strop.training.trainer import LocalTrainer
from strop.training.workers import WorkerTrainer


def open_trainer(
    directory: Path,
    config: TrainerConfig,
    *,
    reference: Path | None = None,
    critic: Path | None = None,
    total_updates: int | None = None,
    total_critic_updates: int | None = None,
) -> Trainer:
    """A trainer of the model in `directory`: in this process, or over `config.workers` processes.

    Args:
        directory: which `transformers` loads.
        config: of the trainer.
        reference: a directory with the frozen model that KL is measured against.
        critic: a directory with the model whose decoder a critic starts from; of a reward model its head, too.
        total_updates: where a cosine schedule of the policy ends.
        total_critic_updates: where one of the critic ends.

    Raises:
        ModelError: there is no model, or not one that can be trained here.
        ValueError: the schedule and `total_updates` do not fit.
        TrainerLost: a process did not start.
    """
    kind = WorkerTrainer if config.workers else LocalTrainer
    return kind.from_directory(
        directory,
        config,
        reference=reference,
        critic=critic,
        total_updates=total_updates,
        total_critic_updates=total_critic_updates,
    )
