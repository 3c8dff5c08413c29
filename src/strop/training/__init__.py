"""Groups -> token batches -> optimizer updates, and the weights that come of them."""

from strop.training.batch import Microbatch, TokenBatch, microbatches, pack, split_by_group
from strop.training.config import CriticConfig, CriticOptimizerConfig, LoraConfig, OptimizerConfig, Schedule, TrainerConfig
from strop.training.opening import open_trainer
from strop.training.protocol import Trainer, UpdateReport, WeightsLost
from strop.training.sft import Demonstration, Segment, pack_demonstrations, sft_token_loss, sft_token_statistics
from strop.training.trainer import LocalTrainer
from strop.training.workers import WorkerTrainer

__all__ = [
    "CriticConfig",
    "CriticOptimizerConfig",
    "Demonstration",
    "LocalTrainer",
    "LoraConfig",
    "Microbatch",
    "OptimizerConfig",
    "Schedule",
    "Segment",
    "TokenBatch",
    "Trainer",
    "TrainerConfig",
    "UpdateReport",
    "WeightsLost",
    "WorkerTrainer",
    "microbatches",
    "open_trainer",
    "pack",
    "pack_demonstrations",
    "sft_token_loss",
    "sft_token_statistics",
    "split_by_group",
]
