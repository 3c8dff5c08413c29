"""The optimizer of a policy or critic: gradients, steps, learning rate, checks for finite values, statistics over tokens.

`PagedAdamW` has its moments in files, for a CPU with little memory.
"""

from __future__ import annotations

import itertools
import logging
import math
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from strop.algorithms.method import SPREAD_FIGURES, LossInputs, ValueInputs
from strop.engine.torch.cpu.resources import give_back_freed_memory
from strop.errors import CannotLearnError, RunError, UserError
from strop.training.batch import TokenBatch, World, shares
from strop.training.config import OptimizerConfig, Schedule, TrainerConfig
from strop.training.weights import Weights, is_divided, zeros_together

logger = logging.getLogger(__name__)

MAX_SKIPPED = 3  # updates in a row, before the run cannot learn


TokenLoss: TypeAlias = Callable[[Tensor, LossInputs], Tensor]
TokenStatistics: TypeAlias = Callable[[Tensor, LossInputs], dict[str, Tensor]]
ValueLoss: TypeAlias = Callable[[Tensor, ValueInputs], Tensor]
ValueStatistics: TypeAlias = Callable[[Tensor, ValueInputs], dict[str, Tensor]]


class WeightsLost(UserError):  # noqa: N818 - named for what happened
    """An update made weights that are not finite, so the trainer has none. The last checkpoint is unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCost:
    """The cost of one update over all ranks."""

    tokens: int  # that went through the decoder
    row_tokens: int  # of all rows, those included that rows share
    flops: float  # of matrix products, forward and backward, without those that are computed again to save memory
    time_s: float
    peak_flops_per_s: float  # of large products in the same precision, as measured once
    peak_memory_mib: float  # of the rank that needed most, since it started; of the device where there is one


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """One optimizer step, or why there was none: then nothing of the trainer has changed."""

    update: int  # how many updates this trainer has done, this one included
    loss: float  # not finite where that is why the update was skipped; so is grad_norm
    grad_norm: float  # before clipping
    learning_rate: float
    statistics: Mapping[str, float]  # of unmasked tokens: entropy_nats and the method's own; empty when skipped
    cost: UpdateCost | None = field(default=None, compare=False)  # None if skipped, and for a critic; depends on a clock
    skip_reason: str = ""  # nothing to learn from, or a loss or gradient that is not finite

    @property
    def is_skipped(self) -> bool:
        return bool(self.skip_reason)


class Optimization:
    """AdamW over the weights of a policy or a critic; all ranks make the same calls.

    Args:
        key: where a recipe has `config`, for messages.
        total_updates: where a cosine schedule ends.
    """

    def __init__(
        self,
        weights: Weights,
        config: OptimizerConfig,
        *,
        key: str,
        world: World,
        total_updates: int | None,
    ) -> None:
        config = config.over(total_updates)
        learning_rate(config, config.warmup_updates, total_updates)  # a bad schedule fails now, not later
        self._weights, self._config, self._key, self._world = weights, config, key, world
        self._total_updates = total_updates
        self._parameters = list(weights.named().values())
        self.optimizer = _make_optimizer(self._parameters, config)
        self.num_updates = 0
        self._num_scheduled = 0  # updates since the schedule started
        self._num_skipped = 0  # in a row
        self._lost = ""  # why there are no weights any more

    def update(self, batch: TokenBatch, backward: Callable[[], tuple[Tensor, TokenFigures]]) -> UpdateReport:
        """Make one step on the gradient that `backward` adds up. `backward` returns this rank's share of loss and statistics.

        Raises:
            CannotLearnError: too many updates in a row were skipped.
            WeightsLost: the step made weights that are not finite; every later call raises it until `restore`.
        """
        self.check()
        rate = learning_rate(self._config, self._num_scheduled, self._total_updates)
        if batch.num_loss_tokens == 0:
            return self._skip(0.0, 0.0, rate, f"none of the {len(batch.lengths)} rows has a token to train on")
        self.optimizer.zero_grad(set_to_none=True)
        self._prepare()
        total_loss, figures = backward()
        norm = nn.utils.clip_grad_norm_(self._parameters, self._config.grad_clip or math.inf)
        loss_value, grad_norm = self._world.sum(total_loss).item(), _whole(norm).item()
        if not (math.isfinite(loss_value) and math.isfinite(grad_norm)):
            return self._skip(loss_value, grad_norm, rate, f"loss is {loss_value}, gradient norm is {grad_norm}")
        for parameter_group in self.optimizer.param_groups:
            parameter_group["lr"] = rate
        self.optimizer.step()
        if not self._are_finite():
            self._lost = (
                f"update {self.num_updates + 1} under {self._key} made weights that are not finite, from a gradient of norm"
                f" {grad_norm:.3g} at a learning rate of {rate:.3g}. They were not saved or published; earlier checkpoints are"
                f" unchanged. The same command resumes from the last one and repeats the same update:"
                f" lower {self._key}.lr, and rerun the stage (--from)."
            )
            self.check()
        self._weights.refresh()
        self.optimizer.zero_grad(set_to_none=True)
        self.num_updates += 1
        self._num_scheduled += 1
        self._num_skipped = 0
        gathered, *others = self._world.gather(figures.on_cpu())
        for other in others:
            gathered.merge(other)
        return UpdateReport(
            update=self.num_updates,
            loss=loss_value,
            grad_norm=grad_norm,
            learning_rate=rate,
            statistics=gathered.summary(batch.num_loss_tokens),
        )

    def check(self) -> None:
        """Raise `WeightsLost` if an update made weights that are not finite, so that they are not saved or published."""
        if self._lost:
            raise WeightsLost(self._lost)

    @torch.no_grad()
    def _are_finite(self) -> bool:
        """Whether all weights on all ranks are finite, also in bfloat16."""
        if math.isfinite(_whole(nn.utils.get_total_norm(self._parameters)).item()):
            return True
        # Squares of weights above 1e19 are not finite. The norm is asked first because it takes a tenth of this.
        of_rank = [each.to_local() if is_divided(each) else each for each in self._parameters]
        largest = torch.finfo(torch.bfloat16).max
        num_others = sum(((each.abs() <= largest).logical_not().sum() for each in of_rank), torch.zeros_like(of_rank[0].sum()))
        return self._world.sum(num_others).item() == 0

    def _prepare(self) -> None:
        """Allocate moments and gradients before short-lived tensors, to avoid holes in the heap. Not for divided tensors."""
        if is_divided(self._parameters[0]):
            return
        if not self.optimizer.state:
            self._prepare_moments()
        for parameter, gradient in zip(self._parameters, zeros_together(self._parameters), strict=True):
            parameter.grad = gradient

    def _prepare_moments(self) -> None:
        first, second = (self._zeros() for _ in range(2))
        for parameter, exp_avg, exp_avg_sq in zip(self._parameters, first, second, strict=True):
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": exp_avg,
                "exp_avg_sq": exp_avg_sq,
            }

    def _zeros(self) -> list[Tensor]:
        if isinstance(self.optimizer, PagedAdamW):
            return self.optimizer.zeros(self._parameters)
        if is_divided(self._parameters[0]):
            return [torch.zeros_like(each, requires_grad=False) for each in self._parameters]
        return zeros_together(self._parameters)

    def reset(self) -> None:
        """Reset the moments and the schedule."""
        self.optimizer = _make_optimizer(self._parameters, self._config)
        self._num_scheduled = 0

    def moments(self) -> dict[str, Tensor]:
        """Return the optimizer's own tensors by name; {} before the first step. Call `rest` after reading or writing them."""
        return {
            f"{kind}.{name}": value
            for name, parameter in self._weights.named().items()
            for kind, value in self.optimizer.state.get(parameter, {}).items()
        }

    def state(self) -> dict[str, Tensor]:
        """Return weights and moments by name, for a checkpoint that has no directory of the model."""
        return {**{name: each.detach() for name, each in self._weights.named().items()}, **self.moments()}

    def rest(self) -> None:
        """Free the memory of moments on a disk, after they were read or written."""
        if isinstance(self.optimizer, PagedAdamW):
            self.optimizer.release()

    def counters(self) -> dict[str, int | bool]:
        """Return the counters of a checkpoint."""
        return {
            "num_updates": self.num_updates,
            "num_scheduled": self._num_scheduled,
            "num_skipped": self._num_skipped,
            "has_moments": bool(self.moments()),
        }

    def restore(self, counters: Mapping[str, int | bool]) -> None:
        """Continue from these counters, with zeros as moments, into which the checkpoint is then read."""
        self.reset()
        self._lost = ""
        self.num_updates = int(counters["num_updates"])
        self._num_scheduled = int(counters["num_scheduled"])
        self._num_skipped = int(counters["num_skipped"])
        if counters["has_moments"]:
            self._prepare_moments()

    def _skip(self, loss: float, grad_norm: float, rate: float, reason: str) -> UpdateReport:
        self.optimizer.zero_grad(set_to_none=True)
        self._num_skipped += 1
        logger.warning("update %d under %s is skipped: %s", self.num_updates + 1, self._key, reason)
        if self._num_skipped >= MAX_SKIPPED:
            raise CannotLearnError(
                f"{self._num_skipped} updates in a row were skipped, the last because {reason}. The weights are those of update"
                f" {self.num_updates}. If values are not finite, lower {self._key}.lr or use precision = 'float32'; if"
                " there is nothing to train on, look at why rollouts are dropped."
            )
        return UpdateReport(
            update=self.num_updates, loss=loss, grad_norm=grad_norm, learning_rate=rate, statistics={}, skip_reason=reason
        )


def _whole(value: Tensor) -> Tensor:
    """Return the value as a plain tensor: the norm of a divided gradient is itself divided."""
    return value.full_tensor() if is_divided(value) else value


def _make_optimizer(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
    vectors = [parameter for parameter in parameters if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    # Fused: one kernel a tensor instead of a dozen. Elementwise, so as reproducible as the plain one.
    kind = PagedAdamW if config.moments == "disk" else torch.optim.AdamW
    return kind([group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def learning_rate(config: OptimizerConfig, update: int, total_updates: int | None) -> float:
    """Return the learning rate of the update with index `update`, from 0.

    Raises:
        ValueError: the schedule is a cosine and `total_updates` is missing or not above the warm-up.
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


def add_up_gradient(
    batch: TokenBatch,
    config: TrainerConfig,
    world: World,
    token_losses: Callable[[TokenBatch], tuple[Tensor, Mapping[str, Tensor]]],
) -> tuple[Tensor, TokenFigures]:
    """Add up this rank's share of the gradient of sum(loss_weights * token loss), one micro-batch at a time.

    Args:
        token_losses: the losses of the tokens of a micro-batch, with gradient, and their statistics, without.

    Returns:
        This rank's share of the loss and of the statistics.
    """
    device = config.torch_device
    total_loss = torch.zeros((), dtype=torch.float64, device=device)
    figures = TokenFigures()
    for part in shares(batch, config.max_tokens_per_microbatch, config.packing, world):
        rows = part.batch.to(device)
        losses, statistics = token_losses(rows)
        part_loss = (rows.loss_weights * losses).sum()
        part_loss.backward()  # type: ignore[no-untyped-call]
        if config.gives_back_memory:
            give_back_freed_memory()
        if world.counts:
            total_loss += part_loss.detach()
            figures.add(rows.loss_mask, statistics)
    return total_loss, figures


_QUANTILES = {"p01": 0.01, "p99": 0.99}


class TokenFigures:
    """Statistics over the tokens of one update. Masked tokens do not count."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._values: dict[str, list[Tensor]] = {name: [] for name in SPREAD_FIGURES}

    def add(self, loss_mask: Tensor, values: Mapping[str, Tensor]) -> None:
        """Add the values of a micro-batch, each of the shape of `loss_mask`."""
        for name, of_tokens in values.items():
            unmasked = of_tokens[loss_mask]
            total = unmasked.sum(dtype=torch.float64)
            self._sums[name] = self._sums[name] + total if name in self._sums else total
            if name in self._values:
                self._values[name].append(unmasked.cpu())

    def on_cpu(self) -> Self:
        """Move the values to the CPU, so that they can be sent to another process."""
        self._sums = {name: total.cpu() for name, total in self._sums.items()}
        return self

    def merge(self, other: TokenFigures) -> None:
        """Add the values of other micro-batches."""
        for name, total in other._sums.items():
            self._sums[name] = self._sums[name] + total if name in self._sums else total
        for name, parts in other._values.items():
            self._values[name] += parts

    def summary(self, num_tokens: int) -> dict[str, float]:
        """Return the mean of each over `num_tokens`, and NAME_p01, NAME_p99 and NAME_max of `SPREAD_FIGURES`."""
        figures = {name: total.item() / num_tokens for name, total in self._sums.items()}
        for name, parts in self._values.items():
            if parts:
                values = torch.cat(parts).double().numpy()
                figures |= {f"{name}_{label}": float(np.quantile(values, at)) for label, at in _QUANTILES.items()}
                figures[f"{name}_max"] = float(values.max())
        return figures


_PART = 2**22  # numbers whose moments are in memory together: 32 MiB, or those of one tensor that is larger


class PagedAdamW(torch.optim.AdamW):
    """AdamW for a CPU with moments in files. Its steps equal those of AdamW bit for bit.

    The files have no name and end with the process. The system may keep their pages in memory that is free.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._mappings: list[mmap.mmap] = []

    def zeros(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Return zeros of these shapes in a new file. Raises `RunError` if the disk is full."""
        sizes = [each.numel() for each in like]
        mapping = _map_file(sum(sizes) * like[0].itemsize)
        self._mappings.append(mapping)
        block = torch.frombuffer(mapping, dtype=like[0].dtype)
        return [part.view(each.shape) for part, each in zip(torch.split(block, sizes), like, strict=True)]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update a part of the weights at a time. All moments must exist: others would lie in memory."""
        groups = self.param_groups
        try:
            for group in groups:
                for part in _parts(group["params"]):
                    self.param_groups = [{**group, "params": part}]
                    super().step()
                    self.release()
        finally:
            self.param_groups = groups

    def release(self) -> None:
        """Free the memory of the moments. Their values stay in the files."""
        for each in self._mappings:
            each.madvise(mmap.MADV_DONTNEED)


def _parts(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield parameters in order, in parts of about `_PART` numbers."""
    ends = itertools.accumulate(each.numel() for each in parameters)
    places = [(end - each.numel()) // _PART for end, each in zip(ends, parameters, strict=True)]
    for _, part in itertools.groupby(zip(places, parameters, strict=True), key=lambda each: each[0]):
        yield [parameter for _, parameter in part]


def _map_file(num_bytes: int) -> mmap.mmap:
    directory = Path(tempfile.gettempdir())
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)  # or a full disk would end the process in the middle of a step
            return mmap.mmap(file.fileno(), num_bytes)
    except OSError as error:
        raise RunError(
            f'{directory}: no file of {num_bytes / 2**20:.0f} MiB for trainer.optimizer.moments = "disk" ({error}). Make room,'
            " or set TMPDIR to a directory with more."
        ) from error
