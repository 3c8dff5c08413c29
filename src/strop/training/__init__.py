"""Groups -> token batches -> optimizer updates, and the weights that come of them."""

from strop.training.batch import pack
from strop.training.config import OptimizerConfig, TrainerConfig
from strop.training.trainer import Trainer

__all__ = ["OptimizerConfig", "Trainer", "TrainerConfig", "pack"]
