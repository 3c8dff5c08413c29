"""Groups -> token batches -> optimizer updates, and the weights that come of them."""

from strop.training.batch import Microbatch, TokenBatch, microbatches, pack, split_by_group
from strop.training.config import CriticConfig, CriticOptimizerConfig, LoraConfig, OptimizerConfig, Schedule, TrainerConfig
from strop.training.optimizer import UpdateReport, WeightsLost
from strop.training.sft import Demonstration, Segment, pack_demonstrations, sft_token_loss, sft_token_statistics
from strop.training.trainer import Trainer

__all__ = [
    "CriticConfig",
    "CriticOptimizerConfig",
    "Demonstration",
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
    "microbatches",
    "pack",
    "pack_demonstrations",
    "sft_token_loss",
    "sft_token_statistics",
    "split_by_group",
]
