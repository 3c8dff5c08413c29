"""Settings of the trainer and its optimizer, and the learning rate of each update."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from strop.config import Config


class Schedule(StrEnum):
    """What the learning rate does after the warm-up."""

    CONSTANT = "constant"
    COSINE = "cosine"  # half a cosine down to `final_lr_fraction`, reached after the last update


_Decay: TypeAlias = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Config):
    """AdamW. Vectors (norms, biases) are never decayed."""

    lr: float = Field(default=1e-6, gt=0)  # rStar2-Agent (arXiv 2508.20722) section 4.3
    betas: tuple[_Decay, _Decay] = (0.9, 0.95)  # CS336 assignment 5
    weight_decay: float = Field(default=0.0, ge=0)
    eps: float = Field(default=1e-8, gt=0)
    grad_clip: float = Field(default=1.0, ge=0)  # largest gradient norm; 0: no clipping
    warmup_updates: int = Field(default=0, ge=0)  # linear; the first update already moves
    schedule: Schedule = Schedule.CONSTANT
    final_lr_fraction: float = Field(default=0.0, ge=0, le=1)  # of lr, at the end of the cosine
    moments: Literal["memory", "disk"] = "memory"  # where they lie between steps; on a disk below TMPDIR, on a CPU alone


class CriticOptimizerConfig(OptimizerConfig):
    """AdamW of the critic, which has to keep up with the policy."""

    lr: float = Field(default=1e-5, gt=0)  # ten times the policy's default


class CriticConfig(Config):
    """What is different of the critic, where the method has one; all else is as of the policy."""

    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    alone_steps: int = Field(default=0, ge=0)  # first steps of a stage, in which the critic learns and the policy does not


class LoraConfig(Config):
    """Low-rank matrices beside frozen ones (LoRA, arXiv 2106.09685)."""

    rank: int = Field(default=16, gt=0)
    alpha: int = Field(default=32, gt=0)  # what they add is scaled by alpha / rank
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"  # or names of layers: "q_proj"; the head is never one
    seed: int = 0  # of the random half


class TrainerConfig(Config):
    """How one model is trained."""

    optimizer: OptimizerConfig = OptimizerConfig()
    precision: Literal["float32", "bfloat16"] = "float32"  # to compute in; weights, gradient sums and optimizer are float32
    lora: LoraConfig | None = None  # train an adapter; unset: all weights
    critic: CriticConfig = CriticConfig()  # of a method that has one
    workers: int = Field(default=0, ge=0)  # processes that divide the model among them; 0: this one has all of it
    worker_timeout_s: float = Field(default=1800.0, gt=0)  # of one call of them, until the silent one is named
    device: str = "cpu"  # or "cuda", "cuda:1"
    max_tokens_per_microbatch: int = Field(default=16_384, gt=0)  # decides memory, never the gradient (law 4)
    packing: bool = True  # rows end to end, without padding, and what rows of a group begin with computed once
    activation_checkpointing: bool = False  # compute layers again in the backward pass instead of keeping what they computed
    max_logits: int = Field(default=2**25, gt=0)  # held at once, and not computed twice; in bfloat16 64 MiB
    background_checkpoints: bool = True  # copy what a checkpoint holds in memory, and write it while training goes on
    max_skipped_updates: int = Field(default=3, gt=0)  # in a row, before the run says that it cannot learn

    @property
    def gives_back_memory(self) -> bool:
        """Whether what a micro-batch freed goes back to the system at once: where little memory is wanted, of the machine's."""
        return self.activation_checkpointing and self.device == "cpu"

    @model_validator(mode="after")
    def _can_page(self) -> Self:
        roles = {"optimizer": self.optimizer, "critic.optimizer": self.critic.optimizer}
        paged = [key for key, optimizer in roles.items() if optimizer.moments == "disk"]
        if paged and not self.device.startswith("cpu"):
            raise ValueError(
                f"{paged[0]}.moments is 'disk' and device is {self.device!r}: moments on a disk are for a CPU. Set moments ="
                " 'memory', and divide them with workers if they have no room."
            )
        return self

    @model_validator(mode="after")
    def _gives_each_worker_a_device(self) -> Self:
        if self.workers and ":" in self.device:
            raise ValueError(
                f"device is {self.device!r} and workers is {self.workers}: worker k computes on device k."
                f" Set device = {self.device.partition(':')[0]!r}, or workers = 0."
            )
        return self


def learning_rate(config: OptimizerConfig, update: int, total_updates: int | None) -> float:
    """The learning rate of the update that comes after `update` others.

    Raises:
        ValueError: a cosine without `total_updates`, or without an update after its warm-up.
    """
    if update < config.warmup_updates:
        return config.lr * (update + 1) / config.warmup_updates
    if config.schedule is Schedule.CONSTANT:
        return config.lr
    if total_updates is None or total_updates <= config.warmup_updates:
        raise ValueError(
            f"optimizer.schedule is 'cosine' over {total_updates} updates after {config.warmup_updates} of warm-up:"
            " it needs a total that is larger than the warm-up"
        )
    progress = min(1.0, (update - config.warmup_updates) / (total_updates - config.warmup_updates))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.final_lr_fraction + (1.0 - config.final_lr_fraction) * cosine)
