"""The optimizer of one role: steps, held back or told where something is not finite; schedule; what a checkpoint needs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strop.errors import CannotLearnError
from strop.training.batch import TokenBatch
from strop.training.config import OptimizerConfig, learning_rate
from strop.training.figures import TokenFigures
from strop.training.gradients import zeros_together
from strop.training.paged import PagedAdamW
from strop.training.protocol import UpdateReport, WeightsLost
from strop.training.state import moments, prepare_moments
from strop.training.weights import Weights
from strop.training.world import World

logger = logging.getLogger(__name__)


class Optimization:
    """AdamW over the weights of a policy or a critic; all ranks make the same calls.

    Args:
        key: where a recipe has `config`, for messages.
        max_skipped: updates in a row, before the run cannot learn.
        total_updates: where a cosine schedule ends.
    """

    def __init__(
        self,
        weights: Weights,
        config: OptimizerConfig,
        *,
        key: str,
        world: World,
        max_skipped: int,
        total_updates: int | None,
    ) -> None:
        learning_rate(config, config.warmup_updates, total_updates)  # a bad schedule fails now, not later
        self._weights, self._config, self._key, self._world = weights, config, key, world
        self._max_skipped, self._total_updates = max_skipped, total_updates
        self._parameters = list(weights.named().values())
        self.optimizer = _make_optimizer(self._parameters, config)
        self.num_updates = 0
        self._num_scheduled = 0  # updates since the schedule started
        self._num_skipped = 0  # in a row
        self._lost = ""  # why there are no weights any more

    def update(self, batch: TokenBatch, backward: Callable[[], tuple[Tensor, TokenFigures]]) -> UpdateReport:
        """One step on the gradient that `backward` adds up; it returns this rank's share of the loss and of the figures.

        Raises:
            CannotLearnError: too many updates in a row were skipped.
            WeightsLost: the step made weights that are not finite; so does every call after it, until others are loaded.
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
                f" {grad_norm:.3g} at a learning rate of {rate:.3g}. Nothing of them was saved or published; the checkpoints"
                f" before it are as they were. The same command goes on from the last one and comes to the same update again:"
                f" lower {self._key}.lr, and make the stage anew (--from)."
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
        """Raises `WeightsLost` where an update has made weights that are not finite: they are not to be saved or published."""
        if self._lost:
            raise WeightsLost(self._lost)

    @torch.no_grad()
    def _are_finite(self) -> bool:
        """Whether all weights are, on all ranks, in bfloat16 too."""
        if math.isfinite(_whole(nn.utils.get_total_norm(self._parameters)).item()):
            return True
        # Squares of weights above 1e19 are not finite. The norm is asked first because it takes a tenth of this.
        of_rank = [each.to_local() if isinstance(each, DTensor) else each for each in self._parameters]
        largest = torch.finfo(torch.bfloat16).max
        num_others = sum(((each.abs() <= largest).logical_not().sum() for each in of_rank), torch.zeros_like(of_rank[0].sum()))
        return self._world.sum(num_others).item() == 0

    def _prepare(self) -> None:
        """Make what lives long, moments and gradients, before what does not; of ranks, each tensor is made as it comes."""
        is_divided = isinstance(self._parameters[0], DTensor)
        if not self.optimizer.state and (not is_divided or isinstance(self.optimizer, PagedAdamW)):
            prepare_moments(self.optimizer, self._weights.named())
        if is_divided:
            return
        for parameter, gradient in zip(self._parameters, zeros_together(self._parameters), strict=True):
            parameter.grad = gradient

    def reset(self) -> None:
        """Forget the moments and start the schedule again."""
        self.optimizer = _make_optimizer(self._parameters, self._config)
        self._num_scheduled = 0

    def moments(self) -> dict[str, Tensor]:
        """Themselves, by name; {} before the first step. `rest` when they have been read or written."""
        return moments(self.optimizer, self._weights.named())

    def rest(self) -> None:
        """Nobody looks at the moments now: on a disk they need no memory."""
        if isinstance(self.optimizer, PagedAdamW):
            self.optimizer.release()

    def counters(self) -> dict[str, int | bool]:
        """All else that a checkpoint has to hold."""
        return {
            "num_updates": self.num_updates,
            "num_scheduled": self._num_scheduled,
            "num_skipped": self._num_skipped,
            "has_moments": bool(self.moments()),
        }

    def restore(self, counters: Mapping[str, int | bool]) -> dict[str, Tensor]:
        """Go on from these; returns the moments that belong to them, to be read into."""
        self.reset()
        self._lost = ""
        self.num_updates = int(counters["num_updates"])
        self._num_scheduled = int(counters["num_scheduled"])
        self._num_skipped = int(counters["num_skipped"])
        return prepare_moments(self.optimizer, self._weights.named()) if counters["has_moments"] else {}

    def _skip(self, loss: float, grad_norm: float, rate: float, reason: str) -> UpdateReport:
        self.optimizer.zero_grad(set_to_none=True)
        self._num_skipped += 1
        logger.warning("update %d under %s is skipped: %s", self.num_updates + 1, self._key, reason)
        if self._num_skipped >= self._max_skipped:
            raise CannotLearnError(
                f"{self._num_skipped} updates in a row were skipped, the last because {reason}. The weights are those of update"
                f" {self.num_updates}. If values are not finite, lower {self._key}.lr or use precision = 'float32'; if"
                " there is nothing to train on, look at why rollouts are dropped."
            )
        return UpdateReport(
            update=self.num_updates, loss=loss, grad_norm=grad_norm, learning_rate=rate, statistics={}, skip_reason=reason
        )


def _whole(value: Tensor) -> Tensor:
    """The norm of a gradient that is divided over ranks is itself divided."""
    return value.full_tensor() if isinstance(value, DTensor) else value


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
