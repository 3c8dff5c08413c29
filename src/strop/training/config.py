"""The `trainer` table of a recipe."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from strop.config import Config
from strop.engine.config import Precision

if TYPE_CHECKING:
    import torch


class Schedule(StrEnum):
    """The learning rate after the warm-up."""

    CONSTANT = "constant"
    COSINE = "cosine"  # falls to `final_lr_fraction` after the last update


_Decay: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
_MAX_COUNT = 10**9


class OptimizerConfig(Config):
    """AdamW. Vectors (norms, biases) are never decayed."""

    # rStar2-Agent (arXiv 2508.20722) section 4.3
    lr: float = Field(default=1e-6, gt=0, le=1e38, description="Learning rate after the warm-up.")
    # CS336 assignment 5
    betas: tuple[_Decay, _Decay] = Field(default=(0.9, 0.95), description="Decay rates of the two moments.")
    weight_decay: float = Field(default=0.0, ge=0, le=10, description="Decoupled weight decay of matrices.")
    eps: float = Field(default=1e-8, gt=0, le=1e9, description="Added to the root of the second moment.")
    grad_clip: float = Field(default=1.0, ge=0, le=1e9, description="Largest norm of the gradient. 0: no clipping.")
    warmup_updates: int = Field(
        default=0, ge=0, le=_MAX_COUNT, description="Updates of the linear warm-up. The first has a rate above 0."
    )
    warmup_fraction: float = Field(
        default=0.0, ge=0, lt=1, description="Length of the warm-up as a share of all updates, instead of warmup_updates."
    )
    schedule: Schedule = Field(default=Schedule.CONSTANT, description="Learning rate after the warm-up: constant or cosine.")
    final_lr_fraction: float = Field(default=0.0, ge=0, le=1, description="Share of lr at the end of a cosine.")
    moments: Literal["memory", "disk"] = Field(
        default="memory", description="Where the moments are between steps. disk: in files below TMPDIR, only on a CPU."
    )

    @model_validator(mode="after")
    def _has_one_warm_up(self) -> Self:
        if self.warmup_updates and self.warmup_fraction:
            raise ValueError("warmup_updates and warmup_fraction are both set. Keep one of them.")
        return self

    def over(self, total_updates: int | None) -> Self:
        """Return the config for `total_updates`, of which the warm-up has a whole number. Unknown: None."""
        if not self.warmup_fraction or total_updates is None:
            return self
        num = round(self.warmup_fraction * total_updates)
        return self.model_copy(update={"warmup_updates": num, "warmup_fraction": 0.0})


class CriticOptimizerConfig(OptimizerConfig):
    """AdamW of the critic."""

    lr: float = Field(default=1e-5, gt=0, le=1e38, description="Learning rate; by default ten times the policy's.")


class CriticConfig(Config):
    """The keys in which the critic of a method differs from the policy."""

    optimizer: CriticOptimizerConfig = Field(default=CriticOptimizerConfig(), description="Optimizer of the critic.")
    alone_steps: int = Field(
        default=0, ge=0, le=_MAX_COUNT, description="Steps at the start of a stage that train only the critic."
    )


class LoraConfig(Config):
    """Low-rank matrices next to frozen ones (LoRA, arXiv 2106.09685), in all linear layers but the head."""

    rank: int = Field(default=16, gt=0, le=65_536, description="Rank of the added matrices.")
    alpha: int = Field(default=32, gt=0, le=10**6, description="The added product is scaled by alpha / rank.")


class TrainerConfig(Config):
    """How one model is trained."""

    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description="Optimizer of the policy.")
    precision: Precision = Field(
        default="float32",
        description="Precision of the computation. Weights, gradient sums and moments are always float32. auto:"
        " bfloat16 where torch finds a CUDA device, else the one in which the processor that reads the recipe computes large"
        " products faster.",
    )
    lora: LoraConfig | None = Field(default=None, description="Train a LoRA adapter. Unset: train all weights.")
    critic: CriticConfig = Field(default=CriticConfig(), description="The critic, if the method has one.")
    workers: int = Field(
        default=0, ge=0, le=1024, description="Processes that share the model, started by Ray. 0: train in this process."
    )
    fsdp_size: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Workers that divide one copy of the weights. Each group of so many has a copy (HSDP). 0: all divide one.",
    )
    sequence_parallel: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Workers that divide the tokens of each micro-batch (Ulysses, arXiv 2309.14509): longer rows fit.",
    )
    worker_timeout_s: float = Field(
        default=1800.0, gt=0, le=86_400.0 * 365, description="Longest time of one call of the workers."
    )
    device: str = Field(
        default="auto",
        max_length=64,
        description="cpu, cuda, or one device, such as cuda:1. auto: cuda if torch finds a device for each worker, as for the"
        " engine; cpu with optimizer.moments = 'disk'.",
    )
    max_tokens_per_microbatch: int = Field(
        default=16_384,
        gt=0,
        le=_MAX_COUNT,
        description="Tokens of a micro-batch. Changes memory, and the gradient by rounding only.",
    )
    packing: bool = Field(
        default=True, description="Place rows end to end without padding, and compute prefixes that rows share once."
    )
    activation_checkpointing: bool = Field(
        default=False, description="Compute layers again in the backward pass instead of keeping their activations."
    )
    max_logits: int = Field(
        default=2**25, gt=0, le=10**12, description="Logits in memory at once. The default takes 64 MiB in bfloat16."
    )

    @property
    def torch_device(self) -> torch.device:
        """The device. Raises `RuntimeError` for a name that torch does not know."""
        import torch

        if self.device != "auto":
            return torch.device(self.device)
        is_cuda = not self.pages_moments and torch.cuda.device_count() >= max(1, self.workers)
        return torch.device("cuda" if is_cuda else "cpu")

    @property
    def gives_back_memory(self) -> bool:
        """Whether memory that a micro-batch freed is returned to the system at once."""
        return self.activation_checkpointing and self.torch_device.type == "cpu"

    @property
    def pages_moments(self) -> bool:
        """Whether moments are on disk, which only a CPU does."""
        return "disk" in (self.optimizer.moments, self.critic.optimizer.moments)

    @model_validator(mode="after")
    def _fits_its_workers(self) -> Self:
        if self.pages_moments and (self.device not in ("auto", "cpu") or self.workers):
            raise ValueError("optimizer.moments = 'disk' is for device = 'cpu' without workers. Set moments = 'memory'.")
        for key, size in (("fsdp_size", self.fsdp_size), ("sequence_parallel", self.sequence_parallel)):
            if size and max(1, self.workers) % size:
                raise ValueError(f"{key} is {size}, which does not divide workers = {self.workers}. Choose a divisor.")
        if self.sequence_parallel > 1 and not self.packing:
            raise ValueError("sequence_parallel divides rows that lie end to end. Set packing = true.")
        if self.workers and ":" in self.device:
            raise ValueError(
                f"device is {self.device!r}, but with workers, worker k computes on device k."
                f" Set device = {self.device.partition(':')[0]!r}, or workers = 0."
            )
        return self
